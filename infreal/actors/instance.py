"""Instance: a host and an executor at work beside each other: a thread for iterations, one for each read served and each copy.

It carries out what its manager decides, as the driver of one process does. Reads are agreed on in control messages before the first
iteration of a step, and end on the data plane. Serving waits for queries alone, never for what is read elsewhere.
"""

import itertools
import threading
from collections.abc import Callable
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
    ResetPair,
    Span,
    State,
    Suspected,
)
from infreal.dist_attention import FETCH, STORE, tag_of
from infreal.executor import Executor, Step
from infreal.layout import Read, StepRow, freeze, lent_blocks, reads_by_creditor
from infreal.requests import Requests
from infreal.transport import PairReset, TransportError
from perfmodel.messages import (
    POST_S,
    Address,
    Command,
    CutIterations,
    IterationsDone,
    LoanId,
    MessageReceived,
    PeerLost,
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

PATIENCE = 3.0  # deadlines: a peer that waits for another one itself is not silent


@dataclass(slots=True)
class Opening:
    """A step whose reads are not all opened yet. waiting: creditors that have not answered."""

    command: StartIterations
    rows: list[StepRow]
    reads: dict[int, tuple[int, Read]]
    waiting: set[int]
    stale: dict[int, tuple[LoanId, ...]] = field(default_factory=dict)
    cut: bool = False


class Instance:
    """One instance of a cluster."""

    def __init__(
        self,
        machine: RManager,
        requests: Requests,
        executor: Executor,
        post: Post,
        *,
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
        self._verdict = threading.Condition(self.host.lock)  # a peer is lost, or its pair is new
        self._verdicts: dict[int, int] = {}  # peer → how often
        self._progress_s = 0.0

    def start(self) -> None:
        self.host.start()
        self.host.spawn(self._run_steps, "iterations")

    def deliver(self, item: Any) -> None:
        """An item from another host or the head."""
        match item:
            case OpenRead():
                self._open_read(item)
            case ReadOpened(creditor, read, stale):
                with self.host.lock:
                    self._note_opened(creditor, read, stale)
            case OpenFetch():
                self._open_fetch(item)
            case ReceiverReady():
                self._send_store(item)
            case ResetPair(peer, give_up):
                if give_up:
                    self._forget(peer)
                self.executor.transport.reset(peer)
                self._judge(peer)
            case PeerLost(peer) if peer >= 0:
                self._forget(peer)
                self.executor.transport.reset(peer)
                self._judge(peer)
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
            case PostReceive():
                self.host.spawn(lambda: self._receive_store(command), "receives")
                self.post(command.peer, ReceiverReady(self.address, command.transfer))
            case StartFetch():
                self._start_fetch(command)
            case Send(_, RequestDone(_, outcome)):
                text = self.executor.texts.pop(outcome.req_id, None)
                if text is not None and outcome.status == "finished":
                    self.host.write(Output(outcome.req_id, tuple(text.new_ids)))

    def _look(self) -> State:
        machine = self.machine
        at_rest = machine.at_rest and self.executor.step is None
        counters, busy_s = replace(machine.counters), self.executor.busy_s
        return State(self.host.now_s(), counters, machine.sample(), at_rest, self._progress_s, busy_s)

    # ---- steps ---------------------------------------------------------------------------------------------------------------
    def _start_step(self, command: StartIterations) -> None:
        """Open the step's reads at its creditors; it begins when all have answered."""
        rows = freeze(self.machine, command)
        reads = {c: (next(self._numbers), read) for c, read in sorted(reads_by_creditor(rows).items())}
        self._opening = Opening(command, rows, reads, set(reads))
        for creditor, (number, read) in reads.items():
            self.post(creditor, OpenRead(self.address, number, tuple(read.rows)))
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
        self._opening = None
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
        executor, peers = self.executor, [part.peer for part in step.parts]
        before = self._verdicts_of(peers)
        with self._iterated:
            self._iterated.notify_all()
        try:
            done = executor.proceed()
        except TransportError as error:
            silent = peers if error.peer is None else [error.peer]
            self._await_verdict(error, silent, before)
            done = executor.abort()
        self._progress_s = executor.now_s()
        if done.ended:
            with self._iterated:
                self._iterated.notify_all()
            now = self._verdicts_of(peers)
            executor.end_reads([part for part in step.parts if now[part.peer] == before[part.peer]])
            self.host.write(Span(step.start_s, self._progress_s, step.command))
        return done

    # ---- reads ---------------------------------------------------------------------------------------------------------------
    def _open_read(self, item: OpenRead) -> None:
        loans = tuple(entry for row in item.rows for entry in row.reads)
        with self.host.lock:
            stale = self.host.ask(ReadStarted(item.reader, item.read, loans))
            tables = [] if stale else [lent_blocks(self.machine, row.reads) for row in item.rows]
        if not stale:
            self.host.spawn(lambda: self._serve(item, tables), "serves")
        self.post(item.reader, ReadOpened(self.address, item.read, stale))

    def _serve(self, item: OpenRead, tables: list[list[int]]) -> None:
        executor, before = self.executor, self._verdicts_of([item.reader])
        serving = executor.serve(item.rows, tables)
        try:
            for layer in itertools.cycle(range(executor.decoder.config.num_layers)):
                if not executor.answer(serving, item.reader, item.read, layer, PATIENCE):
                    break
        except TransportError as error:
            self._await_verdict(error, [item.reader], before)
        self.host.hear(ReadEnded(item.reader, item.read))

    # ---- copies --------------------------------------------------------------------------------------------------------------
    def _give_up(self, transfer: TransferId) -> None:
        """A Store whose receiver has not become ready."""
        store = self._stores.pop(transfer, None)
        if store is not None:
            self.host.hear(TransferDone(transfer, store.loan, ok=False))

    def _send_store(self, item: ReceiverReady) -> None:
        with self.host.lock:
            store = self._stores.pop(item.transfer, None)
        if item.transfer.debtor_incarnation == self.machine.incarnation:
            self.host.spawn(lambda: self._stream(item, store), "sends")

    def _stream(self, item: ReceiverReady, store: StartTransfer | None) -> None:
        tag = tag_of(STORE, item.transfer.number)
        if store is None:
            self._exchange(item.creditor, lambda: send_header(self.executor, item.creditor, tag, NOTHING))
            return
        pace = -(-store.tokens_per_iteration // self.executor.block_tokens)
        wait = self._pacer() if pace else lambda: None
        sent = self._exchange(
            item.creditor, lambda: send_copy(self.executor, item.creditor, tag, store.blocks, pace, wait)
        )
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

    def _receive_store(self, command: PostReceive) -> None:
        tag = tag_of(STORE, command.transfer.number)
        came = self._exchange(
            command.peer, lambda: receive_copy(self.executor, command.peer, tag, command.blocks, PATIENCE)
        )
        self.host.hear(TransferDone(command.transfer, command.loan, ok=came))

    def _start_fetch(self, command: StartFetch) -> None:
        end = command.first + len(command.blocks)
        number = next(self._numbers)
        self.post(command.peer, OpenFetch(self.address, number, command.transfer, command.loan, command.first, end))
        self.host.spawn(lambda: self._receive_fetch(command), "fetches")

    def _receive_fetch(self, command: StartFetch) -> None:
        tag, stale = tag_of(FETCH, command.transfer.number), False

        def receive() -> bool:
            nonlocal stale
            came = receive_copy(self.executor, command.peer, tag, command.blocks, PATIENCE)
            stale = not came
            return came

        came = self._exchange(command.peer, receive)
        self.host.hear(TransferDone(command.transfer, command.loan, ok=came, stale=stale))

    def _open_fetch(self, item: OpenFetch) -> None:
        with self.host.lock:
            stale = self.host.ask(ReadStarted(item.reader, item.read, ((item.loan, item.end),)))
            blocks = [] if stale else lent_blocks(self.machine, ((item.loan, item.end),))[item.first :]
        self.host.spawn(lambda: self._send_fetch(item, blocks), "sends")

    def _send_fetch(self, item: OpenFetch, blocks: list[int]) -> None:
        tag = tag_of(FETCH, item.transfer.number)
        if not blocks:
            self._exchange(item.reader, lambda: send_header(self.executor, item.reader, tag, NOTHING))
            return
        self._exchange(item.reader, lambda: send_copy(self.executor, item.reader, tag, blocks, 0, lambda: None))
        self.host.hear(ReadEnded(item.reader, item.read))

    def _exchange(self, peer: int, work: Callable[[], bool | None]) -> bool:
        """Whether it took place, and what it returned; a failure has been judged by then."""
        before = self._verdicts_of([peer])
        try:
            came = work()
        except TransportError as error:
            self._await_verdict(error, [peer], before)
            return False
        self._progress_s = self.executor.now_s()
        return came is not False

    # ---- peers ---------------------------------------------------------------------------------------------------------------
    def _verdicts_of(self, peers: list[int]) -> dict[int, int]:
        with self.host.lock:
            return {peer: self._verdicts.get(peer, 0) for peer in peers}

    def _await_verdict(self, error: TransportError, peers: list[int], before: dict[int, int]) -> None:
        """An exchange has failed: the head finds out who is alive, and has lost peers forgotten and pairs made again.

        Nothing that rests on the exchange is reported before, since it would be tried again at once.
        """
        with self.host.lock:
            open_peers = lambda: [p for p in peers if self._verdicts.get(p, 0) == before[p]]  # noqa: E731
            if not isinstance(error, PairReset):
                for peer in open_peers():
                    self.host.write(Suspected(peer, str(error)), urgent=True)
            self._verdict.wait_for(lambda: not open_peers(), PATIENCE * self.executor.deadline_s)

    def _judge(self, peer: Address) -> None:
        with self.host.lock:
            self._verdicts[peer] = self._verdicts.get(peer, 0) + 1
            self._verdict.notify_all()

    def _forget(self, peer: int) -> None:
        """Its loans are gone first, so that whatever waits for it plans without them."""
        with self.host.lock:
            self.host.hear(PeerLost(peer))
            opening = self._opening
            if opening is not None and peer in opening.waiting:
                number, read = opening.reads[peer]
                self._note_opened(peer, number, tuple(loan for loan, _ in read.loans))
