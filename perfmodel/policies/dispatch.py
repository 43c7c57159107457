"""Dispatch policies: which instance a request is sent to."""

from perfmodel.dispatcher import DispatchView
from perfmodel.messages import Request


class LeastLoaded:
    """Fewest KV blocks of running and waiting work; among equals the one that has waited longest for a request."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, view: DispatchView, request: Request) -> int:
        chosen = view.least_loaded(self._next)
        self._next = chosen + 1
        return chosen


class RoundRobin:
    """Every instance in turn."""

    def __init__(self) -> None:
        self._next = -1

    def choose(self, view: DispatchView, request: Request) -> int:
        self._next = (self._next + 1) % view.num_instances
        return self._next
