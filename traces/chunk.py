"""What a reader hands over: rows in the order of the file, as they stand in it."""

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from traces.trace import Ints

MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Chunk:
    """Some consecutive rows.

    `time` in the format's ticks (int64, or float64 for seconds), None for a format without times; lengths ≥ 0;
    `more` holds optional columns under their names in `Trace`. `dropped` counts rows that the reader itself could not turn into
    requests, by reason: they come on top of the rows here.
    """

    time: npt.NDArray[Any] | None
    input_tokens: Ints
    output_tokens: Ints
    more: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.input_tokens)
