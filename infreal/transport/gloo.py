"""The transport between processes: one gloo group for a pair of ranks and a lane, made when it is first used.

A posted buffer is gloo's own receive, so an exchange costs what it costs in gloo. Size and dtype are part of gloo's tag; the first
message of a tag, and the first of another size, goes behind a header, so that one that does not fit is an error and no silence.
Buffers are made by who posts them, never from what a peer says; nothing is unpickled.

Beside the rules of `infreal.transport`: tags that lie `WINDOW` apart are not open at once, and a message that nobody reads holds
the memory of those sent after it on its lane until the pair is reset. A message that does not fit breaks the pair.
"""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store

from infreal.transport import DeadlineExceeded, PairReset, PeerLost, Traffic, TransportError, lane_of
from infreal.transport.lane import Arrival, Lane
from infreal.transport.meeting import Meeting

NUM_LANES = 2
WINDOW = 1 << 16  # of tags
SIZE_BITS = 15
SIZE_PRIME = 32_749  # below 2^15: sizes under one code lie a multiple of it apart
DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
WHY_CLOSED_S = 0.1  # a peer that lives has said by then why it closed the connection


@dataclass(frozen=True)
class Form:
    """What two sides agree on before data flows."""

    tag: int
    numel: int
    dtype: int

    @classmethod
    def of(cls, tag: int, buffer: torch.Tensor) -> "Form":
        if not buffer.is_contiguous():
            raise ValueError(
                f"a message's buffer must be dense, not {list(buffer.shape)} with strides {buffer.stride()}"
            )
        if buffer.dtype not in DTYPES:
            raise ValueError(f"no message of {buffer.dtype}; there are {', '.join(map(str, DTYPES))}")
        return cls(tag, buffer.numel(), DTYPES.index(buffer.dtype))

    @property
    def slot(self) -> int:
        num_bytes = self.numel * DTYPES[self.dtype].itemsize
        return self.header_slot | 1 + (num_bytes * len(DTYPES) + self.dtype) % SIZE_PRIME

    @property
    def header_slot(self) -> int:
        return self.tag % WINDOW << SIZE_BITS

    def header(self) -> torch.Tensor:
        return torch.tensor([self.tag, self.numel, self.dtype])

    def check(self, header: torch.Tensor) -> str:
        """What is wrong with a message that is announced so; empty: nothing."""
        tag, numel, dtype = header.tolist()
        if (tag, numel, dtype) == (self.tag, self.numel, self.dtype):
            return ""
        name = DTYPES[dtype] if 0 <= dtype < len(DTYPES) else f"dtype {dtype}"
        return f"a message of {numel} × {name} for a buffer of {self.numel} × {DTYPES[self.dtype]}"


@dataclass(eq=False)
class Receive:
    """A posted buffer. target: where gloo writes, the buffer itself or pinned memory beside it."""

    peer: int
    form: Form
    lane: Lane
    buffer: torch.Tensor
    target: torch.Tensor
    data: Arrival
    header: Arrival | None
    done: bool = False


@dataclass(eq=False)
class Pair:
    """One side's end of a pair in its present generation. sent_forms, posted_forms: the last one by `tag % WINDOW`."""

    meeting: Meeting
    lock: threading.RLock = field(default_factory=threading.RLock)
    lanes: dict[int, Lane] = field(default_factory=dict)
    failure: type[TransportError] | None = None
    sent_forms: dict[int, Form] = field(default_factory=dict)
    posted_forms: dict[int, Form] = field(default_factory=dict)

    def fail(self, failure: type[TransportError]) -> None:
        self.failure = failure
        for lane in self.lanes.values():
            lane.close()

    def find_failure(self) -> None:
        """A connection was closed: by a peer that lives, or by its end."""
        until_s = time.monotonic() + WHY_CLOSED_S
        while self.failure is None:
            if self._was_broken():
                self.fail(PairReset)
            elif time.monotonic() > until_s:
                self.fail(PeerLost)
            else:
                time.sleep(WHY_CLOSED_S / 20)

    def _was_broken(self) -> bool:
        try:
            return self.meeting.was_broken()
        except RuntimeError:  # the store is gone as well
            return False


