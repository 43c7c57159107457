"""Points of a sweep: the replicates of one setting together, and who is compared with whom.

A sweep's axes are of three kinds. Load axes grow until a system breaks; scenario axes change the question (workload,
model, SLO); all others are choices of the operator, and every combination of them is a contender.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan, sqrt
from typing import Any

from experiments.sweepfile import choice_name, label
from perfmodel.metrics import shares

LOADS = ("workload.rate_rps", "workload.users")
SCENARIOS = ("workload", "model", "slo", "seed", "chaos", "truth")
BASES = ("measured", "interpolated", "extrapolated", "analytic")
CONFIDENCE = 0.95

Manifest = Mapping[str, Any]
Key = tuple[tuple[str, Any], ...]


def kind_of(axis: str) -> str:
    """load, scenario or contender."""
    if axis in LOADS:
        return "load"
    return "scenario" if axis.partition(".")[0] in SCENARIOS else "contender"


@dataclass(frozen=True)
class Point:
    """One setting of the axes; `manifests` are its replicates that are done."""

    axes: Mapping[str, Any]
    manifests: tuple[Manifest, ...]

    def key(self, kind: str) -> Key:
        """This point's axes of one kind."""
        return tuple((axis, label(value)) for axis, value in self.axes.items() if kind_of(axis) == kind)

    @property
    def load(self) -> float | None:
        return next((value for axis, value in self.axes.items() if kind_of(axis) == "load"), None)

    @cached_property
    def contender(self) -> str:
        """Its name: the values of the contender axes, or the system where there is none."""
        names = [choice_name(axis, value) for axis, value in self.axes.items() if kind_of(axis) == "contender"]
        return ", ".join(names) or self.manifests[0]["config"]["system"]

    @cached_property
    def scenario(self) -> str:
        return ", ".join(f"{axis.rpartition('.')[2]} {value}" for axis, value in self.key("scenario"))

    @property
    def at_load(self) -> str:
        return ", ".join(f"{axis.rpartition('.')[2]} {value}" for axis, value in self.key("load"))

    def values(self, metric: str) -> list[float]:
        """A metric (or a part of the latency) of every replicate; undefined is nan."""
        found = [{**manifest.get("breakdown", {}), **manifest["metrics"]}.get(metric) for manifest in self.manifests]
        return [nan if value is None else value for value in found]

    def mean(self, metric: str) -> float:
        return mean(self.values(metric))

    def half_width(self, metric: str) -> float:
        """Of the 95 % confidence interval of the mean; nan for fewer than two replicates."""
        return half_width(self.values(metric))

    def basis_shares(self) -> dict[str, float]:
        """Share of the simulated time by how its price is known, mean of the replicates."""
        each = [shares(manifest["basis_s"], BASES) for manifest in self.manifests]
        return {basis: mean([share[basis] for share in each]) for basis in BASES}


def points_of(manifests: Sequence[Manifest]) -> list[Point]:
    """Points in order of the sweep; failed runs are left out."""
    groups: dict[Key, list[Manifest]] = {}
    for manifest in manifests:
        if manifest["status"] == "done":
            groups.setdefault(tuple((axis, label(value)) for axis, value in manifest["axes"].items()), []).append(
                manifest
            )
    return [Point(group[0]["axes"], tuple(group)) for group in groups.values()]


def paired_difference(a: Point, b: Point, metric: str) -> tuple[float, float]:
    """(mean, half width of its 95 % interval) of a − b over the seeds they share."""
    by_seed = [{m["seed"]: v for m, v in zip(p.manifests, p.values(metric), strict=True)} for p in (a, b)]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    differences = [by_seed[0][seed] - by_seed[1][seed] for seed in seeds]
    return mean(differences), half_width(differences)


def rival(point: Point, points: Sequence[Point]) -> Point | None:
    """The sweep's first contender in the same scenario and at the same load, which this point is paired with seed by seed."""
    first = points[0].contender
    same = (p for p in points if p.contender == first and (p.scenario, p.load) == (point.scenario, point.load))
    return None if point.contender == first else next(same, None)


def mean(values: Sequence[float]) -> float:
    """Of what is defined; nan where nothing is."""
    defined = [value for value in values if isfinite(value)]
    return sum(defined) / len(defined) if defined else nan


def half_width(values: Sequence[float]) -> float:
    """Student's t: t(97.5 %, n − 1) · s / √n."""
    defined = [value for value in values if isfinite(value)]
    count = len(defined)
    if count < 2:
        return nan
    from scipy.special import stdtrit

    centre = sum(defined) / count
    variance = sum((value - centre) ** 2 for value in defined) / (count - 1)
    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * sqrt(variance / count)
