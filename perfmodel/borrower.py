"""Borrower: ties an instance's requests to its loans. Carries out orders, streams sealed blocks away, commits, takes back.

The `Debtor` knows what has become of each loan; here it is decided what that means for the rows and blocks of the instance.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from perfmodel.batching import NO_BLOCK, Row
from perfmodel.debtor import Change, Debtor
from perfmodel.loan import Cause, DebtorLoan, State
from perfmodel.messages import (
    Address,
    Chunk,
    CreditorLedger,
    LoanId,
    MoveKvCache,
    OrderId,
    Preempt,
    RecordMove,
    Send,
    StartFetch,
    StartTransfer,
    Store,
    TransferDone,
    TransferId,
)
from perfmodel.view import RemoteRead, SchedulerParams

if TYPE_CHECKING:
    from perfmodel.rmanager import RManager

MAX_STORE_BLOCKS = 64  # blocks of one Store: commits come in steps, and a lost transfer repeats little
MIN_LOCAL_BLOCKS = 2  # of a prompt that streams: one that fills up, and one for the token after it


class Borrower:
    """The borrowing side of an RManager."""

    def __init__(self, owner: "RManager", params: SchedulerParams) -> None:
        self.owner = owner
        self.params = params
        self.debtor = Debtor(owner.instance, owner.incarnation, params)
        self.granting: dict[int, Row] = {}  # prompts whose capacity loans are not all listed yet
        self.suspended: dict[int, Row] = {}  # decode rows that wait for a block
        self.outcomes: list[tuple[OrderId, str]] = []  # for the next heartbeat
        self.open_order: OrderId | None = None  # the capacity order being granted …
        self._open_request = -1  # … and its request
        self._highest_order = OrderId(0, 0)
        self._sending: dict[TransferId, tuple[int, ...]] = {}
        self._fetching: dict[TransferId, list[int]] = {}
        self._changed = True  # something may be ready to send or to settle

    @property
    def has_news(self) -> bool:
        """Orders that the gManager may wait to hear of."""
        return bool(self.outcomes) or self.open_order is not None

    # ---- orders --------------------------------------------------------------------------------------------------------------
    def on_order(self, order: MoveKvCache, now_s: float) -> None:
        self._changed = True
        reason = self._refusal(order.order, order.heartbeat, now_s) or self._lend(order, now_s)
        if reason:
            self.outcomes.append((order.order, reason))
            self._record_refused(order, now_s)
        elif order.kind == "throughput":
            self.outcomes.append((order.order, "accepted"))

    def _refusal(self, order: OrderId, heartbeat: int, now_s: float) -> str:
        """Why an order is not even looked at; "" where it is."""
        if order <= self._highest_order:
            return "an order after it was handled"
        self._highest_order = order
        reporter = self.owner.reporter
        if reporter is None or self._expired(reporter.age_s(heartbeat, now_s)):
            return "it rests on a heartbeat that is too old"
        return ""

    def note_gmanager(self, incarnation: int) -> None:
        """Orders of gManagers before this one are refused from now on."""
        self._highest_order = max(self._highest_order, OrderId(incarnation, 0))

    def _expired(self, age_s: float) -> bool:
        return age_s > self.params.order_ttl_s

    def _lend(self, order: MoveKvCache, now_s: float) -> str:
        """Open the loans of an order. Returns why not, or ""."""
        if any(c == self.owner.instance or not self.debtor.knows(c, i) for c, i, _ in order.parts):
            return "a creditor is of another incarnation"
        for creditor, incarnation, _ in order.parts:
            self._act(self.debtor.note_incarnation(creditor, incarnation), now_s)
        row = self.owner.running(order.req_id) or self.suspended.get(order.req_id)
        if row is not None:
            positions = self.movable_positions(row)
        elif order.kind == "capacity":
            row = next((r for r in self.owner.batcher.waiting if r.req_id == order.req_id), None)
            if row is None or not self._make_room(row, _num_blocks(order)):
                return "the request has no room here"
            positions = list(range(_num_blocks(order)))
        else:
            return "the request is not running"
        return self._open_loans(row, order, positions, now_s)

    def _open_loans(self, row: Row, order: MoveKvCache, positions: Sequence[int], now_s: float) -> str:
        if _num_blocks(order) > len(positions):
            return "too few sealed blocks"
        for creditor, part in _by_creditor(order, positions).items():
            self.debtor.open(creditor, row.req_id, part, (order.kind, now_s), now_s)
        if row.req_id in self.granting:
            self.open_order, self._open_request = order.order, row.req_id
        elif order.kind == "capacity":
            self.outcomes.append((order.order, "accepted"))
        return ""

    def movable_positions(self, row: Row) -> list[int]:
        """Sealed, local blocks of a row that no loan has been promised, first ones first."""
        sealed = self.owner.batcher.kv_tokens(row) // self.owner.limits.batch.block_tokens
        pledged = self._promised(row)
        return [p for p in range(sealed) if row.blocks[p] != NO_BLOCK and p not in pledged]

    def _promised(self, row: Row) -> set[int]:
        loans = self.debtor.by_request.get(row.req_id, ())
        return {p for loan in loans for p in loan.positions[loan.committed : loan.target]}

    def num_movable(self, row: Row) -> int:
        """len(movable_positions(row)), without looking at each."""
        sealed = self.owner.batcher.kv_tokens(row) // self.owner.limits.batch.block_tokens
        loans = self.debtor.by_request.get(row.req_id, ())
        return max(0, sealed - sum(loan.target for loan in loans))

    def _make_room(self, row: Row, num_remote: int) -> bool:
        """Take a waiting prompt's local blocks; its first `num_remote` ones will be elsewhere. False where there is no room."""
        owner = self.owner
        local = row.blocks_needed - num_remote
        if not MIN_LOCAL_BLOCKS <= local <= owner.pool.free:
            return False
        owner.batcher.dequeue(row)
        row.blocks = [NO_BLOCK] * row.blocks_needed
        row.spare = owner.pool.allocate(local)
        row.streams = True
        self.granting[row.req_id] = row
        return True

    def _record_refused(self, order: MoveKvCache, now_s: float) -> None:
        for (creditor, _), positions in _by_creditor(order, range(_num_blocks(order))).items():
            self.owner.commands.append(
                RecordMove(
                    None,
                    order.req_id,
                    self.owner.instance,
                    creditor,
                    len(positions),
                    order.kind,
                    now_s,
                    None,
                    None,
                    "refused",
                )
            )

    def on_preempt(self, order: Preempt, now_s: float) -> None:
        reason = self._refusal(order.order, order.heartbeat, now_s)
        if not reason and self.owner.running(order.req_id) is not None:
            self.owner.leaving.setdefault(order.req_id, "preempted")
            self.owner.replan()
        elif not reason and order.req_id in self.suspended:
            self._preempt_suspended(self.suspended.pop(order.req_id), now_s)
        elif not reason and order.req_id in self.granting:
            self._requeue(order.req_id)
        self.outcomes.append((order.order, reason or "accepted"))

    # ---- answers -------------------------------------------------------------------------------------------------------------
    def on_answer(self, creditor: Address, answer: CreditorLedger, now_s: float) -> None:
        self._act(self.debtor.on_answer(creditor, answer), now_s)

    def on_peer_lost(self, peer: Address, now_s: float) -> None:
        self._act(self.debtor.lose_peer(peer, gone=True), now_s)

    def expire(self, now_s: float) -> None:
        self._act(self.debtor.expire(now_s), now_s)

    def _act(self, changes: Sequence[Change], now_s: float) -> None:
        self._changed = True
        for cause, loan, stored in changes:
            if loan.id not in self.debtor.loans and cause != Cause.LOST:
                continue  # it went with another one of its request
            if cause == Cause.STORED:
                self._commit(loan, stored, now_s)
            elif cause == Cause.KEEP:
                self._recall(loan, now_s)
            elif cause == Cause.LOST:
                self._lost(loan, now_s)
            elif cause == Cause.LISTED:
                self._granted(loan, now_s)

    def _commit(self, loan: DebtorLoan, stored: int, now_s: float) -> None:
        """Remote from the next iteration on; the local copies go, behind the running step."""
        row = self._row(loan.req_id)
        assert row is not None, f"{loan} commits for a request that has ended"
        positions = self.debtor.commit(loan, stored, now_s)
        blocks = [row.blocks[p] for p in positions]
        assert NO_BLOCK not in blocks, f"{loan}: a block is committed twice"
        for p in positions:
            row.blocks[p] = NO_BLOCK
        self.owner.batcher.count_remote(row, len(blocks))
        row.remote_tokens_max = max(row.remote_tokens_max, row.remote_blocks * self.owner.limits.batch.block_tokens)
        self._let_go(row, blocks)
        self.owner.replan()

    def _let_go(self, row: Row, blocks: list[int]) -> None:
        if row.streams:
            (row.fenced if self.owner.step else row.spare).extend(blocks)
        else:
            self.owner.pool.release(blocks, fence=self.owner.step is not None)
            if self.owner.step:
                self.owner.fenced += blocks

    def _granted(self, loan: DebtorLoan, now_s: float) -> None:
        row = self.granting.get(loan.req_id)
        if row is None or not self._is_granted(self.debtor.by_request[loan.req_id]):
            return
        del self.granting[loan.req_id]
        if row.admitted_s is None:
            row.admitted_s = now_s
        self.owner.batcher.prefilling.append(row)
        self._close_order("accepted")
        self.owner.replan()

    def _is_granted(self, loans: Iterable[DebtorLoan]) -> bool:
        """A prompt starts when every one of its loans is listed."""
        return all(loan.listed for loan in loans)

    def _close_order(self, outcome: str) -> None:
        if self.open_order is not None:
            self.outcomes.append((self.open_order, outcome))
            self.open_order = None

    def _lost(self, loan: DebtorLoan, now_s: float) -> None:
        """Requests that had data or a grant there start again."""
        if loan.req_id in self.granting:
            self._requeue(loan.req_id)
        elif loan.target and (loan.committed or loan.capacity):
            self._start_again(loan.req_id, now_s)

    def _start_again(self, req_id: int, now_s: float) -> None:
        if req_id in self.suspended:
            self._preempt_suspended(self.suspended.pop(req_id), now_s)
        elif self.owner.running(req_id) is not None:
            self.owner.leaving.setdefault(req_id, "preempted")
            self.owner.replan()

    def _requeue(self, req_id: int) -> None:
        row = self.withdraw(req_id)
        assert row is not None
        self.owner.batcher.enqueue(row)
        self.owner.replan()

    def withdraw(self, req_id: int) -> Row | None:
        """Take back a prompt whose grant is not complete (all or nothing), or a row that waits for a block."""
        row = self.granting.pop(req_id, None)
        if row is not None:
            self._close_order("refused")
        row = row or self.suspended.pop(req_id, None)
        if row is not None:
            self.owner.release(row)
        return row

    # ---- reclaim and move-back -----------------------------------------------------------------------------------------------
    def _recall(self, loan: DebtorLoan, now_s: float) -> None:
        """The creditor wants memory back: give up what is not committed; fetch the rest, or start again."""
        if not loan.target or loan.fetch:
            return
        if loan.target > max(loan.committed, loan.keep) and not loan.capacity:
            self.debtor.shrink_uncommitted(loan)
        if loan.capacity or (loan.committed > loan.keep and not self._fetch(loan, loan.keep)):
            self._start_again(loan.req_id, now_s)

    def _fetch(self, loan: DebtorLoan, first: int) -> bool:
        """Read positions `first` … back into local blocks. False where there is no room."""
        owner, count = self.owner, loan.committed - first
        if count > owner.pool.free or loan.req_id in owner.leaving or self._row(loan.req_id) is None:
            return False
        blocks = owner.pool.allocate(count)
        transfer = loan.fetch = self.debtor.new_transfer()
        loan.fetch_from = first
        self._fetching[transfer] = blocks
        owner.commands.append(StartFetch(transfer, loan.id, loan.id.creditor, first, tuple(blocks)))
        return True

    def move_back(self, loan: DebtorLoan) -> bool:
        """Take a whole loan back, to where it is no longer waited for."""
        if loan.fetch or loan.state != State.HELD:
            return False
        return self._fetch(loan, 0)

    def _end_fetch(self, event: TransferDone, now_s: float) -> None:
        blocks = self._fetching.pop(event.transfer)
        loan = self.debtor.loans.get(event.loan)
        row = None if loan is None else self._row(loan.req_id)
        if loan is not None and loan.fetch == event.transfer:
            if event.ok and row is not None and loan.target > loan.fetch_from:
                for p, block in zip(loan.positions[loan.fetch_from : loan.committed], blocks, strict=True):
                    row.blocks[p] = block
                self.owner.batcher.count_remote(row, -len(blocks))
                self._record_back(loan, len(blocks), now_s)
                blocks = []
                self.owner.replan()
            if event.ok:
                self.debtor.fetched(loan)
            else:
                loan.fetch = None
        self.owner.pool.release(blocks)
        if loan is not None and event.stale:
            self._act([self.debtor.lose(loan)], now_s)
        elif loan is not None and loan.committed > loan.keep:
            self._recall(loan, now_s)

    def _record_back(self, loan: DebtorLoan, count: int, now_s: float) -> None:
        kind = "reclaim" if loan.keep < loan.committed else "back"
        src, dst = loan.id.creditor, self.owner.instance
        self.owner.commands.append(
            RecordMove(loan.id, loan.req_id, src, dst, count, kind, now_s, now_s, now_s, "committed")
        )

    # ---- transfers -----------------------------------------------------------------------------------------------------------
    def on_transfer_done(self, event: TransferDone, now_s: float) -> None:
        self._changed = True
        if event.transfer in self._fetching:
            self._end_fetch(event, now_s)
            return
        self._unpin(event.transfer)
        loan = self.debtor.loans.get(event.loan)
        if loan is not None:
            self.debtor.stored_by(loan, event.transfer, event.ok)

    def on_refused(self, transfer: TransferId) -> None:
        """No receive was posted: send again from what is committed."""
        self._changed = True
        self._unpin(transfer)
        for loan in self.debtor.loans.values():
            self.debtor.stored_by(loan, transfer, ok=False)

    def _unpin(self, transfer: TransferId) -> None:
        self.owner.pool.unpin(self._sending.pop(transfer, ()))

    def _pump(self) -> None:
        """Send what is sealed and granted, one transfer a loan."""
        sealed: dict[int, int] = {}  # blocks, by request
        for loan in self.debtor.loans.values():
            if loan.listed and not loan.transfer and loan.sent < loan.target:
                if loan.req_id not in sealed:
                    sealed[loan.req_id] = self._sealed_blocks(loan.req_id)
                if loan.positions[loan.sent] < sealed[loan.req_id]:  # positions ascend
                    self._store(loan, sealed[loan.req_id])

    def _sealed_blocks(self, req_id: int) -> int:
        """Full blocks of a request that runs or waits for a block."""
        row = self._row(req_id)
        return 0 if row is None else self.owner.batcher.kv_tokens(row) // self.owner.limits.batch.block_tokens

    def _store(self, loan: DebtorLoan, sealed: int) -> None:
        row = self._row(loan.req_id)
        assert row is not None, f"{loan} sends blocks of a request that does not run"
        positions = loan.positions[loan.sent : min(loan.target, loan.sent + MAX_STORE_BLOCKS)]
        blocks = tuple(row.blocks[p] for p in positions if p < sealed)
        assert NO_BLOCK not in blocks, f"{loan} sends a block that is not here"
        transfer = loan.transfer = self.debtor.new_transfer()
        self._sending[transfer] = blocks
        self.owner.pool.pin(blocks)
        creditor = loan.id.creditor
        pace = 0 if row.streams else self.params.move_tokens_per_iteration
        store = Store(transfer, loan.id, loan.sent, len(blocks))
        self.owner.commands += [Send(creditor, store), StartTransfer(transfer, loan.id, creditor, blocks, pace)]
        loan.sent += len(blocks)

    # ---- the running step ----------------------------------------------------------------------------------------------------
    def reads(self, decode: bool, chunk_ids: Sequence[int]) -> dict[LoanId, int]:
        """(loan, num_blocks) that the next step reads."""
        if not self.debtor.by_request:
            return {}
        batcher = self.owner.batcher
        rows = [r for r in self.debtor.by_request if (decode and r in batcher.decoding) or r in chunk_ids]
        loans = [loan for req_id in rows for loan in self.debtor.by_request[req_id] if loan.readable]
        return {loan.id: loan.readable for loan in loans}

    def remote_reads(self) -> tuple[RemoteRead, ...]:
        """What the decode batch reads elsewhere, by creditor."""
        if not self.debtor.by_request:
            return ()
        sums: dict[int, list[int]] = {}
        for req_id, loans in self.debtor.by_request.items():
            if req_id not in self.owner.batcher.decoding:
                continue
            for creditor in dict.fromkeys(loan.id.creditor for loan in loans if loan.readable):
                entry = sums.setdefault(creditor, [0, 0])
                entry[0] += 1
                entry[1] += sum(loan.readable for loan in loans if loan.id.creditor == creditor)
        size = self.owner.limits.batch.block_tokens
        return tuple(RemoteRead(creditor, rows, blocks * size) for creditor, (rows, blocks) in sorted(sums.items()))

    def chunk_reads(self, chunks: Sequence[Chunk]) -> tuple[RemoteRead, ...]:
        """What the queries of prompt chunks read elsewhere: `rows` are query tokens."""
        size = self.owner.limits.batch.block_tokens
        return tuple(
            RemoteRead(loan.id.creditor, chunk.tokens, loan.readable * size)
            for chunk in chunks
            for loan in self.debtor.by_request.get(chunk.req_id, ())
            if loan.readable
        )

    def in_use(self, loan: DebtorLoan) -> int:
        """The fence: positions of the loan that the running step reads."""
        return self.owner.step.reads.get(loan.id, 0) if self.owner.step else 0

    def on_boundary(self, stale: Sequence[LoanId], now_s: float) -> None:
        """The step has ended: blocks it may have used are spare, and loans that were not served are gone."""
        for row in self.owner.batcher.prefilling:
            if row.fenced:
                row.spare += row.fenced
                row.fenced = []
        self._act([self.debtor.lose(self.debtor.loans[i]) for i in stale if i in self.debtor.loans], now_s)

    # ---- rows that wait for a block ------------------------------------------------------------------------------------------
    def can_suspend(self, row: Row) -> bool:
        """Whether a row that cannot grow should wait for room elsewhere: there is a pool, and it runs alone."""
        batcher = self.owner.batcher
        return self.owner.limits.scheduler is not None and len(batcher.decoding) == 1 and not batcher.prefilling

    def suspend(self, row: Row) -> None:
        self.owner.suspend(row)
        self.suspended[row.req_id] = row

    def resume(self) -> None:
        """Give suspended rows their block as soon as there is one, oldest first."""
        if not self.suspended:
            return
        owner = self.owner
        for row in sorted(self.suspended.values(), key=lambda r: r.sequence):
            if not owner.pool.free:
                return
            del self.suspended[row.req_id]
            row.blocks.append(owner.pool.allocate_one())
            owner.batcher.resume(row, (len(row.blocks) - 1) * owner.limits.batch.block_tokens)
            owner.note_joined(row)

    def _preempt_suspended(self, row: Row, now_s: float) -> None:
        self.owner.batcher.prefilling.append(row)  # preempt takes running rows
        self.owner.preempt(row, now_s)
        self.owner.replan()

    # ---- after every event ---------------------------------------------------------------------------------------------------
    def end_request(self, row: Row) -> None:
        self._changed = True
        self.suspended.pop(row.req_id, None)
        self.debtor.end_request(row.req_id)

    def tend(self, now_s: float) -> None:
        if not self._changed:
            return
        self._changed = False
        self._pump()
        self.debtor.settle(self.in_use)
        self.debtor.flush(now_s)
        self.owner.commands += self.debtor.commands
        self.debtor.commands.clear()

    def _row(self, req_id: int) -> Row | None:
        return self.owner.running(req_id) or self.suspended.get(req_id)

    def fetching(self) -> list[int]:
        """Blocks that wait for what is fetched back."""
        return [block for blocks in self._fetching.values() for block in blocks]

    def check_invariants(self) -> None:
        self.debtor.check_invariants()
        for row in self.owner.rows_with_blocks():
            if row.req_id in self.owner.leaving:
                continue  # a loan of it is gone; it leaves at the next boundary
            loans = self.debtor.by_request.get(row.req_id, ())
            remote = sum(loan.committed for loan in loans if loan.target)
            assert row.remote_blocks == remote, (
                f"request {row.req_id}: {row.remote_blocks} remote blocks, loans have {remote}"
            )


def _num_blocks(order: MoveKvCache) -> int:
    return sum(count for _, _, count in order.parts)


def _by_creditor(order: MoveKvCache, positions: Sequence[int]) -> dict[tuple[int, int], list[int]]:
    """The positions that each creditor (and its incarnation) is to hold."""
    shares: dict[tuple[int, int], list[int]] = {}
    first = 0
    for creditor, incarnation, count in order.parts:
        shares.setdefault((creditor, incarnation), []).extend(positions[first : first + count])
        first += count
    return shares
