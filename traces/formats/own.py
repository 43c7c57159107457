"""The project's own format: the canonical row in CSV or Parquet, as `traces.write_own` and `infsim traces convert` write it.

`arrival_s, input_tokens, output_tokens`, optional `id, session, turn, prefix_blocks, block_tokens, source_row, flags`, and for
a closed loop `users, think_s`. Floats are written so that they read back bit for bit.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from perfmodel.errors import InputError
from traces.chunk import Chunk
from traces.columns import Block, csv_blocks, match_columns
from traces.files import TraceFile
from traces.options import LoadOptions
from traces.trace import Account, Objects

NEEDED = ("arrival_s", "input_tokens", "output_tokens")
WHOLE = ("session", "turn", "block_tokens", "source_row", "users")
RENAMED = {"source_row": "origin_row"}  # the row here is another one
OPTIONAL = ("id", "flags", "prefix_blocks", "think_s", *WHOLE)
BATCH_ROWS = 1 << 18
MAX_WHOLE = 2**63 - 1


def read(file: TraceFile, options: LoadOptions, account: Account) -> Iterator[Chunk]:
    """Times in seconds."""
    for block in parquet_blocks(file) if is_parquet(file) else csv_blocks(file, NEEDED, OPTIONAL):
        more: dict[str, npt.NDArray[Any]] = {
            RENAMED.get(name, name): block.integers(name, high=MAX_WHOLE) for name in WHOLE if block.has(name)
        }
        if block.has("id"):
            more["ids"] = np.array(block.texts("id"), dtype=object)
        if block.has("flags"):
            more["flags"] = np.array(block.texts("flags"), dtype=object)
        if block.has("think_s"):
            more["think_s"] = block.floats("think_s")
        if block.has("prefix_blocks"):
            more["prefix_blocks"] = block_lists(block)
        yield Chunk(block.floats("arrival_s"), block.integers("input_tokens"), block.integers("output_tokens"), more)


def block_lists(block: Block) -> Objects:
    """Space-separated whole numbers, one int64 array per row."""
    column = np.empty(block.num_rows, dtype=object)
    for row, text in enumerate(block.texts("prefix_blocks")):
        try:
            column[row] = np.array([int(item) for item in text.split()], dtype=np.int64)
        except (ValueError, OverflowError):
            raise block.fail("prefix_blocks", row, "whole numbers separated by spaces") from None
    return column


def is_parquet(file: TraceFile) -> bool:
    with file.path.open("rb") as raw:
        return raw.read(4) == b"PAR1"


def parquet_blocks(file: TraceFile) -> Iterator[Block]:
    """The same columns of a Parquet file; rows are numbered from 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path) as source:
            names = match_columns(str(file.path), source.schema_arrow.names, NEEDED, OPTIONAL)
            first = 1
            for batch in source.iter_batches(BATCH_ROWS, columns=list(names.values())):
                columns = {lower: batch.column(batch.schema.get_field_index(name)) for lower, name in names.items()}
                yield Block(columns, names, batch.num_rows, lambda row, first=first: f"{file.path}, row {first + row}")  # type: ignore[misc]
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file.path}: damaged Parquet file ({str(error).splitlines()[0][:160]})") from None
    for _ in file.pieces():  # the hash is that of the whole file
        pass
