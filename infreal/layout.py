"""Where the KV of a step's rows lies, frozen when the step starts. The only reader of an RManager's tables.

A step runs on the placement it began with: blocks that a move commits meanwhile are remote from the next step on, and stay
readable until this one has ended (the fence). Decode rows only grow: blocks added during the step are taken over.
"""

from collections.abc import Sequence
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
    the request's next token · blocks: its KV blocks on this instance, in order of position · remote: what it reads elsewhere.
    """

    request: batching.Row
    position: int
    num_new: int
    yields: bool
    blocks: list[int]
    remote: LoanReads
    _num_seen: int

    @property
    def req_id(self) -> int:
        return self.request.req_id

    def num_local_tokens(self, block_tokens: int) -> int:
        """KV tokens on this instance, the new ones included."""
        return self.position + self.num_new - block_tokens * sum(num_blocks for _, num_blocks in self.remote)

    def advance(self) -> None:
        """The next iteration of a decode row."""
        self.position += 1
        added = self.request.blocks[self._num_seen :]
        self.blocks += added
        self._num_seen += len(added)


def freeze(manager: RManager, step: StartIterations) -> list[StepRow]:
    """The rows of a step that has just been started, in the order of a batch: those of one new token first."""
    remote: dict[int, LoanReads] = {}
    for loan, num_blocks in step.reads:
        req_id = manager.borrower.debtor.loans[loan].req_id
        remote[req_id] = (*remote.get(req_id, ()), (loan, num_blocks))

    def row(request: batching.Row, position: int, num_new: int, yields: bool) -> StepRow:
        blocks = [block for block in request.blocks if block != NO_BLOCK]
        return StepRow(request, position, num_new, yields, blocks, remote.get(request.req_id, ()), len(request.blocks))

    batcher = manager.batcher
    decoding = batcher.decoding.values() if step.decode_rows else ()
    prefilling = {request.req_id: request for request in batcher.prefilling}
    rows = [row(request, batcher.kv_tokens(request), 1, True) for request in decoding]
    rows += [row(prefilling[c.req_id], c.prefix_tokens, c.tokens, c.last) for c in step.chunks]
    return sorted(rows, key=lambda r: r.num_new > 1)


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


def reads_by_creditor(rows: Sequence[StepRow]) -> dict[int, Read]:
    """What the rows of a step read elsewhere."""
    found: dict[int, Read] = {}
    first = 0
    for row in rows:
        for creditor in dict.fromkeys(loan.creditor for loan, _ in row.remote):
            read = found.setdefault(creditor, Read())
            read.rows.append(
                ReadRow(row.num_new, tuple(entry for entry in row.remote if entry[0].creditor == creditor))
            )
            read.tokens += range(first, first + row.num_new)
        first += row.num_new
    return found


def lent_blocks(manager: RManager, reads: LoanReads) -> list[int]:
    """The blocks of a read that this creditor has agreed to serve, one loan after the other."""
    loans = manager.creditor.loans
    return [block for loan, num_blocks in reads for block in loans[loan].blocks[:num_blocks]]
