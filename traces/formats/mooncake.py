"""Mooncake traces (kvcache-ai/Mooncake): JSONL, `timestamp` in ms, `hash_ids` of 512-token blocks, chained by prefix."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.chunk import Chunk
from traces.files import TraceFile
from traces.jsonl import Row, row_batches
from traces.options import LoadOptions
from traces.trace import Account, Floats, Ints

BLOCK_TOKENS = 512


def read(file: TraceFile, options: LoadOptions, account: Account) -> Iterator[Chunk]:
    """Times in milliseconds. Raises where the hash list of a row does not cover its input."""
    for rows in row_batches(file):
        yield Chunk(times(rows), *lengths(rows), prefixes(rows, BLOCK_TOKENS))


def times(rows: list[Row]) -> Floats:
    """`timestamp` in the format's unit."""
    return np.array([row.number("timestamp") for row in rows])


def lengths(rows: list[Row]) -> tuple[Ints, Ints]:
    """`input_length` and `output_length` as int64."""
    inputs = np.array([row.integer("input_length") for row in rows], dtype=np.int64)
    outputs = np.array([row.integer("output_length") for row in rows], dtype=np.int64)
    return inputs, outputs


def prefixes(rows: list[Row], block_tokens: int) -> dict[str, npt.NDArray[Any]]:
    """Columns `prefix_blocks`, the checked hash lists as one int64 array per row, and `block_tokens`."""
    column = np.empty(len(rows), dtype=object)
    for index, row in enumerate(rows):
        column[index] = row.integers("hash_ids")
        row.check_cover("hash_ids", row.integer("input_length"), block_tokens)
    return {"prefix_blocks": column, "block_tokens": np.full(len(rows), block_tokens)}
