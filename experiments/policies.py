"""Finds a policy by name: one of the core's registry, or `file.py:Class` of a user."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from perfmodel.errors import InputError, unknown
from perfmodel.policies import BATCHING, DISPATCH, PLACEMENT

REGISTRIES: dict[str, dict[str, Callable[[], Any]]] = {
    "dispatch": dict(DISPATCH),
    "batching": dict(BATCHING),
    "placement": dict(PLACEMENT),
}
METHODS = {"dispatch": "choose", "batching": "plan", "placement": "plan"}  # what perfmodel.policies asks of each kind


def find_policy(kind: str, name: str) -> Callable[[], Any]:
    """The class of a policy; calling it makes a fresh one. Raises InputError."""
    if ".py:" in name:
        return policy_of_file(kind, name)
    if name not in REGISTRIES[kind]:
        raise unknown(f"{kind} policy", name, [*REGISTRIES[kind], "file.py:Class"])
    return REGISTRIES[kind][name]


def policy_of_file(kind: str, name: str) -> type:
    file, _, class_name = name.rpartition(":")
    module = load_module(Path(file), kind)
    policy = getattr(module, class_name, None)
    if not isinstance(policy, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise InputError(f"{kind}: {unknown(f'class of {Path(file).name}', class_name, classes)}")
    if not callable(getattr(policy, METHODS[kind], None)):
        raise InputError(
            f"{kind}: {Path(file).name}:{class_name} has no method {METHODS[kind]}() (see perfmodel.policies)"
        )
    return policy


def load_module(path: Path, kind: str) -> ModuleType:
    """A Python file as a module, loaded anew so that an edited file is the one that runs."""
    if not path.is_file():
        raise InputError(f"{kind}: {path}: no such file")
    name = f"policy_of_a_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        at = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise InputError(f"{kind}: {path}{at}: cannot be loaded: {type(error).__name__}: {error}") from error
    return module
