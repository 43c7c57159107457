"""The books of one run, whoever carries it out: who arrives when, how requests end, and the tables; and its machines' journal.

A driver asks the `Books` which request comes next, and tells them of endings. Where all machines live in its own process, it hands
every event through their `Journal` to the machine concerned. Neither knows a clock or carries anything out.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from perfmodel.cluster import Machines, Workload
from perfmodel.messages import (
    Address,
    Command,
    Event,
    LoanId,
    ReadStarted,
    RefuseRead,
    Request,
    RequestArrived,
    RequestOutcome,
    Serve,
    StartIterations,
    machine_name,
)
from perfmodel.records import Collector, Counters, RunResult, Sample, total, window_marks

STORY_EVENTS = 12
STALL_S = 600.0  # without an iteration, an arrival or a transfer, after which a run counts as stuck


class Observer(Protocol):
    """Looks on: every event and command in order, and what each instance was busy with."""

    def event(self, t_s: float, machine: Address, event: Event) -> None: ...
    def command(self, t_s: float, machine: Address, command: Command) -> None: ...
    def span(self, machine: Address, start_s: float, end_s: float, step: StartIterations) -> None: ...
    def note(self, t_s: float, what: str, **values: Any) -> None: ...


class Books:
    """Requests and tables of one run.

    mark(name, now_s): a window of measurement opens or closes; to be answered by `keep_mark` · known_lengths: requests give the
    output tokens that the workload says, or as many as they like (False).
    """

    def __init__(
        self,
        workload: Workload,
        mark: Callable[[str, float], None],
        observer: Observer | None = None,
        known_lengths: bool = True,
    ) -> None:
        self.workload, self.observer = workload, observer
        self.collector = Collector(marks={"start": Counters()})
        self.num_arrived, self.num_open = 0, len(workload)
        self.output_tokens: list[int] = workload.output_tokens.tolist()
        self._input_tokens: list[int] = workload.input_tokens.tolist()
        self._mark, self._known_lengths = mark, known_lengths
        self._marks = window_marks(workload.window_kind, len(workload))
        self._arrival_s: list[float] = workload.arrival_s.tolist() if workload.users is None else [0.0] * len(workload)
        self._next_closed = min(workload.users or 0, len(workload))

    def note(self, now_s: float, what: str, **values: Any) -> None:
        if self.observer:
            self.observer.note(now_s, what, **values)

    # ---- requests ------------------------------------------------------------------------------------------------------------
    def first_arrivals(self) -> list[tuple[int, float]]:
        """(req_id, time) of what comes first: the first request, or one of each user."""
        if self.workload.users is None:
            return [(0, self._arrival_s[0])] if len(self.workload) else []
        return [(req_id, 0.0) for req_id in range(self._next_closed)]

    def arrive(self, req_id: int, now_s: float) -> tuple[RequestArrived, tuple[int, float] | None]:
        """A request is here: what the dispatcher is to hear, and (req_id, time) of the next one, where that is known now."""
        self._arrival_s[req_id] = now_s
        if self.workload.window_kind == "arrivals":
            self._mark_at(self.num_arrived, now_s)
        if self._known_lengths:
            self.note(now_s, "asked", req_id=req_id, output_tokens=self.output_tokens[req_id])
        self.num_arrived += 1
        is_open = self.workload.users is None and req_id + 1 < len(self._arrival_s)
        event = RequestArrived(Request(req_id, self._input_tokens[req_id]))
        return event, ((req_id + 1, self._arrival_s[req_id + 1]) if is_open else None)

    def end(self, outcome: RequestOutcome, now_s: float) -> tuple[int, float] | None:
        """A request has ended. (req_id, time) of the next one of a closed workload."""
        req_id = outcome.req_id
        asked = self.output_tokens[req_id] if self._known_lengths else outcome.output_tokens
        assert outcome.status != "finished" or outcome.output_tokens == asked, (
            f"{outcome} has not the {asked} asked for"
        )
        self.collector.add_request(outcome, self._arrival_s[req_id], self._input_tokens[req_id], asked)
        self.num_open -= 1
        if self.workload.window_kind == "finishes":
            self._mark_at(self.collector.num_ended, now_s)
        if self.workload.users is None or self._next_closed >= len(self.workload):
            return None
        following, self._next_closed = self._next_closed, self._next_closed + 1
        think_s = 0.0 if self.workload.think_s is None else float(self.workload.think_s[following])
        return following, now_s + think_s

    @property
    def waits_for_arrivals(self) -> bool:
        """Whether a request is still to come, whatever happens to those that are here."""
        return self.workload.users is None and self.num_arrived < len(self.workload)

    @property
    def all_ended(self) -> bool:
        return not self.num_open

    def open_requests(self) -> list[int]:
        """Requests that have arrived and not ended."""
        ended = set(self.collector.requests["req_id"])
        return [i for i in range(self.num_arrived) if i not in ended]

    # ---- tables --------------------------------------------------------------------------------------------------------------
    def _mark_at(self, count: int, now_s: float) -> None:
        if count in self._marks:
            self._mark(self._marks[count], now_s)

    def keep_mark(self, name: str, counters: Sequence[Counters], now_s: float) -> None:
        """The counters of all instances, as they are at this instant."""
        self.note(now_s, "mark", name=name)
        self.collector.marks[name] = total(counters, now_s)

    def keep_samples(self, samples: Sequence[Sample], now_s: float) -> None:
        """One row of instances.parquet for each instance."""
        self.note(now_s, "sample")
        for instance, sample in enumerate(samples):
            self.collector.add_sample(now_s, instance, sample)

    def close(self, basis_s: dict[str, float], now_s: float) -> RunResult:
        """The run has ended, its last mark and samples are here: its tables."""
        window_kind = self.workload.window_kind
        self.note(now_s, "end", basis_s=basis_s, window_kind=window_kind)
        return self.collector.result(window_kind, basis_s)


class Journal:
    """What the machines of one process hear and command.

    settle(): brings the reports of running steps up to date, before anything is read off them · check: verify a machine's
    invariants after each of its events (tests).
    """

    def __init__(
        self,
        workload: Workload,
        machines: Machines,
        settle: Callable[[], None],
        observer: Observer | None = None,
        check: bool = False,
        known_lengths: bool = True,
    ) -> None:
        self.machines = machines
        self.books = Books(workload, self.mark, observer, known_lengths)
        self._settle, self._check = settle, check
        self._stories: dict[Address, deque[tuple[float, Event]]] = {
            machine: deque(maxlen=STORY_EVENTS) for machine in machines.addresses()
        }

    def handle(self, machine: Address, event: Event, now_s: float) -> list[Command]:
        """Let a machine hear an event, and return what it commands."""
        observer, who = self.books.observer, self.machines[machine]
        if observer:
            observer.event(now_s, machine, event)
        self._stories[machine].append((now_s, event))
        commands = who.handle(event, now_s)
        if self._check:
            who.check_invariants()  # the others have not changed
        if observer:
            for command in commands:
                observer.command(now_s, machine, command)
        return commands

    def ask(self, creditor: Address, read: ReadStarted, now_s: float) -> tuple[tuple[LoanId, ...], list[Command]]:
        """Ask a creditor to serve a read: the loans that it refuses, and what it commands besides its answer."""
        commands = self.handle(creditor, read, now_s)
        refused = next((command.stale for command in commands if isinstance(command, RefuseRead)), ())
        return refused, [command for command in commands if not isinstance(command, Serve | RefuseRead)]

    def story(self, idle: str) -> str:
        """Of a run in which nothing has happened for `idle`: the state of the instances not at rest, and what they last heard."""
        open_ids = self.books.open_requests()
        lines = [f"stalled: nothing has happened for {idle}; {len(open_ids)} requests are open (first: {open_ids[:5]})"]
        for instance, manager in enumerate(self.machines.rmanagers):
            if not manager.at_rest:
                lines.append(f"{machine_name(instance)}: {manager.sample()}")
                lines += [f"  {t_s:.6f} {event}" for t_s, event in self._stories[instance]]
        return "\n".join(lines)

    def mark(self, name: str, now_s: float) -> None:
        """Keep the counters as they are at this instant."""
        self._settle()
        self.books.keep_mark(name, [m.counters for m in self.machines.rmanagers], now_s)

    def sample(self, now_s: float) -> None:
        """One row of instances.parquet for each instance."""
        self._settle()
        self.books.keep_samples([m.sample() for m in self.machines.rmanagers], now_s)

    def close(self, basis_s: dict[str, float], now_s: float) -> RunResult:
        """The run has ended: its tables."""
        self.mark("end", now_s)
        self.sample(now_s)
        return self.books.close(basis_s, now_s)


class Together:
    """Several observers as one."""

    def __init__(self, observers: list[Observer]) -> None:
        self._observers = observers

    def event(self, t_s: float, machine: Address, event: Event) -> None:
        for observer in self._observers:
            observer.event(t_s, machine, event)

    def command(self, t_s: float, machine: Address, command: Command) -> None:
        for observer in self._observers:
            observer.command(t_s, machine, command)

    def span(self, machine: Address, start_s: float, end_s: float, step: StartIterations) -> None:
        for observer in self._observers:
            observer.span(machine, start_s, end_s, step)

    def note(self, t_s: float, what: str, **values: Any) -> None:
        for observer in self._observers:
            observer.note(t_s, what, **values)
