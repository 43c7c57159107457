"""One gloo group of two ranks as a side of it uses it: queued up until the group is there, then straight to gloo.

What gloo does: a send ends only when the peer has posted its receive, so its buffer must live until then; tags are honoured; a wait
that times out closes the group on both sides, and nothing else does; a message that is longer than the buffer that waits under its
tag ends the process.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

FOREVER = timedelta(days=365)
KEPT_BYTES, KEPT_MESSAGES = 1 << 20, 256  # sent messages that nobody looks after
CLOSING_SLOT = (1 << 31) - 1  # nobody sends there


@dataclass(eq=False)
class Arrival:
    """A receive under one slot; `work` is gloo's, None until the group is made."""

    slot: int
    buffer: torch.Tensor
    work: Any = None


class Lane:
    """RuntimeError of its methods: the lane was closed, by either side or a time-out. side: 0 or 1 · slot: below 2^31 - 2."""

    def __init__(self, side: int) -> None:
        self._side = side
        self._changed = threading.Condition()
        self._group: Any = None
        self._closed = False
        self._queued: list[Callable[[Any], None]] = []
        self._sent: list[tuple[int, Any, torch.Tensor]] = []  # slot, gloo's work, the message
        self._sent_bytes = 0
        self.thread = threading.Thread(target=self._free, name="infreal-lane", daemon=True)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def take(self, group: Any) -> None:
        """The group is connected. What has queued up goes first."""
        with self._changed:
            if not self._closed:
                for operation in self._queued:
                    operation(group)
            self._queued.clear()
            self._group = group
            was_closed = self._closed
            self._changed.notify_all()
        if was_closed:
            close_group(group, 1 - self._side)

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
            close_group(self._group, 1 - self._side)

    def _group_or_queue(self, operation: Callable[[Any], None]) -> Any:
        if self._group is None:
            with self._changed:
                if self._closed:
                    raise RuntimeError("the lane is closed")
                if self._group is None:
                    self._queued.append(operation)
                    return None
        return self._group

    def _start_send(self, group: Any, slot: int, message: torch.Tensor) -> None:
        work = group.send([message], 1 - self._side, slot)
        with self._changed:
            self._sent.append((slot, work, message))
            self._sent_bytes += message.nbytes
            if self._has_many_sent():
                self._changed.notify_all()

    def _start_recv(self, group: Any, arrival: Arrival) -> None:
        arrival.work = group.recv([arrival.buffer], 1 - self._side, arrival.slot)

    def _free(self) -> None:
        with contextlib.suppress(RuntimeError):
            while not self._closed:
                self._free_sent()
        self._sent.clear()

    def _has_many_sent(self) -> bool:
        return self._sent_bytes > KEPT_BYTES or len(self._sent) > KEPT_MESSAGES

    def _free_sent(self) -> None:
        """Lets go of messages that the peer has read. Those of a slot are read in order: the last tells of all."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_many_sent() or self._closed)
            sent, self._sent, self._sent_bytes = self._sent, [], 0
        for work in {slot: work for slot, work, _ in sent}.values():
            work.wait(FOREVER)


def close_group(group: Any, peer: int) -> None:
    """gloo closes the connection with a peer when a wait times out: neither its `abort` nor its `shutdown` wakes anybody."""
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1)], peer, CLOSING_SLOT).wait(timedelta(milliseconds=1))
