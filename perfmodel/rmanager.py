"""RManager: the manager of one instance. Owns the truth about its requests and blocks.

It turns messages and completed iterations into the next step of its instance. It knows no other instance, no output length and
no clock: the driver ends a step where a request finishes, and settles the step in progress before it passes on any other event.
"""

from dataclasses import dataclass

from perfmodel.batching import Batcher, BatchingPolicy, BatchLimits, Row
from perfmodel.blocks import BlockPool
from perfmodel.messages import (
    DISPATCHER,
    AbortRequest,
    Chunk,
    Command,
    CutIterations,
    Event,
    Finish,
    IterationsDone,
    Message,
    MessageReceived,
    RequestDone,
    RequestOutcome,
    Send,
    StartIterations,
    SubmitRequest,
)
from perfmodel.records import Counters


@dataclass(frozen=True, slots=True)
class InstanceLimits:
    """What an RManager is told of its instance. `macro`: whether a step may hold more than one iteration."""

    num_blocks: int
    batch: BatchLimits
    macro: bool = True


@dataclass(slots=True)
class _Step:
    command: StartIterations
    done: int = 0
    cut: bool = False


class RManager:
    """One per instance."""

    def __init__(self, instance: int, limits: InstanceLimits, batching: BatchingPolicy) -> None:
        self.instance = instance
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.batcher = Batcher(self.pool, limits.batch, batching)
        self.counters = Counters()
        self._step: _Step | None = None
        self._step_number = 0
        self._received = 0
        self._joined: list[int] = []
        self._left: list[int] = []
        self._aborted: set[int] = set()
        self._remote_wait_s = 0.0
        self._commands: list[Command] = []

    # ---- the machine ---------------------------------------------------------------------------------------------------------
    def handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case IterationsDone():
                self._on_iterations(event, now_s)
            case MessageReceived(_, message):
                self.counters.pass_time(now_s, self.pool.used)
                self._on_message(message, now_s)
            case _:
                raise AssertionError(f"instance {self.instance} does not know {event}")
        self.counters.batch = self._step.command.decode_rows if self._step else 0
        self.counters.blocks = self.pool.used
        commands, self._commands = self._commands, []
        return commands

    def next_deadline_s(self) -> float:
        return float("inf")

    @property
    def at_rest(self) -> bool:
        """Nothing runs, waits or is owed."""
        return self._step is None and not self.batcher.waiting and self.pool.free == self.pool.total

    def sample(self) -> dict[str, int]:
        """State of the instance, in the columns of instances.parquet."""
        pool = self.pool
        return {
            "batch": len(self.batcher.decoding),
            "waiting": len(self.batcher.waiting),
            "free_blocks": pool.free,
            "local_blocks": pool.local,
            "pledged_blocks": 0,
            "reserved_blocks": pool.reserved,
            "lent_blocks": pool.lent,
            "draining_blocks": pool.draining,
            "borrowed_blocks": 0,
        }

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        self.batcher.check_invariants()
        held = sum(len(r.blocks) for r in [*self.batcher.prefilling, *self.batcher.decoding.values()])
        assert held == self.pool.local, f"rows hold {held} blocks, {self.pool.local} are local"

    # ---- messages ------------------------------------------------------------------------------------------------------------
    def _on_message(self, message: Message, now_s: float) -> None:
        match message:
            case SubmitRequest():
                self._submit(message, now_s)
            case AbortRequest(req_id):
                self._abort(req_id, now_s)
            case _:
                raise AssertionError(f"instance {self.instance} does not know {message}")

    def _submit(self, message: SubmitRequest, now_s: float) -> None:
        self._received += 1
        tokens = message.request.input_tokens
        needed = self.batcher.blocks_for(tokens + 1)
        row = Row(message.request, message.attempt, message.sequence, now_s, tokens, needed)
        if needed > self.pool.total:
            self._finish(row, "rejected", f"needs at least {needed} blocks, an instance has {self.pool.total}", now_s)
            return
        behind = bool(self.batcher.waiting) and self.batcher.policy.first_come
        self.batcher.enqueue(row)
        if not behind:
            self._replan(now_s)

    def _abort(self, req_id: int, now_s: float) -> None:
        row = next((r for r in self.batcher.waiting if r.req_id == req_id), None)
        if row is not None:
            self.batcher.dequeue(row)
            self._finish(row, "aborted", "aborted by the client", now_s)
        elif req_id in self.batcher.decoding or any(r.req_id == req_id for r in self.batcher.prefilling):
            self._aborted.add(req_id)
            self._replan(now_s)

    # ---- iterations ----------------------------------------------------------------------------------------------------------
    def _on_iterations(self, event: IterationsDone, now_s: float) -> None:
        step = self._step
        assert step is not None and event.step == step.command.step, f"{event} is not of the step in progress"
        used = self.pool.used
        self._count(step, event)
        step.done += event.num_iterations
        assert step.done <= step.command.max_iterations, f"{event} runs past its step"
        if step.command.decode_rows and event.num_iterations:
            self.batcher.advance(event.num_iterations)
            if not event.ended:
                self.batcher.grow(self.batcher.counter)
        # rows have grown evenly over the iterations just settled
        self.counters.pass_time(now_s, (used + self.pool.used) / 2)
        if event.ended:
            self._end_step(step.command, event.finished_ids, now_s)

    def _count(self, step: _Step, event: IterationsDone) -> None:
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
        self._remote_wait_s += event.remote_wait_s

    def _end_step(self, command: StartIterations, finished_ids: tuple[int, ...], now_s: float) -> None:
        """Take all results first, then let blocks go, then grow what is left, then plan the next step."""
        self._step = None
        for chunk in command.chunks:
            self._end_chunk(chunk, now_s)
        for req_id in finished_ids:
            row = self.batcher.decoding[req_id]
            self._remove(row)
            self._finish(row, "finished", "", now_s)
        for req_id in sorted(self._aborted):
            self._end_aborted(req_id, now_s)
        if command.decode_rows:
            self._grow(command, now_s)
        self._start_step(now_s)

    def _end_chunk(self, chunk: Chunk, now_s: float) -> None:
        row = self.batcher.compute(chunk)
        if row is None:
            return
        if row.first_token_s is None:
            row.first_token_s = now_s
        if row.preempted_at_s is not None:
            row.preempted_s += now_s - max(row.preempted_at_s, row.first_token_s)
            row.preempted_at_s = None
        row.wait_mark_s = self._remote_wait_s
        self.batcher.join(row)
        self._joined.append(row.req_id)

    def _end_aborted(self, req_id: int, now_s: float) -> None:
        row = self._running(req_id)
        if row is not None:
            self._drop(row)
            self._finish(row, "aborted", "aborted by the client", now_s)
        self._aborted.discard(req_id)

    def _running(self, req_id: int) -> Row | None:
        row = self.batcher.decoding.get(req_id)
        return row or next((r for r in self.batcher.prefilling if r.req_id == req_id), None)

    def _grow(self, command: StartIterations, now_s: float) -> None:
        """Give each due decode row its next block, oldest first; where none is free the youngest row is preempted."""
        joined = set(self._joined)  # rows that join now were admitted with room for their next token
        due = [row for row in self.batcher.due().values() if row.req_id not in joined]
        if len(due) <= self.pool.free:
            for row in due:
                row.blocks.append(self.pool.allocate_one())
            return
        for row in sorted(due, key=lambda r: r.sequence):
            if row.req_id in self.batcher.decoding:
                self._grow_or_preempt(row, now_s)

    def _grow_or_preempt(self, row: Row, now_s: float) -> None:
        if len(row.blocks) >= self.pool.total:
            self._fail_outgrown(row, len(row.blocks) + 1, now_s)
            return
        while not self.pool.free:
            victim = self.batcher.youngest()
            self._preempt(victim, now_s)
            if victim is row:
                return
        row.blocks.append(self.pool.allocate_one())

    def _preempt(self, row: Row, now_s: float) -> None:
        """Preempt by recompute: the row waits again, in its order of arrival, for its prompt and what it had generated."""
        self._drop(row)
        row.num_preemptions += 1
        if row.preempted_at_s is None:
            row.preempted_at_s = now_s
        row.computed_tokens = 0
        row.target_tokens = row.request.input_tokens + row.generated_tokens
        row.blocks_needed = self.batcher.blocks_for(row.target_tokens + 1)
        if row.blocks_needed > self.pool.total:
            self._finish_outgrown(row, row.blocks_needed, now_s)
        else:
            self.batcher.enqueue(row)

    def _fail_outgrown(self, row: Row, blocks: int, now_s: float) -> None:
        self._drop(row)
        self._finish_outgrown(row, blocks, now_s)

    def _finish_outgrown(self, row: Row, blocks: int, now_s: float) -> None:
        self._finish(
            row, "failed", f"outgrew its instance: needs {blocks} blocks, an instance has {self.pool.total}", now_s
        )

    def _drop(self, row: Row) -> None:
        """Take a row that has not finished out of the batch and free its blocks."""
        if row.req_id in self.batcher.decoding and row.req_id not in self._joined:
            self._left.append(row.req_id)
        self._remove(row)

    def _remove(self, row: Row) -> None:
        if row.req_id in self._joined:
            self._joined.remove(row.req_id)
        if row.req_id in self.batcher.decoding:
            row.remote_wait_s += self._remote_wait_s - row.wait_mark_s
        self.batcher.leave(row)
        self.pool.release(row.blocks)
        row.blocks = []

    # ---- starting ------------------------------------------------------------------------------------------------------------
    def _replan(self, now_s: float) -> None:
        """Something changed: plan at the next boundary, or now where nothing runs."""
        if self._step is None:
            self._start_step(now_s)
        elif not self._step.cut:
            self._step.cut = True
            if self._step.command.max_iterations - self._step.done > 1:
                self._commands.append(CutIterations(self._step.command.step))

    def _start_step(self, now_s: float) -> None:
        chunks, decode = self.batcher.plan(now_s)
        if not chunks and not decode:
            return
        self._step_number += 1
        command = StartIterations(
            step=self._step_number,
            decode_rows=len(self.batcher.decoding) if decode else 0,
            decode_context_tokens=self.batcher.context_tokens if decode else 0,
            chunks=chunks,
            max_iterations=self.batcher.max_iterations() if self.limits.macro and not chunks else 1,
            joined=tuple(self._joined),
            left=tuple(self._left),
        )
        self._joined.clear()
        self._left.clear()
        self._step = _Step(command)
        self._commands.append(command)

    # ---- endings -------------------------------------------------------------------------------------------------------------
    def load_blocks(self) -> int:
        """KV blocks of running and waiting work."""
        return self.pool.local + self.batcher.waiting_blocks

    def _finish(self, row: Row, status: str, reason: str, now_s: float) -> None:
        self._commands.append(
            Finish(
                RequestOutcome(
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
            )
        )
        done = RequestDone(row.req_id, row.attempt, status, self._received, self.load_blocks())
        self._commands.append(Send(DISPATCHER, done))
