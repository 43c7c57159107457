"""Debtor: what an instance has borrowed. Owns its loans, the ledgers it sends and the leases it relies on.

It moves no block and knows no batch: it tells its RManager what has become of a loan, and the RManager says when nothing uses
a position any more (the fence).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from perfmodel.loan import Cause, DebtorLoan, State, debtor_lease_s, transition
from perfmodel.messages import Command, CreditorLedger, DebtorLedger, LoanId, RecordMove, Send, TransferId
from perfmodel.view import SchedulerParams


class Change(NamedTuple):
    """Something became of a loan; the RManager acts on it."""

    cause: Cause
    loan: DebtorLoan
    stored: int = 0


@dataclass(slots=True)
class _Peer:
    """The pair with one creditor. sent_s: when each ledger not acknowledged yet was sent."""

    incarnation: int
    seq: int = 0
    acked: int = 0
    lease_from_s: float = 0.0
    renew_at_s: float = float("inf")
    sent_s: dict[int, float] = field(default_factory=dict)
    dirty: bool = False
    num_loans: int = 0


@dataclass(slots=True)
class Debtor:
    """The borrowing side of one instance."""

    instance: int
    incarnation: int
    params: SchedulerParams
    loans: dict[LoanId, DebtorLoan] = field(default_factory=dict)
    by_request: dict[int, list[DebtorLoan]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    _peers: dict[int, _Peer] = field(default_factory=dict)
    _transfers: int = 0
    _deadline_s: float | None = None  # cached; None where something has changed

    # ---- opening -------------------------------------------------------------------------------------------------------------
    def knows(self, creditor: int, incarnation: int) -> bool:
        """Whether this incarnation of the creditor is not older than the one known."""
        peer = self._peers.get(creditor)
        return peer is None or incarnation >= peer.incarnation

    def note_incarnation(self, creditor: int, incarnation: int) -> list[Change]:
        """The creditor is known to have restarted by now: what it held is gone."""
        peer = self._peers.get(creditor)
        if peer is None or incarnation <= peer.incarnation:
            return []
        self._deadline_s = None
        return self._restarted(creditor, peer, incarnation)

    def open(
        self, creditor: tuple[int, int], req_id: int, positions: Sequence[int], order: tuple[str, float], now_s: float
    ) -> DebtorLoan:
        """A new loan (state asked). creditor: (instance, incarnation); order: (kind, ordered_s). Flush sends the ledger."""
        peer = self._peers.setdefault(creditor[0], _Peer(creditor[1], lease_from_s=now_s))
        if not peer.num_loans:
            peer.lease_from_s = now_s
        peer.num_loans += 1
        self._deadline_s = None
        part = sum(loan.id.seq == peer.seq + 1 and loan.id.creditor == creditor[0] for loan in self.loans.values())
        loan_id = LoanId(self.instance, self.incarnation, creditor[0], peer.incarnation, peer.seq + 1, part)
        count = len(positions)
        loan = DebtorLoan(loan_id, req_id, tuple(positions), *order, now_s, count, count, count)
        self.loans[loan_id] = loan
        self.by_request.setdefault(req_id, []).append(loan)
        peer.dirty = True
        return loan

    def flush(self, now_s: float) -> None:
        """Send a ledger to every creditor whose pair has changed."""
        for creditor, peer in self._peers.items():
            if peer.dirty:
                self._send_ledger(creditor, peer, now_s)

    def _send_ledger(self, creditor: int, peer: _Peer, now_s: float) -> None:
        peer.seq += 1
        peer.dirty = False
        self._deadline_s = None
        peer.sent_s[peer.seq] = now_s
        mine = [loan for loan in self.loans.values() if loan.id.creditor == creditor]
        peer.renew_at_s = now_s + self.params.renew_s if mine or peer.acked < peer.seq else float("inf")
        entries = tuple((loan.id, loan.num_blocks, loan.capacity) for loan in mine)
        self.commands.append(Send(creditor, DebtorLedger(self.incarnation, peer.incarnation, peer.seq, entries)))

    # ---- answers -------------------------------------------------------------------------------------------------------------
    def on_answer(self, creditor: int, answer: CreditorLedger) -> list[Change]:
        """What the creditor's ledger says of our loans."""
        peer = self._peers.get(creditor)
        if (
            peer is None
            or answer.debtor_incarnation != self.incarnation
            or answer.creditor_incarnation < peer.incarnation
        ):
            return []
        self._deadline_s = None
        if answer.creditor_incarnation > peer.incarnation:
            return self._restarted(creditor, peer, answer.creditor_incarnation)
        if answer.ack_seq > peer.acked:
            self._acknowledge(peer, answer.ack_seq)
        listed = {loan_id: (stored, keep) for loan_id, stored, keep in answer.loans}
        changes = []
        for loan in [loan for loan in self.loans.values() if loan.id.creditor == creditor]:
            if loan.id in listed:
                changes += self._listed(loan, *listed[loan.id])
            elif answer.ack_seq >= loan.id.seq:
                changes.append(self.lose(loan))
        if peer.acked == peer.seq and not peer.num_loans:
            peer.renew_at_s = float("inf")
        return changes

    def _acknowledge(self, peer: _Peer, seq: int) -> None:
        peer.acked = seq
        if seq in peer.sent_s:
            peer.lease_from_s = peer.sent_s[seq]
        peer.sent_s = {s: t for s, t in peer.sent_s.items() if s > seq}

    def _restarted(self, creditor: int, peer: _Peer, incarnation: int) -> list[Change]:
        peer.incarnation, peer.acked = incarnation, peer.seq
        peer.renew_at_s = float("inf")
        return [self.lose(loan) for loan in list(self.loans.values()) if loan.id.creditor == creditor]

    def _listed(self, loan: DebtorLoan, stored: int, keep: int) -> list[Change]:
        changes = []
        if not loan.listed:
            before = loan.state
            loan.listed = True
            transition(before, Cause.LISTED, loan.state)
            changes.append(Change(Cause.LISTED, loan))
        if self._may_commit(loan, stored):
            changes.append(Change(Cause.STORED, loan, stored))
        if keep < loan.keep:
            loan.keep = keep
            transition(loan.state, Cause.KEEP, loan.state)
            changes.append(Change(Cause.KEEP, loan))
        return changes

    def _may_commit(self, loan: DebtorLoan, stored: int) -> bool:
        return min(stored, loan.target) > loan.committed

    def commit(self, loan: DebtorLoan, stored: int, now_s: float) -> tuple[int, ...]:
        """The commit point: positions that are remote from the next iteration on."""
        before = loan.state
        upto = min(stored, loan.target)
        positions = loan.positions[loan.committed : upto]
        loan.committed = upto
        loan.sent = max(loan.sent, upto)
        loan.committed_s = now_s
        transition(before, Cause.STORED, loan.state)
        if loan.committed == loan.target:
            self._record(loan, "committed")
        return positions

    def stored_by(self, loan: DebtorLoan, transfer: TransferId, ok: bool) -> None:
        """A Store has ended at this end. One that failed is sent again from what is committed."""
        if loan.transfer == transfer:
            loan.transfer = None
            if not ok:
                loan.sent = loan.committed

    # ---- shrinking and ending ------------------------------------------------------------------------------------------------
    def end_request(self, req_id: int) -> None:
        """Finish, abort, preempt, fail: one path. Loans go to closing; `settle` lets them go behind the fence."""
        for loan in self.by_request.get(req_id, ()):
            before = loan.state
            loan.target = 0
            transition(before, Cause.ENDED, loan.state)
            self._record(loan, "cancelled")

    def shrink_uncommitted(self, loan: DebtorLoan) -> None:
        """Give up what is not committed beyond `keep`."""
        before = loan.state
        loan.target = min(loan.target, max(loan.committed, loan.keep))
        transition(before, Cause.KEEP, loan.state)
        if loan.committed == loan.target:
            self._record(loan, "committed" if loan.committed else "reclaimed")

    def fetched(self, loan: DebtorLoan) -> None:
        """The tail from `fetch_from` on is back."""
        before = loan.state
        loan.fetch = None
        if loan.target > loan.fetch_from:
            loan.committed = loan.target = loan.sent = loan.fetch_from
        transition(before, Cause.FETCHED, loan.state)

    def settle(self, in_use: Callable[[DebtorLoan], int]) -> None:
        """The fence: loans of which no iteration or fetch uses positions ≥ target shrink, and their creditors are told."""
        for loan in [loan for loan in self.loans.values() if loan.target < loan.num_blocks]:
            if in_use(loan) > loan.target or (loan.fetch and loan.fetch_from >= loan.target):
                continue
            loan.num_blocks = loan.target
            loan.committed = min(loan.committed, loan.num_blocks)
            if not loan.num_blocks:
                self._forget(loan)
            transition(State.CLOSING, Cause.FENCED, loan.state if loan.num_blocks else State.GONE)
            self._peers[loan.id.creditor].dirty = True

    def lose(self, loan: DebtorLoan) -> Change:
        """The loan is gone at its creditor: forget it."""
        transition(loan.state, Cause.LOST, State.GONE)
        self._record(loan, "lost" if loan.listed else "refused")
        self._forget(loan)
        return Change(Cause.LOST, loan)

    def lose_peer(self, creditor: int, gone: bool = False) -> list[Change]:
        """All loans of the pair. Where the peer is `gone`, it is not told."""
        peer = self._peers.get(creditor)
        if peer is None:
            return []
        peer.dirty = not gone
        self._deadline_s = None
        if gone:
            peer.renew_at_s, peer.acked = float("inf"), peer.seq
        return [self.lose(loan) for loan in list(self.loans.values()) if loan.id.creditor == creditor]

    def _forget(self, loan: DebtorLoan) -> None:
        del self.loans[loan.id]
        self._peers[loan.id.creditor].num_loans -= 1
        self._deadline_s = None
        mine = self.by_request[loan.req_id]
        mine.remove(loan)
        if not mine:
            del self.by_request[loan.req_id]

    def _record(self, loan: DebtorLoan, outcome: str) -> None:
        if loan.recorded:
            return
        loan.recorded = True
        count = loan.committed if outcome == "committed" else len(loan.positions)
        self.commands.append(
            RecordMove(
                loan.id,
                loan.req_id,
                self.instance,
                loan.id.creditor,
                count,
                loan.kind,
                loan.ordered_s,
                loan.opened_s,
                loan.committed_s,
                outcome,
            )
        )

    # ---- timers --------------------------------------------------------------------------------------------------------------
    def expire(self, now_s: float) -> list[Change]:
        """Renew what is due, and give up creditors whose lease is over."""
        changes: list[Change] = []
        for creditor, peer in self._peers.items():
            if self._lease_end_s(peer) <= now_s:
                changes += self.lose_peer(creditor)
            elif peer.renew_at_s <= now_s:
                peer.dirty = True
        return changes

    def _lease_end_s(self, peer: _Peer) -> float:
        return peer.lease_from_s + debtor_lease_s(self.params) if peer.num_loans else float("inf")

    def next_deadline_s(self) -> float:
        if self._deadline_s is None:
            peers = self._peers.values()
            leases_s = [peer.lease_from_s for peer in peers if peer.num_loans]
            first_end_s = min(leases_s) + debtor_lease_s(self.params) if leases_s else float("inf")
            self._deadline_s = min([first_end_s, *(peer.renew_at_s for peer in peers)])
        return self._deadline_s

    def new_transfer(self) -> TransferId:
        self._transfers += 1
        return TransferId(self.instance, self.incarnation, self._transfers)

    def pledged_blocks(self) -> int:
        return sum(max(0, loan.pledged) for loan in self.loans.values())

    def borrowed_blocks(self) -> int:
        return sum(loan.committed for loan in self.loans.values())

    def check_invariants(self) -> None:
        for loan in self.loans.values():
            loan.check()
        positions: set[tuple[int, int]] = set()
        for loan in self.loans.values():
            mine = {(loan.req_id, p) for p in loan.positions[: loan.target]}
            assert not positions & mine, f"a block of request {loan.req_id} is in two open loans"
            positions |= mine
