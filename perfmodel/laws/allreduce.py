"""All-reduce over the ranks of one node."""

from dataclasses import dataclass
from math import log2
from typing import Protocol

import numpy as np

from perfmodel.basis import Basis, Domain, basis_in
from perfmodel.specs import LinkSpec


class AllReduceLaw(Protocol):
    """Seconds of an all-reduce of `num_bytes` over `ranks` GPUs of one node."""

    def time_s(self, num_bytes: float, ranks: int, link: LinkSpec) -> float: ...

    def basis(self, num_bytes: float, ranks: int, link: LinkSpec) -> Basis: ...


@dataclass(frozen=True)
class RingAllReduce:
    """base_s + ⌈log2 ranks⌉ hops + 2 (ranks − 1)/ranks · bytes / link rate: nothing measured."""

    base_s: float

    def time_s(self, num_bytes: float, ranks: int, link: LinkSpec) -> float:
        steps = (ranks - 1).bit_length()
        return self.base_s + link.latency_s * steps + 2 * (ranks - 1) / ranks * num_bytes / link.bytes_per_s

    def basis(self, num_bytes: float, ranks: int, link: LinkSpec) -> Basis:
        return Basis.ANALYTIC


@dataclass(frozen=True)
class Knots:
    """Seconds at message sizes, rising; straight lines between them, the last rate beyond the last."""

    num_bytes: tuple[float, ...]
    time_s: tuple[float, ...]

    def at(self, num_bytes: float) -> float:
        last_bytes, last_s = self.num_bytes[-1], self.time_s[-1]
        if num_bytes >= last_bytes:
            return last_s * num_bytes / last_bytes
        return float(np.interp(num_bytes, self.num_bytes, self.time_s))


@dataclass(frozen=True)
class KnotAllReduce:
    """Measured on one kind of link for some numbers of ranks; between them, straight in log2(ranks).

    Another link, or more ranks than were measured, is not this law's: it falls back to `other`.
    """

    link: str
    ranks: tuple[int, ...]
    knots: tuple[Knots, ...]
    other: RingAllReduce
    domain: Domain | None = None

    def time_s(self, num_bytes: float, ranks: int, link: LinkSpec) -> float:
        if not self._covers(ranks, link):
            return self.other.time_s(num_bytes, ranks, link)
        times = [knots.at(num_bytes) for knots in self.knots]
        return float(np.interp(log2(ranks), [log2(r) for r in self.ranks], times))

    def _covers(self, ranks: int, link: LinkSpec) -> bool:
        return link.name == self.link and self.ranks[0] <= ranks <= self.ranks[-1]

    def basis(self, num_bytes: float, ranks: int, link: LinkSpec) -> Basis:
        if not self._covers(ranks, link):
            return Basis.ANALYTIC
        return basis_in(self.domain, num_bytes=num_bytes, ranks=ranks)
