"""Clockwork: virtual time on SimPy, with a total order of events.

Equal times are ordered by (kind, machine, counter); never by the order of insertion. What is called at one time and needs no
SimPy event of its own is kept in a calendar beside SimPy's queue; SimPy's own events of that time come first.
"""

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from math import inf
from typing import Any

import simpy


class Kind(IntEnum):
    """Order of what happens at one instant: first what is complete, then what is new, then who looks on."""

    ITERATIONS = 0
    TRANSFER = 1
    MESSAGE = 2
    ARRIVAL = 3
    TIMER = 4
    SAMPLE = 5


class Clockwork(simpy.Environment):
    """SimPy's environment with callbacks at absolute times."""

    def __init__(self) -> None:
        super().__init__()
        self._calendar: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(
        self, time_s: float, kind: int, machine: int, counter: int, callback: Callable[..., None], *values: Any
    ) -> None:
        """Call `callback(*values)` at `time_s` (now, where that has passed)."""
        order = (kind << 60) | ((machine + 2) << 40) | counter  # machines start at −2; counters stay below 2^40
        heappush(self._calendar, (max(time_s, self._now), order, callback, values))

    def peek(self) -> float:
        """When the next thing happens; infinity where nothing will."""
        return min(super().peek(), self._calendar[0][0] if self._calendar else inf)

    def step(self) -> None:
        """Let the next thing happen."""
        calendar, queue = self._calendar, self._queue
        if calendar and not (queue and queue[0][0] <= calendar[0][0]):
            self._now, _, callback, values = heappop(calendar)
            callback(*values)
        else:
            super().step()
