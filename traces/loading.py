"""From a file and options to a `Trace`: collect rows, then cut, limit, order and scale them, counting everything."""

import importlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.errors import InputError, unknown
from traces.catalogue import READERS
from traces.collect import Reading, Rows, collect
from traces.files import TraceFile
from traces.options import LoadOptions
from traces.progress import progress_over
from traces.shaping import arrivals_of, cut_window, limit_context, with_int_ids
from traces.trace import Account, ClosedLoop, Floats, Trace


def load_trace(name: str, path: str | os.PathLike[str], options: LoadOptions) -> Trace:
    """See `traces.load`."""
    if name not in READERS:
        raise unknown("trace format", name, READERS)
    if (options.tokenizer is None) == (name == "sharegpt"):
        raise InputError(f"tokenizer: format sharegpt needs a tokenizer.json, others do not take it (format {name})")
    reading = Reading(os.fspath(path), READERS[name], options, Account())
    source: dict[str, Any] = {"format": name, "file": Path(path).name}
    rows = _read(reading, source)
    rows = cut_window(rows, reading)
    rows = limit_context(rows, options, reading.account, reading.where)
    if not len(rows):
        raise InputError(f"{reading.where}: no request left; {reading.account.line()}")
    rows, arrival_s = arrivals_of(rows, reading)
    return _as_trace(rows, arrival_s, reading.account, source, options)


def _read(reading: Reading, source: dict[str, Any]) -> Rows:
    """All rows of the file; `source` gets its hash."""
    module = importlib.import_module(f"traces.formats.{reading.fmt.module}")
    if reading.fmt.is_folder:
        return collect(module.read_folder(Path(reading.where), reading.options, source, reading.account), reading)
    file = TraceFile(Path(reading.where))
    with progress_over(file):
        rows = collect(module.read(file, reading.options, reading.account), reading)
    source["sha256"] = file.sha256
    return rows


def _as_trace(rows: Rows, arrival_s: Floats, account: Account, source: dict[str, Any], options: LoadOptions) -> Trace:
    more = dict(rows.more)
    closed = _closed_loop(more, source)
    block_tokens = _constant(more, "block_tokens", source)
    if "prefix_blocks" in more:
        account.notes.append("prefix hashes are not used")
    source_row = more.pop("origin_row", rows.source_row)
    ids = with_int_ids(more.pop("ids")) if "ids" in more else source_row
    account.kept = len(rows)
    lengths = rows.input_tokens.astype(np.int64), rows.output_tokens.astype(np.int64)
    return Trace(
        arrival_s,
        *lengths,
        ids,
        account,
        source,
        asdict(options),
        block_tokens=block_tokens,
        source_row=source_row,
        closed=closed,
        **more,
    )


def _closed_loop(more: dict[str, Any], source: dict[str, Any]) -> ClosedLoop | None:
    users = _constant(more, "users", source)
    think_s = more.pop("think_s", None)
    if (users is None) != (think_s is None):
        raise InputError(f"{source['file']}: columns users and think_s come together or not at all")
    return None if users is None else ClosedLoop(users, think_s)


def _constant(more: dict[str, Any], name: str, source: dict[str, Any]) -> int | None:
    """The one value of a column that is the same on every row."""
    column = more.pop(name, None)
    if column is None:
        return None
    if column.min() != column.max():
        raise InputError(
            f"{source['file']}, column {name}: must be the same on every row, found {column.min()} and {column.max()}"
        )
    return int(column[0])
