"""Where the KV of a step's rows lies, frozen when the step starts. The only reader of an RManager's tables.

A step runs on the placement it began with: blocks that a move commits meanwhile are remote from the next step on, and stay
readable until this one has ended (the fence). Decode rows only grow: blocks added during the step are taken over (`Frozen.added`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perfmodel import batching
from perfmodel.batching import NO_BLOCK
from perfmodel.messages import LoanId, StartIterations
from perfmodel.rmanager import RManager

LoanReads = tuple[tuple[LoanId, int], ...]  # (loan, its first so many blocks)


@dataclass(slots=True)
class StepRow:
    """One request in a step.

    position: global position of its next new token · num_new: new tokens of an iteration (decode: 1) · yields: whether they give
    the request's next token · blocks: its KV blocks on this instance, in order of position · num_remote_blocks: held elsewhere.
    """

    req_id: int
    position: int
    num_new: int
    yields: bool
    blocks: list[int]
    num_remote_blocks: int

    def num_local_tokens(self, block_tokens: int) -> int:
        """KV tokens on this instance, the new ones included."""
        return self.position + self.num_new - block_tokens * self.num_remote_blocks


@dataclass(slots=True)
class Frozen:
    """A step that has just been started: its rows, in the order of a batch, and what they read at each creditor."""

    step: StartIterations
    rows: list[StepRow]
    reads: "dict[int, Read]"
    _requests: list[batching.Row]
    _num_seen: list[int]

    def added(self) -> list[list[int]]:
        """The blocks that each row has got since this was asked last."""
        found = [request.blocks[seen:] for request, seen in zip(self._requests, self._num_seen, strict=True)]
        self._num_seen = [seen + len(blocks) for seen, blocks in zip(self._num_seen, found, strict=True)]
        return found


def freeze(manager: RManager, step: StartIterations) -> Frozen:
    remote: dict[int, LoanReads] = {}
    for loan, num_blocks in step.reads:
        req_id = manager.borrower.debtor.loans[loan].req_id
        remote[req_id] = (*remote.get(req_id, ()), (loan, num_blocks))

    def row(request: batching.Row, position: int, num_new: int, yields: bool) -> StepRow:
        blocks = [block for block in request.blocks if block != NO_BLOCK]
        num_remote = sum(num_blocks for _, num_blocks in remote.get(request.req_id, ()))
        return StepRow(request.req_id, position, num_new, yields, blocks, num_remote)

    batcher = manager.batcher
    decoding = batcher.decoding.values() if step.decode_rows else ()
    prefilling = {request.req_id: request for request in batcher.prefilling}
    found = [(request, row(request, batcher.kv_tokens(request), 1, True)) for request in decoding]
    for chunk in step.chunks:
        request = prefilling[chunk.req_id]
        found.append((request, row(request, chunk.prefix_tokens, chunk.tokens, chunk.last)))
    found.sort(key=lambda pair: pair[1].num_new > 1)  # rows of one new token first
    requests, rows = [request for request, _ in found], [row for _, row in found]
    return Frozen(step, rows, reads_by_creditor(rows, remote), requests, [len(request.blocks) for request in requests])


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A row of a read, as its creditor is told once a step: its query tokens, and the blocks they see there."""

    num_tokens: int
    reads: LoanReads


@dataclass(slots=True)
class Read:
    """What a step reads at one creditor. tokens: which tokens of the batch they are the queries of."""

    rows: list[ReadRow] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def loans(self) -> LoanReads:
        return tuple(entry for row in self.rows for entry in row.reads)


def reads_by_creditor(rows: Sequence[StepRow], remote: Mapping[int, LoanReads]) -> dict[int, Read]:
    """What the rows of a step read elsewhere. remote: by request."""
    found: dict[int, Read] = {}
    first = 0
    for row in rows:
        reads = remote.get(row.req_id, ())
        for creditor in dict.fromkeys(loan.creditor for loan, _ in reads):
            read = found.setdefault(creditor, Read())
            read.rows.append(ReadRow(row.num_new, tuple(entry for entry in reads if entry[0].creditor == creditor)))
            read.tokens += range(first, first + row.num_new)
        first += row.num_new
    return dict(sorted(found.items()))


def lent_blocks(manager: RManager, reads: LoanReads) -> list[int]:
    """The blocks of a read that this creditor has agreed to serve, one loan after the other."""
    loans = manager.creditor.loans
    return [block for loan, num_blocks in reads for block in loans[loan].blocks[:num_blocks]]
