"""Instance: a host and an executor at work beside each other: a thread for iterations, one for each read served and each copy.

It carries out what its manager decides, as the driver of one process does. Reads are agreed on in control messages before the first
iteration of a step, and end on the data plane. Serving waits for queries alone, never for what is read elsewhere.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from infreal.actors.copies import NOTHING, receive_copy, send_copy, send_header
from infreal.actors.host import Host, Post
from infreal.actors.mail import (
    OpenFetch,
    OpenRead,
    Output,
    ReadOpened,
    ReceiverReady,
    Renewed,
    ResetPair,
    Span,
    Stamp,
    State,
    Suspected,
)
from infreal.actors.pairs import Pairs
from infreal.dist_attention import FETCH, STORE, Serving, tag_of
from infreal.executor import Executor, Step
from infreal.layout import Read, StepRow, freeze, lent_blocks, reads_by_creditor
from infreal.requests import Requests
from infreal.transport import PairReset, TransportError
from perfmodel.messages import (
    DISPATCHER,
    POST_S,
    Address,
    Command,
    CutIterations,
    IterationsDone,
    LoanId,
    MessageReceived,
    PeerLost,
    PeerReturned,
    PostReceive,
    ReadEnded,
    ReadStarted,
    RequestDone,
    Send,
    StartFetch,
    StartIterations,
    StartTransfer,
    SubmitRequest,
    TransferDone,
    TransferId,
)
from perfmodel.rmanager import RManager

INCARNATIONS = 4  # of one debtor whose copies are told apart
PATIENCE = 3.0  # deadlines: a peer that waits for another one itself is not silent


@dataclass(slots=True)
class Opening:
    """A step whose reads are not all opened yet. states: of the pairs, see `Pairs` · waiting: creditors that have not answered."""

    command: StartIterations
    rows: list[StepRow]
    reads: dict[int, tuple[int, Read]]
    states: dict[int, int]
    waiting: set[int]
    stale: dict[int, tuple[LoanId, ...]] = field(default_factory=dict)
    cut: bool = False


def copy_tag(kind: int, transfer: TransferId) -> int:
    """Transfers are numbered anew in each incarnation of their debtor."""
    return tag_of(kind, transfer.number * INCARNATIONS + transfer.debtor_incarnation % INCARNATIONS)


class Instance:
    """One instance of a cluster."""

    def __init__(
        self,
        machine: RManager,
        requests: Requests,
        executor: Executor,
        post: Post,
        *,
        incarnations: Mapping[Address, int] | None = None,
        full: bool = False,
        check: bool = False,
    ) -> None:
        self.machine, self.requests, self.executor, self.post = machine, requests, executor, post
        self.address = machine.instance
        self.host = Host(
            self.address, machine, executor.now_s, post, perform=self._perform, look=self._look, full=full, check=check
        )
        self._numbers = itertools.count(1)
        self._opening: Opening | None = None
        self._stores: dict[TransferId, StartTransfer] = {}  # whose receiver is not ready yet
        self._go: SimpleQueue[None] = SimpleQueue()
        self._iterated = threading.Condition()  # an iteration has begun, or a step has ended
        self.pairs = executor.transport = Pairs(executor.transport)
        self._agreed: dict[int, int] = {}  # states of the pairs in which the reads of the step in progress were opened
        self._incarnations = dict(incarnations or {})  # of peers, where it is not 1
        self._resets: dict[int, int] = {}  # peer → number of the last one
        self._early: list[
            OpenRead | OpenFetch | ReceiverReady
        ] = []  # from a state of a pair that is not known here yet
        self._progress_s = 0.0

    def start(self) -> None:
        self.host.start()
        self.host.spawn(self._run_steps, "iterations")

    def deliver(self, item: Any) -> None:
        """An item from another host or the head."""
        match item:
            case OpenRead(peer, stamp) | OpenFetch(peer, stamp) | ReceiverReady(peer, stamp) if stamp != self._known(
                peer
            ):
                self._set_aside(peer, item)
            case OpenRead():
                self._open_read(item)
            case ReadOpened(creditor, read, stale):
                with self.host.lock:
                    self._note_opened(creditor, read, stale)
            case OpenFetch():
                self._open_fetch(item)
            case ReceiverReady():
                self._send_store(item)
            case ResetPair(peer, number, give_up):
                if give_up:
                    self._forget(peer)
                self._renew_pair(peer, number)
            case PeerLost(peer) if peer >= 0:
                self._forget(peer)
                self._renew_pair(peer, 0)
            case PeerReturned(peer, incarnation):
                self._incarnations[peer] = incarnation
                self.host.deliver(item)
                self._take_up()
            case _:
                self._accept(item)
                self.host.deliver(item)

    def _accept(self, item: Any) -> None:
        if isinstance(item, MessageReceived) and isinstance(item.message, SubmitRequest):
            req_id = item.message.request.req_id
            with self.host.lock:
                if req_id not in self.machine.rows:
                    self.executor.accept(req_id, self.requests.text(req_id))

    # ---- commands ------------------------------------------------------------------------------------------------------------
    def _perform(self, command: Command) -> None:
        match command:
            case StartIterations():
                self._start_step(command)
            case CutIterations():
                if self._opening is not None:
                    self._opening.cut = True
                self.executor.cut()
            case StartTransfer(transfer):
                self._stores[transfer] = command
                self.host.at(self.host.now_s() + POST_S, lambda: self._give_up(transfer))
            case PostReceive(peer=peer):
                states = self.pairs.states([peer])
                self.host.spawn(lambda: self._receive_store(command, states), "receives")
                self.post(command.peer, ReceiverReady(self.address, self._stamp(command.peer), command.transfer))
            case StartFetch():
                self._start_fetch(command)
            case Send(_, RequestDone(_, outcome)):
                text = self.executor.texts.pop(outcome.req_id, None)
                if text is not None and outcome.status == "finished":
                    self.post(DISPATCHER, Output(outcome.req_id, tuple(text.new_ids)))  # whose diary outlives this one

    def _look(self) -> State:
        machine = self.machine
        at_rest = machine.at_rest and self.executor.step is None
        counters, work = replace(machine.counters), (self.executor.num_iterations, self.executor.busy_s)
        return State(self.host.now_s(), counters, machine.sample(), at_rest, self._progress_s, *work)

    # ---- steps ---------------------------------------------------------------------------------------------------------------
    def _start_step(self, command: StartIterations) -> None:
        """Open the step's reads at its creditors; it begins when all have answered."""
        rows = freeze(self.machine, command)
        reads = {c: (next(self._numbers), read) for c, read in sorted(reads_by_creditor(rows).items())}
        self._opening = Opening(command, rows, reads, self.pairs.states(reads), set(reads))
        for creditor, (number, read) in reads.items():
            self.post(creditor, OpenRead(self.address, self._stamp(creditor), number, tuple(read.rows)))
        self._begin_if_open()

    def _note_opened(self, creditor: int, read: int, stale: tuple[LoanId, ...]) -> None:
        opening = self._opening
        if opening is not None and creditor in opening.waiting and opening.reads[creditor][0] == read:
            opening.waiting.remove(creditor)
            if stale:
                opening.stale[creditor] = stale
            self._begin_if_open()

    def _begin_if_open(self) -> None:
        opening = self._opening
        if opening is None or opening.waiting:
            return
        self._opening, self._agreed = None, opening.states
        served = {c: read for c, read in opening.reads.items() if c not in opening.stale}
        stale = tuple(loan for loans in opening.stale.values() for loan in loans)
        self.executor.start(opening.command, opening.rows, served, stale)
        if opening.cut:
            self.executor.cut()
        self._go.put(None)

    def _run_steps(self) -> None:
        """The thread of iterations: the next one begins when the manager has heard of the last one."""
        while True:
            self._go.get()
            while (step := self.executor.step) is not None:
                self.host.hear(self._iterate(step))

    def _iterate(self, step: Step) -> IterationsDone:
        executor, agreed = self.executor, self._agreed
        with self._iterated:
            self._iterated.notify_all()
        try:
            with self.pairs.bound(agreed):
                done = executor.proceed()
        except TransportError as error:
            self._await_verdict(error, agreed if error.peer is None else {error.peer: agreed[error.peer]})
            done = executor.abort()
        self._progress_s = executor.now_s()
        if done.ended:
            with self._iterated:
                self._iterated.notify_all()
            with self.pairs.bound(agreed):
                executor.end_reads(step.parts)
            self.host.write(Span(step.start_s, self._progress_s, step.command))
        return done

    # ---- reads ---------------------------------------------------------------------------------------------------------------
    def _open_read(self, item: OpenRead) -> None:
        loans = tuple(entry for row in item.rows for entry in row.reads)
        with self.host.lock:
            stale = self.host.ask(ReadStarted(item.reader, item.read, loans))
            tables = [] if stale else [lent_blocks(self.machine, row.reads) for row in item.rows]
        if not stale:
            states = self.pairs.states([item.reader])
            self.host.spawn(lambda: self._serve(item, tables, states), "serves")
        self.post(item.reader, ReadOpened(self.address, item.read, stale))

    def _serve(self, item: OpenRead, tables: list[list[int]], states: dict[int, int]) -> None:
        executor = self.executor
        serving = executor.serve(item.rows, tables)
        layers = itertools.cycle(range(executor.decoder.config.num_layers))
        self._exchange(states, lambda: self._answer_all(serving, item, layers))
        self.host.hear(ReadEnded(item.reader, item.read))

    def _answer_all(self, serving: Serving, item: OpenRead, layers: Iterator[int]) -> None:
        while self.executor.answer(serving, item.reader, item.read, next(layers), PATIENCE):
            pass

    # ---- copies --------------------------------------------------------------------------------------------------------------
    def _give_up(self, transfer: TransferId) -> None:
        """A Store whose receiver has not become ready."""
        store = self._stores.pop(transfer, None)
        if store is not None:
            self.host.hear(TransferDone(transfer, store.loan, ok=False))

    def _send_store(self, item: ReceiverReady) -> None:
        with self.host.lock:
            store = self._stores.pop(item.transfer, None)
        states = self.pairs.states([item.creditor])
        self.host.spawn(lambda: self._stream(item, store, states), "sends")

    def _stream(self, item: ReceiverReady, store: StartTransfer | None, states: dict[int, int]) -> None:
        tag = copy_tag(STORE, item.transfer)
        if store is None:
            self._exchange(states, lambda: send_header(self.executor, item.creditor, tag, NOTHING))
            return
        pace = -(-store.tokens_per_iteration // self.executor.block_tokens)
        wait = self._pacer() if pace else lambda: None
        sent = self._exchange(states, lambda: send_copy(self.executor, item.creditor, tag, store.blocks, pace, wait))
        self.host.hear(TransferDone(store.transfer, store.loan, ok=sent))

    def _pacer(self) -> Callable[[], None]:
        """Returns once an iteration, or at once where nothing runs."""
        sent_in = -1

        def wait() -> None:
            nonlocal sent_in
            executor = self.executor
            with self._iterated:
                free = lambda: executor.step is None or executor.num_iterations != sent_in  # noqa: E731
                self._iterated.wait_for(free, executor.deadline_s)
            sent_in = executor.num_iterations

        return wait

    def _receive_store(self, command: PostReceive, states: dict[int, int]) -> None:
        tag = copy_tag(STORE, command.transfer)
        is_current = command.transfer.debtor_incarnation == self._known(command.peer).incarnation
        came = is_current and self._exchange(
            states, lambda: receive_copy(self.executor, command.peer, tag, command.blocks, PATIENCE)
        )
        self.host.hear(TransferDone(command.transfer, command.loan, ok=came))

    def _start_fetch(self, command: StartFetch) -> None:
        end = command.first + len(command.blocks)
        number = next(self._numbers)
        self.post(
            command.peer,
            OpenFetch(
                self.address, self._stamp(command.peer), number, command.transfer, command.loan, command.first, end
            ),
        )
        states = self.pairs.states([command.peer])
        self.host.spawn(lambda: self._receive_fetch(command, states), "fetches")

    def _receive_fetch(self, command: StartFetch, states: dict[int, int]) -> None:
        tag, stale = copy_tag(FETCH, command.transfer), False

        def receive() -> bool:
            nonlocal stale
            came = receive_copy(self.executor, command.peer, tag, command.blocks, PATIENCE)
            stale = not came
            return came

        came = self._exchange(states, receive)
        self.host.hear(TransferDone(command.transfer, command.loan, ok=came, stale=stale))

    def _open_fetch(self, item: OpenFetch) -> None:
        with self.host.lock:
            stale = self.host.ask(ReadStarted(item.reader, item.read, ((item.loan, item.end),)))
            blocks = [] if stale else lent_blocks(self.machine, ((item.loan, item.end),))[item.first :]
        states = self.pairs.states([item.reader])
        self.host.spawn(lambda: self._send_fetch(item, blocks, states), "sends")

    def _send_fetch(self, item: OpenFetch, blocks: list[int], states: dict[int, int]) -> None:
        tag = copy_tag(FETCH, item.transfer)
        if not blocks:
            self._exchange(states, lambda: send_header(self.executor, item.reader, tag, NOTHING))
            return
        self._exchange(states, lambda: send_copy(self.executor, item.reader, tag, blocks, 0, lambda: None))
        self.host.hear(ReadEnded(item.reader, item.read))

    def _exchange(self, states: dict[int, int], work: Callable[[], bool | None]) -> bool:
        """Whether it took place, and what it returned; a failure has been judged by then. states: in which it was agreed on."""
        try:
            with self.pairs.bound(states):
                came = work()
        except TransportError as error:
            self._await_verdict(error, states)
            return False
        self._progress_s = self.executor.now_s()
        return came is not False

    # ---- peers ---------------------------------------------------------------------------------------------------------------
    def _await_verdict(self, error: TransportError, states: dict[int, int]) -> None:
        """An exchange has failed: the head finds out who is alive, and has lost peers forgotten and pairs made again.

        Nothing that rests on the exchange is reported before, since it would be tried again at once.
        """
        if not isinstance(error, PairReset):
            for peer in self.pairs.unchanged(states):
                self.host.write(Suspected(self.host.now_s(), peer, str(error)), urgent=True)
        self.pairs.wait_for_change(states, PATIENCE * self.executor.deadline_s)

    def _stamp(self, peer: int) -> Stamp:
        """What goes with a word to this peer."""
        return Stamp(self.machine.incarnation, self._resets.get(peer, 0))

    def _known(self, peer: int) -> Stamp:
        """What a peer's stamp should be."""
        return Stamp(self._incarnations.get(peer, 1), self._resets.get(peer, 0))

    def _set_aside(self, peer: int, item: OpenRead | OpenFetch | ReceiverReady) -> None:
        """From before a loss or a reset: too late, the sender fails by itself. From behind one that will be heard of: early."""
        if item.stamp > self._known(peer):
            self._early.append(item)
        elif isinstance(item, OpenRead):
            stale = tuple(loan for row in item.rows for loan, _ in row.reads)
            self.post(item.reader, ReadOpened(self.address, item.read, stale))

    def _take_up(self) -> None:
        early, self._early = self._early, []
        for item in early:
            self.deliver(item)

    def _renew_pair(self, peer: int, number: int) -> None:
        """Join its next generation; what was under way in the last one has failed."""
        with self.host.lock:
            self.pairs.reset(peer)
            self._resets[peer] = number
            self.host.write(Renewed(peer, number), urgent=True)
        self._take_up()

    def _forget(self, peer: int) -> None:
        """Its loans are gone first, so that whatever waits for it plans without them."""
        with self.host.lock:
            self.host.hear(PeerLost(peer))
            opening = self._opening
            if opening is not None and peer in opening.waiting:
                number, read = opening.reads[peer]
                self._note_opened(peer, number, tuple(loan for loan, _ in read.loans))
