"""Verdicts on folders in which every decode of a system takes so many times as long as in the simulation."""

import numpy as np
import pytest

from experiments.sweep import HARDWARE, Loop, plan_jobs, run_jobs, run_sweep
from experiments.sweepfile import load_sweep
from experiments.verdicts import E2E, Verdict, case_of, orders, verdicts

SYSTEMS = ("vllm-multi", "infinite-llm")
SWEEP = {
    "base": {
        "cluster": {"nodes": 1, "gpus_per_node": 2},
        "workload": {
            "generator": "fixed",
            "params": {"input_tokens": 100, "output_tokens": 50},
            "num_requests": 20,
            "rate_rps": 2,
        },
    },
    "axes": {"system": list(SYSTEMS)},
}
FACTORS = ((1.0, 1.0), (1.0, 1.0))


def folder_of(folder, run_one, factors):
    """A folder of real runs. factors: of each system's decodes."""

    def run(plan, aside, recording):
        result = run_one(plan, aside, recording)
        factor = factors[SYSTEMS.index(plan.config.system)]
        first_s, finish_s = (np.array(result.requests[name]) for name in ("first_token_s", "finish_s"))
        result.requests["finish_s"] = (first_s + factor * (finish_s - first_s)).tolist()
        return result

    run_jobs(plan_jobs(load_sweep(SWEEP), folder, HARDWARE), folder, Loop(run))
    return folder


@pytest.fixture
def judged(tmp_path, run_one):
    """judged(factors, …): the verdicts on so many real folders, by case and metric."""

    def judge(*each):
        reals = [folder_of(tmp_path / f"real-{i}", run_one, factors) for i, factors in enumerate(each)]
        run_sweep(load_sweep(SWEEP), tmp_path / "simulated", Loop(run_one))
        return {(verdict.run, verdict.metric): verdict for verdict in verdicts(tmp_path / "simulated", reals)}

    return judge


def test_what_is_equal_is_within_the_limits(judged):
    found = judged((1.0, 1.0), (1.0, 1.0))
    assert len(found) == 2 * 5
    assert all(verdict.holds and verdict.error_frac == 0 and not verdict.by_noise for verdict in found.values())


def test_an_error_beyond_the_limit_falls_short(judged):
    found = judged((1.25, 1.02), (1.25, 1.02))
    slow, right = (found[system, "tpot_s_mean"] for system in SYSTEMS)
    assert slow.error_frac == pytest.approx(1 / 1.25 - 1) and slow.word == "falls short" and slow.allowed_frac == 0.05
    assert right.error_frac == pytest.approx(1 / 1.02 - 1) and right.word == "within"
    assert found["vllm-multi", "ttft_s_mean"].word == "within", "first tokens came at the same times"
    assert "falls short" in str(slow) and "5.0% (limit)" in str(slow)


def test_noise_widens_what_is_allowed_but_never_beyond_a_fifth(judged):
    found = judged((0.95, 0.6), (1.05, 1.4))
    little, much = (found[system, "tpot_s_mean"] for system in SYSTEMS)
    assert little.noise_frac == pytest.approx(0.1 / 2**0.5) and little.allowed_frac == pytest.approx(0.2 / 2**0.5)
    assert little.by_noise and "noise" in str(little)
    assert much.by_noise and much.allowed_frac == 0.2


def test_the_error_of_a_request_is_absolute_and_so_is_its_noise(judged):
    found = judged((0.9, 1.0), (1.1, 1.0))
    quiet = found["infinite-llm", E2E]
    assert quiet.error_frac == quiet.noise_frac == 0
    noisy = found["vllm-multi", E2E]
    assert noisy.error_frac == pytest.approx(0, abs=1e-9), "the mean of the real runs is what is simulated"
    decode_s = 49 * found["vllm-multi", "tpot_s_mean"].real
    assert noisy.noise_frac == pytest.approx(0.1 * decode_s / noisy.real), "a tenth of the decode in each run"


def test_a_single_real_run_has_no_noise_and_the_limits_apply(judged):
    found = judged((1.02, 1.25))
    assert all(np.isnan(verdict.noise_frac) and not verdict.by_noise for verdict in found.values())
    assert [found[system, "tpot_s_mean"].holds for system in SYSTEMS] == [True, False]


def verdict(run, real, simulated, noise=0.01, metric="ttft_s_mean"):
    return Verdict(run, metric, simulated, real, simulated / real - 1, noise)


def test_order_is_told_where_the_real_systems_differ_by_more_than_noise():
    first, second = (f"short@0.5/{system}" for system in SYSTEMS)
    [order] = orders([verdict(first, 1.0, 1.1), verdict(second, 0.5, 1.2)], SYSTEMS)
    assert (order.place, order.simulated, order.real) == ("short@0.5", "vllm-multi", "infinite-llm")
    assert str(order).endswith("differs")
    assert orders([verdict(first, 1.0, 1.1), verdict(second, 0.98, 1.2)], SYSTEMS) == []
    [order] = orders([verdict(first, 1.0, 1.1), verdict(second, 0.5, 1.1)], SYSTEMS)
    assert order.simulated == "neither" and str(order).endswith("differs")
    assert orders([verdict(first, 1.0, 1.1, np.nan), verdict(second, 0.5, 1.2, np.nan)], SYSTEMS) == [], (
        "noise not known"
    )
    rates = [verdict(first, 100, 100, metric="output_tok_per_s"), verdict(second, 200, 190, metric="output_tok_per_s")]
    [order] = orders(rates, SYSTEMS)
    assert order.simulated == order.real == "infinite-llm", "more tokens are better"


def test_a_case_is_its_workload_and_system():
    assert case_of("system=vllm-multi, workload.path=short@0.5.csv") == "short@0.5/vllm-multi"
