"""Debtor: ledgers and answers, the fence, renewals and the end of leases."""

import pytest

from perfmodel.debtor import Debtor
from perfmodel.loan import Cause, State
from perfmodel.messages import CreditorLedger, RecordMove, Send, TransferId
from perfmodel.view import SchedulerParams

CREDITOR = 1
PARAMS = SchedulerParams()  # lease 10 s (9.8 s for the debtor), renewals every 2 s


def ledgers(debtor):
    """Ledgers ordered since the last look, as (creditor, seq, [(seq of the loan, num_blocks)])."""
    sent, debtor.commands = debtor.commands, []
    messages = [(command.receiver, command.message) for command in sent if isinstance(command, Send)]
    return [(peer, m.seq, [(loan.seq, n) for loan, n, _ in m.loans]) for peer, m in messages]


def records(debtor):
    return [command.outcome for command in debtor.commands if isinstance(command, RecordMove)]


def borrow(num_blocks=8, req_id=7, debtor=None, now_s=0.0, kind="throughput"):
    debtor = debtor or Debtor(0, 1, PARAMS)
    loan = debtor.open((CREDITOR, 1), req_id, range(num_blocks), (kind, now_s), now_s)
    debtor.flush(now_s)
    return debtor, loan


def answer(ack_seq, *loans, incarnation=1, debtor_incarnation=1):
    """loans: (loan, stored, keep)."""
    return CreditorLedger(incarnation, debtor_incarnation, ack_seq, tuple((loan.id, s, k) for loan, s, k in loans))


def held(num_blocks=8):
    debtor, loan = borrow(num_blocks)
    debtor.on_answer(CREDITOR, answer(1, (loan, 0, num_blocks)))
    loan.sent = num_blocks
    debtor.commit(loan, num_blocks, 1.0)
    debtor.commands.clear()
    return debtor, loan


def test_a_new_loan_is_asked_for_by_a_ledger_that_names_it():
    debtor, loan = borrow()
    assert loan.state == State.ASKED
    assert ledgers(debtor) == [(CREDITOR, 1, [(1, 8)])]
    assert loan.id.seq == 1


def test_loans_of_one_ledger_are_told_apart():
    debtor = Debtor(0, 1, PARAMS)
    first, second = (debtor.open((CREDITOR, 1), 7, [p], ("throughput", 0.0), 0.0) for p in (0, 1))
    debtor.flush(0.0)
    assert first.id != second.id
    assert ledgers(debtor) == [(CREDITOR, 1, [(1, 1), (1, 1)])]


def test_listed_is_granted_and_stored_is_committed_up_to_the_target():
    debtor, loan = borrow()
    assert [c.cause for c in debtor.on_answer(CREDITOR, answer(1, (loan, 0, 8)))] == [Cause.LISTED]
    loan.sent = 5
    (change,) = debtor.on_answer(CREDITOR, answer(1, (loan, 5, 8)))
    assert (change.cause, change.stored) == (Cause.STORED, 5)
    assert debtor.commit(loan, 5, 1.0) == (0, 1, 2, 3, 4)
    assert loan.state == State.GRANTED
    loan.target = loan.num_blocks = 6
    assert debtor.commit(loan, 8, 2.0) == (5,)


def test_absent_from_an_answer_that_has_seen_it_is_gone_for_ever():
    debtor, loan = borrow()
    assert debtor.on_answer(CREDITOR, answer(0)) == [], "an answer from before the loan says nothing of it"
    assert [c.cause for c in debtor.on_answer(CREDITOR, answer(1))] == [Cause.LOST]
    assert records(debtor) == ["refused"]
    assert not debtor.loans
    assert debtor.on_answer(CREDITOR, answer(1, (loan, 8, 8))) == [], "a late answer does not bring it back"


def test_late_and_doubled_answers_are_harmless():
    debtor, loan = held()
    for late in (answer(1, (loan, 3, 8)), answer(1, (loan, 8, 8)), answer(0)):
        assert debtor.on_answer(CREDITOR, late) == []
    assert (loan.committed, loan.keep) == (8, 8)
    debtor.on_answer(CREDITOR, answer(1, (loan, 8, 5)))
    assert debtor.on_answer(CREDITOR, answer(1, (loan, 8, 7))) == [], "keep only falls"
    assert loan.keep == 5


@pytest.mark.parametrize("old", [{"incarnation": 0}, {"debtor_incarnation": 0}, {"debtor_incarnation": 2}])
def test_answers_of_or_to_another_incarnation_are_ignored(old):
    debtor, loan = held()
    assert debtor.on_answer(CREDITOR, answer(9, **old)) == []
    assert loan.id in debtor.loans


def test_a_creditor_that_has_restarted_holds_nothing_any_more():
    debtor, _ = held()
    assert [c.cause for c in debtor.on_answer(CREDITOR, answer(0, incarnation=2))] == [Cause.LOST]
    _, loan = borrow(debtor=debtor)
    assert loan.id.creditor_incarnation == 2


