"""The import layers, and what the core must not know."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = {
    "perfmodel": set(),
    "traces": {"perfmodel"},
    "experiments": {"perfmodel", "traces"},
    "infsim": {"perfmodel", "traces", "experiments"},
    "infreal": {"perfmodel", "traces", "experiments"},
}
CORE_STDLIB_BANNED = {
    "time",
    "datetime",
    "random",
    "secrets",
    "threading",
    "asyncio",
    "multiprocessing",
    "socket",
    "os",
    "io",
}
CORE_STDLIB_BANNED |= {"pathlib", "shutil", "subprocess", "tempfile", "logging", "json"}
HARDWARE = {"torch", "triton", "ray", "safetensors", "tokenizers", "gguf"}


def modules(package):
    return sorted((ROOT / package).rglob("*.py"))


def imports(source):
    """(top-level name, whole name, line, whether it is imported on loading the module)."""
    tree = ast.parse(source)
    late = {
        id(node) for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names = [node.module]
        else:
            continue
        for name in names:
            yield name.partition(".")[0], name, node.lineno, id(node) not in late


def violations(package, source):
    """What a module of `package` imports against the rules."""
    for top, name, line, _ in imports(source):
        if top in LAYERS and top != package and top not in LAYERS[package]:
            yield f"line {line}: {package} imports {name}"
        if package == "traces" and top == "perfmodel" and name != "perfmodel.errors":
            yield f"line {line}: traces imports {name}"


def core_violations(source, may_use_scipy):
    """The core is numpy and the standard library, without clock, thread, file or global random numbers."""
    for top, name, line, _ in imports(source):
        if top in CORE_STDLIB_BANNED or (
            top not in sys.stdlib_module_names | {"perfmodel", "numpy"} and not (top == "scipy" and may_use_scipy)
        ):
            yield f"line {line}: {name}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            yield f"line {node.lineno}: open()"


@pytest.mark.parametrize("package", LAYERS)
def test_packages_import_only_the_layers_below(package):
    found = {str(path.relative_to(ROOT)): list(violations(package, path.read_text())) for path in modules(package)}
    assert found, f"{package} has no modules"
    assert not {path: lines for path, lines in found.items() if lines}


def test_the_core_knows_no_clock_file_or_foreign_library():
    for path in modules("perfmodel"):
        may_use_scipy = "calibrate" in str(path.relative_to(ROOT / "perfmodel"))
        assert not list(core_violations(path.read_text(), may_use_scipy)), path


@pytest.mark.parametrize("package", ["perfmodel", "traces", "experiments", "infsim"])
def test_nothing_but_infreal_needs_torch_triton_or_ray_to_be_imported(package):
    """Late imports (inside a function) are for options that say what to install."""
    for path in modules(package):
        found = [name for top, name, _, on_load in imports(path.read_text()) if top in HARDWARE and on_load]
        assert not found, f"{path}: {found}"


@pytest.mark.parametrize("folder", ["infreal/kernels", "infreal/model"])
def test_kernels_run_on_a_machine_that_has_only_torch_triton_and_numpy(folder):
    """All but the module that numba compiles, which is left alone where numba is not installed."""
    allowed = sys.stdlib_module_names | {"torch", "triton", "numpy", "infreal", "safetensors", "tokenizers", "gguf"}
    for path in modules(folder):
        if path.name != "numba_decode.py":
            late_too = [name for top, name, _, _ in imports(path.read_text()) if top not in allowed]
            assert not late_too, f"{path}: {late_too}"


def test_the_guards_can_fail():
    assert list(violations("perfmodel", "import traces")) == ["line 1: perfmodel imports traces"]
    assert list(violations("infsim", "def f():\n    from infreal import x")) == ["line 2: infsim imports infreal"]
    assert list(violations("traces", "from perfmodel.cost import CostModel")) == [
        "line 1: traces imports perfmodel.cost"
    ]
    assert not list(violations("traces", "from perfmodel.errors import InputError"))
    for source in ("import time", "import simpy", "import scipy", "x = open('f')", "from os import path"):
        assert list(core_violations(source, may_use_scipy=False)), source
    assert not list(core_violations("import numpy as np\nfrom scipy import special", may_use_scipy=True))
    with pytest.raises(AssertionError, match="relative"):
        list(imports("from . import x"))


def test_no_file_names_a_place_of_one_machine():
    """Absolute paths under a home or working folder do not exist elsewhere."""
    places = ("/" + "work/", "/" + "root/", "/" + "farm/", "/" + "home/")
    kinds = {".py", ".md", ".yaml", ".toml", ".txt", ".json", ".cff", ".sh", ""}
    kept = [path for package in (*LAYERS, "tests", "paper_figures") for path in (ROOT / package).rglob("*")]
    kept += [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a file in a worktree
    for path in kept:
        if path.is_file() and path.suffix in kinds and "__pycache__" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not [place for place in places if place in text], path
