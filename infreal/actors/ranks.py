"""All ranks of an instance, as rank 0 commands them: one order of orders, and when a job is done everywhere.

A rank that is gone, or says nothing for a deadline, ends the instance.
"""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from infreal.actors.channel import Channel
from infreal.actors.orders import Done, Gone, Job, Order, ReceiveCopy, Renew, Report, SendCopy, ServeRead
from infreal.actors.rank import Rank, Spawn
from infreal.executor import Executor
from infreal.requests import Requests
from infreal.transport import TransportError

Then = Callable[[Done], None]  # hears of a job's end: ok where it is at every rank, nothing where it is at any


@dataclass(slots=True)
class Open:
    """A job that some ranks are at."""

    left: int
    so_far: Done
    then: Then


class Ranks:
    """own: this one · channel: to the others, None where there are none · note(report): hears what they say, but for `Done`."""

    def __init__(
        self,
        executor: Executor,
        requests: Requests,
        spawn: Spawn,
        note: Callable[[Report], None],
        channel: Channel | None,
        num_ranks: int,
    ) -> None:
        assert (channel is None) == (num_ranks == 1), "ranks that are several have a channel"
        self.own = Rank(executor, requests, self.hear, spawn)
        self._spawn, self._note, self._channel, self._others = spawn, note, channel, range(1, num_ranks)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._jobs: dict[int, Open] = {}

    def start(self) -> None:
        """Listen to the others."""
        for rank in self._others:
            self._spawn(partial(self._listen_to, rank), f"rank {rank}")

    def _listen_to(self, rank: int) -> None:
        assert self._channel is not None
        try:
            while True:
                self.hear(self._channel.receive(rank, self.own.executor.deadline_s))
        except TransportError as error:
            self._note(Gone(f"rank {rank}: {error}"))

    def tell(self, order: Order) -> None:
        """The others, in the order in which this is called."""
        if self._channel is not None:
            try:
                self._channel.send(self._others, order)
            except TransportError as error:
                self._note(Gone(str(error)))

    def order(self, order: Order) -> None:
        """All do this, this one before the call returns."""
        self.tell(order)
        self.own.obey(order)

    def begin(self, work: ServeRead | SendCopy | ReceiveCopy | Renew, then: Then) -> None:
        """All begin a job. then(done): called when the last one has ended it, by whichever thread brings the news."""
        with self._lock:
            number = next(self._numbers)
            self._jobs[number] = Open(1 + len(self._others), Done(number), then)
        self.order(Job(number, work))

    def hear(self, report: Report) -> None:
        """Of any rank, this one included."""
        if not isinstance(report, Done):
            self._note(report)
            return
        with self._lock:
            job = self._jobs[report.job]
            job.left -= 1
            job.so_far = Done(report.job, job.so_far.ok and report.ok, job.so_far.nothing or report.nothing)
            if job.left:
                return
            del self._jobs[report.job]
        job.then(job.so_far)
