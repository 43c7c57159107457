"""Validates a run's mapping; words the first error in one line: where, what is wrong, what was found, what is near."""

import re
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from experiments.config import SECTIONS, Config, workload_kind
from perfmodel.errors import InputError, unknown


def validate(raw: dict[str, Any], source: str, axes: tuple[str, ...] = ()) -> Config:
    """The resolved run, or InputError with the first error's place, value and what is allowed."""
    try:
        return Config.model_validate(raw).resolved()
    except ValidationError as error:
        raise InputError(explain(error.errors()[0], raw, source, axes)) from error


def explain(error: ErrorDetails, raw: dict[str, Any], source: str, axes: tuple[str, ...]) -> str:
    """One line for pydantic's error."""
    path = dotted_path(error["loc"])
    axis = next((axis for axis in axes if path == axis or path.startswith((f"{axis}.", f"{axis}["))), None)
    where = f"{source}: {'axes' if axis else 'base'}{'' if path.startswith('[') else '.'}{path}"
    if error["type"] == "extra_forbidden":
        parent, _, name = path.rpartition(".")
        known = SECTIONS[f"workload.{workload_kind(raw['workload'])}" if parent == "workload" else parent].model_fields
        return f"{where}: {unknown('key', name, known)}"
    if error["type"] == "missing":
        return f"{where}: is required (in the file, or --set {path}=...)"
    message = re.sub(r"valid dictionary or instance of \w+", "mapping", error["msg"])
    message = re.sub(r"^(Value error, |Input )", "", message)
    found = "" if error["type"] == "value_error" else f", found {shorten(error['input'])}"
    return f"{where}: {message}{found}{nearest(error)}"


def dotted_path(loc: tuple[int | str, ...]) -> str:
    """`a.b[2]`, without the tag that pydantic puts behind `workload`."""
    parts = (loc[0], *loc[2:]) if loc[:1] == ("workload",) else loc
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


def nearest(error: ErrorDetails) -> str:
    """The nearest allowed name of a choice."""
    choices = re.findall(r"'([^']+)'", str(error.get("ctx", {}).get("expected", "")))
    near = get_close_matches(str(error["input"]), choices, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def shorten(value: Any, width: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 1]}…"
