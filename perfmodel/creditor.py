"""Creditor: what an instance lends. Owns the loans of others and their blocks in the pool; serves reads, answers ledgers.

It trusts no clock but its own: a loan closes `lease_s` after receipt of the last renewing ledger.
"""

from dataclasses import dataclass, field

from perfmodel.blocks import BlockPool, Owner
from perfmodel.loan import CreditorLoan
from perfmodel.messages import (
    Command,
    CreditorLedger,
    DebtorLedger,
    LoanId,
    PostReceive,
    ReadEnded,
    ReadStarted,
    RefuseRead,
    Send,
    Serve,
    Store,
    StoreRefused,
    TransferDone,
    TransferId,
)
from perfmodel.view import SchedulerParams


@dataclass(slots=True)
class _Debtor:
    incarnation: int = 0
    last_seq: int = 0


@dataclass(slots=True)
class Creditor:
    """The lending side of one instance. `headroom_blocks` are never lent; the throughput path lends at most `lent_cap_frac`."""

    instance: int
    incarnation: int
    pool: BlockPool
    params: SchedulerParams
    headroom_blocks: int
    loans: dict[LoanId, CreditorLoan] = field(default_factory=dict)
    _debtors: dict[int, _Debtor] = field(default_factory=dict)
    _receiving: dict[TransferId, tuple[LoanId, int, tuple[int, ...]]] = field(default_factory=dict)
    _reading: dict[tuple[int, int], tuple[tuple[LoanId, int], ...]] = field(default_factory=dict)
    _draining: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # given up while a read uses them
    _deadline_s: float | None = None  # cached; None where a lease has changed

    # ---- ledgers -------------------------------------------------------------------------------------------------------------
    def on_ledger(self, debtor: int, ledger: DebtorLedger, now_s: float) -> list[Command]:
        if ledger.creditor_incarnation != self.incarnation:
            return [Send(debtor, CreditorLedger(self.incarnation, ledger.debtor_incarnation, 0, ()))]
        known = self._debtors.setdefault(debtor, _Debtor())
        if ledger.debtor_incarnation < known.incarnation:
            return []
        if ledger.debtor_incarnation > known.incarnation:
            for loan in self.of(debtor):
                self._close(loan)
            self._debtors[debtor] = known = _Debtor(ledger.debtor_incarnation)
        if not self._is_news(known, ledger):
            return []
        before, known.last_seq = known.last_seq, ledger.seq
        self._take_over(debtor, ledger, before, now_s)
        return [self.answer(debtor)]

    def _is_news(self, known: _Debtor, ledger: DebtorLedger) -> bool:
        """A late, older ledger lacks the newest loan and would free it."""
        return ledger.seq > known.last_seq

    def _take_over(self, debtor: int, ledger: DebtorLedger, before: int, now_s: float) -> None:
        listed = {loan_id: (num_blocks, capacity) for loan_id, num_blocks, capacity in ledger.loans}
        for loan in self.of(debtor):
            if loan.id not in listed:
                self._close(loan)
            else:
                self._shrink(loan, listed[loan.id][0])
                self._renew(loan, now_s)
        for loan_id, (num_blocks, capacity) in listed.items():
            if loan_id not in self.loans and self._may_create(loan_id, before):
                self._reserve(loan_id, num_blocks, capacity, now_s)

    def _renew(self, loan: CreditorLoan, now_s: float) -> None:
        """A debtor that does not meet a reclaim is not renewed."""
        if loan.num_blocks <= loan.keep:
            loan.lease_end_s = now_s + self.params.lease_s
            self._deadline_s = None

    def _may_create(self, loan_id: LoanId, before: int) -> bool:
        """Only a loan that is new since the ledger before: made again, one that is gone would hold no data."""
        return loan_id.seq > before

    def _reserve(self, loan_id: LoanId, num_blocks: int, capacity: bool, now_s: float) -> None:
        """All or nothing."""
        if 0 < num_blocks <= self.room(capacity):
            lease_end_s = now_s + self.params.lease_s
            self.loans[loan_id] = CreditorLoan(
                loan_id, self.pool.reserve(num_blocks), capacity, lease_end_s, keep=num_blocks
            )
            self._deadline_s = None

    def room(self, capacity: bool) -> int:
        """Blocks that can be lent now."""
        room = self.pool.free - self.headroom_blocks
        if not capacity:
            cap = int(self.params.lent_cap_frac * self.pool.total)
            room = min(room, cap - self.pool.lent - self.pool.reserved)
        return max(0, room)

    def answer(self, debtor: int) -> Command:
        known = self._debtors[debtor]
        loans = tuple((loan.id, loan.stored, loan.keep) for loan in self.of(debtor))
        return Send(debtor, CreditorLedger(self.incarnation, known.incarnation, known.last_seq, loans))

    def of(self, debtor: int) -> list[CreditorLoan]:
        """Loans to one debtor, in the order they were made."""
        return [loan for loan in self.loans.values() if loan.id.debtor == debtor]

    def _shrink(self, loan: CreditorLoan, num_blocks: int) -> None:
        if num_blocks < loan.num_blocks:
            self._pin_served(loan, num_blocks)
            first_reserved = max(num_blocks, loan.stored)
            self.pool.release(loan.blocks[first_reserved:], Owner.RESERVED)
            self.pool.release(loan.blocks[num_blocks:first_reserved], Owner.LENT)
            del loan.blocks[num_blocks:]
            loan.stored, loan.keep = min(loan.stored, num_blocks), min(loan.keep, num_blocks)

    def _close(self, loan: CreditorLoan) -> None:
        self._shrink(loan, 0)
        del self.loans[loan.id]
        self._deadline_s = None

    # ---- data ----------------------------------------------------------------------------------------------------------------
    def on_store(self, debtor: int, store: Store) -> list[Command]:
        loan = self.loans.get(store.loan)
        if loan is not None and loan.last_transfer == store.transfer:
            return []  # the same message once more
        end = store.first + store.num_blocks
        if loan is None or loan.receiving or store.first != loan.stored or end > loan.num_blocks:
            return [Send(debtor, StoreRefused(store.transfer))]
        blocks = tuple(loan.blocks[store.first : end])
        self.pool.pin(blocks)
        loan.receiving = loan.last_transfer = store.transfer
        self._receiving[store.transfer] = (loan.id, end, blocks)
        return [PostReceive(store.transfer, loan.id, debtor, blocks)]

    def on_received(self, event: TransferDone) -> list[Command]:
        loan_id, end, blocks = self._receiving.pop(event.transfer)
        loan = self.loans.get(loan_id)
        commands: list[Command] = []
        if loan is not None:
            loan.receiving = None
            if event.ok:
                end = min(end, loan.num_blocks)
                self.pool.lend(end - loan.stored)
                loan.stored = end
                commands.append(self.answer(loan_id.debtor))
        self.pool.unpin(blocks)
        return commands

    # ---- reads ---------------------------------------------------------------------------------------------------------------
    def on_read(self, event: ReadStarted) -> list[Command]:
        stale = tuple(loan_id for loan_id, num_blocks in event.reads if not self._can_serve(loan_id, num_blocks))
        if stale:
            return [RefuseRead(event.reader, event.read, stale)]
        key = (event.reader, event.read)
        self._reading[key] = event.reads
        for loan_id, num_blocks in event.reads:
            self.loans[loan_id].readers[key] = num_blocks
        return [Serve(event.reader, event.read)]

    def _can_serve(self, loan_id: LoanId, num_blocks: int) -> bool:
        """Exactly what the query names, or `Stale`: never silently less."""
        loan = self.loans.get(loan_id)
        return loan is not None and loan.stored >= num_blocks

    def _pin_served(self, loan: CreditorLoan, num_blocks: int) -> None:
        """Positions from `num_blocks` on are about to go: what is being read of them drains until its reads have ended."""
        for key, used in loan.readers.items():
            blocks = loan.blocks[num_blocks:used]
            self.pool.pin(blocks)
            self._draining.setdefault(key, []).extend(blocks)

    def on_read_ended(self, event: ReadEnded) -> None:
        key = (event.reader, event.read)
        for loan_id, _ in self._reading.pop(key, ()):
            if loan_id in self.loans:
                self.loans[loan_id].readers.pop(key, None)
        self.pool.unpin(self._draining.pop(key, ()))

    def served(self) -> list[tuple[int, int, int]]:
        """(debtor, loans, blocks) being read now."""
        sums: dict[int, list[int]] = {}
        for (reader, _), reads in self._reading.items():
            entry = sums.setdefault(reader, [0, 0])
            entry[0] += len(reads)
            entry[1] += sum(n for _, n in reads)
        return [(reader, loans, blocks) for reader, (loans, blocks) in sorted(sums.items())]

    # ---- memory back ---------------------------------------------------------------------------------------------------------
    def reclaim(self, num_blocks: int) -> list[Command]:
        """Ask debtors to take back what is lent beyond all but `num_blocks` blocks, from the newest loan on.

        Capacity loans stay: a whole prompt depends on each.
        """
        touched = []
        missing = num_blocks - (self.pool.total - sum(loan.keep for loan in self.loans.values()))
        for loan in reversed(list(self.loans.values())):
            take = min(missing, loan.keep)
            if take > 0 and not loan.capacity:
                loan.keep -= take
                missing -= take
                touched.append(loan.id.debtor)
        return [self.answer(debtor) for debtor in dict.fromkeys(touched)]

    def expire(self, now_s: float) -> list[Command]:
        """Close loans whose lease is over."""
        if now_s < self.next_deadline_s():
            return []
        over = [loan for loan in self.loans.values() if loan.lease_end_s <= now_s]
        for loan in over:
            self._close(loan)
        return [self.answer(debtor) for debtor in dict.fromkeys(loan.id.debtor for loan in over)]

    def next_deadline_s(self) -> float:
        if self._deadline_s is None:
            self._deadline_s = min((loan.lease_end_s for loan in self.loans.values()), default=float("inf"))
        return self._deadline_s

    def check_invariants(self) -> None:
        lent = sum(loan.stored for loan in self.loans.values())
        reserved = sum(loan.num_blocks - loan.stored for loan in self.loans.values())
        assert (lent, reserved) == (self.pool.lent, self.pool.reserved), (
            f"instance {self.instance}: loans hold {lent} + {reserved} blocks, the pool lends "
            f"{self.pool.lent} + {self.pool.reserved}"
        )

    def blocks(self) -> list[int]:
        """All blocks of its loans."""
        return [block for loan in self.loans.values() for block in loan.blocks]