class GlooTransport:
    """One rank's end; see `infreal.transport.Transport`. Threads may share it.

    store: seen by all ranks · interface: the network interface that gloo listens on, by default that of this host's name.
    """

    def __init__(self, rank: int, num_ranks: int, store: Store, interface: str | None = None) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"no rank {rank} among {num_ranks}")
        self.rank, self.num_ranks = rank, num_ranks
        self.traffic = Traffic()
        self._store = store
        self._devices = [_device(interface) for _ in range(NUM_LANES)]  # each has an event loop of its own
        self._lock = threading.Lock()
        self._pairs: dict[int, Pair] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    def post_recv(self, peer: int, tag: int, buffer: torch.Tensor) -> Receive:
        form, pair = Form.of(tag, buffer), self._pair(peer)
        target = torch.empty_like(buffer, device="cpu", pin_memory=True) if buffer.is_cuda else buffer
        with pair.lock:
            lane, slot = self._lane(pair, peer, tag), tag % WINDOW
            is_new = pair.posted_forms.get(slot) != form
            pair.posted_forms[slot] = form
            try:
                header = lane.post_recv(form.header_slot, torch.empty(3, dtype=torch.int64)) if is_new else None
                return Receive(peer, form, lane, buffer, target, lane.post_recv(form.slot, target), header)
            except RuntimeError as error:
                raise self._failure(pair, peer, tag) from error

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> None:
        form, pair = Form.of(tag, buffer), self._pair(peer)
        message = _staged(buffer)
        with pair.lock:
            lane, slot = self._lane(pair, peer, tag), tag % WINDOW
            is_new = pair.sent_forms.get(slot) != form
            pair.sent_forms[slot] = form
            try:
                if is_new:
                    lane.send(form.header_slot, form.header())
                lane.send(form.slot, message)
            except RuntimeError as error:
                raise self._failure(pair, peer, tag) from error
        with self._lock:
            self.traffic.count_sent(peer, message.nbytes)

    def wait(self, handle: Receive, deadline_s: float) -> None:
        if handle.done:
            return
        pair, peer, tag = self._pair(handle.peer), handle.peer, handle.form.tag
        try:
            if handle.header is not None:
                handle.lane.wait(handle.header, deadline_s)
                self._check_header(pair, handle)
            handle.lane.wait(handle.data, deadline_s)
        except TimeoutError:
            self._give_up(pair, handle.lane)
            raise DeadlineExceeded(f"nothing came {self._where(peer, tag)} by the deadline") from None
        except TransportError:
            raise
        except RuntimeError as error:
            raise self._failure(pair, peer, tag, handle.lane) from error
        if handle.target is not handle.buffer:
            handle.buffer.copy_(handle.target, non_blocking=True)  # torch keeps pinned memory until its copies have run
        handle.done = True
        with self._lock:
            self.traffic.count_received(peer, handle.buffer.nbytes)

    def reset(self, peer: int) -> None:
        """Whoever resets first opens the pair's next generation; the other joins it with its own reset."""
        pair = self._pair(peer)
        with pair.lock:
            pair.meeting.join_next()  # before connections close: the peer looks there for why they did
            pair.fail(PairReset)
            pair.lanes, pair.failure = {}, None
            pair.sent_forms.clear()
            pair.posted_forms.clear()

    def close(self) -> None:
        """Ends all connections and threads; peers that wait get `PeerLost`."""
        with self._lock:
            self._closed = True
            pairs, threads = list(self._pairs.values()), list(self._threads)
        for pair in pairs:
            with pair.lock:
                pair.fail(PeerLost)
                pair.lanes = {}
        for thread in threads:
            thread.join()
        self._devices = []

    def _pair(self, peer: int) -> Pair:
        if peer == self.rank or not 0 <= peer < self.num_ranks:
            raise ValueError(f"rank {self.rank} has no peer {peer} among {self.num_ranks} ranks")
        with self._lock:
            if self._closed:
                raise PeerLost(f"rank {self.rank} has closed its transport")
            if peer not in self._pairs:
                self._pairs[peer] = Pair(Meeting(self._store, self.rank, peer))
            return self._pairs[peer]

    def _lane(self, pair: Pair, peer: int, tag: int) -> Lane:
        if pair.failure is not None:
            raise self._failure(pair, peer, tag)
        if not pair.lanes:
            if not pair.meeting.try_stay():
                pair.fail(PairReset)
                raise self._failure(pair, peer, tag)
            self._open(pair)
        return pair.lanes[lane_of(tag)]

    def _open(self, pair: Pair) -> None:
        """All lanes at once, so that each of them sees the end of the peer."""
        meeting = pair.meeting
        for number, device in enumerate(self._devices):
            lane = Lane(meeting.lane_store(number), meeting.side, device, meeting.is_former)
            pair.lanes[number] = lane
            with self._lock:
                self._threads = [thread for thread in self._threads if thread.is_alive()] + [lane.thread]

    def _check_header(self, pair: Pair, handle: Receive) -> None:
        assert handle.header is not None
        problem = handle.form.check(handle.header.buffer)
        if problem:
            self._give_up(pair, handle.lane)
            raise TransportError(f"{problem} {self._where(handle.peer, handle.form.tag)}")

    def _give_up(self, pair: Pair, lane: Lane) -> None:
        """This side breaks the pair, unless the lane is of a former generation."""
        with pair.lock:
            if lane in pair.lanes.values() and pair.failure is None:
                pair.meeting.note_break()
                pair.fail(PairReset)

    def _failure(self, pair: Pair, peer: int, tag: int, lane: Lane | None = None) -> TransportError:
        """Why the pair cannot be used. lane: the one that failed, which may be of a former generation."""
        with pair.lock:
            if lane is not None and lane not in pair.lanes.values() and not self._closed:
                return PairReset(f"the pair was reset {self._where(peer, tag)}")
            pair.find_failure()
            assert pair.failure is not None
            said = "the peer is gone" if pair.failure is PeerLost else "the pair is broken and wants a reset"
            return pair.failure(f"{said} {self._where(peer, tag)}")

    def _where(self, peer: int, tag: int) -> str:
        return f"(rank {self.rank}, peer {peer}, tag {tag})"


def _device(interface: str | None) -> Any:
    return (
        ProcessGroupGloo.create_device(interface=interface) if interface else ProcessGroupGloo.create_default_device()
    )


def _staged(buffer: torch.Tensor) -> torch.Tensor:
    """A copy on the host that stays as it is."""
    if not buffer.is_cuda:
        return buffer.clone()
    message = torch.empty_like(buffer, device="cpu", pin_memory=True)
    message.copy_(buffer, non_blocking=True)
    torch.cuda.current_stream(buffer.device).synchronize()
    return message
