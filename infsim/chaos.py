"""Chaos: seeded faults of messages and clocks between managers. What clients and the dispatcher say is reliable."""

from random import Random

from perfmodel.cluster import ChaosParams
from perfmodel.messages import DISPATCHER, Address

REORDER_FACTOR = 10.0  # an overtaken message comes this much later than the others at most


class Chaos:
    """Draws what happens to each message. Without parameters nothing does."""

    def __init__(self, params: ChaosParams | None, seed: int, latency_s: float) -> None:
        self.params = params or ChaosParams()
        self._active = params is not None
        self._random = Random(seed)
        self._latency_s = latency_s
        self._rates: dict[Address, float] = {}
        self.drifts = self.params.drift_frac > 0

    def arrivals_s(self, sender: Address, receiver: Address) -> list[float]:
        """Delays after which a message arrives: none where it is lost, two where it is doubled."""
        if not self._active or DISPATCHER in (sender, receiver):
            return [self._latency_s]
        params, draw = self.params, self._random.random
        copies = 0 if draw() < params.loss else 2 if draw() < params.duplicate else 1
        return [self._delay_s() for _ in range(copies)]

    def _delay_s(self) -> float:
        delay_s = self._latency_s + self.params.delay_s * self._random.random()
        if self._random.random() < self.params.reorder:
            delay_s += REORDER_FACTOR * (self._latency_s + self.params.delay_s) * self._random.random()
        return delay_s

    def clock_rate(self, machine: Address) -> float:
        """Seconds that a machine's clock counts in one second."""
        if not self.params.drift_frac:
            return 1.0
        if machine not in self._rates:
            self._rates[machine] = 1 + self.params.drift_frac * self._random.uniform(-1, 1)
        return self._rates[machine]
