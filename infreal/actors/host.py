"""Host: one machine of the core, its timers and its diary, behind one lock.

Whoever has an event for the machine calls `hear`, from any thread; its commands are performed before the next event is heard. The
diary keeps what the head needs for the books; `collect` hands it over.
"""

import threading
import traceback
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

from infreal.actors.mail import Entry, Failed, Heard, Look, Looked, Output, Page, State, Timed
from perfmodel.cluster import Machine
from perfmodel.messages import (
    Address,
    Command,
    Event,
    Finish,
    LoanId,
    MessageReceived,
    ReadStarted,
    RecordMove,
    RefuseRead,
    Send,
    Serve,
    TimerFired,
)

INF = float("inf")


class Post(Protocol):
    """Carries an item to another host, and does not wait for it. To one that is gone: nowhere."""

    def __call__(self, receiver: Address, item: Any) -> None: ...


class Host:
    """perform(command): carries out whatever is no `Send` · look(): the state of an instance · check: verify the machine's
    invariants after every event (tests) · full: the diary keeps every event, not only what the tables need."""

    def __init__(
        self,
        address: Address,
        machine: Machine,
        now_s: Callable[[], float],
        post: Post,
        *,
        perform: Callable[[Command], None] | None = None,
        look: Callable[[], State] | None = None,
        full: bool = False,
        check: bool = False,
    ) -> None:
        self.address, self.machine, self.now_s, self.post = address, machine, now_s, post
        self.lock = threading.RLock()
        self._perform, self._look, self._full, self._check = perform, look, full, check
        self._sooner = threading.Condition(self.lock)  # the timers' thread sleeps too long
        self._written = threading.Condition(self.lock)  # the diary has an urgent entry
        self._calls: list[tuple[float, int, Callable[[], None]]] = []  # heap of (time, number, what to do)
        self._numbers = count()
        self._awake_s = INF
        self._entries: list[Entry] = []
        self._urgent = self._closed = False

    def start(self) -> None:
        self.spawn(self._keep_time, "timers")

    def close(self) -> None:
        """Nothing is heard any more."""
        with self.lock:
            self._closed = True
            self._sooner.notify_all()
            self._written.notify_all()

    # ---- the machine ---------------------------------------------------------------------------------------------------------
    @property
    def host(self) -> "Host":
        """As of an `Instance`, which has one."""
        return self

    def deliver(self, item: Any) -> None:
        """An item for any host: an event, or a word of the head."""
        match item:
            case Timed(t_s, event):
                self.hear(event, t_s)
            case Look(number):
                with self.lock:
                    assert self._look is not None, "only instances are looked at"
                    self.write(Looked(number, self._look()), urgent=True)
            case Output():
                self.write(item)  # its Finish comes right behind it
            case _:
                self.hear(item)

    def hear(self, event: Event, at_s: float | None = None) -> None:
        """Let the machine hear an event, and perform what it commands. at_s: its time, where that is not now."""
        with self.lock:
            for command in self._handle(event, at_s):
                self._carry_out(command)
            self._mind_timers()

    def ask(self, read: ReadStarted) -> tuple[LoanId, ...]:
        """Ask the machine to serve a read. Returns the loans that it refuses."""
        with self.lock:
            commands = self._handle(read, None)
            for command in commands:
                if not isinstance(command, Serve | RefuseRead):
                    self._carry_out(command)
            self._mind_timers()
            return next((command.stale for command in commands if isinstance(command, RefuseRead)), ())

    def _handle(self, event: Event, at_s: float | None) -> Sequence[Command]:
        if self._closed:
            return ()
        now_s = self.now_s() if at_s is None else at_s
        commands = self.machine.handle(event, now_s)
        if self._check:
            self.machine.check_invariants()
        if self._full:
            self.write(Heard(now_s, event, tuple(commands)), urgent=any(isinstance(c, Finish) for c in commands))
        else:
            kept = tuple(c for c in commands if isinstance(c, Finish | RecordMove))
            if kept:
                self.write(Heard(now_s, None, kept), urgent=True)
        return commands

    def _carry_out(self, command: Command) -> None:
        if self._perform is not None:
            self._perform(command)
        if isinstance(command, Send):
            self.post(command.receiver, MessageReceived(self.address, command.message))

    # ---- time ----------------------------------------------------------------------------------------------------------------
    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call it then, under the lock."""
        with self.lock:
            heappush(self._calls, (time_s, next(self._numbers), call))
            self._mind_timers()

    def _due_s(self) -> float:
        return min(self.machine.next_deadline_s(), self._calls[0][0] if self._calls else INF)

    def _mind_timers(self) -> None:
        if self._due_s() < self._awake_s:
            self._sooner.notify()

    def _keep_time(self) -> None:
        with self.lock:
            while not self._closed:
                now_s, self._awake_s = self.now_s(), -INF
                if self._calls and self._calls[0][0] <= now_s:
                    heappop(self._calls)[2]()
                elif self.machine.next_deadline_s() <= now_s:
                    self.hear(TimerFired())
                else:
                    self._awake_s = self._due_s()
                    self._sooner.wait(None if self._awake_s == INF else self._awake_s - now_s)

    # ---- the diary -----------------------------------------------------------------------------------------------------------
    def write(self, entry: Entry, urgent: bool = False) -> None:
        with self.lock:
            self._entries.append(entry)
            if urgent:
                self._urgent = True
                self._written.notify()

    def collect(self, wait_s: float) -> Page:
        """What is new; returns before `wait_s` only where something is urgent."""
        with self.lock:
            self._written.wait_for(lambda: self._urgent or self._closed, wait_s)
            entries, self._entries, self._urgent = self._entries, [], False
            return Page(tuple(entries), self._look() if self._look else None)

    # ---- threads -------------------------------------------------------------------------------------------------------------
    def spawn(self, work: Callable[[], None], name: str) -> None:
        """A thread whose errors are the host's."""

        def run() -> None:
            try:
                work()
            except Exception:
                self.write(Failed(traceback.format_exc()), urgent=True)

        threading.Thread(target=run, daemon=True, name=f"{self.address} {name}").start()
