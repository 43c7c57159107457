"""Clockwork: virtual time on SimPy, with a total order of events.

Equal times are ordered by (kind, machine, counter), which SimPy takes as its priority; never by the order of insertion.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import simpy
from simpy.events import EventPriority


class Kind(IntEnum):
    """Order of what happens at one instant: first what is complete, then what is new, then who looks on."""

    ITERATIONS = 0
    TRANSFER = 1
    MESSAGE = 2
    ARRIVAL = 3
    TIMER = 4
    SAMPLE = 5


class Call(simpy.Event):
    """An event that has been triggered already, with one callback."""

    _ok, _value = True, None
    callbacks: Any = (lambda call: call.perform(),)

    def __init__(self, perform: Callable[[], None]) -> None:
        self.perform = perform


class Clockwork(simpy.Environment):
    """SimPy's environment with callbacks at absolute times."""

    def at(self, time_s: float, kind: Kind, machine: int, counter: int, callback: Callable[[], None]) -> None:
        """Call `callback` at `time_s` (now, where that has passed)."""
        priority = (kind << 60) | ((machine + 2) << 40) | counter  # machines start at −2; counters stay below 2^40
        self.schedule(Call(callback), EventPriority(priority), max(0.0, time_s - self.now))
