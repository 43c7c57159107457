"""Run folders: what is in one, how it is written (aside, then renamed) and read. Owns the schema of every file.

    DIR/summary.csv                one row a run: axis columns, replicate, metrics
    DIR/runs/NNN-slug/             manifest.json, requests.parquet, instances.parquet, moves.parquet

Columns have declared types: an all-null column written through pandas would change its type with the data.
"""

import csv
import importlib.metadata
import json
import math
import platform
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from experiments.sweepfile import Run, label
from perfmodel.errors import InputError
from perfmodel.metrics import METRICS
from perfmodel.records import RunResult

INT, FLOAT, TEXT = pa.int64(), pa.float64(), pa.string()
SCHEMAS = {
    "requests": pa.schema(
        {
            "req_id": INT,
            "arrival_s": FLOAT,
            "input_tokens": INT,
            "output_tokens": INT,
            "status": TEXT,
            "reason": TEXT,
            "instance": INT,
            "first_token_s": FLOAT,
            "finish_s": FLOAT,
            "num_preemptions": INT,
            "remote_tokens_max": INT,
            "queue_s": FLOAT,
            "prefill_s": FLOAT,
            "decode_s": FLOAT,
            "remote_wait_s": FLOAT,
            "preempted_s": FLOAT,
            "other_s": FLOAT,
        }
    ),
    "instances": pa.schema(
        {
            "t_s": FLOAT,
            "instance": INT,
            "batch": INT,
            "waiting": INT,
            "free_blocks": INT,
            "local_blocks": INT,
            "pledged_blocks": INT,
            "reserved_blocks": INT,
            "lent_blocks": INT,
            "draining_blocks": INT,
            "borrowed_blocks": INT,
        }
    ),
    "moves": pa.schema(
        {
            "move_id": INT,
            "req_id": INT,
            "src": INT,
            "dst": INT,
            "num_blocks": INT,
            "num_bytes": INT,
            "kind": TEXT,
            "ordered_s": FLOAT,
            "tried_s": FLOAT,
            "committed_s": FLOAT,
            "outcome": TEXT,
        }
    ),
}
PACKAGES = ("infsim", "numpy", "scipy", "pandas", "pyarrow", "simpy", "pydantic", "joblib")


def make_folder(folder: Path) -> None:
    """A folder that can be written to. Raises InputError."""
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be written: {error.strerror or error}") from error


def aside_of(folder: Path) -> Path:
    """Where a run is written until it is complete."""
    return folder.with_name(f".{folder.name}.part")


def open_aside(folder: Path) -> Path:
    """An empty `aside_of(folder)`."""
    aside = aside_of(folder)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def close_aside(folder: Path) -> None:
    """Put a complete run into its place."""
    shutil.rmtree(folder, ignore_errors=True)
    aside_of(folder).rename(folder)


def clear(folder: Path) -> None:
    """Remove a failed or interrupted run."""
    for path in (folder, aside_of(folder)):
        shutil.rmtree(path, ignore_errors=True)


def write_tables(folder: Path, result: RunResult) -> None:
    """The three tables of a run. Raises pyarrow's error for a column that is missing or of another type."""
    for name, schema in SCHEMAS.items():
        columns: dict[str, list[Any]] = getattr(result, name)
        table = pa.table({column: columns[column] for column in schema.names}, schema=schema)
        pq.write_table(table, folder / f"{name}.parquet", compression="zstd")


def read_table(folder: Path, name: str) -> Any:
    """A table of a run as a DataFrame."""
    return pq.read_table(folder / f"{name}.parquet", schema=SCHEMAS[name]).to_pandas()


def manifest_of(run: Run, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies a run, before its results."""
    return {
        "status": "done",
        "axes": run.axes,
        "replicate": run.replicate,
        "seed": run.config.seed,
        "config": run.config.model_dump(mode="json"),
        "versions": versions(),
        **facts,
    }


def versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **found}


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    text = json.dumps(without_nan(manifest), indent=2, allow_nan=False, ensure_ascii=False)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")


def without_nan(value: Any) -> Any:
    """JSON knows no nan: undefined is null."""
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete or failed run; None where there is none."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / 'manifest.json'}: cannot be read: {error}") from error
    return manifest


def run_folders(out: Path) -> list[Path]:
    """Folders of complete and failed runs, in order."""
    found = (path.parent for path in (out / "runs").glob("[0-9]*-*/manifest.json"))
    return sorted(found, key=lambda folder: int(folder.name.partition("-")[0]))


def write_summary(out: Path, manifests: Iterable[Mapping[str, Any]]) -> None:
    """summary.csv; a failed run has no metrics."""
    rows = [summary_row(manifest) for manifest in manifests]
    aside = out / ".summary.csv.part"
    with aside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    aside.replace(out / "summary.csv")


def summary_row(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Axis columns, replicate, metrics."""
    axes = {key: value if isinstance(value, int | float) else label(value) for key, value in manifest["axes"].items()}
    metrics = manifest.get("metrics", {})
    return {**axes, "replicate": manifest["replicate"], **{name: metrics.get(name) for name in METRICS}}


def difference(manifest: Mapping[str, Any], run: Run, facts: Mapping[str, Any]) -> str | None:
    """Why an existing run folder is not this run: the first key that differs; None if it is."""
    wanted = manifest_of(run, facts)
    for part in ("config", "inputs"):
        ours, theirs = flatten(wanted[part]), flatten(manifest.get(part, {}))
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                return f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here"
    if manifest.get("driver") != wanted["driver"]:
        return f"carried out in {manifest.get('driver')} there and in {wanted['driver']} here"
    if manifest["versions"]["infsim"] != wanted["versions"]["infsim"]:
        return f"made by infsim {manifest['versions']['infsim']}"
    return None


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    if isinstance(value, Mapping) and value:
        return {k: v for key, item in value.items() for k, v in flatten(item, f"{path}.{key}" if path else key).items()}
    return {path: value}
