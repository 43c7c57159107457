"""A rank of an instance that decides nothing: it does what rank 0 orders, and says when it is done."""

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from infreal.actors.channel import Channel
from infreal.actors.orders import Alive, Broken, Gone, OfSteps, Report
from infreal.actors.rank import Rank
from infreal.executor import Executor
from infreal.requests import Requests
from infreal.transport import TransportError

LEADER = 0
PULSES = 5  # in a deadline


class Follower:
    """It ends, as all its threads do, when rank 0 is gone."""

    def __init__(self, executor: Executor, requests: Requests, channel: Channel) -> None:
        self.executor = executor
        self._channel = channel
        self._rank = Rank(executor, requests, self._tell, self._spawn)
        self._steps: SimpleQueue[OfSteps] = SimpleQueue()
        self._ended = threading.Event()

    def start(self) -> None:
        for work in (self._listen, self._iterate, self._pulse):
            self._spawn(work, work.__name__)

    def wait(self) -> None:
        """Returns when it has ended."""
        self._ended.wait()

    def _listen(self) -> None:
        try:
            while True:
                order = self._channel.receive(LEADER)
                if isinstance(order, OfSteps):
                    self._steps.put(order)
                else:
                    self._rank.obey(order)
        finally:
            self._ended.set()

    def _iterate(self) -> None:
        while not self._ended.is_set():
            self._rank.obey(self._steps.get())

    def _pulse(self) -> None:
        while not self._ended.is_set():
            self._tell(Alive())
            time.sleep(self.executor.deadline_s / PULSES)

    def _tell(self, report: Report) -> None:
        self._channel.send([LEADER], report)

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        """A thread whose errors rank 0 hears of. One that has lost another rank of the instance just ends."""

        def run() -> None:
            try:
                work()
            except TransportError as error:
                self._report(Gone(f"rank {self._channel.rank}: {error}"))
            except Exception:
                self._report(Broken(traceback.format_exc()))

        threading.Thread(target=run, daemon=True, name=f"rank {self._channel.rank} {name}").start()

    def _report(self, report: Report) -> None:
        with suppress(TransportError):
            self._tell(report)
