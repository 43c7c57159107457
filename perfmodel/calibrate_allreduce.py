"""Fits all-reduce times by message size, for every number of ranks that was measured."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.basis import Domain
from perfmodel.calibrate import FitError, Floats, fit_error
from perfmodel.errors import InputError
from perfmodel.laws.allreduce import KnotAllReduce, Knots, RingAllReduce
from perfmodel.specs import LinkSpec

MOST_KNOTS = 7  # a side of the jump
LEAST_SIZES = 5
JUMP = 1.05  # exponent: time that rises faster than bytes is another algorithm
CLOSE = 0.01


@dataclass(frozen=True)
class AllReduceRows:
    """Measured all-reduces inside a node: message bytes, ranks, seconds."""

    num_bytes: Floats
    ranks: Floats
    time_s: Floats

    def __len__(self) -> int:
        return len(self.num_bytes)

    def pick(self, keep: NDArray[Any]) -> "AllReduceRows":
        return AllReduceRows(self.num_bytes[keep], self.ranks[keep], self.time_s[keep])


def fit_all_reduce(rows: AllReduceRows, link: str, other: RingAllReduce) -> tuple[KnotAllReduce, FitError]:
    """The law and its error. Raises InputError for fewer than five message sizes of a number of ranks."""
    ranks = tuple(int(r) for r in np.unique(rows.ranks))
    knots = tuple(fit_knots(rows.pick(rows.ranks == r), r) for r in ranks)
    low, high = float(rows.num_bytes.min()), float(rows.num_bytes.max())
    domain = Domain({"num_bytes": (low, high), "ranks": (ranks[0], ranks[-1])})
    law = KnotAllReduce(link, ranks, knots, other, domain)
    return law, fit_error(all_reduce_times(law, rows), rows.time_s)


def all_reduce_times(law: KnotAllReduce, rows: AllReduceRows) -> Floats:
    """What a law says of the rows."""
    link = LinkSpec(law.link, 1.0, 0.0)
    pairs = zip(rows.num_bytes.tolist(), rows.ranks.tolist(), strict=True)
    return np.array([law.time_s(num_bytes, int(ranks), link) for num_bytes, ranks in pairs])


def fit_knots(rows: AllReduceRows, ranks: int) -> Knots:
    """Rising times at few sizes, closest to the measurements.

    A larger message cannot take less time: where it seems to, the shorter time is the truer one (what disturbs a measurement
    adds to it). The library changes its algorithm at some size, where time jumps: no line runs across the jump.
    """
    sizes, times = medians(rows.num_bytes, rows.time_s)
    if len(sizes) < LEAST_SIZES:
        raise InputError(f"all_reduce over {ranks} ranks: {len(sizes)} message sizes (allowed: {LEAST_SIZES} or more)")
    rising = np.minimum.accumulate(times[::-1])[::-1]
    sides = [simplify(*side) for side in split_at_jump(sizes, rising)]
    x, y = (np.concatenate([side[i] for side in sides]) for i in (0, 1))
    return Knots(tuple(x.tolist()), tuple(y.tolist()))


def medians(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Sorted distinct x, and the median y of each."""
    keys = np.unique(x)
    return keys, np.array([np.median(y[x == key]) for key in keys])


def split_at_jump(x: Floats, y: Floats) -> list[tuple[Floats, Floats]]:
    """The points below and above the steepest step, if time rises faster than bytes there; else all of them.

    The upper side is led down to the step along its own first slope.
    """
    steps = np.diff(np.log(y)) / np.diff(np.log(x))
    at = int(steps.argmax())
    if steps[at] <= JUMP or at + 2 >= len(x):
        return [(x, y)]
    slope = (y[at + 2] - y[at + 1]) / (x[at + 2] - x[at + 1])
    start = max(y[at + 1] - slope * (x[at + 1] - x[at]), y[at])
    above = np.concatenate([[x[at] + 1.0], x[at + 1 :]]), np.concatenate([[start], y[at + 1 :]])
    return [(x[: at + 1], y[: at + 1]), above]


def simplify(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """The fewest of the points, at most seven, whose straight lines stay closest to all: the worst one joins, in turn."""
    kept = sorted({0, len(x) - 1})
    while len(kept) < min(MOST_KNOTS, len(x)):
        error = np.abs(np.interp(x, x[kept], y[kept]) / y - 1.0)
        if error.max() < CLOSE:
            break
        kept = sorted([*kept, int(error.argmax())])
    return x[kept], y[kept]
