"""RManager: the manager of one instance. Owns the truth about its requests and blocks.

It turns messages and completed iterations into the next step of its instance. It knows no output length and no clock: the
driver ends a step where a request finishes, and settles the step in progress before it passes on any other event. What it lends
and borrows is kept by its `Creditor` and its `Borrower`; heartbeats by its `Reporter` (systems without a gManager have none).
"""

from dataclasses import dataclass

from perfmodel.batching import Batcher, BatchingPolicy, BatchLimits, Row
from perfmodel.blocks import BlockPool
from perfmodel.borrower import Borrower
from perfmodel.creditor import Creditor
from perfmodel.heartbeats import Reporter
from perfmodel.messages import (
    DISPATCHER,
    AbortRequest,
    Address,
    Chunk,
    Command,
    CreditorLedger,
    CutIterations,
    DebtorLedger,
    Event,
    HeartbeatReply,
    IterationsDone,
    LoadReport,
    LoanId,
    Message,
    MessageReceived,
    MoveKvCache,
    PeerLost,
    PeerReturned,
    Preempt,
    ReadEnded,
    ReadStarted,
    RequestDone,
    RequestOutcome,
    Send,
    StartIterations,
    Store,
    StoreRefused,
    SubmitRequest,
    TimerFired,
    TransferDone,
)
from perfmodel.records import Counters, Sample
from perfmodel.view import SchedulerParams

INF = float("inf")


@dataclass(frozen=True, slots=True)
class InstanceLimits:
    """What an RManager is told of its instance and its cluster.

    largest_blocks: blocks that one request can have, here and elsewhere (its own instance's, without a pool) · macro: whether a
    step may hold more than one iteration · scheduler: None in systems that share nothing.
    """

    num_blocks: int
    batch: BatchLimits
    macro: bool = True
    largest_blocks: int = 0
    scheduler: SchedulerParams | None = None


@dataclass(slots=True)
class Step:
    """The step in progress. `reads`: positions of each loan that its iterations use."""

    command: StartIterations
    reads: dict[LoanId, int]
    done: int = 0
    cut: bool = False


