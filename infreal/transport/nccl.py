"""The transport between GPUs: NCCL carries their tensors, each behind a header that goes over another transport, gloo's.

Untested on hardware: there was no machine with several GPUs. Tests put fakes in NCCL's place and watch the order of operations.

NCCL knows no tags, and an operation occupies the GPU until the other side starts its own. So each lane of a pair has a communicator
for either direction; a sender starts operations in the order of its headers, and a receiver one for each header that has come: into
the buffer that is posted under its tag or, where there is none yet, aside. Sizes are checked first. Communicators are named by
senders, at random, so that those of a former generation are never met again. Generations, broken pairs and lost peers are those of
the transport below; tensors of the CPU go over it as they are.
"""

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from infreal.transport import DeadlineExceeded, PairReset, PeerLost, Traffic, Transport, TransportError, lane_of
from infreal.transport.connecting import PatientStore
from infreal.transport.gloo import DTYPES
from infreal.transport.in_process import take

HEADER_TAGS = (-4, -3)  # by lane of the message; on the lane of what is waited for, where all else goes over NCCL
BREAK_TAG = -8  # nobody sends there
ASIDE_BYTES = 1 << 30  # longest message that may come before its buffer
FOREVER_S = 1e7
PAUSE_S = 2e-5
SENDER, RECEIVER = 0, 1
MakeGroup = Callable[[int, int], Any]  # of a name, for one side: two ranks, with `send`, `recv` and `abort`


def nccl_groups(store: Store) -> MakeGroup:
    def make(name: int, side: int) -> Any:
        from torch.distributed import ProcessGroupNCCL  # not in every build of torch

        return ProcessGroupNCCL(PrefixStore(f"nccl/{name}", PatientStore(store)), side, 2)

    return make


def is_on_gpu(buffer: torch.Tensor) -> bool:
    return buffer.is_cuda


@dataclass(eq=False)
class Arrival:
    """A message that is coming in. work: NCCL's, None until it is started."""

    buffer: torch.Tensor
    work: Any = None

    @property
    def has_come(self) -> bool:
        return self.work is not None and bool(self.work.is_completed())


@dataclass(eq=False)
class Receive:
    """A posted buffer."""

    peer: int
    tag: int
    buffer: torch.Tensor
    pair: "Pair"
    arrival: Arrival | None = None
    error: TransportError | None = None
    done: bool = False


class Pair:
    """One side's end of a pair in one generation."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: TransportError | None = None
        self.groups: list[Any] = []
        self.next_headers: list[tuple[Any, torch.Tensor]] = []  # by lane
        self.names = [secrets.randbits(62) for _ in HEADER_TAGS]
        self.outgoing: list[SimpleQueue[torch.Tensor | None]] = [SimpleQueue() for _ in HEADER_TAGS]
        self.posted: dict[int, deque[Receive]] = {}  # by tag
        self.early: dict[int, deque[Arrival]] = {}

    def check(self) -> None:
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    def fail(self, failure: TransportError) -> None:
        """Whoever waits is woken, and the pair's threads end."""
        with self.changed:
            if self.failure is not None:
                return
            self.failure = failure
            self.changed.notify_all()
        for queue in self.outgoing:
            queue.put(None)
        for group in self.groups:
            group.abort()


