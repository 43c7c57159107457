"""The SimPy driver: carries out what the machines decide, in virtual time.

It performs each command, feeds its completion back as an event, prices steps by the *true* cost model and knows the output
lengths. It decides nothing. Before a machine hears of anything else, the iterations its instance has completed are reported.
"""

from collections import deque
from functools import partial
from typing import Any, Protocol

from infsim.clockwork import Clockwork, Kind
from infsim.executor import Executor
from perfmodel.cluster import ClusterSpec, Workload, build_machines
from perfmodel.errors import RunError
from perfmodel.messages import (
    DISPATCHER,
    Address,
    Command,
    CutIterations,
    Event,
    Finish,
    MessageReceived,
    Request,
    RequestArrived,
    RequestOutcome,
    Send,
    StartIterations,
    machine_name,
)
from perfmodel.records import Collector, Counters, RunResult, total, window_marks

STALL_S = 600.0  # virtual seconds without an iteration, an arrival or a transfer after which a run counts as stuck
STORY_EVENTS = 12


class Observer(Protocol):
    """Looks on: every event and command in order, and what each instance was busy with."""

    def event(self, t_s: float, machine: Address, event: Event) -> None: ...
    def command(self, t_s: float, machine: Address, command: Command) -> None: ...
    def span(self, machine: Address, start_s: float, end_s: float, step: StartIterations) -> None: ...
    def note(self, t_s: float, what: str, **values: Any) -> None: ...


