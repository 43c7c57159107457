"""The Python API: run, load, predict, and the README's example."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import infsim
from perfmodel.errors import InputError, RunError

README = Path(__file__).parents[2] / "README.md"
WORKLOAD = {"generator": "fixed", "params": {"input_tokens": 64, "output_tokens": 8}, "num_requests": 30, "rate_rps": 5}
CONFIG = {
    "base": {"system": "vllm-multi", "cluster": {"nodes": 1, "gpus_per_node": 2}, "workload": WORKLOAD},
    "axes": {"dispatch": ["least-loaded", "round-robin"]},
}


def test_run_takes_a_mapping_and_settings_and_load_finds_the_same(tmp_path):
    runs = infsim.run(CONFIG, out=tmp_path, seed=3, workload__rate_rps=2)
    assert runs.summary["dispatch"].tolist() == ["least-loaded", "round-robin"]
    assert runs.manifests[0]["config"]["workload"]["rate_rps"] == 2
    assert len(runs.requests) == 60 and not runs.instances.empty and runs.moves.empty
    again = infsim.load(tmp_path)
    assert again.summary.equals(runs.summary) and again.requests.equals(runs.requests)


def test_without_out_a_temporary_folder_holds_the_runs():
    runs = infsim.run(CONFIG, workload__num_requests=3)
    assert runs.folder.is_dir() and runs.summary["num_requests"].tolist() == [3, 3]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_ray_cluster_carries_the_runs_out(tmp_path):
    ray = pytest.importorskip("ray")
    try:
        on_ray = infsim.run(CONFIG, out=tmp_path / "ray", workers=2, ray="local")
    finally:
        ray.shutdown()
    assert on_ray.requests.equals(infsim.run(CONFIG, out=tmp_path / "here").requests)


def test_mistakes_are_input_errors_and_failed_runs_run_errors(tmp_path):
    with pytest.raises(InputError, match="unknown key 'sed'"):
        infsim.run(CONFIG, sed=1)
    (tmp_path / "bad.py").write_text("class Bad:\n    def choose(self, view, request):\n        return self.answer\n")
    config = {"base": {**CONFIG["base"], "dispatch": f"{tmp_path}/bad.py:Bad"}}
    with pytest.raises(RunError, match=r"000-vllm-multi: AttributeError: .*answer"):
        infsim.run(config, out=tmp_path / "out")
    (tmp_path / "bad.py").write_text("class Bad:\n    def choose(self, view, request):\n        return 99\n")
    with pytest.raises(InputError, match=r"dispatch policy Bad sent request 0 to instance 99"):
        infsim.run(config, out=tmp_path / "out")


def test_predict_answers_as_the_command_does():
    found = infsim.predict(model="llama2-7b", gpu="a100-80gb", decode=["64x1024"])
    assert found["total_s"] > found["roofline_s"] > 0
    assert infsim.predict(model="llama2-70b", gpu="a100-80gb", tp=8, memory=True)["memory"]


def test_importing_the_package_costs_nothing():
    code = "import sys, infsim; print({'numpy', 'pandas', 'simpy', 'pydantic'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "set()"
    )


def test_the_readme_example_runs(tmp_path, monkeypatch, capsys):
    """The first block of Python in the README, as it stands."""
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL).group(1)
    assert len(code.splitlines()) <= 15
    exec(compile(code, str(README), "exec"), {})
    assert capsys.readouterr().out
