"""Writes the canonical rows so that `own` reads them back bit for bit."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.errors import InputError
from traces.trace import Trace

SUFFIXES = (".csv", ".csv.gz", ".parquet")


def write_own_file(trace: Trace, path: str | os.PathLike[str]) -> None:
    """See `traces.write_own`."""
    target = Path(path)
    if not target.name.endswith(SUFFIXES):
        raise InputError(f"{target}: the own format is written to a name that ends with {', '.join(SUFFIXES)}")
    table = as_table(trace)
    try:
        if target.suffix == ".parquet":
            import pyarrow.parquet as pq

            pq.write_table(table, target)
        else:
            _write_csv(table, target)
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror or error})") from None


def as_table(trace: Trace) -> Any:
    """A pyarrow table of the columns that the trace has; block hashes as numbers separated by spaces."""
    import pyarrow as pa

    columns: dict[str, Any] = {
        "arrival_s": trace.arrival_s,
        "input_tokens": trace.input_tokens,
        "output_tokens": trace.output_tokens,
        "id": trace.ids,
        "session": trace.session,
        "turn": trace.turn,
        "source_row": trace.source_row,
        "flags": trace.flags,
    }
    if trace.prefix_blocks is not None:
        columns["prefix_blocks"] = [" ".join(map(str, blocks.tolist())) for blocks in trace.prefix_blocks]
    if trace.block_tokens is not None:
        columns["block_tokens"] = np.full(len(trace), trace.block_tokens, dtype=np.int64)
    if trace.closed is not None:
        columns["users"] = np.full(len(trace), trace.closed.users, dtype=np.int64)
        columns["think_s"] = trace.closed.think_s
    return pa.table({name: column for name, column in columns.items() if column is not None})


def _write_csv(table: Any, target: Path) -> None:
    import pyarrow as pa
    import pyarrow.csv as pacsv

    with pa.OSFile(str(target), "wb") as raw:
        stream = pa.CompressedOutputStream(raw, "gzip") if target.suffix == ".gz" else raw
        pacsv.write_csv(table, stream, pacsv.WriteOptions(quoting_style="needed"))
        if stream is not raw:
            stream.close()
