"""The head of a run on actors: sends requests at their times, reads diaries into the books, finds faults and mends them.

It decides nothing about requests or memory. A host that has died, or has not handed over its diary for a deadline, is ended; all
others are told; and it is made again, empty, under a new incarnation.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from infreal.actors.fleet import PAGE_S, Birth, Collected, Died, Fleet, News, Ready
from infreal.actors.mail import (
    Entry,
    Failed,
    Heard,
    Look,
    Looked,
    Lost,
    Output,
    Renewed,
    ResetPair,
    Span,
    State,
    Suspected,
    Timed,
)
from infreal.requests import Requests
from perfmodel.cluster import ClusterSpec
from perfmodel.errors import RunError
from perfmodel.journal import STALL_S, Books, Observer
from perfmodel.messages import (
    DISPATCHER,
    GMANAGER,
    Address,
    Event,
    Finish,
    PeerLost,
    PeerReturned,
    RecordMove,
    RequestAborted,
    machine_name,
)
from perfmodel.records import RunResult

INF = float("inf")
MAX_DEATHS = 5  # of one machine, after which a run is given up
MISSING_S = 60.0  # without progress while a machine that has died is not back, after which a run is given up


@dataclass(slots=True)
class Member:
    """A host as the head knows it. alive: it has begun and is not known to have died · unread: entries that wait for a look to
    close · state: behind the last entry · begun_s: when it began · heard_s: when its last page came."""

    address: Address
    incarnation: int = 1
    alive: bool = False
    deaths: int = 0
    begun_s: float = 0.0
    heard_s: float = 0.0
    state: State | None = None
    unread: deque[Entry | tuple[str, float]] = field(default_factory=deque)


@dataclass(slots=True)
class Looking:
    """A look at all instances. mark: the name of a mark, "" for a sample · waiting: who has been asked and lives."""

    number: int
    mark: str
    waiting: set[Address]


class Head:
    """One run of requests on the hosts of a fleet."""

    def __init__(
        self,
        spec: ClusterSpec,
        requests: Requests,
        fleet: Fleet,
        observer: Observer | None = None,
        deadline_s: float = 10.0,
    ) -> None:
        self.spec, self.requests, self.fleet, self.deadline_s = spec, requests, fleet, deadline_s
        self.books = Books(requests.workload, self._ask_mark, observer, known_lengths=not requests.stop_ids)
        self.outputs: dict[int, list[int]] = {}  # of the requests that have finished
        addresses = [DISPATCHER, *([GMANAGER] if spec.placement else []), *range(spec.num_instances)]
        self.members = {address: Member(address) for address in addresses}
        self._looks: deque[Looking] = deque()  # that are not closed
        self._calls: list[tuple[float, int, Callable[[], None]]] = []  # heap of (time, number, what to do)
        self._numbers = count(1)
        self._suspected: list[tuple[int, int, float]] = []  # (who says it, of whom, since when)
        self._renewing: set[tuple[int, int, int]] = set()  # (who, its pair with whom, for which reset), not done yet
        self._progress_s = self._busy_s = 0.0

    # ---- the run -------------------------------------------------------------------------------------------------------------
    def run(self) -> RunResult:
        """Raises RunError where the run cannot end."""
        try:
            self._begin()
            while not (self.books.all_ended and self._is_at_rest()):
                self._turn()
            return self._end()
        finally:
            self.fleet.close()

    def _begin(self) -> None:
        for address in self.members:
            self.fleet.make(address)
        waiting = set(self.members)
        while waiting:
            for address, news in self.fleet.news(1.0):
                if isinstance(news, Died):
                    raise RunError(f"{machine_name(address)} does not start: {news.why}")
                waiting.discard(address)
        self.fleet.begin([Birth(address) for address in self.members])
        for member in self.members.values():
            member.alive, member.heard_s = True, self.fleet.now_s()
        for req_id, time_s in self.books.first_arrivals():
            self._at(time_s, partial(self._arrive, req_id))
        self._sample(0)

    def _turn(self) -> None:
        now_s = self.fleet.now_s()
        while self._calls and self._calls[0][0] <= now_s:
            heappop(self._calls)[2]()
        due_s = self._calls[0][0] if self._calls else INF
        for address, news in self.fleet.news(min(max(0.0, due_s - self.fleet.now_s()), 1.0)):
            self._take(self.members[address], news)
        self._read_diaries()
        self._find_silent()

    def _end(self) -> RunResult:
        self._look("end")
        while self._looks:
            self._turn()
        busy_s = sum(member.state.busy_s for member in self._instances() if member.state and member.alive)
        return self.books.close({"measured": self._busy_s + busy_s}, self.fleet.now_s())

    def _at(self, time_s: float, call: Callable[[], None]) -> None:
        heappush(self._calls, (time_s, next(self._numbers), call))

    def _instances(self) -> list[Member]:
        return [member for address, member in self.members.items() if address >= 0]

    def _is_at_rest(self) -> bool:
        """Every live instance is, and its diary is read."""
        live = [member for member in self._instances() if member.alive]
        return all(m.state is not None and m.state.at_rest and not m.unread for m in live)

    def free_blocks(self) -> list[int]:
        """Of each instance, as it last said."""
        return [member.state.sample.free_blocks for member in self._instances() if member.state]

    def num_iterations(self) -> int:
        """Begun by the instances that live."""
        return sum(member.state.num_iterations for member in self._instances() if member.state)

    def core_frac(self) -> float:
        """Of the time of all iterations, that in which their thread had its core; 1 where there was none."""
        states = [member.state for member in self._instances() if member.state]
        busy_s = sum(state.busy_s for state in states)
        return sum(state.core_s for state in states) / busy_s if busy_s else 1.0

    # ---- requests ------------------------------------------------------------------------------------------------------------
    def _arrive(self, req_id: int) -> None:
        now_s = self.fleet.now_s()
        event, following = self.books.arrive(req_id, now_s)
        self._schedule(following)
        self.fleet.post(DISPATCHER, Timed(now_s, event))
        patience_s = self.requests.workload.patience_s
        if patience_s is not None and patience_s[req_id] < INF:
            leave = partial(self.fleet.post, DISPATCHER, RequestAborted(req_id))
            self._at(now_s + float(patience_s[req_id]), leave)

    def _schedule(self, following: tuple[int, float] | None) -> None:
        if following:
            self._at(following[1], partial(self._arrive, following[0]))

    # ---- diaries -------------------------------------------------------------------------------------------------------------
    def _take(self, member: Member, news: News) -> None:
        match news:
            case Collected(page, asked_s) if member.alive:
                member.heard_s = self.fleet.now_s()
                member.unread.extend(page.entries)
                member.state = page.state
                self._clear(member.address, asked_s)
            case Died(why):
                self._lose(member, why)
            case Ready():
                self._bring_back(member)

    def _read_diaries(self) -> None:
        """Entries in the order of each diary; a look is closed when every live instance has come to it."""
        while True:
            for member in self.members.values():
                while member.unread and not self._is_open_look(member.unread[0]):
                    self._read(member, member.unread.popleft())
            if not self._looks or not all(self.members[address].unread for address in self._looks[0].waiting):
                return
            self._close_look(self._looks.popleft())

    def _is_open_look(self, entry: Entry | tuple[str, float]) -> bool:
        return isinstance(entry, Looked) and bool(self._looks) and entry.number >= self._looks[0].number

    def _read(self, member: Member, entry: Entry | tuple[str, float]) -> None:
        observer, address = self.books.observer, member.address
        match entry:
            case Heard():
                self._read_event(address, entry)
            case Span(start_s, end_s, step):
                if observer:
                    observer.span(address, start_s, end_s, step)
            case Output(req_id, ids):
                self.outputs[req_id] = list(ids)
            case Suspected(t_s, peer, _):
                if self.members[peer].alive and t_s > self.members[peer].begun_s:  # else all have been told
                    self._suspected.append((address, peer, self.fleet.now_s()))
            case Renewed(peer, number):
                self._renewing.discard((address, peer, number))
                self._suspected = [s for s in self._suspected if s[:2] != (address, peer)]  # of the former generation
            case Lost(t_s, why):
                if member.alive and t_s > member.begun_s:  # once, and not of one before
                    self.fleet.kill(address)
                    self._lose(member, why)
            case Failed(text):
                raise RunError(f"{machine_name(address)} is broken: {text}")
            case (what, t_s):
                self.books.note(t_s, what, who=machine_name(address))

    def _read_event(self, address: Address, entry: Heard) -> None:
        observer = self.books.observer
        if observer and entry.event is not None:
            observer.event(entry.t_s, address, entry.event)
        for command in entry.commands:
            if observer:
                observer.command(entry.t_s, address, command)
            if isinstance(command, RecordMove):
                self.books.collector.add_move(command, self.spec.instance.block_bytes)
            elif isinstance(command, Finish):
                self._schedule(self.books.end(command.outcome, entry.t_s))

    # ---- looks ---------------------------------------------------------------------------------------------------------------
    def _ask_mark(self, name: str, now_s: float) -> None:
        self._look(name)

    def _sample(self, number: int) -> None:
        """One row of instances.parquet for each instance, and a look at whether the run still moves."""
        self._look("")
        self._check_progress()
        self._at((number + 1) * self.spec.sample_s, partial(self._sample, number + 1))

    def _look(self, mark: str) -> None:
        """Ask all instances for their counters and state, for a mark of this name or for a sample."""
        look = Looking(next(self._numbers), mark, {m.address for m in self._instances() if m.alive})
        self._looks.append(look)
        for address in look.waiting:
            self.fleet.post(address, Look(look.number))

    def _close_look(self, look: Looking) -> None:
        states, mark = [self._state_at(member, look.number) for member in self._instances()], look.mark
        now_s = max(state.t_s for state in states)
        if mark:
            self.books.keep_mark(mark, [state.counters for state in states], now_s)
        if mark in ("", "end"):
            self.books.keep_samples([state.sample for state in states], now_s)

    def _state_at(self, member: Member, number: int) -> State:
        """What an instance has answered; of one that cannot answer any more, what it said last."""
        first = member.unread[0] if member.unread else None
        if isinstance(first, Looked) and first.number == number:
            member.unread.popleft()
            return first.state
        assert member.state is not None, f"{machine_name(member.address)} has said nothing"
        return member.state

    def _check_progress(self) -> None:
        times_s = [member.state.progress_s for member in self._instances() if member.state]
        self._progress_s = max([self._progress_s, *times_s])
        missing = [machine_name(m.address) for m in self.members.values() if not m.alive]
        patience_s = MISSING_S if missing else STALL_S
        if not self.books.waits_for_arrivals and self.fleet.now_s() - self._progress_s >= patience_s:
            raise RunError(self._story(patience_s, missing))

    def _story(self, patience_s: float, missing: list[str]) -> str:
        open_ids = self.books.open_requests()
        lines = [
            f"stalled: nothing has happened for {patience_s:g} s; {len(open_ids)} requests are open ({open_ids[:5]})"
        ]
        lines += [f"{name} has died and finds no place again" for name in missing]
        lines += [f"{machine_name(m.address)}: {m.state}" for m in self._instances() if m.state and not m.state.at_rest]
        return "\n".join(lines)

    # ---- faults --------------------------------------------------------------------------------------------------------------
    def _find_silent(self) -> None:
        """Whoever has handed over nothing for a deadline is stopped or stuck: ended, so that it cannot come back by itself."""
        now_s = self.fleet.now_s()
        for member in self.members.values():
            if member.alive and now_s - member.heard_s > self.deadline_s:
                self.fleet.kill(member.address)
                self._lose(member, f"it was silent for {self.deadline_s:g} s")

    def _clear(self, peer: Address, asked_s: float) -> None:
        """The peer lives: the fault is the pair's. Both make it anew, and the one who waited gives up what was lent over it."""
        for who in {s[0] for s in self._suspected if s[1] == peer and s[2] <= asked_s}:
            if not self._is_renewing(who, peer):
                self._suspected = [s for s in self._suspected if s[:2] != (who, peer)]
                number = next(self._numbers)
                self._renewing |= {(who, peer, number), (peer, who, number)}
                self.fleet.post(who, ResetPair(peer, number, give_up=True))
                self.fleet.post(peer, ResetPair(who, number, give_up=False))

    def _is_renewing(self, one: Address, other: Address) -> bool:
        """One renewal of a pair at a time: sides that go ahead on their own would not meet in the same generation."""
        return any({who, peer} == {one, other} for who, peer, _ in self._renewing)

    def _lose(self, member: Member, why: str) -> None:
        address = member.address
        if not member.alive and member.deaths == 0:
            raise RunError(f"{machine_name(address)} has died: {why}")
        member.deaths += 1
        if address == DISPATCHER or member.deaths > MAX_DEATHS:
            raise RunError(f"{machine_name(address)} has died ({member.deaths} times): {why}")
        if member.alive:
            member.alive = False
            member.unread.append(("kill", self.fleet.now_s()))
            for look in self._looks:
                if not any(isinstance(entry, Looked) and entry.number == look.number for entry in member.unread):
                    look.waiting.discard(address)
            self._busy_s += member.state.busy_s if member.state else 0.0
            self._suspected = [s for s in self._suspected if address not in s[:2]]
            if address >= 0:
                self._renewing = {r for r in self._renewing if r[0] != address}
                self._renewing |= {(m.address, address, 0) for m in self._instances() if m.alive}
                self._tell_others(address, PeerLost(address))
        self.fleet.make(address)

    def _bring_back(self, member: Member) -> None:
        now_s = self.fleet.now_s()
        if self._looks or any(peer == member.address for _, peer, _ in self._renewing):  # of the one before
            self._at(now_s + PAGE_S, partial(self._bring_back, member))
            return
        member.incarnation += 1
        member.unread.append(("return", now_s))
        others = tuple((m.address, m.incarnation) for m in self.members.values() if m is not member)
        self.fleet.begin([Birth(member.address, member.incarnation, now_s, others)])
        member.alive, member.heard_s = True, self.fleet.now_s()
        member.begun_s = member.heard_s
        if member.address >= 0:
            self._tell_others(member.address, PeerReturned(member.address, member.incarnation))

    def _tell_others(self, about: Address, event: Event) -> None:
        for member in self.members.values():
            if member.address != about and member.alive:
                self.fleet.post(member.address, event)
