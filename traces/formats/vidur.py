"""Vidur's processed traces: CSV `arrived_at` (s), `num_prefill_tokens, num_decode_tokens`; some files have lengths only."""

from collections.abc import Iterator

from traces.chunk import Chunk
from traces.columns import csv_blocks
from traces.files import TraceFile
from traces.options import LoadOptions
from traces.trace import Account

NEEDED = ("num_prefill_tokens", "num_decode_tokens")


def read(file: TraceFile, options: LoadOptions, account: Account) -> Iterator[Chunk]:
    """Times in seconds, None for a length-only file."""
    for block in csv_blocks(file, NEEDED, ("arrived_at",)):
        time = block.floats("arrived_at") if block.has("arrived_at") else None
        yield Chunk(time, block.integers("num_prefill_tokens"), block.integers("num_decode_tokens"))
