"""The driver of several instances in one process: real iterations, one after the other, and the machines of the core unchanged.

It performs each command, feeds its completion back as an event and measures. It decides nothing. There are no threads: instances
take turns, an iteration each; while one of them waits for a creditor's answer, that creditor serves; and between the layers of an
iteration messages arrive, timers fire and blocks are copied, as they would beside it on a machine of its own.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count

from infreal.clocks import Clock
from infreal.dist_attention import Serving
from infreal.executor import Executor
from infreal.layout import Frozen, freeze, lent_blocks
from infreal.model import Decoder
from infreal.moves import Move, Moves, start_store
from infreal.requests import Requests
from infreal.transport import TransportError
from infreal.transport.in_process import CooperativeTransport, InProcessNetwork
from perfmodel.cluster import ClusterSpec, build_machines
from perfmodel.errors import RunError
from perfmodel.journal import STALL_S, Journal, Observer
from perfmodel.messages import (
    DISPATCHER,
    POST_S,
    Address,
    Command,
    CutIterations,
    Event,
    Finish,
    LoanId,
    MessageReceived,
    PostReceive,
    ReadEnded,
    ReadStarted,
    RecordMove,
    RefuseRead,
    RequestAborted,
    RequestOutcome,
    Send,
    Serve,
    StartFetch,
    StartIterations,
    StartTransfer,
    SubmitRequest,
    TimerFired,
    TransferDone,
    TransferId,
)
from perfmodel.records import RunResult

INF = float("inf")


@dataclass(frozen=True, slots=True)
class Options:
    """backend: of the kernels · check: verify every invariant after every event (tests) · deadline_s: longest wait for a peer."""

    backend: str = "torch"
    check: bool = False
    deadline_s: float = 10.0


@dataclass(slots=True)
class Session:
    """A read that an instance serves. layer: whose queries come next."""

    read: int
    serving: Serving
    layer: int = 0


class InProcess:
    """One run of requests on the instances of a cluster, all in this process, over one model's weights."""

    def __init__(
        self,
        spec: ClusterSpec,
        requests: Requests,
        decoder: Decoder,
        clock: Clock,
        observer: Observer | None = None,
        options: Options | None = None,
    ) -> None:
        self.spec, self.requests, self.clock = spec, requests, clock
        options = options or Options()
        self.machines = build_machines(spec)
        self.journal = Journal(
            requests.workload,
            self.machines,
            lambda: None,  # every iteration is reported when it ends
            observer,
            options.check,
            known_lengths=not requests.stop_ids,
        )
        self.books = self.journal.books
        network = InProcessNetwork(spec.num_instances)
        self.executors = [
            Executor(
                decoder,
                decoder.new_pool(spec.num_blocks, spec.instance.block_tokens),
                options.backend,
                CooperativeTransport(network, instance, self._let_serve),
                clock.now_s,
                options.deadline_s,
                between_layers=self._catch_up,
            )
            for instance in range(spec.num_instances)
        ]
        self.moves = Moves(self.executors)
        self.outputs: dict[int, list[int]] = {}  # of the requests that have ended
        self._messages: deque[tuple[Address, Event]] = deque()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []  # heap of (time, number, what to do)
        self._due_s: dict[Address, float] = {}  # next deadline of each machine
        self._frozen: dict[int, Frozen] = {}  # the last step of each instance
        self._sessions: dict[tuple[int, int], Session] = {}  # (creditor, reader) → the read of its step
        self._numbers = count(1)
        self._progress_s = 0.0

    def run(self) -> RunResult:
        """Raises RunError, with the story of the machines that are stuck, where the run cannot end."""
        for req_id, time_s in self.books.first_arrivals():
            self._at(time_s, partial(self._arrive, req_id))
        self._sample(0)
        for machine in self.machines.addresses():
            self._due_s[machine] = self.machines[machine].next_deadline_s()
        while not (self.books.all_ended and self.machines.at_rest):
            something_happened = self._catch_up()
            if not self._take_turns() and not something_happened:
                self.clock.wait_until(self._next_due_s())
        busy_s = sum(executor.busy_s for executor in self.executors)
        return self.journal.close({"measured": busy_s}, self.clock.now_s())

    # ---- what happens next ---------------------------------------------------------------------------------------------------
    def _at(self, time_s: float, call: Callable[[], None]) -> None:
        heappush(self._calls, (time_s, next(self._numbers), call))

    def _next_due_s(self) -> float:
        return min([*self._due_s.values(), *(call[0] for call in self._calls[:1])])

    def _catch_up(self) -> bool:
        """Messages, calls and timers that are due, then copies. Returns whether there was anything."""
        something_happened, now_s = False, self.clock.now_s()
        while self._do_next(now_s):
            something_happened = True
        return self._copy_blocks() or something_happened

    def _do_next(self, now_s: float) -> bool:
        if self._messages:
            self._deliver(*self._messages.popleft())
            return True
        if self._calls and self._calls[0][0] <= now_s:
            heappop(self._calls)[2]()
            return True
        due_s, machine = min((due_s, machine) for machine, due_s in self._due_s.items())
        if due_s <= now_s:
            self._handle(machine, TimerFired())
        return due_s <= now_s

    def _take_turns(self) -> bool:
        """An iteration of every instance that has a step. Returns whether one has."""
        busy = [instance for instance, executor in enumerate(self.executors) if executor.step is not None]
        for instance in busy:
            self._take_turn(instance)
            self._catch_up()
        return bool(busy)

    def _take_turn(self, instance: int) -> None:
        executor, frozen = self.executors[instance], self._frozen[instance]
        step = executor.step
        if step is None:
            return
        try:
            done = executor.give_up() if step.is_over else executor.proceed(frozen.added())
        except TransportError:
            done = executor.give_up()
        self._progress_s = self.clock.now_s()
        if done.ended:
            executor.end()
            self._close_reads(instance)
            if self.books.observer:
                self.books.observer.span(instance, step.start_s, self._progress_s, frozen.step)
        self._handle(instance, done)

    # ---- events to machines, commands from them ------------------------------------------------------------------------------
    def _deliver(self, machine: Address, event: Event) -> None:
        if isinstance(event, MessageReceived) and isinstance(event.message, SubmitRequest):
            req_id = event.message.request.req_id
            if req_id not in self.machines.rmanagers[machine].rows:
                self.executors[machine].accept(req_id, self.requests.text(req_id))
        self._handle(machine, event)

    def _handle(self, machine: Address, event: Event, now_s: float | None = None) -> None:
        commands = self.journal.handle(machine, event, self.clock.now_s() if now_s is None else now_s)
        self._due_s[machine] = self.machines[machine].next_deadline_s()
        for command in commands:
            self._perform(machine, command)

    def _perform(self, machine: Address, command: Command) -> None:
        match command:
            case StartIterations():
                self._start_step(machine, command)
            case CutIterations():
                self.executors[machine].cut()
            case Send(receiver, message):
                self._messages.append((receiver, MessageReceived(machine, message)))
            case StartTransfer():
                self.moves.add(start_store(machine, command, self.spec.instance.block_tokens))
                self._at(self.clock.now_s() + POST_S, partial(self._give_up, command.transfer))
            case PostReceive():
                if not self.moves.receive(command):
                    self._messages.append((machine, TransferDone(command.transfer, command.loan, ok=False)))
            case StartFetch():
                self._start_fetch(machine, command)
            case RecordMove():
                self.books.collector.add_move(command, self.spec.instance.block_bytes)
            case Finish(outcome):
                self._end_request(outcome)
            case Serve() | RefuseRead():
                raise AssertionError(f"{command} answers no read")

    # ---- reads ---------------------------------------------------------------------------------------------------------------
    def _start_step(self, debtor: int, command: StartIterations) -> None:
        """Open the step's reads at its creditors, and get ready for its iterations."""
        frozen = self._frozen[debtor] = freeze(self.machines.rmanagers[debtor], command)
        served, stale = {}, ()
        for creditor, read in frozen.reads.items():
            number = next(self._numbers)
            refused = self._open_read(debtor, creditor, number, read.loans)
            if not refused:
                manager, executor = self.machines.rmanagers[creditor], self.executors[creditor]
                tables = [lent_blocks(manager, row.reads) for row in read.rows]
                self._sessions[creditor, debtor] = Session(number, executor.serve(read.rows, tables))
                served[creditor] = (number, read.tokens)
            stale += refused
        self.executors[debtor].start(command.step, command.max_iterations, frozen.rows, served, stale)

    def _open_read(
        self, debtor: int, creditor: int, number: int, loans: tuple[tuple[LoanId, int], ...]
    ) -> tuple[LoanId, ...]:
        """Ask a creditor to serve a read. Returns the loans that it refuses."""
        refused, commands = self.journal.ask(creditor, ReadStarted(debtor, number, loans), self.clock.now_s())
        self._due_s[creditor] = self.machines[creditor].next_deadline_s()
        for command in commands:
            self._perform(creditor, command)
        return refused

    def _close_reads(self, debtor: int) -> None:
        for creditor, reader in [key for key in self._sessions if key[1] == debtor]:
            session = self._sessions.pop((creditor, reader))
            self._handle(creditor, ReadEnded(debtor, session.read))

    def _let_serve(self, reader: int, creditor: int) -> None:
        """A reader waits for this creditor's answer."""
        session = self._sessions.get((creditor, reader))
        if session is not None:
            executor = self.executors[creditor]
            executor.answer(session.serving, reader, session.read, session.layer)
            session.layer = (session.layer + 1) % executor.decoder.config.num_layers

    # ---- copies of blocks ----------------------------------------------------------------------------------------------------
    def _start_fetch(self, debtor: int, command: StartFetch) -> None:
        number, end = next(self._numbers), command.first + len(command.blocks)
        if self._open_read(debtor, command.peer, number, ((command.loan, end),)):
            done = TransferDone(command.transfer, command.loan, ok=False, stale=True)
            self._messages.append((debtor, done))
            return
        blocks = lent_blocks(self.machines.rmanagers[command.peer], ((command.loan, end),))[command.first :]
        self.moves.add(
            Move(command.transfer, command.loan, command.peer, debtor, blocks, into=command.blocks, read=number)
        )

    def _copy_blocks(self) -> bool:
        """Let copies proceed. Returns whether one has ended."""
        complete = self.moves.advance()
        for move in complete:
            self._progress_s = self.clock.now_s()
            done = TransferDone(move.transfer, move.loan, ok=True)
            if move.read is not None:
                self._messages.append((move.src, ReadEnded(move.dst, move.read)))
                self._messages.append((move.dst, done))
            else:
                self._messages += [(move.dst, done), (move.src, done)]
        return bool(complete)

    def _give_up(self, transfer: TransferId) -> None:
        move = self.moves.give_up(transfer)
        if move is not None:
            self._messages.append((move.src, TransferDone(transfer, move.loan, ok=False)))

    # ---- requests and samples ------------------------------------------------------------------------------------------------
    def _arrive(self, req_id: int) -> None:
        now_s = self._progress_s = self.clock.now_s()
        event, following = self.books.arrive(req_id, now_s)
        if following:
            self._at(following[1], partial(self._arrive, following[0]))
        patience_s = self.requests.workload.patience_s
        if patience_s is not None and patience_s[req_id] < INF:
            leave = partial(self._handle, DISPATCHER, RequestAborted(req_id))
            self._at(now_s + float(patience_s[req_id]), leave)
        self._handle(DISPATCHER, event, now_s)

    def _end_request(self, outcome: RequestOutcome) -> None:
        for executor in self.executors:
            text = executor.texts.pop(outcome.req_id, None)
            if text is not None:
                self.outputs[outcome.req_id] = text.new_ids
        following = self.books.end(outcome, self.clock.now_s())
        if following:
            self._at(following[1], partial(self._arrive, following[0]))

    def _sample(self, number: int) -> None:
        """One row of instances.parquet for each instance, and a look at whether the run still moves."""
        now_s = self.clock.now_s()
        self.journal.sample(now_s)
        self._check_progress(now_s)
        self._at((number + 1) * self.spec.sample_s, partial(self._sample, number + 1))

    def _check_progress(self, now_s: float) -> None:
        busy = any(executor.step is not None for executor in self.executors) or self.books.waits_for_arrivals
        if not busy and now_s - self._progress_s >= STALL_S:
            raise RunError(self.journal.story(f"{STALL_S:g} s"))
