"""Reads a sweep (base, axes or points) and expands it into runs. Owns paths, `--set` and how an error is worded.

Every key of `base` may be an axis; dotted names reach inside a mapping, and inside a catalogue name, which then
becomes {preset: NAME, KEY: VALUE}. Paths are relative to the file; those given by `--set` to the current directory.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from experiments.config import SECTIONS, Config
from experiments.explain import validate
from perfmodel.errors import InputError, unknown

CONFIGS = Path(__file__).parent / "configs"
FILE_KEYS = ("workload.path", "workload.tokenizer")
FILE_OR_NAME_KEYS = ("model", "belief.pack", "truth.pack", "dispatch", "batching", "placement", "real.weights")


@dataclass(frozen=True)
class Run:
    """One run of a sweep. `axes` maps each axis (dotted name) to this run's value."""

    index: int
    axes: dict[str, Any]
    replicate: int
    config: Config

    @property
    def name(self) -> str:
        """Folder name: number, then the axis values that fit into a path."""
        values = [label(value) for value in self.axes.values()] + ([f"r{self.replicate}"] if self.replicate else [])
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(values)).strip("-.")[:60] or self.config.system
        return f"{self.index:03d}-{slug}"


@dataclass(frozen=True)
class Sweep:
    """A file's runs in order: points outermost first, replicates innermost."""

    name: str
    source: str
    axes: tuple[str, ...]
    runs: tuple[Run, ...]


def load_sweep(config: Path | str | Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> Sweep:
    """The sweep of a file, of a ready configuration's name, or of a mapping; `settings` change `base`."""
    if isinstance(config, Mapping):
        return expand(copy.deepcopy(dict(config)), settings or {}, "configuration", Path.cwd())
    path = find_config(config)
    return expand(read_yaml(path), settings or {}, str(path.name), path.resolve().parent)


def find_config(config: Path | str) -> Path:
    """A file, or a ready configuration of this package by name."""
    path = Path(config)
    if path.is_file():
        return path
    ready = {file.stem: file for file in sorted(CONFIGS.glob("*.yaml"))}
    if str(config) in ready:
        return ready[str(config)]
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise InputError(f"{config}: no such file")
    raise unknown("configuration", str(config), ready)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML 1.2 file."""
    try:
        value = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: should be a mapping with base, and axes or points")
    return value


def parse_yaml(text: str, where: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = " ".join(str(error.problem).split())
        raise InputError(f"{where}{at}: not YAML: {problem}") from error
    except YAMLError as error:
        raise InputError(f"{where}: not YAML: {' '.join(str(error).split())}") from error


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """`["a.b=v", ...]` as a mapping; values are YAML."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set {pair!r}: should be KEY=VALUE, e.g. workload.rate_rps=4")
        settings[key.strip()] = parse_yaml(value, f"--set {key}")
    return settings


def expand(raw: dict[str, Any], settings: Mapping[str, Any], source: str, folder: Path) -> Sweep:
    """All runs of a sweep's mapping. Raises InputError for the first thing that is wrong, with its path."""
    base, points = check_sections(raw, source)
    axes = tuple(dict.fromkeys(key for point in points for key in point))
    base = resolve_paths(base, folder)
    for key, value in settings.items():
        check_setting(key, axes)
        set_dotted(base, key, resolve_paths_of(key, value, Path.cwd()), f"--set {key}")
    runs = list(expand_points(base, points, source, folder))
    return Sweep(Path(source).stem, source, axes, tuple(runs))


def check_sections(raw: dict[str, Any], source: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(base, points); axes become the points of their product."""
    for key in raw:
        if key not in ("base", "axes", "points"):
            raise InputError(f"{source}: {unknown('section', str(key), ('base', 'axes', 'points'))}")
    base, axes, points = raw.get("base") or {}, raw.get("axes") or {}, raw.get("points")
    if not isinstance(base, dict):
        raise InputError(f"{source}: base: should be a mapping, found {base!r}")
    if axes and points is not None:
        raise InputError(f"{source}: axes and points exclude each other; write the product out as points")
    return base, check_points(points, source) if points is not None else product_of(axes, source)


def check_points(points: Any, source: str) -> list[dict[str, Any]]:
    if not isinstance(points, list) or not points or not all(isinstance(point, dict) for point in points):
        raise InputError(f"{source}: points: should be a list of mappings KEY: VALUE, found {points!r}")
    for number, point in enumerate(points):
        if set(point) != set(points[0]):
            known = ", ".join(points[0])
            raise InputError(f"{source}: points[{number}]: should set the same keys as points[0]: {known}")
    return points


def product_of(axes: Any, source: str) -> list[dict[str, Any]]:
    if not isinstance(axes, dict):
        raise InputError(f"{source}: axes: should be a mapping KEY: [VALUE, ...], found {axes!r}")
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{source}: axes.{key}: should be a list of values, found {values!r}")
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def check_setting(key: str, axes: tuple[str, ...]) -> None:
    for axis in axes:
        if key == axis or key.startswith(f"{axis}."):
            raise InputError(f"--set {key}: is an axis of this sweep; --set changes base (change the axis in the file)")


def expand_points(base: dict[str, Any], points: list[dict[str, Any]], source: str, folder: Path) -> Iterator[Run]:
    index = 0
    for point in points:
        raw = copy.deepcopy(base)
        for key, value in point.items():
            set_dotted(raw, key, resolve_paths_of(key, copy.deepcopy(value), folder), f"{source}: axis {key}")
        config = validate(raw, source, tuple(point))
        for replicate in range(config.replicates):
            seeded = config.model_copy(update={"seed": config.seed + replicate})
            yield Run(index, dict(point), replicate, seeded)
            index += 1


def set_dotted(target: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set `a.b.c`; a name on the way (a preset, given or by default) becomes {preset: name}."""
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents):
        child = target.get(parent)
        if child is None:
            child = default_name(".".join(parents[:depth]), parent) or {}
        if isinstance(child, str):
            child = {"preset": child}
        if not isinstance(child, dict):
            raise InputError(f"{where}: {parent} is {child!r}, which has no keys")
        target[parent] = child
        target = child
    target[last] = value


def default_name(section: str, key: str) -> str | None:
    """The default of `section.key` where that is a name."""
    fields = SECTIONS[section].model_fields if section in SECTIONS else {}
    default = fields[key].default if key in fields else None
    return default if isinstance(default, str) else None


def resolve_paths(base: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {key: resolve_paths_of(key, value, folder) for key, value in base.items()}


def resolve_paths_of(key: str, value: Any, folder: Path) -> Any:
    """`value` of `key` (or of a mapping under it) with file names made absolute from `folder`."""
    if isinstance(value, dict):
        return {inner: resolve_paths_of(f"{key}.{inner}", item, folder) for inner, item in value.items()}
    if isinstance(value, str) and (key in FILE_KEYS or (key in FILE_OR_NAME_KEYS and is_path(value))):
        return str((folder / value).resolve())
    return value


def is_path(value: str) -> bool:
    """Is this name of a model, pack, policy or weights a file rather than a known name?"""
    return value.partition("@")[0].endswith((".json", ".gguf")) or ".py:" in value or "/" in value


def label(value: Any) -> str:
    """An axis value as text: in folder names, tables and summary.csv."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)


def choice_name(axis: str, value: Any) -> str:
    """An axis value where it stands alone, in a legend or a sentence: a number or a boolean says of what."""
    return f"{axis.rpartition('.')[2]} {label(value)}" if isinstance(value, int | float) else label(value)
