"""The canonical workload and the account of how it came about. Owns the invariants of a row; opens no file."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Objects = npt.NDArray[np.object_]


@dataclass(frozen=True)
class ClosedLoop:
    """`users` clients, each with one request in flight: send, wait for the answer, think for `think_s[request]` seconds."""

    users: int
    think_s: Floats


@dataclass
class Account:
    """What happened to the rows of a file: `rows_read == kept + Σ dropped`. Filled by the loader, read-only afterwards.

    `changed` counts kept rows that differ from the file (clipped, raised from zero); `inversions` counts rows that are
    earlier than the row before them; `notes` say what a reader of the results must know.
    """

    rows_read: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    inversions: int = 0
    notes: list[str] = field(default_factory=list)

    def drop(self, reason: str, count: int) -> None:
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def change(self, reason: str, count: int) -> None:
        if count:
            self.changed[reason] = self.changed.get(reason, 0) + count

    def check(self) -> None:
        lost = sum(self.dropped.values())
        assert self.rows_read == self.kept + lost, f"{self.rows_read} rows read, {self.kept} kept, {lost} dropped"

    def line(self) -> str:
        """One line for people: `19,366 rows read = 19,366 kept + 0 dropped`, with the reasons."""
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(self.dropped.items()))
        lost = sum(self.dropped.values())
        return (
            f"{self.rows_read:,} rows read = {self.kept:,} kept + {lost:,} dropped{f' ({reasons})' if reasons else ''}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows_read": self.rows_read,
            "kept": self.kept,
            "dropped": dict(sorted(self.dropped.items())),
            "changed": dict(sorted(self.changed.items())),
            "inversions": self.inversions,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, eq=False)
class Trace:
    """A workload, one element per request, sorted by arrival (ties in the order of the file).

    - `arrival_s` float64 `[n]`, first 0; `input_tokens`, `output_tokens` int64 `[n]`, ≥ 1; `ids` int64 or str `[n]`.
    - `session` int64 (numbered), `turn` int64, `prefix_blocks` (object, an int64 array of block hashes each, `block_tokens`
      tokens a block), `source_row` int64 (from 1, header not counted), `flags` (object: `""`, `failed`, `clipped`): or None.
    - `closed`: with it `arrival_s` is all 0 and requests start as users become free.
    - `source`: format or generator, file name, sha256; `options`: as asked for.
    """

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    ids: npt.NDArray[Any]
    account: Account
    source: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    session: Ints | None = None
    turn: Ints | None = None
    prefix_blocks: Objects | None = None
    block_tokens: int | None = None
    source_row: Ints | None = None
    flags: Objects | None = None
    closed: ClosedLoop | None = None

    def __post_init__(self) -> None:
        self.check()

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def context_tokens(self) -> Ints:
        """Input + output of each request."""
        return self.input_tokens + self.output_tokens

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_s[-1])

    @property
    def mean_rate_rps(self) -> float:
        """Gaps per second; NaN where all requests arrive at one instant."""
        return (len(self) - 1) / self.duration_s if self.duration_s > 0 else float("nan")

    @property
    def is_saturated(self) -> bool:
        """Every request is there from the start and no user paces them."""
        return self.closed is None and len(self) > 1 and self.duration_s == 0.0

    def check(self) -> None:
        """The invariants of the canonical row; a violation is a defect of ours, since loaders refuse bad files by line."""
        num_requests = len(self.arrival_s)
        assert num_requests > 0, "a trace has at least one request"
        optional = (self.session, self.turn, self.prefix_blocks, self.source_row, self.flags)
        columns = [self.input_tokens, self.output_tokens, self.ids, *(c for c in optional if c is not None)]
        assert all(len(column) == num_requests for column in columns), "columns of unequal length"
        assert self.arrival_s[0] == 0.0, f"first arrival is {self.arrival_s[0]}"
        assert bool(np.all(self.arrival_s[1:] >= self.arrival_s[:-1])), "arrivals are not sorted"
        assert bool(np.isfinite(self.arrival_s[-1])), "an arrival is not finite"
        assert int(self.input_tokens.min()) >= 1, "an input is empty"
        assert int(self.output_tokens.min()) >= 1, "an output is empty"
        assert self.closed is None or len(self.closed.think_s) == num_requests, "think times of another length"
        self.account.check()
        assert self.account.kept == num_requests, f"{self.account.kept} accounted for, {num_requests} present"

    def manifest(self) -> dict[str, Any]:
        """Where the workload came from and what was done to it, fit for JSON: source, options, account."""
        return {**self.source, "options": self.options, "account": self.account.as_dict()}
