"""Gathers the chunks of a reader in compact columns, counting what it leaves out and what the clock of the file is like.

Memory: 20 bytes a kept row plus the optional columns; rows that cannot fall into the window are left out at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.catalogue import Format
from traces.chunk import Chunk
from traces.options import LoadOptions
from traces.trace import Account, Ints, Objects

Column = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
GRID_TOLERANCE_TICKS = 2.0  # Mooncake's 3 s grid is rounded: 5,999 ms stands for 6,000
ON_GRID_FRAC = 0.99


@dataclass
class Clock:
    """What the times of a whole file say: earliest and latest, how many go back, whether they lie on a coarse grid."""

    grid_ticks: float | None
    earliest: Any = None
    latest: Any = None
    rows: int = 0
    inversions: int = 0
    off_grid: int = 0
    previous: Any = None

    def see(self, time: Column) -> None:
        if not len(time):
            return
        if self.rows:
            self.inversions += int(time[0] < self.previous)
        self.inversions += int(np.count_nonzero(time[1:] < time[:-1]))
        self.earliest = time.min() if self.rows == 0 else min(self.earliest, time.min())
        self.latest = time.max() if self.rows == 0 else max(self.latest, time.max())
        self.rows += len(time)
        self.previous = time[-1]
        if self.grid_ticks is not None:
            phase = time % self.grid_ticks
            slack = min(GRID_TOLERANCE_TICKS, self.grid_ticks / 4)
            self.off_grid += int(np.count_nonzero((phase > slack) & (phase < self.grid_ticks - slack)))

    @property
    def is_coarse(self) -> bool:
        """The file spans several steps of the grid, and its times lie on them."""
        return (
            self.grid_ticks is not None
            and self.rows > 1
            and self.latest - self.earliest >= self.grid_ticks
            and self.off_grid <= (1 - ON_GRID_FRAC) * self.rows
        )


@dataclass(frozen=True)
class Rows:
    """Kept rows in columns: `time` in ticks (None: the format has none), lengths, row numbers from 1, optional columns."""

    time: Column | None
    input_tokens: Column
    output_tokens: Column
    source_row: Ints
    clock: Clock
    more: dict[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.input_tokens)

    def take(self, index: Column) -> "Rows":
        """The rows of a boolean mask or an index array."""
        time = None if self.time is None else self.time[index]
        more = {name: column[index] for name, column in self.more.items()}
        lengths = self.input_tokens[index], self.output_tokens[index]
        return Rows(time, *lengths, self.source_row[index], self.clock, more)


@dataclass(frozen=True)
class Reading:
    """One file being read: what for, how, and what came of it so far. `where` names the file in errors."""

    where: str
    fmt: Format
    options: LoadOptions
    account: Account


def collect(chunks: Iterator[Chunk], reading: Reading) -> Rows:
    """All chunks; drops empty requests (unless kept) and rows that are surely behind the window."""
    fmt, account = reading.fmt, reading.account
    clock = Clock(None if fmt.tick_s is None else fmt.tick_s * fmt.ticks_per_s)
    parts: dict[str, list[Column]] = {}
    for chunk in chunks:
        columns = _columns(chunk, account.rows_read)
        account.rows_read += len(chunk) + sum(chunk.dropped.values())
        for reason, count in chunk.dropped.items():
            account.drop(reason, count)
        if chunk.time is not None:
            clock.see(chunk.time)
        kept = _without_empty(chunk, columns, reading)
        kept &= _before_window_end(chunk, kept, clock, reading)
        for name, column in columns.items():
            parts.setdefault(name, []).append(column if kept.all() else column[kept])
    account.inversions = clock.inversions
    return _joined(parts, clock)


def _columns(chunk: Chunk, rows_before: int) -> dict[str, Column]:
    source_row = np.arange(rows_before + 1, rows_before + 1 + len(chunk), dtype=np.int64)
    columns: dict[str, Column] = {"source_row": source_row, **chunk.more}
    columns["input_tokens"] = chunk.input_tokens.astype(np.int32)
    columns["output_tokens"] = chunk.output_tokens.astype(np.int32)
    if chunk.time is not None:
        columns["time"] = chunk.time
    return columns


def _without_empty(chunk: Chunk, columns: dict[str, Column], reading: Reading) -> Mask:
    """Rows to keep; where failed ones are kept, `columns` are changed to one token and flagged."""
    account = reading.account
    no_input, no_output = chunk.input_tokens == 0, chunk.output_tokens == 0
    empty: Mask = no_input | no_output
    if not reading.options.keep_failed:
        account.drop("zero_input", int(np.count_nonzero(no_input)))
        account.drop("zero_output", int(np.count_nonzero(no_output & ~no_input)))
        return np.logical_not(empty)
    account.change("zero_length_kept_as_1_token", int(np.count_nonzero(empty)))
    for name in ("input_tokens", "output_tokens"):
        columns[name] = np.maximum(columns[name], 1)
    columns["flags"] = with_flag(columns.get("flags"), empty, "failed")
    return np.ones(len(chunk), dtype=bool)


def _before_window_end(chunk: Chunk, kept: Mask, clock: Clock, reading: Reading) -> Mask:
    """Rows that are not surely late: a later row can only move the origin back, which makes these later still."""
    if chunk.time is None or reading.options.window_s is None:
        return kept
    inside: Mask = (chunk.time - clock.earliest) / reading.fmt.ticks_per_s < reading.options.window_s[1]
    reading.account.drop("outside_window", int(np.count_nonzero(kept & ~inside)))
    return inside


def with_flag(flags: Column | None, where: Mask, flag: str) -> Objects:
    """`flags` with `flag` added on the rows of a mask; several are joined by `+`."""
    column = np.full(len(where), "", dtype=object) if flags is None else flags.copy()
    column[where] = [f"{old}+{flag}" if old else flag for old in column[where]]
    return column


def _joined(parts: dict[str, list[Column]], clock: Clock) -> Rows:
    def whole(name: str) -> Column:
        pieces = parts.pop(name)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return Rows(none, none, none, none, clock)
    time = whole("time") if "time" in parts else None
    lengths = whole("input_tokens"), whole("output_tokens")
    return Rows(time, *lengths, whole("source_row"), clock, {name: whole(name) for name in list(parts)})
