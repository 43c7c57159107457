"""BurstGPT v1 and v3 (HPMLL/BurstGPT): CSV, `Timestamp` in whole seconds; v3 adds `Session ID, Elapsed time`.

Failed requests have 0 response tokens; the file opens with a ramp far below its steady rate, so a window is advisable.
"""

from collections.abc import Iterator

import numpy as np

from traces.chunk import Chunk
from traces.columns import csv_blocks
from traces.files import TraceFile
from traces.options import LoadOptions
from traces.trace import Account

NEEDED = ("Timestamp", "Request tokens", "Response tokens")
RAMP_NOTE = "BurstGPT opens with a ramp far below its steady rate: window_s skips it"


def read(file: TraceFile, options: LoadOptions, account: Account) -> Iterator[Chunk]:
    """Times in seconds; sessions numbered in order of appearance."""
    known: dict[str, int] = {}
    if options.window_s is None:
        account.notes.append(RAMP_NOTE)
    for block in csv_blocks(file, NEEDED, ("Session ID",)):
        more = {}
        if block.has("Session ID"):
            names = block.texts("Session ID")
            more["session"] = np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int64)
        yield Chunk(
            block.floats("Timestamp"), block.integers("Request tokens"), block.integers("Response tokens"), more
        )
