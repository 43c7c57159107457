"""The data plane of one instance, by pairs and their generations: what was agreed on in one never goes on in the next.

A generation ends with a `PeerLost` or a `ResetPair`. Threads say in which state of a pair their exchange was agreed on (`bound`);
posting or sending after its end raises `PairReset`, so nobody waits for an answer to something that was dropped.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from infreal.transport import PairReset, Transport


class Pairs:
    """A `Transport` over another one. States of a pair are numbers that grow."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.traffic = transport.rank, transport.traffic
        self._transport = transport
        self._changed = threading.Condition()
        self._states: dict[int, int] = {}
        self._agreed = threading.local()

    def states(self, peers: Iterable[int]) -> dict[int, int]:
        with self._changed:
            return {peer: self._states.get(peer, 0) for peer in peers}

    @contextmanager
    def bound(self, states: Mapping[int, int]) -> Iterator[None]:
        """What this thread does in here was agreed on in these states."""
        self._agreed.states = states
        try:
            yield
        finally:
            self._agreed.states = {}

    def post_recv(self, peer: int, tag: int, buffer: torch.Tensor) -> Any:
        with self._changed:
            self._check(peer, tag)
            return self._transport.post_recv(peer, tag, buffer)

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> None:
        with self._changed:
            self._check(peer, tag)
            self._transport.send(peer, tag, buffer)

    def wait(self, handle: Any, deadline_s: float) -> None:
        self._transport.wait(handle, deadline_s)

    def reset(self, peer: int) -> None:
        """The next generation of a pair begins."""
        with self._changed:
            self._transport.reset(peer)
            self._states[peer] = self._states.get(peer, 0) + 1
            self._changed.notify_all()

    def unchanged(self, states: Mapping[int, int]) -> list[int]:
        """Peers whose pair is still in this state."""
        with self._changed:
            return [peer for peer, state in states.items() if self._states.get(peer, 0) == state]

    def wait_for_change(self, states: Mapping[int, int], timeout_s: float) -> None:
        """Until all of these are over."""
        with self._changed:
            self._changed.wait_for(lambda: not self.unchanged(states), timeout_s)

    def _check(self, peer: int, tag: int) -> None:
        agreed = getattr(self._agreed, "states", {}).get(peer)
        if agreed is not None and agreed != self._states.get(peer, 0):
            raise PairReset(f"the pair was reset (rank {self.rank}, peer {peer}, tag {tag})")
