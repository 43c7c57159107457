"""Named models, GPUs, links and engines (data files in data/catalogue), and a Hugging Face `config.json` as a model."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from experiments.hf_config import model_from_config, width_of_dtype
from perfmodel.errors import InputError, unknown
from perfmodel.specs import EngineSpec, GpuSpec, LinkSpec, ModelSpec

FOLDER = Path(__file__).parent / "data" / "catalogue"
Spec = TypeVar("Spec", GpuSpec, LinkSpec, EngineSpec)


@cache
def table(kind: str) -> dict[str, dict[str, Any]]:
    """All entries of `models`, `gpus`, `links` or `engines`."""
    from ruamel.yaml import YAML

    entries: dict[str, dict[str, Any]] = YAML(typ="safe", pure=True).load(FOLDER / f"{kind}.yaml")
    return entries


def listing(kind: str) -> dict[str, str]:
    """name → one line, for `infsim list`."""
    return {name: entry["about"] for name, entry in table(kind).items()}


def __getattr__(name: str) -> dict[str, str]:
    """MODELS, GPUS, LINKS, ENGINES: name → one line (read on first use)."""
    if name in ("MODELS", "GPUS", "LINKS", "ENGINES"):
        return listing(name.lower())
    raise AttributeError(name)


def load_model(name_or_path: str, dtype: str | None = None, kv_dtype: str | None = None) -> ModelSpec:
    """A catalogue name, or the path of a `config.json` or its folder. dtype None: the model's; kv_dtype None: dtype."""
    config, name, where = load_model_config(name_or_path)
    model = model_from_config(name, config, where)
    width = width_of_dtype(dtype, "dtype") if dtype else model.dtype_bytes
    return replace(model, dtype_bytes=width, kv_dtype_bytes=width_of_dtype(kv_dtype, "kv_dtype") if kv_dtype else width)


def load_model_config(name_or_path: str) -> tuple[Mapping[str, Any], str, str]:
    """Hugging Face's fields of a model, its name, and where they stand."""
    entries = table("models")
    if name_or_path in entries:
        return entries[name_or_path]["config"], name_or_path, name_or_path
    if Path(name_or_path).exists() or name_or_path.endswith(".json") or "/" in name_or_path:
        return _config_of_file(Path(name_or_path))
    raise unknown("model", name_or_path, entries)


def _config_of_file(path: Path) -> tuple[Mapping[str, Any], str, str]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"model {path}: cannot read {file.name} ({getattr(error, 'strerror', None) or error})"
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(f"model {file}: line {error.lineno}: not JSON ({error.msg})") from None
    if not isinstance(config, dict):
        raise InputError(f"model {file}: a JSON object is expected")
    return config, file.resolve().parent.name, str(file)


def load_gpu(name_or_mapping: str | Mapping[str, Any]) -> GpuSpec:
    """A catalogue name, or {preset: name, field: value, …}."""
    return _load("gpus", "gpu", GpuSpec, name_or_mapping)


def gpu_of_device(device: str) -> str | None:
    """The catalogue name of what a profile calls its GPU: a name as it is, or one of an entry's `devices`."""
    entries = table("gpus")
    known = {other: name for name, entry in entries.items() for other in entry.get("devices", ())}
    return device if device in entries else known.get(device)


def load_link(name_or_mapping: str | Mapping[str, Any]) -> LinkSpec:
    """A catalogue name, or {preset: name, field: value, …}."""
    return _load("links", "link", LinkSpec, name_or_mapping)


def load_engine(name_or_mapping: str | Mapping[str, Any]) -> EngineSpec:
    """A catalogue name, or {preset: name, field: value, …}."""
    return _load("engines", "engine", EngineSpec, name_or_mapping)


def _load(kind: str, noun: str, spec: type[Spec], choice: str | Mapping[str, Any]) -> Spec:
    changes = {} if isinstance(choice, str) else dict(choice)
    name = choice if isinstance(choice, str) else changes.pop("preset", None)
    entries = table(kind)
    if not isinstance(name, str):
        raise InputError(f"{noun}: a mapping names its preset ({{preset: {next(iter(entries))}, …}})")
    if name not in entries:
        raise unknown(noun, name, entries)
    preset = {key: value for key, value in entries[name].items() if key not in ("about", "devices")}
    types = {item.name: item.type for item in fields(spec) if item.name != "name"}
    checked = {key: _checked(noun, key, value, types) for key, value in changes.items()}
    return spec(name=name + ("*" if changes else ""), **preset | checked)


def _checked(noun: str, key: str, value: Any, types: Mapping[str, Any]) -> Any:
    """One changed value of a mapping: a known field, the right type, not negative."""
    if key not in types:
        raise unknown(f"{noun} field", key, types)
    kind = types[key]
    if kind is bool or kind is str:
        fits = isinstance(value, kind)
    else:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and (kind is float or value == int(value))
    if not fits:
        raise InputError(f"{noun}.{key}: {value!r} (a {kind.__name__} is expected)")
    zero_allowed = key.startswith(("latency", "launch", "iteration", "row_s", "exchange", "runtime", "fitted", "peak"))
    if kind in (int, float) and not (value > 0 or (value == 0 and zero_allowed)):
        raise InputError(f"{noun}.{key}: {value!r} (allowed: above 0{', or 0' if zero_allowed else ''})")
    return int(value) if kind is int else value