def test_an_order_may_name_an_incarnation_that_is_newer_than_the_known_one():
    debtor, old = held()
    assert debtor.knows(CREDITOR, 2)
    assert not debtor.knows(CREDITOR, 0)
    changes = debtor.note_incarnation(CREDITOR, 2)
    assert [(c.cause, c.loan) for c in changes] == [(Cause.LOST, old)]
    loan = debtor.open((CREDITOR, 2), 8, [0], ("throughput", 3.0), 3.0)
    assert loan.id.creditor_incarnation == 2


def test_the_fence_delays_the_ledger():
    debtor, loan = held()
    debtor.end_request(7)
    assert (loan.state, loan.readable) == (State.CLOSING, 0)
    debtor.settle(lambda loan: 8)
    debtor.flush(2.0)
    assert ledgers(debtor) == []
    debtor.settle(lambda loan: 0)
    debtor.flush(3.0)
    assert ledgers(debtor) == [(CREDITOR, 2, [])]


def test_a_fetch_is_a_fence_too():
    debtor, loan = held()
    loan.fetch, loan.fetch_from = TransferId(0, 1, 1), 6
    debtor.end_request(7)
    debtor.settle(lambda loan: 0)
    assert loan.num_blocks == 8
    debtor.fetched(loan)
    debtor.settle(lambda loan: 0)
    assert not debtor.loans


def test_a_fetched_tail_is_given_back_once_nothing_reads_it_there():
    debtor, loan = held()
    loan.fetch, loan.fetch_from = TransferId(0, 1, 1), 6
    debtor.fetched(loan)
    assert (loan.committed, loan.target, loan.num_blocks) == (6, 6, 8)
    debtor.settle(lambda loan: 8)
    assert loan.num_blocks == 8
    debtor.settle(lambda loan: 6)
    debtor.flush(2.0)
    assert ledgers(debtor) == [(CREDITOR, 2, [(1, 6)])]
    assert loan.state == State.HELD


@pytest.mark.parametrize(("committed", "keep", "target"), [(0, 3, 3), (2, 3, 3), (5, 3, 5), (0, 0, 0)])
def test_a_reclaim_takes_what_is_not_committed(committed, keep, target):
    debtor, loan = borrow()
    debtor.on_answer(CREDITOR, answer(1, (loan, 0, 8)))
    loan.sent = 8
    if committed:
        debtor.commit(loan, committed, 1.0)
    loan.keep = keep
    debtor.shrink_uncommitted(loan)
    assert (loan.target, loan.pledged) == (target, target - committed)


@pytest.mark.parametrize("ok", [True, False])
def test_a_failed_store_is_sent_again_from_what_is_committed(ok):
    debtor, loan = borrow()
    debtor.on_answer(CREDITOR, answer(1, (loan, 0, 8)))
    loan.sent, loan.transfer = 8, TransferId(0, 1, 1)
    debtor.stored_by(loan, TransferId(0, 1, 9), ok)
    assert loan.transfer, "another transfer's end says nothing of this one"
    debtor.stored_by(loan, TransferId(0, 1, 1), ok)
    assert (loan.transfer, loan.sent) == (None, 8 if ok else 0)


# ---- timers ------------------------------------------------------------------------------------------------------------------
def test_renewals_go_on_while_something_is_owed():
    debtor, _ = held()
    assert debtor.next_deadline_s() == 2.0
    for now_s in (2.0, 4.0):
        assert debtor.expire(now_s) == []
        debtor.flush(now_s)
    assert [seq for _, seq, _ in ledgers(debtor)] == [2, 3]


def test_the_last_ledger_is_repeated_until_it_is_acknowledged():
    debtor, _ = held()
    debtor.end_request(7)
    debtor.settle(lambda loan: 0)
    debtor.flush(1.0)
    debtor.expire(3.0)
    debtor.flush(3.0)
    assert [entry[1:] for entry in ledgers(debtor)] == [(2, []), (3, [])]
    debtor.on_answer(CREDITOR, answer(3))
    assert debtor.next_deadline_s() == float("inf")


def test_a_lease_counts_from_the_sending_of_the_newest_acknowledged_ledger():
    debtor, loan = held()
    debtor.expire(2.0)
    debtor.flush(2.0)
    assert debtor.expire(9.79) == []
    debtor.on_answer(CREDITOR, answer(2, (loan, 8, 8)))
    debtor.flush(9.79)  # not acknowledged: extends nothing
    assert debtor.expire(11.79) == []
    assert [c.cause for c in debtor.expire(11.8)] == [Cause.LOST]


def test_a_creditor_given_up_is_told_and_one_that_is_gone_is_not():
    debtor, _ = held()
    debtor.expire(9.8)
    debtor.flush(9.8)
    assert ledgers(debtor)[-1] == (CREDITOR, 2, [])
    debtor, _ = held()
    assert [c.cause for c in debtor.lose_peer(CREDITOR, gone=True)] == [Cause.LOST]
    debtor.flush(1.0)
    assert ledgers(debtor) == []
    assert debtor.next_deadline_s() == float("inf")


def test_a_block_in_two_open_loans_is_caught():
    debtor, _ = borrow()
    debtor.open((CREDITOR, 1), 7, [7, 8], ("throughput", 0.0), 0.0)
    with pytest.raises(AssertionError, match="a block of request 7 is in two open loans"):
        debtor.check_invariants()
