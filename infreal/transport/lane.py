"""One gloo group of two ranks, made in the background and used for one generation of a pair.

What gloo does: a send ends only when the peer has posted its receive, so its buffer must live until then; tags
are honoured; a wait that times out closes the group on both sides, and nothing else does; a message that is longer than the buffer
that waits under its tag ends the process.
"""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

FOREVER = timedelta(days=365)
CONNECT_S = 10.0  # for a group whose two sides have both said in the store that they are there
LONGEST_PAUSE_S = 0.02
CLOSING_SLOT = (1 << 31) - 1  # nobody sends there


@dataclass(eq=False)
class Arrival:
    """A receive under one slot; `work` is gloo's, None until the group is made."""

    slot: int
    buffer: torch.Tensor
    work: Any = None


class Lane:
    """One side's end. Before the group is there, sends and receives queue up. RuntimeError: closed, by either side or a time-out.

    store: of this lane and generation alone · side: 0 or 1 · is_former: whether the pair has a later generation ·
    slot: below CLOSING_SLOT.
    """

    def __init__(self, store: Store, side: int, device: Any, is_former: Callable[[], bool]) -> None:
        self._store, self._side, self._device, self._is_former = store, side, device, is_former
        self._changed = threading.Condition()
        self._group: Any = None
        self._closed = False
        self._queued: list[Callable[[Any], None]] = []
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self.thread = threading.Thread(target=self._run, name="infreal-lane", daemon=True)
        self.thread.start()

    def send(self, slot: int, message: torch.Tensor) -> None:
        """The message is the lane's from now on."""
        group = self._group_or_queue(lambda group: self._start_send(group, slot, message))
        if group is not None:
            self._start_send(group, slot, message)

    def post_recv(self, slot: int, buffer: torch.Tensor) -> Arrival:
        arrival = Arrival(slot, buffer)
        group = self._group_or_queue(lambda group: self._start_recv(group, arrival))
        if group is not None:
            self._start_recv(group, arrival)
        return arrival

    def wait(self, arrival: Arrival, deadline_s: float) -> None:
        """TimeoutError at the deadline; the lane is closed then."""
        if arrival.work is None:
            with self._changed:
                self._changed.wait_for(lambda: arrival.work or self._closed, deadline_s - time.monotonic())
        if arrival.work is not None:
            left_ms = max(1, math.ceil((deadline_s - time.monotonic()) * 1e3))
            try:
                arrival.work.wait(timedelta(milliseconds=left_ms))
                return
            except RuntimeError as error:
                if time.monotonic() < deadline_s:
                    raise RuntimeError(str(error).partition("\n")[0]) from None
        elif self._closed:
            raise RuntimeError("the lane is closed")
        self.close()
        raise TimeoutError

    def close(self) -> None:
        """Whoever waits on either side is woken. The thread ends soon after."""
        with self._changed:
            was_closed, self._closed = self._closed, True
            self._queued.clear()
            self._changed.notify_all()
        if self._group is not None and not was_closed:
            _close(self._group, self._side)

    def _group_or_queue(self, operation: Callable[[Any], None]) -> Any:
        with self._changed:
            if self._closed:
                raise RuntimeError("the lane is closed")
            if self._group is None:
                self._queued.append(operation)
            return self._group

    def _start_send(self, group: Any, slot: int, message: torch.Tensor) -> None:
        item = group.send([message], 1 - self._side, slot), message
        with self._changed:
            self._sent.append(item)
            if len(self._sent) == 1:
                self._changed.notify_all()

    def _start_recv(self, group: Any, arrival: Arrival) -> None:
        arrival.work = group.recv([arrival.buffer], 1 - self._side, arrival.slot)

    def _run(self) -> None:
        try:
            group = self._connect()
            self._take(group)
            while not self._closed:
                self._free_sent()
        except RuntimeError:
            self.close()
        self._sent.clear()

    def _connect(self) -> Any:
        self._store.set(f"here/{self._side}", "")
        pause_s = 0.0005
        while not self._store.check([f"here/{1 - self._side}"]):
            if self._closed or self._is_former():
                raise RuntimeError("the lane is closed")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [self._device], 1, timedelta(seconds=CONNECT_S)
        return ProcessGroupGloo(PrefixStore("gloo", self._store), self._side, 2, options)

    def _take(self, group: Any) -> None:
        """What has queued up goes first."""
        with self._changed:
            for operation in self._queued:
                operation(group)
            self._queued.clear()
            self._group = group
            was_closed = self._closed
            self._changed.notify_all()
        if was_closed:
            _close(group, self._side)

    def _free_sent(self) -> None:
        """Lets go of messages that the peer has read, oldest first; looks seldom, to leave the processor to others."""
        with self._changed:
            self._changed.wait_for(lambda: self._sent or self._closed)
        time.sleep(LONGEST_PAUSE_S)
        for _ in range(len(self._sent)):
            self._sent[0][0].wait(FOREVER)
            self._sent.popleft()


def _close(group: Any, side: int) -> None:
    """gloo closes a group when a wait times out: neither its `abort` nor its `shutdown` wakes anybody."""
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1)], 1 - side, CLOSING_SLOT).wait(timedelta(milliseconds=1))
