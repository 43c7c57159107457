"""The simulator compiled by mypyc gives, to the last bit, what the same sources give as Python."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("perfmodel", "traces", "experiments", "infsim", "infreal")
SUMMARIES = """
import importlib.util, json, sys
import infsim.driver, perfmodel.rmanager
spec = importlib.util.spec_from_file_location("golden", sys.argv[1])
golden = importlib.util.module_from_spec(spec)
spec.loader.exec_module(golden)
summaries = {name: golden.summary_of(case) for name, case in golden.CASES.items()}
json.dump({"files": [infsim.driver.__file__, perfmodel.rmanager.__file__], "summaries": summaries}, sys.stdout)
"""


def summaries(packages):
    """Of the golden cases, and which files have computed them."""
    command = [sys.executable, "-c", SUMMARIES, str(Path(__file__).with_name("test_golden.py"))]
    env = {**os.environ, "PYTHONPATH": str(packages)}
    return json.loads(subprocess.run(command, cwd=packages, env=env, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_compiled_gives_the_same_bits(tmp_path):
    pytest.importorskip("mypyc.build")
    source, packages = tmp_path / "source", tmp_path / "packages"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "infsim.bench.compiled", "--quiet", "build", "--build-lib", str(packages)]
    subprocess.run(build, cwd=source, env={**os.environ, "PYTHONPATH": str(source)}, check=True, capture_output=True)
    compiled, pure = summaries(packages), summaries(ROOT)
    assert all(not file.endswith(".py") for file in compiled["files"])
    assert all(file.endswith(".py") for file in pure["files"])
    assert compiled["summaries"] == pure["summaries"]
