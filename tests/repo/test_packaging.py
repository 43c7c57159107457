"""The distribution: each package is ours, and the wheel works in an environment without torch or ray."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("perfmodel", "traces", "experiments", "infsim", "infreal")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_name_comes_from_this_distribution(package):
    """An unrelated `traces` is on the package index."""
    origin = importlib.util.find_spec(package).origin
    assert Path(origin) == ROOT / package / "__init__.py"
    assert set(importlib.metadata.packages_distributions()[package]) == {"infsim"}


def test_constraints_pin_every_dependency_and_no_local_build():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.partition("#")[0].strip().split("==") for line in lines)
    assert pins["torch"] == "2.13.0"
    assert not [line for line in lines if "+" in line], "a local version such as +cpu"
    assert not [name for name in pins if name.startswith(("nvidia", "cuda"))]
    wanted = (
        PROJECT["dependencies"] + PROJECT["optional-dependencies"]["real"] + PROJECT["optional-dependencies"]["dev"]
    )
    names = {requirement.partition(";")[0].strip().split(">")[0].lower() for requirement in wanted}
    assert names <= {name.lower() for name in pins}, names - {name.lower() for name in pins}


def git_files():
    """Tracked and new files, as a clean checkout of the next commit has them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Built from a copy, so that nothing lying about gets in and nothing is left behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(out.glob("infsim-*.whl"))


def test_the_wheel_holds_the_five_packages_with_their_data(wheel):
    import zipfile

    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {name for name in tracked if (ROOT / name).exists()} - set(names)


def base_only(folder, wheel):
    """An environment with the wheel alone; the base dependencies are those of this one, and nothing else of it is seen."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in base_distributions():
        link_into(site, importlib.metadata.distribution(name))
    return python


def base_distributions():
    """The base dependencies and what they need, without extras."""
    from packaging.requirements import Requirement

    waiting, found = list(PROJECT["dependencies"]), set()
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name.lower() in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(requirement.name.lower())
        waiting += importlib.metadata.requires(requirement.name) or []
    return found


def link_into(site, distribution):
    """Symbolic links to the packages and modules of a distribution."""
    for name in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        if not (site / name).exists():
            (site / name).symlink_to(distribution.locate_file(name))


def test_the_wheel_runs_the_demo_and_predict_without_torch_or_ray(wheel, tmp_path):
    python = base_only(tmp_path / "env", wheel)

    def run(*arguments):
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        return subprocess.run(
            [str(python), *arguments], capture_output=True, text=True, check=False, cwd=tmp_path, env=clean, timeout=250
        )

    for name in ("torch", "ray", "triton", "pytest"):
        assert run("-c", f"import {name}").returncode == 1, f"{name} is visible"
    demo = run("-m", "infsim", "run", "demo", "--out", "out", "--set", "workload.num_requests=100", "--workers", "1")
    assert demo.returncode == 0, demo.stderr
    assert demo.stdout.splitlines()[-1].startswith("Trust: ")
    assert (tmp_path / "out" / "throughput-latency.png").stat().st_size > 10_000
    query = ("--model", "llama2-7b", "--gpu", "a100-80gb", "--decode", "32x2048", "--json")
    assert json.loads(run("-m", "infsim", "predict", *query).stdout)["total_s"] > 0
    assert run("-m", "infsim", "list", "keys").stdout.startswith("system ")


@pytest.mark.slow
def test_a_fresh_environment_installs_the_wheel_with_its_constraints(wheel, tmp_path):
    """What a user does: pip resolves the base dependencies itself."""
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(install, check=True)
    command = [str(tmp_path / "env" / "bin" / "infsim"), "run", "demo", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0 and "Best by goodput: " in done.stdout, done.stderr
