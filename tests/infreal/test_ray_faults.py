"""Faults of Ray actors, by signals to their processes: requests end with the tokens of one instance, and all blocks are free."""

import signal
from dataclasses import replace
from functools import partial

import pytest
from pool_tools import QUICK, Restless, cluster, workload
from ray_tools import RayRun, local_ray, send_signal

from perfmodel.messages import GMANAGER

pytest.importorskip("ray")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("ray"), pytest.mark.timeout(180)]
SOON = replace(QUICK, lease_s=2.0, renew_s=0.3, order_ttl_s=1.0)
LOAD = workload([(30, 300), (44, 300), (20, 300), (60, 300)], gap_s=0.02)
MAKE = partial(cluster, 2, 260, placement=Restless, scheduler=SOON)


@pytest.fixture(scope="module")
def ray_cluster():
    with local_ray(num_cpus=3) as mark:
        yield mark


def when_lent(run, who, number=signal.SIGKILL):
    """A signal to the debtor ("src") or creditor ("dst") of a loan that is held, as soon as there is one."""
    moves = run.head.books.collector.moves
    held = [i for i, outcome in enumerate(moves["outcome"]) if outcome == "committed"]
    if not held:
        run.at(run.fleet.now_s() + 0.01, when_lent, who, number)
        return
    run.victim = who if isinstance(who, int) else moves[who][held[-1]]
    send_signal(run, run.victim, number)


FAULTS = [("dst", signal.SIGKILL), ("src", signal.SIGKILL), (GMANAGER, signal.SIGKILL), ("dst", signal.SIGSTOP)]


def check(who, number):
    """One fault in mid-step; whoever had it returns under a new incarnation."""
    run = RayRun(MAKE, LOAD, deadline_s=6.0 if number == signal.SIGSTOP else 30.0)
    run.at(0.3, when_lent, who, number)
    run.finish().assert_exact()
    member = run.head.members[run.victim]
    assert member.deaths == 1
    assert sum(other.deaths for other in run.head.members.values()) == 1


@pytest.mark.parametrize(
    ("who", "number"), [FAULTS[0], *(pytest.param(*fault, marks=pytest.mark.slow) for fault in FAULTS[1:])]
)
def test_a_fault_in_mid_step(ray_cluster, who, number):
    """S14: a creditor, a debtor, the gManager killed; a creditor stopped, which is found silent, ended and replaced."""
    check(who, number)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_faults_twenty_times(ray_cluster):
    for _ in range(20):
        for who, number in FAULTS:
            check(who, number)
