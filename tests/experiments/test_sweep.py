"""The sweep loop with a driver that simulates nothing: workers, deaths, resume, failures."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import cloudpickle
import pandas as pd
import pytest

from experiments import raycluster
from experiments.run_command import shared_out
from experiments.runfolder import read_manifest
from experiments.runs import load_runs
from experiments.sweep import Loop, OtherSweepError, Recording, Workers, plan_jobs, run_sweep
from experiments.sweepfile import load_sweep
from perfmodel.errors import InputError, RunError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test

WORKLOAD = {
    "generator": "fixed",
    "params": {"input_tokens": 100, "output_tokens": 10},
    "num_requests": 20,
    "rate_rps": 1,
}
BASE = {"system": "vllm-multi", "cluster": {"nodes": 1, "gpus_per_node": 2}, "workload": {**WORKLOAD}}
AXES = {"system": ["vllm-multi", "vllm-single"], "workload.rate_rps": [1, 2]}


def small_sweep(axes=AXES, **changes):
    return load_sweep({"base": {**BASE, **changes}, "axes": axes})


def test_every_run_gets_its_folder_and_a_row_of_the_summary(tmp_path, run_one):
    seen = []
    runs = run_sweep(small_sweep(), tmp_path, Loop(run_one, report=lambda run, manifest: seen.append(run.index)))
    assert seen == [0, 1, 2, 3]
    summary = pd.read_csv(tmp_path / "summary.csv")
    assert summary["system"].tolist() == ["vllm-multi", "vllm-multi", "vllm-single", "vllm-single"]
    assert summary["num_finished"].tolist() == [20] * 4
    assert summary["e2e_s_mean"].tolist() == pytest.approx([2.0] * 4)
    assert (runs.summary["workload.rate_rps"] == summary["workload.rate_rps"]).all()


def test_two_workers_write_the_same_bytes_as_one(tmp_path, run_one):
    for count in (1, 2):
        run_sweep(small_sweep(), tmp_path / str(count), Loop(run_one, workers=Workers(count)))
    files = sorted(path.relative_to(tmp_path / "1") for path in (tmp_path / "1").rglob("*.parquet"))
    assert len(files) == 12
    for file in files:
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes()


def test_an_interrupted_sweep_resumes_where_it_stopped(tmp_path, run_one):
    def stop_at_the_third(plan, folder, recording):
        if plan.config.system == "vllm-single":
            raise KeyboardInterrupt
        return run_one(plan, folder, recording)

    with pytest.raises(KeyboardInterrupt):
        run_sweep(small_sweep(), tmp_path, Loop(stop_at_the_third))
    assert not (tmp_path / "summary.csv").exists()
    assert [job.done for job in plan_jobs(small_sweep(), tmp_path)] == [True, True, False, False]
    seen = []
    run_sweep(small_sweep(), tmp_path, Loop(run_one, report=lambda run, manifest: seen.append(run.index)))
    assert seen == [2, 3]
    assert not list((tmp_path / "runs").glob(".*"))


def test_a_folder_of_another_sweep_is_not_touched(tmp_path, run_one):
    run_sweep(small_sweep(), tmp_path, Loop(run_one))
    with pytest.raises(OtherSweepError, match=r"seed is 0 there and 1 here"):
        run_sweep(small_sweep(seed=1), tmp_path, Loop(run_one))
    with pytest.raises(OtherSweepError, match=r"holds another sweep's run 000-vllm-multi-1"):
        run_sweep(small_sweep({"system": ["vllm-multi"]}), tmp_path, Loop(run_one))
    assert len(load_runs(tmp_path).folders) == 4


def test_a_changed_input_file_is_another_run(tmp_path, run_one):
    trace = tmp_path / "own.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens,id\n0,10,10,0\n1,10,10,1\n")
    sweep = small_sweep({}, workload={"trace": "own", "path": str(trace)})
    run_sweep(sweep, tmp_path / "out", Loop(run_one))
    assert plan_jobs(sweep, tmp_path / "out")[0].done
    trace.write_text("arrival_s,input_tokens,output_tokens,id\n0,10,10,0\n2,10,10,1\n")
    with pytest.raises(OtherSweepError, match=r"own.csv is '"):
        plan_jobs(sweep, tmp_path / "out")


def test_a_failed_run_is_a_row_without_metrics_and_is_tried_again(tmp_path, run_one):
    def fail_single(plan, folder, recording):
        if plan.config.system == "vllm-single":
            raise RunError("stuck: instance 0 waits for ever")
        if plan.config.workload.rate_rps == 2:
            raise ZeroDivisionError("a defect")
        return run_one(plan, folder, recording)

    runs = run_sweep(small_sweep(), tmp_path, Loop(fail_single))
    assert [manifest["status"] for manifest in runs.manifests] == ["done", "failed", "failed", "failed"]
    assert runs.manifests[2]["error"] == "stuck: instance 0 waits for ever"
    assert "ZeroDivisionError: a defect" in runs.manifests[1]["traceback"]
    assert runs.summary["num_finished"].isna().tolist() == [False, True, True, True]
    assert len(runs.requests) == 20
    runs = run_sweep(small_sweep(), tmp_path, Loop(run_one))
    assert [manifest["status"] for manifest in runs.manifests] == ["done"] * 4


def die_on_single(plan, folder, recording):
    if plan.config.system == "vllm-single":
        os._exit(9)
    return fake_run_one(plan, folder, recording)


def die_once(plan, folder, recording):
    marker = folder.parent / "died"
    if plan.config.system == "vllm-single" and not marker.exists():
        marker.touch()
        os._exit(9)
    return fake_run_one(plan, folder, recording)


def fake_run_one(plan, folder, recording):
    raise AssertionError("replaced by the fixture")


@pytest.fixture
def workers_can_fake(run_one, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "fake_run_one", run_one)


@pytest.mark.usefixtures("workers_can_fake")
def test_a_worker_that_always_dies_fails_its_run_and_no_other(tmp_path):
    axes = {"system": ["vllm-single", "vllm-multi"], "workload.rate_rps": [1, 2, 3]}
    runs = run_sweep(
        small_sweep({**axes, "workload.rate_rps": [1]}), tmp_path / "a", Loop(die_on_single, workers=Workers(2))
    )
    assert [manifest["status"] for manifest in runs.manifests] == ["failed", "done"]
    assert runs.manifests[0]["error"].startswith("the worker died 3 times")


@pytest.mark.usefixtures("workers_can_fake")
def test_a_run_survives_the_death_of_its_worker(tmp_path):
    runs = run_sweep(small_sweep(), tmp_path, Loop(die_once, workers=Workers(2)))
    assert [manifest["status"] for manifest in runs.manifests] == ["done"] * 4


def test_strict_refuses_extrapolated_times(tmp_path, run_one):
    runs = run_sweep(small_sweep({}), tmp_path, Loop(run_one, Recording(strict=True)))
    assert runs.manifests[0]["error"] == "--strict: 25.0 % of the simulated time is extrapolated"


def test_the_driver_writes_its_own_files_beside_the_tables(tmp_path, run_one):
    runs = run_sweep(small_sweep({}), tmp_path, Loop(run_one, Recording(events=True)))
    assert (runs.folders[0] / "events.jsonl").exists()


def test_wrong_input_ends_the_sweep_before_it_begins(tmp_path, run_one):
    sweep = small_sweep({"model": ["llama2-7b", "llama2-8b"]})
    with pytest.raises(
        InputError, match=r"^configuration: at model llama2-8b: unknown model 'llama2-8b'; did you mean"
    ):
        run_sweep(sweep, tmp_path, Loop(run_one))
    assert not (tmp_path / "runs").exists()


def test_an_unwritable_folder_is_named(tmp_path, run_one):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--out .*file: cannot be written: "):
        run_sweep(small_sweep(), tmp_path / "file", Loop(run_one))


def test_replicates_share_a_point_and_differ_in_seed(tmp_path, run_one):
    runs = run_sweep(small_sweep({"system": ["vllm-multi"]}, replicates=2), tmp_path, Loop(run_one))
    assert runs.summary["replicate"].tolist() == [0, 1]
    assert [read_manifest(folder)["seed"] for folder in runs.folders] == [0, 1]
    assert not runs.requests.query("replicate == 0").arrival_s.equals(runs.requests.query("replicate == 1").arrival_s)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("workers_can_fake")
def test_ray_carries_a_sweep_out_and_survives_the_death_of_an_actor(tmp_path):
    ray = pytest.importorskip("ray")
    for function in (die_once, fake_run_one):  # Ray brings a cloudpickle of its own
        ray.cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    try:
        runs = run_sweep(small_sweep(), tmp_path, Loop(die_once, workers=Workers(2, ray="local")))
        with pytest.raises(InputError, match=r"gone\.csv: node .* does not see this input"):
            raycluster.check_shared(tmp_path, [tmp_path / "gone.csv"])
    finally:
        ray.shutdown()
    assert [manifest["status"] for manifest in runs.manifests] == ["done"] * 4


@pytest.mark.parametrize(
    ("unseen", "error"),
    [
        ([], None),
        (["trace.csv"], r"trace\.csv: node 10\.0\.0\.2 of the Ray cluster does not see this input"),
        (["probe", "trace.csv"], r"--out .*: node 10\.0\.0\.2 of the Ray cluster does not see this folder"),
    ],
)
def test_all_nodes_must_see_the_folder_and_the_inputs(tmp_path, monkeypatch, unseen, error):
    def looked(paths):
        assert paths[0].exists(), "the probe"
        named = {"probe": paths[0], "trace.csv": paths[1]}
        return {"10.0.0.1": [], "10.0.0.2": [named[name] for name in unseen]}

    monkeypatch.setattr(raycluster, "unseen_by_node", looked)
    with pytest.raises(InputError, match=error) if error else nullcontext():
        raycluster.check_shared(tmp_path, [Path("trace.csv")])
    assert list(tmp_path.iterdir()) == [], "the probe is gone"


def test_a_cluster_needs_a_folder_that_is_named():
    with pytest.raises(InputError, match="give --out, a folder that all nodes"):
        shared_out(None, "10.0.0.1:6379")
    assert shared_out(None, "local") is None
    assert shared_out(Path("out"), "10.0.0.1:6379").is_absolute()
    assert shared_out(Path("out"), None) == Path("out")
