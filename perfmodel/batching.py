"""Continuous batching of one instance: which requests wait, prefill and decode, and which blocks they hold.

Owns rows, their block tables and the growth of decode rows. Knows no clock and no message: times are stamped by its owner.
A decode row's length is not stored but derived from the number of decode iterations since it joined, so that one iteration,
or a thousand, costs O(changes): the rows that join or leave and the blocks that are added, never O(batch).
"""

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter
from typing import Protocol

from perfmodel.blocks import BlockPool
from perfmodel.errors import InputError
from perfmodel.messages import Chunk, Request

NO_BLOCK = -1  # block-table entry of a block that is on another instance, or not computed yet

_by_sequence = attrgetter("sequence")


@dataclass(slots=True, eq=False)
class Row:
    """One attempt of a request on an instance.

    Before it decodes, `target_tokens` must be computed: its prompt, and after a preemption also what it had generated.
    """

    request: Request
    attempt: int
    sequence: int  # arrival order at the dispatcher; the latest is preempted first
    received_s: float
    target_tokens: int
    blocks_needed: int  # to be admitted: target + 1 tokens
    blocks: list[int] = field(default_factory=list)  # block table, in order of position; NO_BLOCK: not here
    spare: list[int] = field(default_factory=list)  # local blocks of a prompt larger than the instance, to compute into
    fenced: list[int] = field(default_factory=list)  # … that become spare when the running step has ended
    remote_blocks: int = 0
    streams: bool = False  # its sealed blocks leave while its prompt is computed
    computed_tokens: int = 0
    generated_tokens: int = 0  # when it joined the decode batch
    joined_at: int = 0  # Batcher.counter when it joined …
    joined_tokens: int = 0  # … and its context then
    admitted_s: float | None = None
    first_token_s: float | None = None
    num_preemptions: int = 0
    preempted_at_s: float | None = None
    preempted_s: float = 0.0
    wait_mark_s: float = 0.0  # the instance's cumulative remote wait when it joined
    remote_wait_s: float = 0.0
    remote_tokens_max: int = 0
    req_id: int = field(init=False)

    def __post_init__(self) -> None:
        self.req_id = self.request.req_id

    @property
    def remaining_tokens(self) -> int:
        """Prompt tokens still to compute."""
        return self.target_tokens - self.computed_tokens

    def local_blocks(self) -> list[int]:
        """Blocks of this instance's pool that the row owns."""
        return [block for block in self.blocks if block != NO_BLOCK] + self.spare + self.fenced


@dataclass(frozen=True, slots=True)
class Plan:
    """What a batching policy decides for the next step.

    admit: req_ids to take from the waiting queue, in order · chunks: (req_id, tokens) of admitted prompts to compute in this
    iteration · decode: whether the decode batch takes part.
    """

    admit: Sequence[int] = ()
    chunks: Sequence[tuple[int, int]] = ()
    decode: bool = True


@dataclass(frozen=True, slots=True)
class BatchView:
    """What a batching policy may see. `prefilling` and `waiting` are in order of arrival."""

    token_budget: int
    block_tokens: int
    max_new_rows: int
    free_blocks: int
    headroom_blocks: int
    num_decode_rows: int
    prefilling: Sequence[Row]
    waiting: Sequence[Row]

    def computable_tokens(self, row: Row) -> int:
        """Prompt tokens of a row that can be computed now: those that remain, or as many as there is local room for."""
        if not row.streams:
            return row.remaining_tokens
        begun = -row.computed_tokens % self.block_tokens  # room in the block that the last chunk ended in
        room = begun + len(row.spare) * self.block_tokens - 1  # one is kept for the next token
        return min(row.remaining_tokens, max(0, room))

    def admissible(self) -> Iterator[Row]:
        """Waiting rows that fit together, first come first served: it ends at the first one that does not fit.

        Headroom is kept back for growth, except where the instance is idle (so every prompt is admitted in finite time).
        """
        room = self.free_blocks
        idle = not self.num_decode_rows and not self.prefilling
        for row in self.waiting[: self.max_new_rows]:
            if row.blocks_needed > (room if idle else room - self.headroom_blocks):
                return
            room -= row.blocks_needed
            idle = False
            yield row


