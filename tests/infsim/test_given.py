"""A simulation under recorded times decides as the recorded run did, whatever its own cost model says."""

import json

import pytest

from experiments.decisions import decisions_of, equal_shares, first_divergence
from experiments.sweep import Loop, Recording, run_sweep
from experiments.sweepfile import load_sweep
from infsim.given import GivenStep, GivenTime
from infsim.replay import simulate_run
from infsim.runner import run_one
from perfmodel.messages import IterationsDone, StartIterations

BASE = {
    "system": "infinite-llm",
    "cluster": {"nodes": 1, "gpus_per_node": 4},
    "instance": {"blocks_per_gpu": 600},
    "workload": {"generator": "paper-3", "output": "balanced", "num_requests": 80, "rate_rps": 1.0},
    "truth": {"scale": {"decode_attention": 1.3, "non_attention": 1.2, "transfer": 3.0}},
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run on a machine that is slower than its configuration says."""
    folder = tmp_path_factory.mktemp("recorded")
    run_sweep(load_sweep({"base": BASE}), folder, Loop(run_one, Recording(events=True)))
    log = next(folder.glob("runs/*/events.jsonl"))
    header, *lines = log.read_text().splitlines()
    fields = json.loads(header)
    fields["config"]["truth"]["scale"] = {}
    log.write_text("\n".join([json.dumps(fields), *lines]) + "\n")
    return log


def test_under_the_recorded_times_the_decisions_are_the_recorded_ones(recorded, tmp_path):
    runs, log = simulate_run(recorded, tmp_path / "out")
    a, b = decisions_of(recorded), decisions_of(log)
    assert first_divergence(a, b) is None
    assert equal_shares(a, b)["lend"][1] > 10
    assert runs.manifests[0]["driver"] == "simulation"
    assert runs.summary["num_finished"][0] > 0


def test_without_them_the_decisions_differ(recorded, tmp_path):
    """The guard guarded: the same requests under the times of the cost model."""
    run_sweep(load_sweep({"base": BASE | {"truth": {}}}), tmp_path / "other", Loop(run_one, Recording(events=True)))
    other = next((tmp_path / "other").glob("runs/*/events.jsonl"))
    assert first_divergence(decisions_of(recorded), decisions_of(other)) is not None


def test_iterations_that_were_reported_together_are_spread_evenly():
    step = GivenStep(StartIterations(1, 2, 40, 20, (), 5, (0, 1), ()), 10.0)
    step.report(IterationsDone(1, 2, (), False, remote_wait_s=0.2, iteration_s=0.6), 11.0)
    step.report(IterationsDone(1, 1, (1,), True, iteration_s=0.5), 11.5)
    assert step.ends_s == pytest.approx([0.5, 1.0, 1.5])
    assert step.alone_s == pytest.approx([0.4, 0.8, 1.3])
    time = GivenTime(step.ends_s)
    assert [time.completed(elapsed_s, 3) for elapsed_s in (0.4, 0.5, 1.2, 9.0)] == [0, 1, 2, 3]
    assert time.completed(9.0, 2) == 2 and time.duration_s(2) == pytest.approx(0.5)
