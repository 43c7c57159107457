"""RManagers wired by hand: messages arrive at once, in order, and transfers complete; steps end when the test says so."""

from collections import deque

from perfmodel.batching import BatchLimits
from perfmodel.messages import (
    DISPATCHER,
    GMANAGER,
    HeartbeatReply,
    IterationsDone,
    MessageReceived,
    MoveKvCache,
    OrderId,
    PostReceive,
    ReadEnded,
    ReadStarted,
    RefuseRead,
    Request,
    RequestDone,
    Send,
    StartFetch,
    StartIterations,
    StartTransfer,
    SubmitRequest,
    TimerFired,
    TransferDone,
)
from perfmodel.policies import BATCHING
from perfmodel.rmanager import InstanceLimits, RManager
from perfmodel.view import SchedulerParams

PARAMS = SchedulerParams()  # lease 10 s, renewals 2 s, orders 3 s, half of an instance may be lent
BLOCK_TOKENS = 16


def make_manager(instance=0, num_blocks=10, headroom_blocks=0, params=PARAMS, incarnation=1, largest_blocks=30):
    limits = BatchLimits(BLOCK_TOKENS, token_budget=10_000, max_batch=None, headroom_blocks=headroom_blocks)
    limits = InstanceLimits(num_blocks, limits, macro=False, largest_blocks=largest_blocks, scheduler=params)
    return RManager(instance, limits, BATCHING["chunked"](), incarnation)


class Wired:
    """`sent`: (sender, message) to the dispatcher and the gManager; `hold_stores`: let no Store arrive until asked to."""

    def __init__(self, *managers, now_s=0.0):
        self.managers, self.now_s, self.sent, self.others = managers, now_s, [], []
        self.hold_stores, self.held = False, []
        self._queue, self._sends, self._orders, self._reads = deque(), {}, 0, 0

    # ---- what tests do ---------------------------------------------------------------------------------------------------
    def submit(self, instance, req_id, tokens, sequence=None):
        sequence = req_id if sequence is None else sequence
        self.hear(instance, MessageReceived(DISPATCHER, SubmitRequest(Request(req_id, tokens), 1, sequence)))

    def order(self, instance, req_id, parts, kind="throughput", **changes):
        """An order of gManager 1 that rests on the newest heartbeat. parts: (creditor, blocks[, its incarnation])."""
        self._orders += 1
        parts = tuple((c, *(incarnation or [self.managers[c].incarnation]), n) for c, n, *incarnation in parts)
        values = {"order": OrderId(1, self._orders), "heartbeat": self.managers[instance].reporter._seq, **changes}
        self.hear(instance, MessageReceived(GMANAGER, MoveKvCache(req_id=req_id, parts=parts, kind=kind, **values)))

    def heartbeat(self, instance, may_rest=False):
        """Let its heartbeat be due, and answer it."""
        self.managers[instance].reporter.due_s = self.now_s
        self.hear(instance, TimerFired())
        seq = self.managers[instance].reporter._seq
        self.hear(instance, MessageReceived(GMANAGER, HeartbeatReply(1, seq, (), resync=False, may_rest=may_rest)))

    def iterate(self, instance, finished=(), stale=()):
        """Complete one iteration (none, where reads are stale) and so end the step."""
        step = self.managers[instance].step.command.step
        self.hear(instance, IterationsDone(step, 0 if stale else 1, tuple(finished), ended=True, stale=tuple(stale)))

    def prefill(self, instance, req_id, tokens):
        """A request that has decoded its first token."""
        self.submit(instance, req_id, tokens)
        self.iterate(instance)

    def hear(self, instance, event):
        self._queue.append((instance, event))
        self._drain()

    def _drain(self):
        while self._queue:
            receiver, event = self._queue.popleft()
            manager = self.managers[receiver]
            for command in manager.handle(event, self.now_s):
                self._perform(receiver, command)
            for each in self.managers:
                each.check_invariants()

    def release_stores(self):
        held, self.held, self.hold_stores = self.held, [], False
        for transfer, loan, creditor in held:
            self._complete(transfer, loan, creditor)
        self._drain()

    def outcomes(self):
        """What has become of orders, as heartbeats have told it."""
        beats = [message for _, message in self.sent if hasattr(message, "outcomes")]
        return {order.counter: outcome for beat in beats for order, outcome in beat.outcomes}

    def ended(self):
        return {m.outcome.req_id: m.outcome.status for _, m in self.sent if isinstance(m, RequestDone)}

    # ---- commands --------------------------------------------------------------------------------------------------------
    def _perform(self, sender, command):
        match command:
            case Send(receiver, message) if receiver >= 0:
                self._queue.append((receiver, MessageReceived(sender, message)))
            case Send(_, message):
                self.sent.append((sender, message))
            case StartTransfer():
                self._sends[command.transfer] = sender
            case PostReceive(transfer, loan, _, _) if self.hold_stores:
                self.held.append((transfer, loan, sender))
            case PostReceive(transfer, loan, _, _):
                self._complete(transfer, loan, sender)
            case StartFetch():
                self._fetch(sender, command)
            case StartIterations():
                self._read(sender, command)
            case RefuseRead():
                raise AssertionError(f"{command} in a test that expects all reads to be served")
            case _:
                self.others.append((sender, command))

    def _complete(self, transfer, loan, creditor):
        for end in (creditor, self._sends.pop(transfer)):
            self._queue.append((end, TransferDone(transfer, loan, ok=True)))

    def _fetch(self, debtor, command):
        self._reads += 1
        reads = ((command.loan, command.first + len(command.blocks)),)
        self._queue.append((command.peer, ReadStarted(debtor, self._reads, reads)))
        self._queue.append((command.peer, ReadEnded(debtor, self._reads)))
        self._queue.append((debtor, TransferDone(command.transfer, command.loan, ok=True)))

    def _read(self, debtor, step):
        for creditor in sorted({loan.creditor for loan, _ in step.reads}):
            self._reads += 1
            reads = tuple((loan, n) for loan, n in step.reads if loan.creditor == creditor)
            self._queue.append((creditor, ReadStarted(debtor, self._reads, reads)))
            self._queue.append((creditor, ReadEnded(debtor, self._reads)))