class BatchingPolicy(Protocol):
    """Decides who runs next. `first_come`: a request is never admitted before an earlier one (lets a step run on when another
    request arrives behind a waiting one)."""

    first_come: bool

    def plan(self, view: BatchView) -> Plan: ...


@dataclass(frozen=True, slots=True)
class BatchLimits:
    block_tokens: int
    token_budget: int
    max_batch: int | None
    headroom_blocks: int


class Batcher:
    """The rows of one instance. Every method leaves the block accounting exact."""

    def __init__(self, pool: BlockPool, limits: BatchLimits, policy: BatchingPolicy) -> None:
        self.pool = pool
        self.limits = limits
        self.policy = policy
        self.waiting: list[Row] = []
        self.prefilling: list[Row] = []
        self.decoding: dict[int, Row] = {}
        self.barrier: int | None = None  # sequence of a request that waits for room elsewhere: admit none behind it
        self.waiting_blocks = 0
        self.counter = 0  # decode iterations done
        self.remote_tokens = 0  # tokens of the decode batch's context that are on other instances
        self.context_tokens = 0  # tokens the decode batch reads in its next iteration, the new ones included
        # heap of (−local context less the counter, req_id); may be out of date
        self._longest: list[tuple[int, int]] = []
        self._grows_at: list[dict[int, Row]] = [{} for _ in range(limits.block_tokens)]

    # ---- waiting rows --------------------------------------------------------------------------------------------------------
    def enqueue(self, row: Row) -> None:
        insort(self.waiting, row, key=_by_sequence)
        self.waiting_blocks += row.blocks_needed

    def dequeue(self, row: Row) -> None:
        self.waiting.remove(row)
        self.waiting_blocks -= row.blocks_needed

    def lacks_room(self) -> bool:
        """Whether the first waiting row finds too few free blocks beside those kept back for growth."""
        return bool(self.waiting) and self.waiting[0].blocks_needed > self.pool.free - self.limits.headroom_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.limits.block_tokens)

    # ---- planning ------------------------------------------------------------------------------------------------------------
    def view(self) -> BatchView:
        limits = self.limits
        rows = len(self.prefilling) + len(self.decoding)
        return BatchView(
            token_budget=limits.token_budget,
            block_tokens=limits.block_tokens,
            max_new_rows=len(self.waiting) if limits.max_batch is None else max(0, limits.max_batch - rows),
            free_blocks=self.pool.free,
            headroom_blocks=limits.headroom_blocks,
            num_decode_rows=len(self.decoding),
            prefilling=self.prefilling,
            waiting=self.waiting
            if self.barrier is None
            else self.waiting[: bisect_right(self.waiting, self.barrier, key=_by_sequence)],
        )

    def plan(self, now_s: float) -> tuple[tuple[Chunk, ...], bool]:
        """Ask the policy, admit whom it names, and return the chunks and whether the decode batch runs."""
        if not self.waiting and not self.prefilling:
            return (), bool(self.decoding)
        view = self.view()
        plan = self.policy.plan(view)
        for req_id in plan.admit:
            self._admit(req_id, now_s)
        return self._chunks(plan.chunks, view), plan.decode and bool(self.decoding)

    def _admit(self, req_id: int, now_s: float) -> None:
        row = next((r for r in self.waiting if r.req_id == req_id), None)
        if row is None:
            raise InputError(f"batching policy admits request {req_id}, which is not waiting")
        if row.blocks_needed > self.pool.free:
            raise InputError(
                f"batching policy admits request {req_id}: it needs {row.blocks_needed} blocks, {self.pool.free} are free"
            )
        self.dequeue(row)
        row.blocks = self.pool.allocate(row.blocks_needed)
        if row.admitted_s is None:
            row.admitted_s = now_s
        self.prefilling.append(row)

    def _chunks(self, planned: Sequence[tuple[int, int]], view: BatchView) -> tuple[Chunk, ...]:
        if not planned:
            return ()
        rows = {row.req_id: row for row in self.prefilling}
        chunks = []
        for req_id, tokens in planned:
            row = rows.pop(req_id, None)
            limit = 0 if row is None else view.computable_tokens(row)
            if row is None or not 1 <= tokens <= limit:
                raise InputError(
                    f"batching policy gives request {req_id} a chunk of {tokens} tokens (allowed: 1 to {limit}, of prompts "
                    "that are admitted)"
                )
            self._place_chunk(row, tokens)
            remote_tokens = row.remote_blocks * self.limits.block_tokens
            chunks.append(Chunk(req_id, tokens, row.computed_tokens, tokens == row.remaining_tokens, remote_tokens))
        return tuple(chunks)

    def _place_chunk(self, row: Row, tokens: int) -> None:
        """Give the blocks that a chunk will fill their place in the table, where the row does not hold them all yet."""
        if not row.streams:
            return
        for position in range(self.blocks_for(row.computed_tokens), self.blocks_for(row.computed_tokens + tokens)):
            row.blocks[position] = row.spare.pop()
        if tokens == row.remaining_tokens and row.blocks[-1] == NO_BLOCK:
            row.blocks[-1] = row.spare.pop()  # for the next token

    def unplace(self, chunk: Chunk) -> None:
        """A chunk was not computed after all: its blocks can be filled by another one."""
        row = next((r for r in self.prefilling if r.req_id == chunk.req_id), None)
        if row is not None and row.streams:
            for position in range(self.blocks_for(row.computed_tokens), len(row.blocks)):
                if row.blocks[position] != NO_BLOCK:
                    row.spare.append(row.blocks[position])
                    row.blocks[position] = NO_BLOCK

    # ---- a step's progress ---------------------------------------------------------------------------------------------------
    def max_iterations(self) -> int:
        """Decode iterations that can run before a row lacks a block: the rows due at each boundary fit in what is free."""
        rows, free = len(self.decoding), self.pool.free
        size = self.limits.block_tokens
        cycles, free = divmod(free, rows)
        iterations = 1 + cycles * size
        for i in range(1, size + 1):
            free -= len(self._grows_at[(self.counter + i) % size])
            if free < 0:
                break
            iterations += 1
        return iterations

    def advance(self, num_iterations: int) -> None:
        """`num_iterations` decode iterations are done. Blocks of the last boundary are not added yet: see `grow`."""
        size, allocate = self.limits.block_tokens, self.pool.allocate
        for phase in range(self.counter + 1, self.counter + min(num_iterations, size + 1)):
            blocks = 1 + (self.counter + num_iterations - 1 - phase) // size
            for row in self._grows_at[phase % size].values():
                row.blocks += allocate(blocks)
        self.counter += num_iterations
        self.context_tokens += num_iterations * len(self.decoding)

    def due(self) -> dict[int, Row]:
        """Rows that need one more block before the next decode iteration."""
        return self._grows_at[self.counter % self.limits.block_tokens]

    def grow(self, counter: int) -> None:
        """Add a block to every row that is due at `counter`. The caller knows that they fit."""
        allocate = self.pool.allocate_one
        for row in self._grows_at[counter % self.limits.block_tokens].values():
            row.blocks.append(allocate())

    def compute(self, chunk: Chunk) -> Row | None:
        """A prompt chunk is done. Returns its row where it was the last one."""
        row = next(r for r in self.prefilling if r.req_id == chunk.req_id)
        row.computed_tokens += chunk.tokens
        return row if chunk.last else None

    # ---- joining and leaving -------------------------------------------------------------------------------------------------
    def join(self, row: Row) -> None:
        """A row whose prompt is computed, its next token out, begins to decode."""
        self.prefilling.remove(row)
        row.streams = False
        row.generated_tokens += 1
        self.resume(row, row.target_tokens)

    def resume(self, row: Row, context_tokens: int) -> None:
        """A row with `context_tokens` tokens of KV, and room for the next, decodes (again)."""
        row.joined_at, row.joined_tokens = self.counter, context_tokens
        self.decoding[row.req_id] = row
        self.context_tokens += context_tokens + 1
        self.remote_tokens += row.remote_blocks * self.limits.block_tokens
        self._grows_at[self._growth_phase(row)][row.req_id] = row
        self._note_length(row)

    def leave(self, row: Row) -> None:
        """Take a running row out of the batch; its blocks stay with it until the caller releases them."""
        if row.req_id not in self.decoding:
            self.prefilling.remove(row)
            return
        self.context_tokens -= self._context(row) + 1
        del self.decoding[row.req_id]
        del self._grows_at[self._growth_phase(row)][row.req_id]
        self.remote_tokens -= row.remote_blocks * self.limits.block_tokens
        row.generated_tokens += self.counter - row.joined_at
        row.computed_tokens = row.joined_tokens + self.counter - row.joined_at

    def _context(self, row: Row) -> int:
        return row.joined_tokens + self.counter - row.joined_at

    def kv_tokens(self, row: Row) -> int:
        """Tokens whose KV a running row has, here and elsewhere."""
        return self._context(row) if row.req_id in self.decoding else row.computed_tokens

    def count_remote(self, row: Row, num_blocks: int) -> None:
        """`num_blocks` more (or fewer) of a row's blocks are on other instances."""
        row.remote_blocks += num_blocks
        if row.req_id in self.decoding:
            self.remote_tokens += num_blocks * self.limits.block_tokens
            self._note_length(row)

    def _length(self, row: Row) -> int:
        """Tokens a decode row reads here in its next iteration, less the counter: it does not change while the row decodes."""
        return row.joined_tokens + 1 - row.joined_at - row.remote_blocks * self.limits.block_tokens

    def _note_length(self, row: Row) -> None:
        heappush(self._longest, (-self._length(row), row.req_id))

    def longest_tokens(self) -> int:
        """Tokens that the longest row of the decode batch reads here in its next iteration."""
        heap = self._longest
        while heap:
            row = self.decoding.get(heap[0][1])
            if row is not None and -self._length(row) == heap[0][0]:
                return self.counter - heap[0][0]
            heappop(heap)
        return 0

    def youngest(self) -> Row:
        """The running row that arrived last: the one to preempt."""
        return max([*self.prefilling, *self.decoding.values()], key=_by_sequence)

    def _growth_phase(self, row: Row) -> int:
        """`counter` (modulo the block size) at which the row's context fills its last block."""
        return (row.joined_at - row.joined_tokens) % self.limits.block_tokens

    def check_invariants(self) -> None:
        """Rows hold exactly the blocks their tokens need; sums agree with the rows."""
        context = sum(self._context(r) + 1 for r in self.decoding.values())
        assert context == self.context_tokens, f"context {self.context_tokens}, rows sum to {context}"
        longest = max((self._length(r) + self.counter for r in self.decoding.values()), default=0)
        assert longest == self.longest_tokens(), f"longest row {self.longest_tokens()}, rows say {longest}"
        remote = sum(r.remote_blocks for r in self.decoding.values()) * self.limits.block_tokens
        assert remote == self.remote_tokens, f"remote context {self.remote_tokens}, rows sum to {remote}"
        assert self.waiting_blocks == sum(r.blocks_needed for r in self.waiting)
        assert sum(map(len, self._grows_at)) == len(self.decoding)
        assert all(not row.local_blocks() for row in self.waiting), "a waiting row holds blocks"
        for row in self.decoding.values():
            tokens = self._context(row) + 1
            assert len(row.blocks) == self.blocks_for(tokens), (
                f"request {row.req_id}: {len(row.blocks)} blocks for {tokens} tokens"
            )
            assert row.blocks.count(NO_BLOCK) == row.remote_blocks, f"request {row.req_id} lacks a block"
        held = [b for row in [*self.prefilling, *self.decoding.values()] for b in row.local_blocks()]
        assert len(held) == len(set(held)), "a block belongs to two rows"
