"""Instance: a host whose machine decides, and the ranks that carry it out: iterations, reads served, copies.

Reads are agreed on in control messages before the first iteration of a step, and end on the data plane. Serving waits for queries
alone, never for what is read elsewhere. Everything the ranks do is an order (`orders`), for an instance of one rank too.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from infreal.actors.channel import Channel
from infreal.actors.copies import copy_tag
from infreal.actors.host import Host, Post
from infreal.actors.mail import (
    Failed,
    Lost,
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
from infreal.actors.orders import (
    Accept,
    BeginStep,
    Broken,
    Done,
    Drop,
    EndStep,
    Gone,
    Iterate,
    ReceiveCopy,
    Renew,
    Report,
    SendCopy,
    ServeRead,
    States,
    Suspect,
)
from infreal.actors.ranks import Ranks
from infreal.dist_attention import FETCH, STORE
from infreal.executor import Executor, Step
from infreal.layout import Frozen, freeze, lent_blocks
from infreal.requests import Requests
from infreal.transport import TransportError
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


@dataclass(slots=True)
class Opening:
    """A step whose reads are not all opened yet. reads: numbers, by creditor · states: of the pairs, see `Pairs` · waiting:
    creditors that have not answered."""

    frozen: Frozen
    reads: dict[int, int]
    states: States
    waiting: set[int]
    stale: dict[int, tuple[LoanId, ...]] = field(default_factory=dict)
    cut: bool = False


class Instance:
    """One instance of a cluster, in its rank 0. channel: to the other ranks, of `num_ranks` in all."""

    def __init__(
        self,
        machine: RManager,
        requests: Requests,
        executor: Executor,
        post: Post,
        *,
        channel: Channel | None = None,
        num_ranks: int = 1,
        incarnations: Mapping[Address, int] | None = None,
        full: bool = False,
        check: bool = False,
    ) -> None:
        self.machine, self.executor, self.post = machine, executor, post
        self.address = machine.instance
        self.host = Host(
            self.address, machine, executor.now_s, post, perform=self._perform, look=self._look, full=full, check=check
        )
        self.ranks = Ranks(executor, requests, self.host.spawn, self._note, channel, num_ranks)
        self.pairs = self.ranks.own.pairs
        self._numbers = itertools.count(1)
        self._opening: Opening | None = None
        self._frozen: Frozen | None = None  # of the step in progress
        self._stores: dict[TransferId, StartTransfer] = {}  # whose receiver is not ready yet
        self._go: SimpleQueue[None] = SimpleQueue()
        self._incarnations = dict(incarnations or {})  # of peers, where it is not 1
        self._resets: dict[int, int] = {}  # peer → number of the last one
        self._early: list[
            OpenRead | OpenFetch | ReceiverReady
        ] = []  # from a state of a pair that is not known here yet

    def start(self) -> None:
        self.host.start()
        self.host.spawn(self._run_steps, "iterations")
        self.ranks.start()

    def _note(self, report: Report) -> None:
        """What ranks report, for the head."""
        now_s = self.host.now_s()
        match report:
            case Suspect(peer, why):
                self.host.write(Suspected(now_s, peer, why), urgent=True)
            case Gone(why):
                self.host.write(Lost(now_s, why), urgent=True)
            case Broken(text):
                self.host.write(Failed(text), urgent=True)

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
                    self.ranks.order(Accept(req_id))

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
                self._receive_store(command)
            case StartFetch():
                self._start_fetch(command)
            case Send(_, RequestDone(_, outcome)):
                self._end_request(outcome.req_id, outcome.status == "finished")

    def _end_request(self, req_id: int, has_finished: bool) -> None:
        text = self.executor.texts.get(req_id)
        if text is not None:
            self.ranks.order(Drop(req_id))
            if has_finished:
                self.post(DISPATCHER, Output(req_id, tuple(text.new_ids)))  # whose diary outlives this one

    def _look(self) -> State:
        machine = self.machine
        at_rest = machine.at_rest and self.executor.step is None
        counters, executor = replace(machine.counters), self.executor
        work = executor.num_iterations, executor.busy_s, executor.core_s
        return State(self.host.now_s(), counters, machine.sample(), at_rest, self.ranks.own.progress_s, *work)

    # ---- steps ---------------------------------------------------------------------------------------------------------------
    def _start_step(self, command: StartIterations) -> None:
        """Open the step's reads at its creditors; it begins when all have answered."""
        frozen = freeze(self.machine, command)
        numbers = {creditor: next(self._numbers) for creditor in frozen.reads}
        self._opening = Opening(frozen, numbers, self.pairs.states(numbers), set(numbers))
        for creditor, read in frozen.reads.items():
            self.post(creditor, OpenRead(self.address, self._stamp(creditor), numbers[creditor], tuple(read.rows)))
        self._begin_if_open()

    def _note_opened(self, creditor: int, read: int, stale: tuple[LoanId, ...]) -> None:
        opening = self._opening
        if opening is not None and creditor in opening.waiting and opening.reads[creditor] == read:
            opening.waiting.remove(creditor)
            if stale:
                opening.stale[creditor] = stale
            self._begin_if_open()

    def _begin_if_open(self) -> None:
        opening = self._opening
        if opening is None or opening.waiting:
            return
        self._opening, self._frozen = None, opening.frozen
        step, rows, reads = opening.frozen.step, opening.frozen.rows, opening.frozen.reads
        served = {c: (number, reads[c].tokens) for c, number in opening.reads.items() if c not in opening.stale}
        stale = tuple(loan for loans in opening.stale.values() for loan in loans)
        self.ranks.order(BeginStep(step.step, step.max_iterations, rows, served, stale, opening.states))
        if opening.cut:
            self.executor.cut()
        self._go.put(None)

    def _run_steps(self) -> None:
        """The thread of iterations: the next one begins when the manager has heard of the last one."""
        try:
            while True:
                self._go.get()
                while (step := self.executor.step) is not None:
                    self.host.hear(self._iterate(step))
        except TransportError as error:
            self._note(Gone(str(error)))

    def _iterate(self, step: Step) -> IterationsDone:
        """One of all ranks together."""
        assert self._frozen is not None
        if step.is_over:
            done = self.executor.give_up()
        else:
            added = self._frozen.added()
            self.ranks.tell(Iterate(added))
            done = self.ranks.own.iterate(added)
        if done.ended:
            self.ranks.order(EndStep())
            self.host.write(Span(step.start_s, self.ranks.own.progress_s, self._frozen.step))
        return done

    # ---- reads ---------------------------------------------------------------------------------------------------------------
    def _open_read(self, item: OpenRead) -> None:
        loans = tuple(entry for row in item.rows for entry in row.reads)
        with self.host.lock:
            stale = self.host.ask(ReadStarted(item.reader, item.read, loans))
            tables = [] if stale else [lent_blocks(self.machine, row.reads) for row in item.rows]
        if not stale:
            serve = ServeRead(item.reader, item.read, item.rows, tables, self.pairs.states([item.reader]))
            self.ranks.begin(serve, lambda done: self.host.hear(ReadEnded(item.reader, item.read)))
        self.post(item.reader, ReadOpened(self.address, item.read, stale))

    # ---- copies --------------------------------------------------------------------------------------------------------------
    def _give_up(self, transfer: TransferId) -> None:
        """A Store whose receiver has not become ready."""
        store = self._stores.pop(transfer, None)
        if store is not None:
            self.host.hear(TransferDone(transfer, store.loan, ok=False))

    def _send_store(self, item: ReceiverReady) -> None:
        with self.host.lock:
            store = self._stores.pop(item.transfer, None)
        tag, states = copy_tag(STORE, item.transfer), self.pairs.states([item.creditor])
        if store is None:
            self.ranks.begin(SendCopy(item.creditor, tag, [], 0, states), lambda done: None)
            return
        pace = -(-store.tokens_per_iteration // self.executor.block_tokens)
        send = SendCopy(item.creditor, tag, list(store.blocks), pace, states)
        self.ranks.begin(send, lambda done: self._end_copy(store.transfer, store.loan, done))

    def _receive_store(self, command: PostReceive) -> None:
        peer, transfer, states = command.peer, command.transfer, self.pairs.states([command.peer])
        if transfer.debtor_incarnation == self._known(peer).incarnation:
            receive = ReceiveCopy(peer, copy_tag(STORE, transfer), list(command.blocks), states)
            self.ranks.begin(receive, lambda done: self._end_copy(transfer, command.loan, done))
        else:
            self.host.spawn(lambda: self._end_copy(transfer, command.loan, Done(0, ok=False)), "refuses")
        self.post(peer, ReceiverReady(self.address, self._stamp(peer), transfer))

    def _end_copy(self, transfer: TransferId, loan: LoanId, done: Done) -> None:
        """Every rank has sent or stored its part, or some have not. A Store that the sender gave up has no data and is not ok."""
        self.host.hear(TransferDone(transfer, loan, ok=done.ok))

    def _start_fetch(self, command: StartFetch) -> None:
        peer, transfer, end = command.peer, command.transfer, command.first + len(command.blocks)
        self.post(
            peer,
            OpenFetch(self.address, self._stamp(peer), next(self._numbers), transfer, command.loan, command.first, end),
        )
        states = self.pairs.states([peer])
        receive = ReceiveCopy(peer, copy_tag(FETCH, transfer), list(command.blocks), states)
        self.ranks.begin(
            receive, lambda d: self.host.hear(TransferDone(transfer, command.loan, ok=d.ok, stale=d.nothing))
        )

    def _open_fetch(self, item: OpenFetch) -> None:
        with self.host.lock:
            stale = self.host.ask(ReadStarted(item.reader, item.read, ((item.loan, item.end),)))
            blocks = [] if stale else lent_blocks(self.machine, ((item.loan, item.end),))[item.first :]
        send = SendCopy(item.reader, copy_tag(FETCH, item.transfer), blocks, 0, self.pairs.states([item.reader]))
        ended = ReadEnded(item.reader, item.read)
        self.ranks.begin(send, lambda done: self.host.hear(ended) if blocks else None)

    # ---- peers ---------------------------------------------------------------------------------------------------------------
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
        renewed = Renewed(peer, number)
        with self.host.lock:
            self._resets[peer] = number
            self.ranks.begin(Renew(peer), lambda done: self.host.write(renewed, urgent=True))
        self._take_up()

    def _forget(self, peer: int) -> None:
        """Its loans are gone first, so that whatever waits for it plans without them."""
        with self.host.lock:
            self.host.hear(PeerLost(peer))
            opening = self._opening
            if opening is not None and peer in opening.waiting:
                loans = tuple(loan for loan, _ in opening.frozen.reads[peer].loans)
                self._note_opened(peer, opening.reads[peer], loans)
