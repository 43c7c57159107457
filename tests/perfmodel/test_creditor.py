"""Creditor: ledgers, room, data, reads, memory back, leases."""

import pytest

from perfmodel.blocks import BlockPool
from perfmodel.creditor import Creditor
from perfmodel.messages import (
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

ME = 5
T1, T2 = TransferId(0, 1, 1), TransferId(0, 1, 2)


def make(num_blocks=10, headroom_blocks=0, **params):
    params = SchedulerParams(**{"lent_cap_frac": 1.0, **params})
    return Creditor(ME, 1, BlockPool(num_blocks), params, headroom_blocks)


def loan_id(seq=1, debtor=0, part=0, incarnation=1):
    return LoanId(debtor, incarnation, ME, 1, seq, part)


def tell(creditor, seq, *loans, debtor=0, incarnation=1, to=1, now_s=0.0):
    """A ledger; loans: (LoanId, num_blocks[, capacity]). Returns the answer's (ack_seq, loans), None where there is none."""
    loans = tuple((loan[0], loan[1], len(loan) > 2 and loan[2]) for loan in loans)
    commands = creditor.on_ledger(debtor, DebtorLedger(incarnation, to, seq, loans), now_s)
    creditor.check_invariants()
    creditor.pool.check_invariants()
    creditor.pool.check_owners(creditor.blocks())
    return answers(commands)[0] if commands else None


def answers(commands):
    return [(c.message.ack_seq, c.message.loans) for c in commands if isinstance(c.message, CreditorLedger)]


def receive(creditor, loan, num_blocks, first=0, transfer=T1, ok=True):
    creditor.on_store(0, Store(transfer, loan, first, num_blocks))
    commands = creditor.on_received(TransferDone(transfer, loan, ok))
    creditor.check_invariants()
    return commands


def lend(num_blocks=4, **options):
    """A creditor that holds the data of one loan."""
    creditor = make(**options)
    tell(creditor, 1, (loan_id(), num_blocks))
    receive(creditor, loan_id(), num_blocks)
    return creditor


# ---- ledgers -----------------------------------------------------------------------------------------------------------------
def test_an_older_ledger_that_comes_late_is_ignored():
    creditor = make()
    tell(creditor, 2, (loan_id(1), 2), (loan_id(2), 2))
    assert tell(creditor, 1, (loan_id(1), 2)) is None
    assert tell(creditor, 2) is None, "nor is the same one once more"
    assert list(creditor.loans) == [loan_id(1), loan_id(2)]


def test_a_loan_that_is_gone_is_never_made_again():
    creditor = lend()
    creditor.expire(10.0)
    assert tell(creditor, 2, (loan_id(1), 4), now_s=10.5) == (2, ())
    assert creditor.pool.free == 10


def test_a_loan_that_a_lost_ledger_named_first_is_new():
    creditor = make()
    tell(creditor, 1)
    assert tell(creditor, 4, (loan_id(3), 2)) == (4, ((loan_id(3), 0, 2),))


def test_reserving_is_all_or_nothing():
    creditor = make()
    assert tell(creditor, 1, (loan_id(part=0), 8), (loan_id(part=1), 3)) == (1, ((loan_id(part=0), 0, 8),))
    assert creditor.pool.free == 2


def test_two_debtors_ask_for_8_of_10_blocks_and_one_gets_them():
    creditor = make()
    granted = [tell(creditor, 1, (loan_id(debtor=debtor), 8), debtor=debtor)[1] for debtor in (0, 1)]
    assert [len(loans) for loans in granted] == [1, 0]


@pytest.mark.parametrize(
    ("capacity", "blocks", "granted"), [(False, 5, True), (False, 6, False), (True, 8, True), (True, 9, False)]
)
def test_the_lent_cap_binds_the_throughput_path_and_headroom_binds_both(capacity, blocks, granted):
    creditor = make(headroom_blocks=2, lent_cap_frac=0.5)
    _, loans = tell(creditor, 1, (loan_id(), blocks, capacity))
    assert bool(loans) == granted


def test_the_cap_counts_what_is_lent_and_what_is_reserved():
    creditor = make(lent_cap_frac=0.5)
    tell(creditor, 1, (loan_id(1), 2))
    receive(creditor, loan_id(1), 1)
    assert [creditor.room(capacity) for capacity in (False, True)] == [3, 8]


def test_a_ledger_to_another_incarnation_is_answered_with_mine_and_nothing():
    creditor = make()
    (command,) = creditor.on_ledger(0, DebtorLedger(3, 2, 7, ((loan_id(), 4, False),)), 0.0)
    assert command == Send(0, CreditorLedger(1, 3, 0, ()))
    assert not creditor.loans


def test_a_debtor_that_has_restarted_owes_nothing_any_more():
    creditor = lend()
    assert tell(creditor, 1, (loan_id(incarnation=2), 1), incarnation=2) == (1, ((loan_id(incarnation=2), 0, 1),))
    assert creditor.pool.free == 9
    assert tell(creditor, 9, (loan_id(), 4), incarnation=1) is None, "and its old self is not heard"


def test_fewer_blocks_release_the_tail_and_none_at_all_close():
    creditor = lend()
    assert tell(creditor, 2, (loan_id(), 3)) == (2, ((loan_id(), 3, 3),))
    assert creditor.pool.lent == 3
    assert tell(creditor, 3) == (3, ())
    assert creditor.pool.free == 10


# ---- data --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("first", "num_blocks"), [(1, 2), (0, 5)])
def test_a_store_out_of_order_or_too_long_is_refused(first, num_blocks):
    creditor = make()
    tell(creditor, 1, (loan_id(), 4))
    assert creditor.on_store(0, Store(T1, loan_id(), first, num_blocks)) == [Send(0, StoreRefused(T1))]


def test_a_store_of_an_unknown_loan_is_refused():
    assert make().on_store(0, Store(T1, loan_id(), 0, 1)) == [Send(0, StoreRefused(T1))]


def test_one_store_at_a_time_and_each_only_once():
    creditor = make()
    tell(creditor, 1, (loan_id(), 4))
    (post,) = creditor.on_store(0, Store(T1, loan_id(), 0, 2))
    assert isinstance(post, PostReceive)
    assert creditor.on_store(0, Store(T1, loan_id(), 0, 2)) == []
    assert creditor.on_store(0, Store(T2, loan_id(), 0, 2)) == [Send(0, StoreRefused(T2))]
    assert answers(creditor.on_received(TransferDone(T1, loan_id(), ok=True))) == [(1, ((loan_id(), 2, 4),))]
    assert creditor.on_store(0, Store(T1, loan_id(), 0, 2)) == []


def test_a_failed_receive_stores_nothing():
    creditor = make()
    tell(creditor, 1, (loan_id(), 4))
    assert receive(creditor, loan_id(), 2, ok=False) == []
    assert (creditor.loans[loan_id()].stored, creditor.pool.reserved) == (0, 4)


def test_blocks_being_received_drain_when_their_loan_ends():
    creditor = make()
    tell(creditor, 1, (loan_id(), 4))
    creditor.on_store(0, Store(T1, loan_id(), 0, 2))
    tell(creditor, 2)
    assert (creditor.pool.draining, creditor.pool.free) == (2, 8)
    assert creditor.on_received(TransferDone(T1, loan_id(), ok=True)) == []
    assert creditor.pool.free == 10


def test_a_loan_that_shrinks_while_it_receives_stores_what_is_left():
    creditor = make()
    tell(creditor, 1, (loan_id(), 4))
    creditor.on_store(0, Store(T1, loan_id(), 0, 4))
    tell(creditor, 2, (loan_id(), 3))
    creditor.on_received(TransferDone(T1, loan_id(), ok=True))
    assert (creditor.loans[loan_id()].stored, creditor.pool.lent, creditor.pool.free) == (3, 3, 7)


# ---- reads -------------------------------------------------------------------------------------------------------------------
def test_a_read_gets_exactly_what_it_names_or_stale():
    creditor = lend(4)
    assert creditor.on_read(ReadStarted(0, 1, ((loan_id(), 4),))) == [Serve(0, 1)]
    tell(creditor, 2, (loan_id(), 3))
    assert creditor.on_read(ReadStarted(0, 2, ((loan_id(), 3),))) == [Serve(0, 2)]
    reads = ((loan_id(), 4), (loan_id(9), 1))
    assert creditor.on_read(ReadStarted(0, 3, reads)) == [RefuseRead(0, 3, (loan_id(), loan_id(9)))]


def test_reserved_blocks_are_not_served():
    creditor = make()
    tell(creditor, 1, (loan_id(), 4))
    receive(creditor, loan_id(), 2)
    assert creditor.on_read(ReadStarted(0, 1, ((loan_id(), 3),))) == [RefuseRead(0, 1, (loan_id(),))]


def test_what_is_served_drains_until_the_read_ends():
    creditor = lend(4)
    blocks = list(creditor.loans[loan_id()].blocks)
    creditor.on_read(ReadStarted(0, 1, ((loan_id(), 4),)))
    creditor.on_read(ReadStarted(0, 2, ((loan_id(), 2),)))
    tell(creditor, 2)
    creditor.on_read_ended(ReadEnded(0, 1))
    assert creditor.pool.draining == 2
    assert set(creditor.pool.free_ids()) & set(blocks) == set(blocks[2:])
    creditor.on_read_ended(ReadEnded(0, 2))
    assert creditor.pool.free == 10


# ---- memory back and leases --------------------------------------------------------------------------------------------------
def keeps(creditor):
    return [loan.keep for loan in creditor.loans.values()]


def test_memory_is_asked_back_from_the_newest_loan_on_but_not_from_capacity_loans():
    creditor = make()
    tell(creditor, 1, (loan_id(part=0), 3), (loan_id(part=1), 3), (loan_id(part=2), 2, True))
    creditor.reclaim(6)  # all but 6 of 10 are lent, or were not asked back
    assert keeps(creditor) == [2, 0, 2]
    creditor.reclaim(6)
    assert keeps(creditor) == [2, 0, 2], "what was asked for before counts"
    creditor.reclaim(10)
    assert keeps(creditor) == [0, 0, 2]


def test_a_debtor_that_does_not_meet_a_reclaim_is_not_renewed():
    creditor = lend(4)
    creditor.reclaim(8)
    tell(creditor, 2, (loan_id(), 4), now_s=5.0)
    assert answers(creditor.expire(10.0)) == [(2, ())]
    creditor = lend(4)
    creditor.reclaim(8)
    tell(creditor, 2, (loan_id(), 2), now_s=5.0)
    assert creditor.expire(10.0) == []
    assert creditor.next_deadline_s() == 15.0


def test_a_lease_counts_from_the_receipt_of_the_last_renewal():
    creditor = lend(4)
    tell(creditor, 2, (loan_id(), 4), now_s=7.0)
    assert creditor.expire(16.9) == []
    assert answers(creditor.expire(17.0)) == [(2, ())]
    assert creditor.pool.free == 10