class RManager:
    """One per instance; `incarnation` tells a returned instance from the one that was lost."""

    def __init__(
        self, instance: int, limits: InstanceLimits, batching: BatchingPolicy, incarnation: int = 1, now_s: float = 0.0
    ) -> None:
        self.instance, self.incarnation, self.limits = instance, incarnation, limits
        self.pool = BlockPool(limits.num_blocks)
        self.batcher = Batcher(self.pool, limits.batch, batching)
        self.rows: dict[int, Row] = {}  # of every request here, whatever it is doing, by req_id
        self.counters = Counters(t_s=now_s)
        self.step: Step | None = None
        self.commands: list[Command] = []
        self.leaving: dict[
            int, str
        ] = {}  # running rows to take out at the next boundary: req_id → what becomes of them
        self.iteration_s = 0.0  # duration of the last iteration
        self.fenced: list[int] = []  # released while the running step may use them
        self.load_told: LoadReport | None = None  # the last one the dispatcher was told
        params = limits.scheduler or SchedulerParams()
        self.creditor = Creditor(instance, incarnation, self.pool, params, limits.batch.headroom_blocks)
        self.borrower = Borrower(self, params)
        self.reporter = Reporter(self, limits.scheduler, now_s) if limits.scheduler else None
        self._wants_plan = False
        self._step_number = 0
        self._received = 0
        self._joined: list[int] = []
        self._left: list[int] = []
        self.remote_wait_s = 0.0
        self._blocked_since_s = INF

    # ---- the machine ---------------------------------------------------------------------------------------------------------
    def handle(self, event: Event, now_s: float) -> list[Command]:
        if isinstance(event, IterationsDone):
            self._on_iterations(event, now_s)
        else:
            self.counters.pass_time(now_s, self.pool.used)
            free = self.pool.free
            self._on_event(event, now_s)
            self._adjust_step(free)
        if self._wants_plan:
            self._plan(now_s)
        if self.reporter:
            self.borrower.tend(now_s)
            self.reporter.hurry(now_s)
        self.counters.batch = self.step.command.decode_rows if self.step else 0
        self.counters.blocks = self.pool.used
        commands, self.commands = self.commands, []
        return commands

    def _on_event(self, event: Event, now_s: float) -> None:
        match event:
            case MessageReceived(sender, message):
                self._on_message(sender, message, now_s)
            case TransferDone() if event.transfer.debtor == self.instance:
                self.borrower.on_transfer_done(event, now_s)
            case TransferDone():
                self.commands += self.creditor.on_received(event)
            case ReadStarted():
                self.commands += self.creditor.on_read(event)
            case ReadEnded():
                self.creditor.on_read_ended(event)
            case PeerLost(peer):
                self.borrower.on_peer_lost(peer, now_s)
            case PeerReturned():
                pass  # its loans ended with its incarnation
            case TimerFired():
                self._on_timer(now_s)
            case _:
                raise AssertionError(f"instance {self.instance} does not know {event}")

    def _on_timer(self, now_s: float) -> None:
        self.commands += self.creditor.expire(now_s)
        self.borrower.expire(now_s)
        if self.reporter and self.reporter.due_s <= now_s:
            self.reporter.report(now_s)
        if now_s >= self._reclaim_at_s():
            self._reclaim(now_s)

    def next_deadline_s(self) -> float:
        if not self.reporter:
            return INF
        debtor_s, creditor_s = self.borrower.debtor.next_deadline_s(), self.creditor.next_deadline_s()
        return min(self.reporter.due_s, debtor_s, creditor_s, self._reclaim_at_s())

    @property
    def at_rest(self) -> bool:
        """Nothing runs, waits or is owed, and nothing is lent."""
        return self.idle and self.pool.free == self.pool.total

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is owed."""
        busy = self.step or self.batcher.waiting or self.borrower.suspended or self.borrower.debtor.loans
        return not busy

    def sample(self) -> Sample:
        """State of the instance."""
        pool, debtor = self.pool, self.borrower.debtor
        return Sample(
            len(self.batcher.decoding),
            len(self.batcher.waiting) + len(self.borrower.granting),
            pool.free,
            pool.local,
            debtor.pledged_blocks(),
            pool.reserved,
            pool.lent,
            pool.draining,
            debtor.borrowed_blocks(),
        )

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        self.batcher.check_invariants()
        self.creditor.check_invariants()
        self.borrower.check_invariants()
        held = [block for row in self.rows_with_blocks() for block in row.local_blocks()] + self.borrower.fetching()
        assert len(held) == self.pool.local, f"rows and fetches hold {len(held)} blocks, {self.pool.local} are local"
        self.pool.check_owners(held + self.creditor.blocks())

    def rows_with_blocks(self) -> list[Row]:
        borrower = self.borrower
        running = [*self.batcher.prefilling, *self.batcher.decoding.values()]
        return [*running, *borrower.granting.values(), *borrower.suspended.values()]

    # ---- messages ------------------------------------------------------------------------------------------------------------
    def _on_message(self, sender: Address, message: Message, now_s: float) -> None:
        match message:
            case SubmitRequest():
                self._submit(message, now_s)
            case AbortRequest():
                self._abort(message, now_s)
            case DebtorLedger():
                self.commands += self.creditor.on_ledger(sender, message, now_s)
            case CreditorLedger():
                self.borrower.on_answer(sender, message, now_s)
            case Store():
                self.commands += self.creditor.on_store(sender, message)
            case StoreRefused(transfer):
                self.borrower.on_refused(transfer)
            case MoveKvCache():
                self.borrower.on_order(message, now_s)
            case Preempt():
                self.borrower.on_preempt(message, now_s)
            case HeartbeatReply() if self.reporter:
                self.reporter.on_reply(message, now_s)
            case _:
                raise AssertionError(f"instance {self.instance} does not know {message}")

    def _submit(self, message: SubmitRequest, now_s: float) -> None:
        self._received += 1
        running = self.rows.get(message.request.req_id)
        if running is not None:
            running.attempt = message.attempt  # thought to be lost, it was here all the time
            if self.leaving.get(running.req_id) == "aborted":
                self.leaving[running.req_id] = "preempted"  # meanwhile it may have lost blocks: it starts again
            return
        tokens = message.request.input_tokens
        needed = self.batcher.blocks_for(tokens + 1)
        row = Row(message.request, message.attempt, message.sequence, now_s, tokens, needed)
        if needed > self.limits.largest_blocks:
            self.finish(row, "rejected", f"needs at least {needed} blocks, {self._largest_text()}", now_s)
            return
        self.rows[row.req_id] = row
        self.batcher.enqueue(row)
        first = self.batcher.waiting[0] is row  # or behind others: one whose instance was lost is older than they are
        if first or not self.batcher.policy.first_come:
            self.replan()

    def _largest_text(self) -> str:
        largest = self.limits.largest_blocks
        return (
            f"an instance has {largest}"
            if largest == self.pool.total
            else f"one request can have {largest} of the pool"
        )

    def _abort(self, abort: AbortRequest, now_s: float) -> None:
        row = self.rows.get(abort.req_id)
        if row is None or row.attempt != abort.attempt:
            return
        self.replan()  # who waited behind it may fit
        if self.running(abort.req_id) is not None:
            self.leaving[abort.req_id] = "aborted"
            return
        if row in self.batcher.waiting:
            self.batcher.dequeue(row)
        self.borrower.withdraw(abort.req_id)
        self.finish(row, "aborted", "aborted by the client", now_s)

    # ---- iterations ----------------------------------------------------------------------------------------------------------
    def _on_iterations(self, event: IterationsDone, now_s: float) -> None:
        step = self.step
        assert step is not None and event.step == step.command.step, f"{event} is not of the step in progress"
        used = self.pool.used
        self._count(step, event)
        step.done += event.num_iterations
        assert step.done <= step.command.max_iterations, f"{event} runs past its step"
        if event.num_iterations:
            self.iteration_s = event.iteration_s
            if step.command.decode_rows:
                self.batcher.advance(event.num_iterations)
                if not event.ended:
                    self.batcher.grow(self.batcher.counter)
        # rows have grown evenly over the iterations just settled
        self.counters.pass_time(now_s, (used + self.pool.used) / 2)
        if event.ended:
            self._end_step(step, event, now_s)

    def _count(self, step: Step, event: IterationsDone) -> None:
        n, counters, command = event.num_iterations, self.counters, step.command
        rows = command.decode_rows
        if rows:
            counters.output_tokens += n * rows
            counters.computed_tokens += n * rows
            counters.attention_pairs += n * self.batcher.context_tokens + rows * (n * (n - 1) // 2)
        if command.chunks and n:
            for chunk in command.chunks:
                counters.computed_tokens += chunk.tokens
                counters.attention_pairs += chunk.tokens * chunk.prefix_tokens + chunk.tokens * (chunk.tokens + 1) // 2
                counters.output_tokens += chunk.last
        self.remote_wait_s += event.remote_wait_s

    def _end_step(self, step: Step, event: IterationsDone, now_s: float) -> None:
        """Take all results first, then let blocks go, then grow what is left, then plan the next step."""
        self.step = None
        for chunk in step.command.chunks:
            self._end_chunk(chunk, done=event.num_iterations > 0, now_s=now_s)
        for req_id in event.finished_ids:
            row = self.batcher.decoding[req_id]
            self.remove(row)
            self.finish(row, "finished", "", now_s)
        self.pool.unpin(self.fenced)
        self.fenced.clear()
        self.borrower.on_boundary(event.stale, now_s)
        self._end_leaving(now_s)
        if step.command.decode_rows and event.num_iterations:
            self._grow(now_s)
        self.replan()

    def _end_chunk(self, chunk: Chunk, done: bool, now_s: float) -> None:
        if not done:
            self.batcher.unplace(chunk)
            return
        row = self.batcher.compute(chunk)
        if row is None:
            return
        if row.first_token_s is None:
            row.first_token_s = now_s
        if row.preempted_at_s is not None:
            row.preempted_s += now_s - max(row.preempted_at_s, row.first_token_s)
            row.preempted_at_s = None
        self.batcher.join(row)
        self.note_joined(row)

    def note_joined(self, row: Row) -> None:
        row.wait_mark_s = self.remote_wait_s
        self._joined.append(row.req_id)

    def _end_leaving(self, now_s: float) -> None:
        """Take out the rows that were to leave at this boundary."""
        if not self.leaving:
            return
        for req_id, status in sorted(self.leaving.items()):
            row = self.running(req_id)
            if row is None:
                continue
            if status == "aborted":
                self.drop(row)
                self.finish(row, "aborted", "aborted by the client", now_s)
            else:
                self.preempt(row, now_s)
        self.leaving.clear()

    def running(self, req_id: int) -> Row | None:
        row = self.batcher.decoding.get(req_id)
        return row or next((r for r in self.batcher.prefilling if r.req_id == req_id), None)

    def _grow(self, now_s: float) -> None:
        """Give each due decode row its next block, oldest first; where none is free the youngest row is preempted."""
        joined = self._joined  # rows that join now have room for their next token
        due = [row for row in self.batcher.due().values() if row.req_id not in joined]
        if len(due) <= self.pool.free:
            for row in due:
                row.blocks.append(self.pool.allocate_one())
            return
        for row in sorted(due, key=lambda r: r.sequence):
            if row.req_id in self.batcher.decoding:
                self._grow_or_preempt(row, now_s)

    def _grow_or_preempt(self, row: Row, now_s: float) -> None:
        needed = len(row.blocks) + 1
        if needed > self.limits.largest_blocks:
            self.drop(row)
            self._finish_outgrown(row, needed, now_s)
            return
        while not self.pool.free:
            victim = self.batcher.youngest()
            if victim is row and self.borrower.can_suspend(row):
                self.borrower.suspend(row)
                return
            self.preempt(victim, now_s)
            if victim is row:
                return
        row.blocks.append(self.pool.allocate_one())

    def preempt(self, row: Row, now_s: float) -> None:
        """Preempt by recompute: the row waits again, in its order of arrival, for its prompt and what it had generated."""
        self.drop(row)
        row.num_preemptions += 1
        if row.preempted_at_s is None:
            row.preempted_at_s = now_s
        row.computed_tokens = 0
        row.target_tokens = row.request.input_tokens + row.generated_tokens
        row.blocks_needed = self.batcher.blocks_for(row.target_tokens + 1)
        if row.blocks_needed > self.limits.largest_blocks:
            self._finish_outgrown(row, row.blocks_needed, now_s)
        else:
            self.batcher.enqueue(row)

    def _finish_outgrown(self, row: Row, blocks: int, now_s: float) -> None:
        kind = "its instance" if self.limits.largest_blocks == self.pool.total else "the pool"
        self.finish(row, "failed", f"outgrew {kind}: needs {blocks} blocks, {self._largest_text()}", now_s)

    def drop(self, row: Row) -> None:
        """Take a row that has not finished out of the batch and free its blocks, here and elsewhere."""
        if row.req_id in self.batcher.decoding and row.req_id not in self._joined:
            self._left.append(row.req_id)
        self.remove(row)

    def remove(self, row: Row) -> None:
        self.take_out(row)
        self.release(row)

    def take_out(self, row: Row) -> None:
        """Out of the batch, with its blocks."""
        if row.req_id in self._joined:
            self._joined.remove(row.req_id)
        if row.req_id in self.batcher.decoding:
            row.remote_wait_s += self.remote_wait_s - row.wait_mark_s
        self.batcher.leave(row)

    def suspend(self, row: Row) -> None:
        """Out of the decode batch for want of a block, to come back with all it has."""
        if row.req_id not in self._joined:
            self._left.append(row.req_id)
        self.take_out(row)

    def release(self, row: Row) -> None:
        """Free all blocks of a row that has ended here, and end its loans."""
        self.pool.release(row.local_blocks())
        self.borrower.end_request(row)
        row.blocks, row.spare, row.fenced, row.streams = [], [], [], False
        row.remote_blocks = 0

    # ---- starting ------------------------------------------------------------------------------------------------------------
    def replan(self) -> None:
        """Something changed: plan at the next boundary, or after this event where nothing runs."""
        self._wants_plan = True

    def _plan(self, now_s: float) -> None:
        """Plan what was wanted. A running step is cut, once."""
        self._wants_plan = False
        if self.step is None:
            self._end_leaving(now_s)
            self._start_step(now_s)
        elif not self.step.cut:
            self.step.cut = True
            if self.step.command.max_iterations - self.step.done > 1:
                self.commands.append(CutIterations(self.step.command.step))

    def _adjust_step(self, free_before: int) -> None:
        """Blocks have come or gone: who waits may fit now, or the running step may lack blocks before it ends."""
        come = self.pool.free - free_before
        if (come > 0 and (self.batcher.waiting or self.borrower.suspended)) or (come < 0 and self._lacks_blocks()):
            self.replan()

    def _lacks_blocks(self) -> bool:
        step = self.step
        if step is None or not step.command.decode_rows:
            return False
        return step.command.max_iterations - step.done > self.batcher.max_iterations()

    def _start_step(self, now_s: float) -> None:
        self.borrower.resume()
        chunks, decode = self.batcher.plan(now_s)
        self._note_blocked(now_s)
        if not chunks and not decode:
            return
        self._step_number += 1
        rows = self.batcher.decoding if decode else {}
        reads = self.borrower.reads(decode, [chunk.req_id for chunk in chunks])
        command = StartIterations(
            step=self._step_number,
            decode_rows=len(rows),
            decode_context_tokens=self.batcher.context_tokens - self.batcher.remote_tokens if decode else 0,
            longest_tokens=self.batcher.longest_tokens() if decode else 0,
            chunks=chunks,
            max_iterations=self.batcher.max_iterations() if self.limits.macro and not chunks else 1,
            joined=tuple(self._joined),
            left=tuple(self._left),
            remote=self.borrower.remote_reads() if decode else (),
            chunk_remote=self.borrower.chunk_reads(chunks),
            reads=tuple(reads.items()),
        )
        self._joined.clear()
        self._left.clear()
        self.step = Step(command, reads)
        self.commands.append(command)

    # ---- memory lent ---------------------------------------------------------------------------------------------------------
    def _note_blocked(self, now_s: float) -> None:
        """Remember since when the first waiting request would not fit even if all that runs here had ended."""
        waiting, lent = self.batcher.waiting, self.pool.lent + self.pool.reserved
        if not waiting or not lent or waiting[0].blocks_needed <= self.pool.total - lent:
            self._blocked_since_s = INF
        elif self._blocked_since_s == INF:
            self._blocked_since_s = now_s

    def _reclaim_at_s(self) -> float:
        return self._blocked_since_s + self.creditor.params.period_s

    def _reclaim(self, now_s: float) -> None:
        """Lent blocks have stood in the way of the first waiting request for a period: ask for what it lacks of them.

        Only then: a debtor without room at home has to start again, which costs more than waiting for what runs here.
        """
        self._blocked_since_s = now_s
        if self.batcher.waiting:
            self.commands += self.creditor.reclaim(self.batcher.waiting[0].blocks_needed)

    # ---- endings -------------------------------------------------------------------------------------------------------------
    def load_report(self) -> LoadReport:
        """KV blocks of running and waiting work; what is lent is others' work."""
        lent = self.pool.lent + self.pool.reserved
        return LoadReport(self._received, self.pool.local + lent + self.batcher.waiting_blocks)

    def tell_load(self) -> LoadReport:
        """The load as it is now, for the dispatcher."""
        self.load_told = self.load_report()
        return self.load_told

    def finish(self, row: Row, status: str, reason: str, now_s: float) -> None:
        self.rows.pop(row.req_id, None)  # a rejected request has none
        outcome = RequestOutcome(
            req_id=row.req_id,
            status=status,
            reason=reason,
            instance=self.instance if row.admitted_s is not None else None,
            output_tokens=row.generated_tokens,
            received_s=row.received_s,
            admitted_s=row.admitted_s,
            first_token_s=row.first_token_s,
            finish_s=now_s,
            num_preemptions=row.num_preemptions,
            preempted_s=row.preempted_s,
            remote_wait_s=row.remote_wait_s,
            remote_tokens_max=row.remote_tokens_max,
        )
        self.commands.append(Send(DISPATCHER, RequestDone(row.attempt, outcome, self.tell_load())))
