"""How a time is known, and the domain in which a fitted law was measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    return bases[0] if len(bases) == 1 else max(bases, key=ORDER.index)


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


@dataclass(frozen=True, slots=True)
class Along:
    """A domain seen along one argument, the others fixed: quick to ask again and again."""

    low: float
    high: float
    points: frozenset[float]
    at_points: Basis
    inside: Basis

    def basis(self, x: float) -> Basis:
        if not self.low <= x <= self.high:
            return Basis.EXTRAPOLATED
        return self.at_points if x in self.points else self.inside

    def extrapolated(self) -> "Along":
        """The same, where another argument lies beyond what was measured."""
        return replace(self, at_points=Basis.EXTRAPOLATED, inside=Basis.EXTRAPOLATED)


EVERYWHERE_ANALYTIC = Along(float("-inf"), float("inf"), frozenset(), Basis.ANALYTIC, Basis.ANALYTIC)


def basis_along(domain: Domain | None, name: str, **fixed: float) -> Along:
    """A law's basis along the argument `name`; analytic everywhere where it was never measured."""
    if domain is None:
        return EVERYWHERE_ANALYTIC
    low, high = domain.ranges[name]
    points = frozenset(domain.points.get(name, ()))
    at_points = domain.basis(**fixed, **{name: min(points, default=low)})
    inside = Basis.INTERPOLATED if at_points == Basis.MEASURED else at_points
    return Along(low, high, points, at_points, inside)


def basis_in(domain: Domain | None, **at: float) -> Basis:
    """Analytic where a law was never measured."""
    return domain.basis(**at) if domain else Basis.ANALYTIC