class NcclTransport:
    """One rank's end; see `infreal.transport.Transport`. Threads may share it.

    headers: the transport below · device: of messages that come early · is_fast(buffer): whether it goes over NCCL.
    """

    def __init__(
        self,
        headers: Transport,
        make_group: MakeGroup,
        device: str = "cuda",
        is_fast: Callable[[torch.Tensor], bool] = is_on_gpu,
    ) -> None:
        self.rank, self.traffic = headers.rank, Traffic()
        self._headers, self._make_group, self._device, self._is_fast = headers, make_group, device, is_fast
        self._lock = threading.Lock()
        self._pairs: dict[int, Pair] = {}

    def post_recv(self, peer: int, tag: int, buffer: torch.Tensor) -> Any:
        if not self._is_fast(buffer):
            return self._headers.post_recv(peer, tag, buffer)
        pair = self._pair(peer)
        receive = Receive(peer, tag, _dense(buffer), pair)
        _settle(buffer)
        with pair.changed:
            pair.check()
            receive.arrival = take(pair.early, tag)
            if receive.arrival is None:
                pair.posted.setdefault(tag, deque()).append(receive)
                return receive
        self._check_form(receive, receive.arrival.buffer.numel(), receive.arrival.buffer.dtype)
        return receive

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> None:
        if not self._is_fast(buffer):
            return self._headers.send(peer, tag, buffer)
        pair, lane = self._pair(peer), lane_of(tag)
        message = _dense(buffer).clone()
        _settle(message)
        header = torch.tensor([pair.names[lane], tag, message.numel(), DTYPES.index(message.dtype)])
        with pair.changed:  # one order for headers and operations
            pair.check()
            self._headers.send(peer, HEADER_TAGS[lane], header)
            pair.outgoing[lane].put(message)
            self.traffic.count_sent(peer, message.nbytes)
        return None

    def wait(self, handle: Any, deadline_s: float) -> None:
        if not isinstance(handle, Receive):
            return self._headers.wait(handle, deadline_s)
        pair = handle.pair
        while not handle.done:
            if handle.error is not None:
                raise handle.error
            pair.check()
            if handle.arrival is not None and handle.arrival.has_come:
                self._take(handle, handle.arrival)
            elif time.monotonic() > deadline_s:
                self._break(handle.peer, pair)
                raise DeadlineExceeded(f"nothing came {self._where(handle.peer, handle.tag)} by the deadline")
            elif handle.arrival is not None:
                time.sleep(PAUSE_S)
            else:
                with pair.changed:
                    pair.changed.wait_for(
                        lambda: handle.arrival or handle.error or pair.failure, deadline_s - time.monotonic()
                    )
        return None

    def reset(self, peer: int) -> None:
        with self._lock:
            pair = self._pairs.pop(peer, None)
            if pair is not None:
                pair.fail(
                    PairReset(f"the pair was reset (rank {self.rank}, peer {peer})")
                )  # nothing of it is sent any more
            self._headers.reset(peer)

    def close(self) -> None:
        """Ends all threads and communicators; the transport below is its maker's to close."""
        with self._lock:
            for pair in self._pairs.values():
                pair.fail(PeerLost(f"rank {self.rank} has closed its transport"))

    def _pair(self, peer: int) -> Pair:
        with self._lock:
            if peer not in self._pairs:
                pair = Pair()
                for lane in range(len(HEADER_TAGS)):
                    pair.next_headers.append(self._post_header(peer, lane))
                self._pairs[peer] = pair
                for lane in range(len(HEADER_TAGS)):
                    for work in (self._carry_in, self._carry_out):
                        args = (work, peer, pair, lane)
                        threading.Thread(target=self._run, args=args, name="infreal-nccl", daemon=True).start()
            return self._pairs[peer]

    def _run(self, work: Callable[[int, Pair, int], None], peer: int, pair: Pair, lane: int) -> None:
        """A failure of a thread is the pair's."""
        try:
            with torch.inference_mode():  # messages may come from there
                work(peer, pair, lane)
        except TransportError as error:
            pair.fail(error)
        except RuntimeError:  # NCCL's
            self._break(peer, pair)

    def _carry_out(self, peer: int, pair: Pair, lane: int) -> None:
        group = None
        while (message := pair.outgoing[lane].get()) is not None:
            group = group or self._group(pair, pair.names[lane], SENDER)
            work = group.send([message], RECEIVER, 0)
            while not work.is_completed() and pair.failure is None:
                time.sleep(PAUSE_S)

    def _carry_in(self, peer: int, pair: Pair, lane: int) -> None:
        groups: dict[int, Any] = {}
        while True:
            handle, header = pair.next_headers[lane]
            self._headers.wait(handle, time.monotonic() + FOREVER_S)
            name, tag, numel, number = header.tolist()
            if name not in groups:
                groups[name] = self._group(pair, name, RECEIVER)
            with pair.changed:
                pair.check()
                arrival = self._expect(peer, pair, tag, numel, number)
                pair.next_headers[lane] = self._post_header(peer, lane)
            arrival.work = groups[name].recv([arrival.buffer], SENDER, 0)  # the first one waits for the other side
            with pair.changed:
                pair.changed.notify_all()

    def _post_header(self, peer: int, lane: int) -> tuple[Any, torch.Tensor]:
        header = torch.zeros(4, dtype=torch.int64)
        return self._headers.post_recv(peer, HEADER_TAGS[lane], header), header

    def _expect(self, peer: int, pair: Pair, tag: int, numel: int, number: int) -> Arrival:
        """A place for the message that a header announces; under the pair's lock."""
        dtype = DTYPES[number] if 0 <= number < len(DTYPES) else None
        receive = take(pair.posted, tag)
        if receive is not None:
            self._check_form(receive, numel, dtype)
            receive.arrival = Arrival(receive.buffer)
            return receive.arrival
        if dtype is None or not 0 <= numel * dtype.itemsize <= ASIDE_BYTES:
            self._break(peer, pair)
            raise PairReset(f"a header of {numel} × dtype {number} {self._where(peer, tag)}")
        arrival = Arrival(torch.empty(numel, dtype=dtype, device=self._device))
        pair.early.setdefault(tag, deque()).append(arrival)
        return arrival

    def _take(self, receive: Receive, arrival: Arrival) -> None:
        if arrival.buffer is not receive.buffer:
            receive.buffer.view(-1).copy_(arrival.buffer)
        receive.done = True
        with receive.pair.changed:
            self.traffic.count_received(receive.peer, receive.buffer.nbytes)

    def _check_form(self, receive: Receive, numel: int, dtype: torch.dtype | None) -> None:
        """A message that does not fit breaks the pair."""
        buffer = receive.buffer
        if (numel, dtype) != (buffer.numel(), buffer.dtype):
            said = f"a message of {numel} × {dtype} for a buffer of {buffer.numel()} × {buffer.dtype}"
            where = self._where(receive.peer, receive.tag)
            receive.error = TransportError(f"{said} {where}")
            self._break(receive.peer, receive.pair)
            raise receive.error

    def _break(self, peer: int, pair: Pair) -> None:
        """By a time-out, which breaks the pair of the transport below for both sides."""
        if pair.failure is None:
            with contextlib.suppress(TransportError):
                handle = self._headers.post_recv(peer, BREAK_TAG, torch.zeros(1))
                self._headers.wait(handle, time.monotonic())
            pair.fail(PairReset(f"the pair is broken and wants a reset (rank {self.rank}, peer {peer})"))

    def _group(self, pair: Pair, name: int, side: int) -> Any:
        group = self._make_group(name, side)
        with pair.changed:
            pair.groups.append(group)
            if pair.failure is not None:
                group.abort()
        return group

    def _where(self, peer: int, tag: int) -> str:
        return f"(rank {self.rank}, peer {peer}, tag {tag})"


def _dense(buffer: torch.Tensor) -> torch.Tensor:
    if not buffer.is_contiguous():
        raise ValueError(f"a message's buffer must be dense, not {list(buffer.shape)} with strides {buffer.stride()}")
    return buffer


def _settle(buffer: torch.Tensor) -> None:
    """Other threads and streams may use it from now on."""
    if buffer.is_cuda:
        torch.cuda.current_stream(buffer.device).synchronize()
