"""`python -m infreal.gpu_check` on a CPU: it needs nothing but torch and numpy, and what it writes is read by `infsim`."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from pool_tools import tiny_decoder

from experiments.eventlog import read_log
from experiments.explain import validate
from experiments.plan import plan_cluster
from infreal.check import Verdict
from infreal.check.kernels import Setting, check_kernels, decode_errors
from infreal.check.sharing import SIZES, check_sharing, make_spec
from infreal.gpu_check import check_model, main
from infreal.kernels import torch_backend
from infsim.__main__ import main as infsim_main

FOREIGN = (
    "pandas",
    "pyarrow",
    "scipy",
    "pydantic",
    "ruamel",
    "typer",
    "rich",
    "joblib",
    "simpy",
    "matplotlib",
    "transformers",
)
FOREIGN += ("safetensors", "tokenizers", "gguf", "ray", "numba")
WITHOUT = (
    f"import sys; sys.modules.update(dict.fromkeys({FOREIGN!r})); from infreal.gpu_check import main; sys.exit(main())"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a run left, in a process that has only torch, triton and numpy."""
    out = tmp_path_factory.mktemp("gpu-check")
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", WITHOUT, "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert done.stdout.count(" ok ") == 10
    return out


@pytest.mark.slow
def test_its_event_log_replays_and_compares_with_a_simulation(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert infsim_main(["replay", "events.jsonl", "--out", "real"]) == 0
    assert infsim_main(["run", "config.yaml", "--out", "simulated", "--workers", "1"]) == 0
    assert infsim_main(["compare", "real", "simulated"]) == 0
    requests = [pd.read_parquet(next(folder.glob(f"{name}/runs/*/requests.parquet"))) for name in ("real", "simulated")]
    for column in ("req_id", "input_tokens", "output_tokens", "status"):
        assert requests[0][column].tolist() == requests[1][column].tolist()
    assert requests[0]["remote_tokens_max"].max() > 0
    moves = pd.read_parquet(next(folder.glob("real/runs/*/moves.parquet")))
    assert (moves["outcome"] == "committed").any()


@pytest.mark.slow
def test_its_profile_is_read_by_calibration(folder):
    table = pd.read_csv(folder / "profile.csv")
    assert {"decode_attention", "prefill_attention", "gemm", "memory_copy"} == set(table["operator"])
    assert (table["time_s"] > 0).all()


def test_every_check_holds_on_a_small_model(tmp_path, one_thread):
    verdicts = [*check_model(tiny_decoder(), "torch"), *check_sharing(tiny_decoder(), "torch", "cpu", tmp_path)]
    assert all(verdict.holds for verdict in verdicts), list(map(str, verdicts))
    assert len(verdicts) == 4


def test_its_cluster_is_that_of_its_configuration(tmp_path, one_thread):
    """The managers of the log are rebuilt from the configuration alone."""
    list(check_sharing(tiny_decoder(), "torch", "cpu", tmp_path))
    header, _ = read_log(tmp_path / "events.jsonl")
    planned, made = plan_cluster(validate(header["config"], "header")), make_spec(SIZES["cpu"])
    assert planned.instance.model == made.instance.model
    for name in (
        "num_instances",
        "nodes",
        "num_blocks",
        "token_budget",
        "dispatch",
        "batching",
        "placement",
        "scheduler",
    ):
        assert getattr(planned, name) == getattr(made, name), name
    for name in ("max_batch", "headroom_frac", "macro", "largest_blocks", "seed", "sample_s"):
        assert getattr(planned, name) == getattr(made, name), name
    assert planned.instance.block_bytes == made.instance.block_bytes


def test_a_wrong_kernel_is_found(monkeypatch):
    monkeypatch.setattr(torch_backend, "merge", lambda parts, out: out.fill_neutral())
    assert max(decode_errors(Setting(2, 1, 64, torch.float32, "cpu", "torch"))) > 0.1
    assert not all(verdict.holds for verdict in check_kernels("cpu", "torch"))
    assert str(Verdict("x", False, "y")).startswith("FAILED")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        main(["--device", "cuda", "--out", str(tmp_path)])
    assert exit_.value.code == 2
    assert (
        capsys.readouterr().err
        == "python -m infreal.gpu_check: --device cuda: torch sees no CUDA device here (allowed: cpu)\n"
    )
