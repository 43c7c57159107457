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

import torch
from torch.distributed import Store

from infreal.transport import DeadlineExceeded, PairReset, PeerLost, Traffic, TransportError, lane_of
from infreal.transport.connecting import device_maker, make_group
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


@dataclass(frozen=True, slots=True)
class Form:
    """What two sides agree on before data flows. slot, header_slot: gloo's tags."""

    tag: int
    numel: int
    dtype: torch.dtype
    slot: int
    header_slot: int

    @classmethod
    def of(cls, tag: int, buffer: torch.Tensor) -> "Form":
        if not buffer.is_contiguous():
            raise ValueError(
                f"a message's buffer must be dense, not {list(buffer.shape)} with strides {buffer.stride()}"
            )
        if buffer.dtype not in DTYPES:
            raise ValueError(f"no message of {buffer.dtype}; there are {', '.join(map(str, DTYPES))}")
        header_slot = tag % WINDOW << SIZE_BITS
        size = 1 + (buffer.nbytes * len(DTYPES) + DTYPES.index(buffer.dtype)) % SIZE_PRIME
        return cls(tag, buffer.numel(), buffer.dtype, header_slot | size, header_slot)

    def fits(self, tag: int, buffer: torch.Tensor) -> bool:
        same = tag == self.tag and buffer.dtype == self.dtype and buffer.numel() == self.numel
        return same and buffer.is_contiguous()

    def header(self) -> torch.Tensor:
        return torch.tensor([self.tag, self.numel, DTYPES.index(self.dtype)])

    def problem(self, header: torch.Tensor) -> str:
        """What is wrong with a message that is announced so; empty: nothing."""
        tag, numel, number = header.tolist()
        dtype = DTYPES[number] if 0 <= number < len(DTYPES) else f"dtype {number}"
        if (tag, numel, dtype) == (self.tag, self.numel, self.dtype):
            return ""
        return f"a message of {numel} × {dtype} for a buffer of {self.numel} × {self.dtype}"


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

    store: seen by all ranks · host: the address of this machine that gloo listens on, by default that of its name.
    """

    def __init__(self, rank: int, num_ranks: int, store: Store, host: str | None = None) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"no rank {rank} among {num_ranks}")
        self.rank, self.num_ranks = rank, num_ranks
        self.traffic = Traffic()
        self._store = store
        self._make_device = device_maker(host)
        self._lock = threading.Lock()
        self._pairs: dict[int, Pair] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    def post_recv(self, peer: int, tag: int, buffer: torch.Tensor) -> Receive:
        pair = self._pair(peer)
        with pair.lock:
            form, is_new = _form(pair.posted_forms, tag, buffer)
            lane = self._lane(pair, peer, tag)
            target = torch.empty_like(buffer, device="cpu", pin_memory=True) if buffer.is_cuda else buffer
            try:
                header = lane.post_recv(form.header_slot, torch.empty(3, dtype=torch.int64)) if is_new else None
                return Receive(peer, form, lane, buffer, target, lane.post_recv(form.slot, target), header)
            except RuntimeError as error:
                raise self._failure(pair, peer, tag) from error

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> None:
        pair = self._pair(peer)
        with pair.lock:
            form, is_new = _form(pair.sent_forms, tag, buffer)
            lane = self._lane(pair, peer, tag)
            message = _staged(buffer)
            try:
                if is_new:
                    lane.send(form.header_slot, form.header())
                lane.send(form.slot, message)
            except RuntimeError as error:
                raise self._failure(pair, peer, tag) from error
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
        with pair.lock:
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
            pairs, threads, self._pairs = list(self._pairs.values()), list(self._threads), {}
        for pair in pairs:
            with pair.lock:
                pair.fail(PeerLost)
                pair.lanes = {}
        for thread in threads:
            thread.join()

    def _pair(self, peer: int) -> Pair:
        pair = self._pairs.get(peer)
        return pair if pair is not None else self._new_pair(peer)

    def _new_pair(self, peer: int) -> Pair:
        if peer == self.rank or not 0 <= peer < self.num_ranks:
            raise ValueError(f"rank {self.rank} has no peer {peer} among {self.num_ranks} ranks")
        with self._lock:
            if self._closed:
                raise PeerLost(f"rank {self.rank} has closed its transport")
            return self._pairs.setdefault(peer, Pair(Meeting(self._store, self.rank, peer)))

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
        """Lanes are there for use at once, and connected together, so that each of them sees the end of the peer."""
        meeting = pair.meeting
        pair.lanes = {number: Lane(meeting.side) for number in range(NUM_LANES)}
        lanes = [(lane, meeting.lane_store(number)) for number, lane in pair.lanes.items()]
        connecting = threading.Thread(target=self._connect, args=(meeting, lanes), name="infreal-connect", daemon=True)
        threads = [connecting, *(lane.thread for lane, _ in lanes)]
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()] + threads
            for thread in threads:
                thread.start()

    def _connect(self, meeting: Meeting, lanes: list[tuple[Lane, Store]]) -> None:
        def is_over() -> bool:
            return lanes[0][0].is_closed or meeting.is_former()

        try:
            groups = [make_group(store, meeting.side, 2, self._make_device, is_over) for _, store in lanes]
        except RuntimeError:
            for lane, _ in lanes:
                lane.close()
        else:
            for (lane, _), group in zip(lanes, groups, strict=True):
                lane.take(group)

    def _check_header(self, pair: Pair, handle: Receive) -> None:
        assert handle.header is not None
        problem = handle.form.problem(handle.header.buffer)
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


def _form(known: dict[int, Form], tag: int, buffer: torch.Tensor) -> tuple[Form, bool]:
    """The form of a message, and whether the last one of its tag had another."""
    form = known.get(tag % WINDOW)
    if form is not None and form.fits(tag, buffer):
        return form, False
    form = known[tag % WINDOW] = Form.of(tag, buffer)
    return form, True


def _staged(buffer: torch.Tensor) -> torch.Tensor:
    """A copy on the host that stays as it is."""
    if not buffer.is_cuda:
        return buffer.clone()
    message = torch.empty_like(buffer, device="cpu", pin_memory=True)
    message.copy_(buffer, non_blocking=True)
    torch.cuda.current_stream(buffer.device).synchronize()
    return message
