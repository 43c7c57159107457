"""From a file and options to a `Trace`: collect rows, then cut, limit, order and scale them, counting everything."""

import importlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.errors import InputError, unknown
from traces.catalogue import READERS, Format
from traces.collect import Rows, collect
from traces.files import TraceFile
from traces.options import LoadOptions
from traces.progress import progress_over
from traces.shaping import arrivals_of, cut_window, limit_context, with_int_ids
from traces.trace import Account, ClosedLoop, Floats, Trace

BLOCK_TOKENS = {"mooncake": 512, "bailian": 16}


def load_trace(name: str, path: str | os.PathLike[str], options: LoadOptions) -> Trace:
    """See `traces.load`."""
    if name not in READERS:
        raise unknown("trace format", name, READERS)
    if (options.tokenizer is None) == (name == "sharegpt"):
        raise InputError(f"tokenizer: format sharegpt needs a tokenizer.json, others do not take it (format {name})")
    fmt, account, where = READERS[name], Account(), os.fspath(path)
    source: dict[str, Any] = {"format": name, "file": Path(where).name}
    rows = _read(fmt, Path(where), options, account, source)
    rows = cut_window(rows, fmt, options, account, where)
    rows = limit_context(rows, options, account, where)
    if not len(rows):
        raise InputError(f"{where}: no request left; {account.line()}")
    rows, arrival_s = arrivals_of(rows, fmt, options, account, where)
    return _as_trace(rows, arrival_s, account, source, options)


def _read(fmt: Format, path: Path, options: LoadOptions, account: Account, source: dict[str, Any]) -> Rows:
    module = importlib.import_module(f"traces.formats.{fmt.module}")
    if fmt.is_folder:
        return collect(module.read_folder(path, options, source, account), fmt, options, account)
    file = TraceFile(path)
    with progress_over(file):
        rows = collect(module.read(file, options, account), fmt, options, account)
    source["sha256"] = file.sha256
    return rows


def _as_trace(rows: Rows, arrival_s: Floats, account: Account, source: dict[str, Any], options: LoadOptions) -> Trace:
    more = dict(rows.more)
    closed = _closed_loop(more, source)
    block_tokens = _constant(more, "block_tokens", source)
    if "prefix_blocks" in more:
        block_tokens = BLOCK_TOKENS.get(source["format"], block_tokens)
        account.notes.append("prefix hashes are not used")
    source_row = more.pop("source_row", rows.source_row)
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
