"""Azure LLM inference traces of 2023, 2024 and 2025 (AzurePublicDataset): one reader, three dialects of time.

`TIMESTAMP[,NumImages],ContextTokens,GeneratedTokens`; naive or aware times, never both in one file.
"""

from collections.abc import Iterator

from perfmodel.errors import InputError
from traces.chunk import Chunk
from traces.columns import csv_blocks
from traces.files import TraceFile
from traces.options import LoadOptions
from traces.trace import Account

NEEDED = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(file: TraceFile, options: LoadOptions, account: Account) -> Iterator[Chunk]:
    """Times in nanoseconds since 1970."""
    was_aware: bool | None = None
    for block in csv_blocks(file, NEEDED, ("NumImages",)):
        time, is_aware = block.instants("TIMESTAMP")
        if was_aware is not None and is_aware is not was_aware:
            raise InputError(f"{block.where(0)}, column TIMESTAMP: naive and aware times in one file")
        if was_aware is None and block.has("NumImages"):
            account.notes.append("NumImages is not used: ContextTokens are taken as they stand")
        was_aware = is_aware
        yield Chunk(time, block.integers("ContextTokens"), block.integers("GeneratedTokens"))
