"""The `infsim` command from outside: exit codes, one line for every mistake, files it leaves."""

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pandas as pd
import pytest

from infsim.__main__ import main

SWEEP = """
base:
  system: vllm-multi
  cluster: {nodes: 1, gpus_per_node: 2}
  workload: {generator: fixed, params: {input_tokens: 512, output_tokens: 32}, num_requests: 60, rate_rps: 2}
axes:
  system: [vllm-multi, vllm-single]
  workload.rate_rps: [2, 8]
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "small.yaml"
    file.write_text(SWEEP)
    return str(file)


@pytest.fixture(scope="module")
def swept(config, tmp_path_factory):
    """The sweep's folder, and what the command printed."""
    out = tmp_path_factory.mktemp("swept") / "out"
    printed, progress = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(progress):
        assert infsim("run", config, "--out", out, "--events", "--timeline", "--workers", 1) == 0
    return out, printed.getvalue(), progress.getvalue()


def infsim(*arguments):
    return main([str(argument) for argument in arguments])


def command(*arguments, **environment):
    """The installed command's module, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "infsim", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
        cwd=Path(__file__).parents[2],
    )


def test_run_leaves_table_pictures_and_folders_and_ends_in_three_lines(swept):
    out, printed, progress = swept
    lines = printed.strip().splitlines()
    assert [line.split(":")[0] for line in lines[-3:]] == ["Best by goodput", "Why", "Trust"]
    assert "2 × TP1: pool" in printed and "1 × TP2: pool" in printed
    assert "4/4 003-vllm-single-8: done" in progress
    assert {path.name for path in out.iterdir()} == {
        "summary.csv",
        "throughput-latency.png",
        "throughput-latency.svg",
        "runs",
    }
    assert pd.read_csv(out / "summary.csv")["num_finished"].tolist() == [60] * 4
    assert len(list((out / "runs").iterdir())) == 4


def test_a_second_run_resumes_and_simulates_nothing(config, swept, tmp_path, capsys):
    out = shutil.copytree(swept[0], tmp_path / "out")
    before = (out / "summary.csv").read_bytes()
    assert infsim("run", config, "--out", out) == 0
    printed = capsys.readouterr()
    assert "4 of them done already" in printed.out and printed.err == ""
    assert (out / "summary.csv").read_bytes() == before


def test_two_workers_write_the_same_bytes(config, swept, tmp_path):
    assert infsim("run", config, "--out", tmp_path, "--workers", 2) == 0
    files = sorted(path.relative_to(swept[0]) for path in swept[0].rglob("*.parquet"))
    assert len(files) == 12
    assert not [file for file in files if (tmp_path / file).read_bytes() != (swept[0] / file).read_bytes()]


def test_set_and_seed_change_base(config, tmp_path):
    infsim("run", config, "--out", tmp_path, "--seed", 5, "--set", "workload.num_requests=20", "--workers", 1)
    manifest = json.loads((tmp_path / "runs" / "000-vllm-multi-2" / "manifest.json").read_text())
    assert (manifest["seed"], manifest["metrics"]["num_requests"]) == (5, 20)


def test_without_out_each_sweep_finds_a_folder_of_its_own(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1, 0):
        settings = ("--set", "workload.num_requests=5", "--seed", seed)
        assert infsim("run", config, *settings, "--workers", 1) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["small", "small-2"]


def test_dry_run_writes_nothing(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert infsim("run", config, "--dry-run") == 0
    assert capsys.readouterr().out.startswith("000-vllm-multi-2: 2 × TP1: pool ")
    assert not (tmp_path / "out").exists()


def test_events_replay_into_the_same_tables(swept, tmp_path):
    original = swept[0] / "runs" / "003-vllm-single-8"
    assert json.loads((original / "timeline.json").read_text())["traceEvents"]
    assert infsim("replay", original / "events.jsonl", "--out", tmp_path / "b") == 0
    (rebuilt,) = (tmp_path / "b" / "runs").iterdir()
    for name in ("requests", "instances", "moves"):
        assert (rebuilt / f"{name}.parquet").read_bytes() == (original / f"{name}.parquet").read_bytes()
    a, b = (json.loads((folder / "manifest.json").read_text())["metrics"] for folder in (original, rebuilt))
    assert {**a, "wall_s": 0} == {**b, "wall_s": 0}


def test_capacity_prints_a_line_a_system_and_a_picture(config, tmp_path, capsys):
    slo = "slo={ttft_s: 0.2, ttft_s_per_1k_tokens: 0.0, tpot_s: 0.1}"
    assert infsim("capacity", config, "--out", tmp_path / "c", "--workers", 1, "--set", slo) == 0
    rows = pd.read_csv(tmp_path / "c" / "capacity.csv")
    assert rows["system"].tolist() == ["vllm-multi", "vllm-single"]
    assert (rows["rate_rps"] > 1).all() and (rows["slo_attainment_frac"] >= 0.9).all()
    assert rows["limit"].isin(["KV memory", "compute", "prefill", "link", "queue"]).all()
    assert (tmp_path / "c" / "capacity.svg").exists()
    printed = capsys.readouterr()
    assert "vllm-single" in printed.out and "2/2 vllm-single: " in printed.err


def test_compare_with_itself_has_no_error(swept, tmp_path):
    assert infsim("compare", swept[0], swept[0], "--out", tmp_path / "c") == 0
    assert (pd.read_csv(tmp_path / "c" / "compare.csv")["error_frac"] == 0).all()
    assert (tmp_path / "c" / "compare.png").exists()


def test_a_policy_that_raises_fails_its_run_by_name_and_exits_1(config, tmp_path, capsys):
    (tmp_path / "bad.py").write_text(
        "class Bad:\n    def choose(self, view, request):\n        raise ValueError('no idea [of it]')\n"
    )
    code = infsim("run", config, "--set", f"dispatch={tmp_path}/bad.py:Bad", "--out", tmp_path / "out", "--workers", 1)
    printed = capsys.readouterr()
    assert code == 1
    assert "003-vllm-single-8 failed: ValueError: no idea [of it]" in printed.out
    assert "Traceback" not in printed.out + printed.err
    manifest = json.loads((tmp_path / "out" / "runs" / "000-vllm-multi-2" / "manifest.json").read_text())
    assert "bad.py" in manifest["traceback"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "CONFIG", "--ot", "x"], "No such option: --ot"),
        (["run"], "Missing argument 'CONFIG'"),
        (["rum"], "No such command 'rum'"),
        (["run", "CONFIG", "--workers", "0"], "Invalid value for '--workers'"),
        (["run", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["run", "dem"], "unknown configuration 'dem'; did you mean 'demo'"),
        (["run", "CONFIG", "--set", "a"], "--set 'a': should be KEY=VALUE"),
        (["run", "CONFIG", "--set", "modle=x"], "small.yaml: base.modle: unknown key 'modle'; did you mean 'model'"),
        (["run", "CONFIG", "--set", "system=vllm-multi"], "--set system: is an axis"),
        (["run", "CONFIG", "--set", "model=llama2-70b"], "llama2-70b"),
        (["run", "CONFIG", "--set", "instance.tensor_parallel=3"], "small.yaml: at system vllm-multi"),
        (["run", "CONFIG", "--set", "seed=[1"], "--set seed:1:"),
        (["run", "CONFIG", "--out", "CONFIG"], "cannot be written"),
        (["run", "azure-conversation"], "base.workload.path: is required (in the file, or --set workload.path=...)"),
        (["run", "CONFIG", "--set", "workload={trace: own, path: nowhere.csv, rate_rps: 1}"], "nowhere.csv"),
        (["capacity", "CONFIG", "--attainment", "2"], "Invalid value for '--attainment'"),
        (["compare", "nowhere", "nowhere"], "nowhere: holds no runs"),
        (["replay", "nowhere.jsonl", "--out", "OUT"], "nowhere.jsonl: No such file"),
        (["replay", "CONFIG", "--out", "OUT"], "line 1"),
        (["list", "model"], "unknown kind 'model'; did you mean 'models'"),
        (["predict", "--model", "llama2-7b", "--gpu", "a10", "--decode", "1x1"], "unknown gpu 'a10'"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_2(arguments, line, config, tmp_path, capsys):
    places = {"CONFIG": config, "OUT": str(tmp_path / "out")}
    assert infsim(*(places.get(argument, argument) for argument in arguments)) == 2
    printed = capsys.readouterr()
    assert line in printed.err
    assert printed.err.startswith("infsim: ") and printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_damaged_event_log_is_named(swept, tmp_path, capsys):
    lines = next(swept[0].rglob("events.jsonl")).read_text().splitlines()
    log = tmp_path / "events.jsonl"
    log.write_text("\n".join([*lines[:5], '{"t_s": 1.0, "machine": "dispatcher", "event": "Nonsense"}']))
    assert infsim("replay", log, "--out", tmp_path / "b") == 2
    assert "events.jsonl: a damaged event log" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["run"], ["list"], ["predict"], ["traces"]])
def test_help_is_there_for_every_command(arguments, capsys):
    assert infsim(*arguments, "--help") == 0
    assert "Usage: infsim" in capsys.readouterr().out


def test_list_prints_one_line_each(capsys):
    assert infsim("list", "keys") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("scheduler.lease_s ") for line in lines)


def test_the_process_exits_with_the_code_and_no_traceback():
    done = command("run", "nowhere.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "infsim: nowhere.yaml: no such file\n"


def test_help_needs_no_heavy_import():
    """What keeps it under 0.5 s on an idle host: nothing heavy is imported."""
    code = "import sys, infsim.cli; print([m for m in sys.modules if m in HEAVY])"
    heavy = (
        "HEAVY = {'numpy', 'pandas', 'pyarrow', 'scipy', 'matplotlib', 'simpy', 'joblib', 'pydantic', 'torch', 'ray'}; "
    )
    found = subprocess.run([sys.executable, "-c", heavy + code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
    assert command("--help").returncode == 0
