"""How a time is known, and the domain in which a fitted law was measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Basis(StrEnum):
    """How a time is known, best first."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    EXTRAPOLATED = "extrapolated"
    ANALYTIC = "analytic"


ORDER = tuple(Basis)


def worst(*bases: Basis) -> Basis:
    """The weakest of several."""
    return max(bases, key=ORDER.index)


@dataclass(frozen=True)
class Domain:
    """Where a law was measured: the range of every argument, and the values at which it was measured, where they are few."""

    ranges: Mapping[str, tuple[float, float]]
    points: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def basis(self, **at: float) -> Basis:
        """Measured where every argument is a measured value, interpolated inside every range, extrapolated beyond one."""
        if any(not low <= at[name] <= high for name, (low, high) in self.ranges.items()):
            return Basis.EXTRAPOLATED
        if self.points and all(at[name] in self.points.get(name, ()) for name in self.ranges):
            return Basis.MEASURED
        return Basis.INTERPOLATED


def basis_in(domain: Domain | None, **at: float) -> Basis:
    """Analytic where a law was never measured."""
    return domain.basis(**at) if domain else Basis.ANALYTIC
