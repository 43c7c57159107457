"""Capacity by bisection, against drivers whose capacity is known."""

import pytest

from experiments.capacity import LIMITS, PRECISION, Probe, find_capacity, limit_of, points_without_rate
from experiments.plots import capacity_picture
from experiments.sweep import Workers
from experiments.sweepfile import load_sweep
from perfmodel.errors import InputError

FIXED = {"generator": "fixed", "params": {"input_tokens": 100, "output_tokens": 10}, "num_requests": 40, "rate_rps": 3}
BASE = {"system": "vllm-multi", "cluster": {"nodes": 1, "gpus_per_node": 2}, "workload": FIXED, "slo": {"tpot_s": 1.0}}
CAPACITY_RPS = {"vllm-multi": 20.0, "vllm-single": 0.3}


@pytest.fixture
def limited(run_one):
    """Beyond the capacity of its system, every request is 100 s late."""

    def run(plan, folder, recording):
        result = run_one(plan, folder, recording)
        if plan.config.workload.rate_rps > CAPACITY_RPS[plan.config.system]:
            result.requests["first_token_s"] = [t_s + 100 for t_s in result.requests["first_token_s"]]
            result.requests["finish_s"] = [t_s + 100 for t_s in result.requests["finish_s"]]
        return result

    return run


def capacities(run_one, axes, attainment=0.9, **base):
    points = points_without_rate(load_sweep({"base": {**BASE, **base}, "axes": axes}))
    return list(find_capacity(points, attainment, run_one, Workers(1)))


def test_bisection_finds_the_capacity_from_either_side(limited):
    found = capacities(limited, {"system": ["vllm-multi", "vllm-single"], "workload.rate_rps": [1, 3]})
    assert [one.point.axes for one in found] == [{"system": "vllm-multi"}, {"system": "vllm-single"}]
    for one in found:
        capacity = CAPACITY_RPS[one.point.axes["system"]]
        assert capacity / PRECISION <= one.best.rate_rps <= capacity
        assert len(one.probes) <= 12
    assert found[0].row()["output_tok_per_s_per_gpu"] > 0


def test_requests_that_are_always_rejected_end_the_search(run_one):
    def reject_a_third(plan, folder, recording):
        result = run_one(plan, folder, recording)
        count = len(result.requests["status"])
        result.requests["status"] = ["rejected" if i % 3 == 0 else "finished" for i in range(count)]
        return result

    (found,) = capacities(reject_a_third, {})
    assert found.best is None and len(found.probes) == 1
    assert (found.row()["rate_rps"], found.limit) == (0.0, "KV memory")
    (found,) = capacities(reject_a_third, {}, attainment=0.5)
    assert found.best is not None


def test_replicates_are_averaged(limited):
    (found,) = capacities(limited, {}, replicates=2)
    assert CAPACITY_RPS["vllm-multi"] / PRECISION <= found.best.rate_rps <= CAPACITY_RPS["vllm-multi"]


def test_a_workload_without_a_rate_is_refused(run_one):
    with pytest.raises(InputError, match="capacity: the workload has no rate"):
        capacities(run_one, {}, workload={**FIXED, "rate_rps": None, "arrivals": "saturated"})


NUMBERS = {
    "num_rejected": 0,
    "num_requests": 100,
    "e2e_s_mean": 10.0,
    "preempted_s": 0.0,
    "remote_wait_s": 0.0,
    "waits_when_full": 0.0,
    "waits_beside_idle": 0.0,
    "batch_is_full": 0.0,
    "late_ttft": 30,
    "late_tpot": 0,
}


@pytest.mark.parametrize(
    ("numbers", "limit"),
    [
        ({}, "prefill"),
        ({"waits_when_full": 0.9, "late_tpot": 99}, "KV memory"),
        ({"preempted_s": 1.0}, "KV memory"),
        ({"num_rejected": 20}, "KV memory"),
        ({"remote_wait_s": 2.0}, "link"),
        ({"late_tpot": 40}, "compute"),
        ({"batch_is_full": 1.0}, "queue"),
        ({"waits_beside_idle": 0.8}, "queue"),
    ],
)
def test_the_limit_is_the_first_that_binds(numbers, limit):
    assert limit_of(Probe(1.0, NUMBERS | numbers, 8)) == limit
    assert limit in dict(LIMITS)


def test_the_picture_has_a_bar_a_point(limited):
    found = capacities(limited, {"system": ["vllm-multi", "vllm-single"]})
    left, right = capacity_picture(found, 0.9).axes
    assert [line.get_label() for line in left.get_lines()[:2]] == ["vllm-multi", "vllm-single"]
    assert [bar.get_width() for bar in right.patches] == [one.best.rate_rps for one in found]
