"""The pool under faults: whatever is delayed, lost, doubled, killed or accused, nothing leaks and every request has one end."""

from collections import Counter
from random import Random

import pytest

from infsim.driver import Simulation
from perfmodel import debtor as debtor_module
from perfmodel.cluster import ChaosParams
from perfmodel.loan import TRANSITIONS
from perfmodel.messages import GMANAGER
from perfmodel.policies import PLACEMENT
from perfmodel.view import SchedulerParams

INSTANCES = 3


def chaos_case(seed):
    """(chaos, scheduler, requests, options) of one seed."""
    draw = Random(seed)
    kills = []
    if draw.random() < 0.6:
        victim = draw.choice([GMANAGER, *range(INSTANCES)])
        at_s = draw.uniform(0.2, 12.0)
        kills.append((at_s, victim, at_s + draw.uniform(0.5, 20.0)))
    if draw.random() < 0.3:
        at_s = draw.uniform(0.2, 12.0)
        kills.append((at_s, draw.choice([v for v in range(INSTANCES) if not kills or v != kills[0][1]]), at_s + 8.0))
    accuse = ((draw.uniform(0.5, 10.0), draw.randrange(INSTANCES)),) if draw.random() < 0.2 else ()
    chaos = ChaosParams(
        delay_s=draw.choice([0.0, 0.01, 0.5]),
        reorder=draw.choice([0.0, 0.2]),
        duplicate=draw.choice([0.0, 0.2]),
        loss=draw.choice([0.0, 0.1, 0.3]),
        kill=tuple(kills),
        accuse=accuse,
        detect_s=draw.choice([0.05, 1.0, 5.0]),
        drift_frac=draw.choice([0.0, 0.009]),
    )
    scheduler = SchedulerParams(
        lease_s=draw.choice([2.5, 5.0]), renew_s=0.4, order_ttl_s=draw.choice([0.5, 3.0]), period_s=0.5, heartbeat_s=0.5
    )
    slow = draw.random() < 0.1  # iterations ten times longer than a lease
    longest = 5 if slow else 150
    requests = [(draw.randrange(50, 700), draw.randrange(1, longest)) for _ in range(8 if slow else 24)]
    for _ in range(draw.randrange(3)):
        requests.insert(draw.randrange(len(requests)), (draw.randrange(1700, 2600), draw.randrange(1, longest)))
    return chaos, scheduler, requests, slow


def run_chaos(seed, cluster, workload):
    chaos, scheduler, requests, slow = chaos_case(seed)
    spec = cluster(
        num_instances=INSTANCES,
        num_blocks=100,
        placement=PLACEMENT["greedy" if seed % 3 else "reactive"],
        scheduler=scheduler,
        chaos=chaos,
        seed=seed,
        **({"scale": {"non_attention": 500.0}} if slow else {}),
    )
    return Simulation(spec, workload(requests, rate_rps=4.0, seed=seed), check=True).run()


def check(seed, result):
    assert len(result.requests["req_id"]) == len(set(result.requests["req_id"])), f"seed {seed}"
    for status, reason in zip(result.requests["status"], result.requests["reason"], strict=True):
        assert status in ("finished", "failed", "rejected"), f"seed {seed}: {status}"
        assert (status == "finished") == (reason == ""), f"seed {seed}: {status} {reason!r}"


@pytest.mark.parametrize("block", range(10))
def test_chaos(cluster, workload, block):
    for seed in range(block * 10, block * 10 + 10):
        check(seed, run_chaos(seed, cluster, workload))
