"""The transport within one process: endpoints share a table of mailboxes under one lock. Threads may be its ranks.

A message is copied once: into the buffer that is posted for it, or aside until one is. Which thread runs first decides
nothing but time.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from infreal.transport import DeadlineExceeded, PairReset, PeerLost, Traffic, TransportError

Mailbox = tuple[int, int, int, int]  # source, destination, generation of the pair, tag


@dataclass(eq=False)
class Receive:
    """A posted buffer, and what became of it."""

    peer: int
    tag: int
    generation: int
    buffer: torch.Tensor
    done: bool = False
    error: str = ""


class InProcessNetwork:
    """All mailboxes of `num_ranks` endpoints."""

    def __init__(self, num_ranks: int) -> None:
        self.changed = threading.Condition()
        self.generation: dict[frozenset[int], int] = defaultdict(int)
        self.messages: dict[Mailbox, deque[torch.Tensor]] = defaultdict(deque)
        self.receives: dict[Mailbox, deque[Receive]] = defaultdict(deque)
        self.lost: set[int] = set()
        self.endpoints = [InProcessTransport(self, rank) for rank in range(num_ranks)]

    def kill(self, rank: int) -> None:
        """The rank is gone: whoever waits for it, or turns to it, gets `PeerLost`."""
        with self.changed:
            self.lost.add(rank)
            self.changed.notify_all()

    def drop_before(self, pair: frozenset[int], generation: int) -> None:
        """Forgets mailboxes of the pair's former generations."""
        for boxes in (self.messages, self.receives):
            for key in [key for key in boxes if pair == {key[0], key[1]} and key[2] < generation]:
                del boxes[key]


class InProcessTransport:
    """One rank's end of an `InProcessNetwork`; see `infreal.transport.Transport`."""

    def __init__(self, network: InProcessNetwork, rank: int) -> None:
        self.network = network
        self.rank = rank
        self.traffic = Traffic()
        self._joined: dict[int, int] = defaultdict(int)
        self._broken: set[int] = set()

    def post_recv(self, peer: int, tag: int, buffer: torch.Tensor) -> Receive:
        net = self.network
        with net.changed:
            self._check_pair(peer, tag)
            receive = Receive(peer, tag, self._joined[peer], _dense(buffer))
            mailbox = (peer, self.rank, receive.generation, tag)
            message = take(net.messages, mailbox)
            if message is not None:
                _deliver(message, receive)
            else:
                net.receives[mailbox].append(receive)
        return receive

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> None:
        net = self.network
        with net.changed:
            self._check_pair(peer, tag)
            mailbox = (self.rank, peer, self._joined[peer], tag)
            receive = take(net.receives, mailbox)
            if receive is not None:
                _deliver(_dense(buffer), receive)
            else:
                net.messages[mailbox].append(_dense(buffer).clone())
            self.traffic.count_sent(peer, buffer.nbytes)
            net.changed.notify_all()

    def wait(self, handle: Receive, deadline_s: float) -> None:
        net = self.network
        with net.changed:
            while not handle.done:
                self._check_alive(handle)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    self._broken.add(handle.peer)
                    raise DeadlineExceeded(f"nothing came {self._where(handle.peer, handle.tag)} by the deadline")
                net.changed.wait(left_s)
        if handle.error:
            raise TransportError(f"{handle.error} {self._where(handle.peer, handle.tag)}")
        self.traffic.count_received(handle.peer, handle.buffer.nbytes)

    def reset(self, peer: int) -> None:
        """Whoever resets first opens the pair's next generation; the other joins it with its own reset."""
        net, pair = self.network, frozenset((self.rank, peer))
        with net.changed:
            if self._joined[peer] == net.generation[pair]:
                net.generation[pair] += 1
            self._joined[peer] = net.generation[pair]
            self._broken.discard(peer)
            net.drop_before(pair, net.generation[pair])
            net.changed.notify_all()

    def _check_pair(self, peer: int, tag: int) -> None:
        if peer == self.rank or not 0 <= peer < len(self.network.endpoints):
            raise ValueError(f"rank {self.rank} has no peer {peer} among {len(self.network.endpoints)} ranks")
        if {peer, self.rank} & self.network.lost:
            raise PeerLost(f"the peer is gone {self._where(peer, tag)}")
        if peer in self._broken or self._is_former(peer, self._joined[peer]):
            raise PairReset(f"the pair is broken and wants a reset {self._where(peer, tag)}")

    def _check_alive(self, handle: Receive) -> None:
        if {handle.peer, self.rank} & self.network.lost:
            raise PeerLost(f"the peer is gone {self._where(handle.peer, handle.tag)}")
        if self._is_former(handle.peer, handle.generation):
            raise PairReset(f"the pair was reset {self._where(handle.peer, handle.tag)}")

    def _is_former(self, peer: int, generation: int) -> bool:
        return generation < self.network.generation[frozenset((self.rank, peer))]

    def _where(self, peer: int, tag: int) -> str:
        return f"(rank {self.rank}, peer {peer}, tag {tag})"


class CooperativeTransport(InProcessTransport):
    """An endpoint in a process without threads: before it waits, `let_work(rank, peer)` lets its peer do its part."""

    def __init__(self, network: InProcessNetwork, rank: int, let_work: Callable[[int, int], None]) -> None:
        super().__init__(network, rank)
        self._let_work = let_work

    def wait(self, handle: Receive, deadline_s: float) -> None:
        if not handle.done:
            self._let_work(self.rank, handle.peer)
        super().wait(handle, deadline_s)


def _dense(buffer: torch.Tensor) -> torch.Tensor:
    if not buffer.is_contiguous():
        raise ValueError(f"a message's buffer must be dense, not {list(buffer.shape)} with strides {buffer.stride()}")
    return buffer


def take(boxes: dict[Any, deque[Any]], mailbox: Any) -> Any:
    """The first item of a mailbox, None where there is none; an empty mailbox leaves nothing behind."""
    box = boxes.get(mailbox)
    if box is None:
        return None
    item = box.popleft()
    if not box:
        del boxes[mailbox]
    return item


@torch.inference_mode()  # buffers made under inference mode may be filled from threads that are not
def _deliver(message: torch.Tensor, receive: Receive) -> None:
    target = receive.buffer
    if message.dtype != target.dtype or message.numel() != target.numel():
        sizes = f"{message.numel()} × {message.dtype} for a buffer of {target.numel()} × {target.dtype}"
        receive.error = f"a message of {sizes}"
    else:
        target.view(-1).copy_(message.view(-1))
    receive.done = True


def run_ranks(network: InProcessNetwork, work: Callable[[InProcessTransport], Any]) -> list[Any]:
    """Runs `work(endpoint)` for every rank in a thread of its own; returns the results by rank.

    A rank that raises is lost to the others, so nobody waits for it; its error is raised here once all have ended.
    """
    results: list[Any] = [None] * len(network.endpoints)
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(network.endpoints[rank])
        except BaseException as error:
            errors.append((rank, error))
            network.kill(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0][1]
    return results
