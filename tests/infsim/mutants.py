"""Mutants of the loan protocol: each breaks one rule by replacing one function. No switch in the core knows of them."""

from unittest.mock import patch

from perfmodel import cluster
from perfmodel.borrower import Borrower
from perfmodel.cluster import Machines
from perfmodel.creditor import Creditor
from perfmodel.debtor import Debtor
from perfmodel.gmanager import GManager

NEVER = float("inf")


def no_fence(original):
    """Local copies are free at once, though the running step reads them."""

    def let_go(self, row, blocks):
        if row.streams:
            row.spare.extend(blocks)
        else:
            self.owner.pool.release(blocks)

    return let_go


def no_pin_on_serve(original):
    def on_read(self, event):
        commands = original(self, event)
        for loan_id, _ in event.reads:
            if loan_id in self.loans:
                self.loans[loan_id].readers.clear()
        return commands

    return on_read


def no_pin_on_receive(original):
    def on_store(self, debtor, store):
        before = set(self._receiving)
        commands = original(self, debtor, store)
        for transfer in set(self._receiving) - before:
            loan, end, blocks = self._receiving[transfer]
            self.pool.unpin(blocks)
            self._receiving[transfer] = (loan, end, ())
        return commands

    return on_store


def commit_before_stored(original):
    """What is listed counts as stored."""
    return lambda self, loan, stored, keep: original(self, loan, loan.num_blocks, keep)


def headroom_lent(original):
    def room(self, capacity):
        with patch.object(self, "headroom_blocks", 0):
            return original(self, capacity)

    return room


def debtor_never_renews(original):
    def expire(self, now_s):
        changes = original(self, now_s)
        for peer in self._peers.values():
            if peer.dirty and peer.renew_at_s <= now_s:
                peer.dirty, peer.renew_at_s, self._deadline_s = False, NEVER, None
        return changes

    return expire


def no_lease(original):
    """A loan whose lease is over goes on for ever."""

    def expire(self, now_s):
        for loan in self.loans.values():
            if loan.lease_end_s <= now_s:
                loan.lease_end_s, self._deadline_s = NEVER, None
        return []

    return expire


def same_incarnation(original):
    def restart(self, machine, now_s):
        if machine < 0:
            return original(self, machine, now_s)
        incarnation = self.rmanagers[machine].incarnation
        self.rmanagers[machine] = cluster._rmanager(self.spec, machine, incarnation, now_s)
        return None

    return restart


def half_granted(original):
    """A prompt keeps the part of its grant that it has, and waits for the rest."""

    def lost(self, loan, now_s):
        if loan.req_id not in self.granting:
            original(self, loan, now_s)

    return lost


def order_in_flight_for_ever(original):
    def plan_capacity(self, now_s):
        if self._granting is not None:
            self._granting = (*self._granting[:2], NEVER)
        return original(self, now_s)

    return plan_capacity


MUTANTS = {
    "no fence": (Borrower, "_let_go", no_fence),
    "no pin on serve": (Creditor, "on_read", no_pin_on_serve),
    "no pin on receive": (Creditor, "on_store", no_pin_on_receive),
    "ledger before the fence": (Borrower, "in_use", lambda original: lambda self, loan: 0),
    "no num_blocks check": (Creditor, "_can_serve", lambda original: lambda self, loan, num_blocks: loan in self.loans),
    "pledges not counted": (Borrower, "_promised", lambda original: lambda self, row: set()),
    "commit before stored": (Debtor, "_listed", commit_before_stored),
    "seq not compared": (Creditor, "_is_news", lambda original: lambda self, known, ledger: True),
    "old loan re-created": (Creditor, "_may_create", lambda original: lambda self, loan, before: True),
    "no renewal by the creditor": (Creditor, "_renew", lambda original: lambda self, loan, now_s: None),
    "no renewal by the debtor": (Debtor, "expire", debtor_never_renews),
    "headroom lent": (Creditor, "room", headroom_lent),
    "no lent cap": (Creditor, "room", lambda original: lambda self, capacity: original(self, True)),
    "no lease": (Creditor, "expire", no_lease),
    "same incarnation after restart": (Machines, "restart", same_incarnation),
    "half-granted capacity": (Borrower, "_lost", half_granted),
    "no order expiry at the gManager": (GManager, "_plan_capacity", order_in_flight_for_ever),
    "no order expiry at the debtor": (Borrower, "_expired", lambda original: lambda self, age_s: False),
}