class Simulation:
    """One run of a workload on a cluster. `check` verifies every invariant after every event (tests)."""

    def __init__(
        self, spec: ClusterSpec, workload: Workload, observer: Observer | None = None, check: bool = False
    ) -> None:
        self.spec, self.workload, self.observer, self.check = spec, workload, observer, check
        self.machines = build_machines(spec)
        self.collector = Collector(marks={"start": Counters()})
        self.env = Clockwork()
        left: list[int] = workload.output_tokens.tolist()
        self.executors = [Executor(spec.truth, left) for _ in range(spec.num_instances)]
        self._message_s = spec.instance.inter_link.latency_s
        self._sent: dict[Address, int] = {}
        self._marks = window_marks(workload.window_kind, len(workload))
        self._arrival_s: list[float] = workload.arrival_s.tolist() if workload.users is None else [0.0] * len(workload)
        self._num_arrived = 0
        self._progress_s = 0.0
        self._stories: dict[Address, deque[tuple[float, Event]]] = {}
        self._done = self.env.event()

    def run(self) -> RunResult:
        """Raises RunError, with the story of the machines that are stuck, where the run cannot end."""
        if len(self.workload):
            self._schedule_arrivals()
            self._schedule_sample(0)
            self.env.run(until=self._done)
        self._mark("end")
        self._sample()
        basis_s = self._basis_s()
        self._note("end", basis_s=basis_s, window_kind=self.workload.window_kind)
        return self.collector.result(self.workload.window_kind, basis_s)

    # ---- events to machines, commands from them ------------------------------------------------------------------------------
    def _deliver(self, machine: Address, event: Event) -> None:
        """Settle, hand over, and perform what comes back."""
        if machine >= 0:
            self._settle(machine)
        self._handle(machine, event)

    def _settle(self, instance: int) -> None:
        settled = self.executors[instance].settle(self.env.now)
        if settled is not None:
            self._handle(instance, settled)

    def _handle(self, machine: Address, event: Event) -> None:
        now_s = self.env.now
        if self.observer:
            self.observer.event(now_s, machine, event)
        self._stories.setdefault(machine, deque(maxlen=STORY_EVENTS)).append((now_s, event))
        commands = self.machines[machine].handle(event, now_s)
        if self.check:
            self.machines.check_invariants()
        for command in commands:
            if self.observer:
                self.observer.command(now_s, machine, command)
            self._perform(machine, command)

    def _perform(self, machine: Address, command: Command) -> None:
        match command:
            case StartIterations():
                self.executors[machine].start(command, self.env.now)
                self._schedule_end(machine)
            case CutIterations():
                if self.executors[machine].cut():
                    self._schedule_end(machine)
            case Send(receiver, message):
                event = MessageReceived(machine, message)
                self._at(
                    self.env.now + self._message_s, Kind.MESSAGE, receiver, partial(self._deliver, receiver, event)
                )
            case Finish(outcome):
                self._note_end(outcome)

    def _at(self, time_s: float, kind: Kind, machine: Address, callback: partial[None]) -> None:
        counter = self._sent[machine] = self._sent.get(machine, 0) + 1
        self.env.at(time_s, kind, machine, counter, callback)

    # ---- iterations ----------------------------------------------------------------------------------------------------------
    def _schedule_end(self, instance: int) -> None:
        executor = self.executors[instance]
        assert executor.step is not None
        end = partial(self._end_step, instance, executor.step.step, executor.end_iterations)
        self._at(executor.end_s, Kind.ITERATIONS, instance, end)

    def _end_step(self, instance: int, step: int, iterations: int) -> None:
        executor = self.executors[instance]
        running = executor.step
        if running is None or running.step != step or executor.end_iterations != iterations:
            return  # a timeout of a step that was cut or has ended: SimPy cannot cancel them
        self._progress_s = self.env.now
        if self.observer:
            self.observer.span(instance, executor.start_s, self.env.now, running)
        self._handle(instance, executor.end())

    # ---- requests ------------------------------------------------------------------------------------------------------------
    def _schedule_arrivals(self) -> None:
        users = self.workload.users
        if users is None:
            self._schedule_arrival(0, self._arrival_s[0])
        else:
            for req_id in range(min(users, len(self.workload))):
                self._schedule_arrival(req_id, 0.0)
            self._next_closed = min(users, len(self.workload))

    def _schedule_arrival(self, req_id: int, time_s: float) -> None:
        self._at(time_s, Kind.ARRIVAL, DISPATCHER, partial(self._arrive, req_id))

    def _arrive(self, req_id: int) -> None:
        self._progress_s = self._arrival_s[req_id] = self.env.now
        if self.workload.window_kind == "arrivals":
            self._mark_at(self._num_arrived)
        self._note("asked", req_id=req_id, output_tokens=int(self.workload.output_tokens[req_id]))
        self._num_arrived += 1
        if self.workload.users is None and req_id + 1 < len(self.workload):
            self._schedule_arrival(req_id + 1, self._arrival_s[req_id + 1])
        self._deliver(DISPATCHER, RequestArrived(Request(req_id, int(self.workload.input_tokens[req_id]))))

    def _note_end(self, outcome: RequestOutcome) -> None:
        req_id = outcome.req_id
        asked = int(self.workload.output_tokens[req_id])
        assert outcome.status != "finished" or outcome.output_tokens == asked, (
            f"{outcome} gave another number than {asked}"
        )
        self.collector.add_request(outcome, self._arrival_s[req_id], int(self.workload.input_tokens[req_id]), asked)
        if self.workload.window_kind == "finishes":
            self._mark_at(self.collector.num_ended)
        if self.workload.users is not None and self._next_closed < len(self.workload):
            following, self._next_closed = self._next_closed, self._next_closed + 1
            think_s = 0.0 if self.workload.think_s is None else float(self.workload.think_s[following])
            self._schedule_arrival(following, self.env.now + think_s)
        if self.collector.num_ended == len(self.workload):
            self._at(self.env.now, Kind.SAMPLE, DISPATCHER, partial(self._end_if_at_rest))

    def _end_if_at_rest(self) -> None:
        if not self._done.triggered and all(manager.at_rest for manager in self.machines.rmanagers):
            self._done.succeed()

    # ---- looking on ----------------------------------------------------------------------------------------------------------
    def _mark_at(self, count: int) -> None:
        if count in self._marks:
            self._mark(self._marks[count])

    def _mark(self, name: str) -> None:
        """Keep the counters as they are at this instant."""
        for instance in range(self.spec.num_instances):
            self._settle(instance)
        self._note("mark", name=name)
        self.collector.marks[name] = total([m.counters for m in self.machines.rmanagers], self.env.now)

    def _note(self, what: str, **values: Any) -> None:
        if self.observer:
            self.observer.note(self.env.now, what, **values)

    def _schedule_sample(self, count: int) -> None:
        self._at(count * self.spec.sample_s, Kind.SAMPLE, DISPATCHER, partial(self._sample_and_again, count))

    def _sample_and_again(self, count: int) -> None:
        self._sample()
        self._check_progress()
        self._schedule_sample(count + 1)

    def _sample(self) -> None:
        for instance in range(self.spec.num_instances):
            self._settle(instance)
        self._note("sample")
        for instance, manager in enumerate(self.machines.rmanagers):
            self.collector.add_sample(self.env.now, instance, manager.sample())

    def _check_progress(self) -> None:
        waiting_for_arrivals = self.workload.users is None and self._num_arrived < len(self.workload)
        busy = any(executor.step is not None for executor in self.executors)
        if busy or waiting_for_arrivals or self.env.now - self._progress_s < STALL_S:
            return
        raise RunError(self._story())

    def _story(self) -> str:
        ended = set(self.collector.requests["req_id"])
        open_ids = [i for i in range(self._num_arrived) if i not in ended]
        lines = [
            f"stalled: nothing has happened for {STALL_S:g} s of virtual time; {len(open_ids)} requests are open "
            f"(first: {open_ids[:5]})"
        ]
        for instance, manager in enumerate(self.machines.rmanagers):
            if not manager.at_rest:
                lines.append(f"{machine_name(instance)}: {manager.sample()}")
                lines += [f"  {t_s:.6f} {event}" for t_s, event in self._stories.get(instance, ())]
        return "\n".join(lines)

    def _basis_s(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for executor in self.executors:
            for name, seconds in executor.basis_s.items():
                sums[name] = sums.get(name, 0.0) + seconds
        return sums
