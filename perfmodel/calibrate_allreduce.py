"""Fits all-reduce times by message size, for every number of ranks that was measured."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from perfmodel.basis import Domain
from perfmodel.calibrate import FitError, Floats, fit_error
from perfmodel.errors import InputError
from perfmodel.laws.allreduce import KnotAllReduce, Knots, RingAllReduce
from perfmodel.specs import LinkSpec

NUM_KNOTS = 12
LEAST_SIZES = 5


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
    """Rising times at up to twelve sizes, closest to the measurements on logarithmic axes.

    The library changes its algorithm at some size, where time jumps: a knot stands at both ends of the steepest step.
    """
    sizes, times = medians(rows.num_bytes, rows.time_s)
    if len(sizes) < LEAST_SIZES:
        raise InputError(f"all_reduce over {ranks} ranks: {len(sizes)} message sizes (allowed: {LEAST_SIZES} or more)")
    rising = isotonic_regression(np.log(times)).x
    return Knots(*simplify(np.log(sizes), rising))


def medians(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Sorted distinct x, and the median y of each."""
    keys = np.unique(x)
    return keys, np.array([np.median(y[x == key]) for key in keys])


def simplify(x: Floats, y: Floats) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The fewest of the points, at most twelve, whose straight lines stay closest to all: the worst one joins, in turn."""
    kept = [0, len(x) - 1]
    while len(kept) < min(NUM_KNOTS, len(x)):
        error = np.abs(np.interp(x, x[kept], y[kept]) - y)
        if error.max() < 1e-3:
            break
        kept = sorted([*kept, int(error.argmax())])
    return tuple(np.exp(x[kept]).tolist()), tuple(np.exp(y[kept]).tolist())
