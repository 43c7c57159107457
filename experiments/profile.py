"""Measured operators as one table, whatever format they came in: the profile CSV of design.md §5, checked row by row.

`rows` sequences of `tokens` new tokens each; `context_tokens` of one sequence, new tokens included; `num_bytes` read and
written (streams) or sent (all_reduce); `time_s` of one layer's operator on one GPU.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel.errors import InputError

COLUMNS = (
    *("operator", "gpu", "software", "dtype", "tensor_parallel", "rows", "tokens", "context_tokens"),
    *("heads", "kv_heads", "head_dim", "m", "n", "k", "num_bytes", "ranks", "link", "time_s", "time_s_std", "repeats"),
)
TEXT = ("operator", "gpu", "software", "dtype", "link")
NEEDS = {  # what a row of an operator must say
    "gemm": ("m", "n", "k"),
    "decode_attention": ("rows", "context_tokens", "heads", "kv_heads", "head_dim"),
    "prefill_attention": ("rows", "tokens", "context_tokens", "heads", "kv_heads", "head_dim"),
    "all_reduce": ("num_bytes", "ranks"),
    "send_recv": ("num_bytes",),
    "layer": ("tokens",),
    "head": ("rows",),
    "host": ("rows",),
} | dict.fromkeys(("norm", "add", "rope", "kv_write", "activation", "embedding", "copy"), ("tokens", "num_bytes"))


@dataclass(frozen=True)
class Profile:
    """One measured source. `table` has the columns above; `dropped`: rows left out, by reason."""

    format: str
    path: str
    table: pd.DataFrame
    sha256: Mapping[str, str]
    software: str
    dropped: Mapping[str, int] = field(default_factory=dict)

    def operator(self, name: str) -> pd.DataFrame:
        return self.table[self.table["operator"] == name]


def make_table(parts: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Columns by name, several parts stacked; what a part leaves out is empty."""
    frames = [pd.DataFrame(dict(part)).reindex(columns=COLUMNS) for part in parts]
    table = pd.concat([frame.astype(dict.fromkeys(TEXT, object)) for frame in frames], ignore_index=True)
    return table.astype({name: float for name in COLUMNS if name not in TEXT})


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_csv(path: Path) -> pd.DataFrame:
    """Raises InputError where the file cannot be read as CSV."""
    return _read(path, lambda: pd.read_csv(path), "CSV")


def read_parquet(path: Path) -> pd.DataFrame:
    """Raises InputError where the file cannot be read as Parquet."""
    return _read(path, lambda: pd.read_parquet(path), "Parquet")


def _read(path: Path, read: Any, kind: str) -> pd.DataFrame:
    try:
        frame: pd.DataFrame = read()
    except OSError as error:
        if not path.is_file():
            raise InputError(f"{path}: no such file") from None
        raise InputError(f"{path}: not {kind} ({str(error).splitlines()[0]})") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not {kind} ({str(error).splitlines()[0]})") from None
    if frame.empty:
        raise InputError(f"{path}: no rows")
    return frame


def column(frame: pd.DataFrame, name: str, path: Path) -> "pd.Series[Any]":
    """Raises InputError naming the column that is missing."""
    if name not in frame.columns:
        raise InputError(f"{path}: column {name} is missing")
    return frame[name]


def numbers(frame: pd.DataFrame, name: str, path: Path, least: float = 0.0, above: bool = True) -> np.ndarray[Any, Any]:
    """A column as numbers above `least` (or from it on). Raises InputError naming the first row that is not."""
    raw = column(frame, name, path)
    values = pd.to_numeric(raw, errors="coerce").to_numpy(float)
    fine = np.isfinite(values) & ((values > least) if above else (values >= least))
    if not fine.all():
        at = int(np.argmin(fine))
        allowed = f"a number above {least:g}" if above else f"a number, {least:g} or more"
        raise InputError(f"{path}: row {frame.index[at] + 2}: {name}: {raw.iloc[at]!r} ({allowed} is expected)")
    return values


def check_needs(table: pd.DataFrame, path: Path) -> None:
    """Every row has a time, and the sizes its operator needs. Rows keep their line numbers in the index."""
    for operator, frame in table.groupby("operator", sort=False):
        for name in (*NEEDS.get(str(operator), ()), "time_s"):
            numbers(frame, name, path)
