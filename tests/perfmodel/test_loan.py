"""Loans: the transition table, what a loan's numbers say of its state, and timers that let the debtor stop first."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import loan as loan_module
from perfmodel.errors import InputError
from perfmodel.loan import CLOCK_DRIFT, TRANSITIONS, Cause, DebtorLoan, State, check_timers, debtor_lease_s, transition
from perfmodel.messages import LoanId
from perfmodel.view import SchedulerParams


def make_loan(num_blocks=8, **changes):
    loan_id = LoanId(0, 1, 1, 1, 1, 0)
    loan = DebtorLoan(loan_id, 7, tuple(range(num_blocks)), "throughput", 0.0, 0.0, num_blocks, num_blocks, num_blocks)
    for name, value in changes.items():
        setattr(loan, name, value)
    return loan


@pytest.mark.parametrize(("before", "cause"), list(product(State, Cause)))
def test_what_is_not_in_the_table_raises(before, cause):
    allowed = TRANSITIONS.get((before, cause), ())
    for after in State:
        if after in allowed:
            transition(before, cause, after)
        else:
            with pytest.raises(AssertionError, match=f"in state {before} became {after} by {cause}"):
                transition(before, cause, after)


def test_the_docstring_shows_the_table():
    for state, cause in TRANSITIONS:
        assert any(line.split()[:2] == [state, cause] for line in loan_module.__doc__.splitlines())


@pytest.mark.parametrize(
    ("changes", "state", "readable"),
    [
        ({}, State.ASKED, 0),
        ({"listed": True}, State.GRANTED, 0),
        ({"listed": True, "committed": 3}, State.GRANTED, 3),
        ({"listed": True, "committed": 8}, State.HELD, 8),
        ({"listed": True, "committed": 3, "target": 3}, State.CLOSING, 3),
        ({"listed": True, "committed": 8, "target": 0}, State.CLOSING, 0),
        ({"target": 0}, State.CLOSING, 0),
    ],
)
def test_state_follows_from_the_numbers(changes, state, readable):
    loan = make_loan(**changes)
    assert (loan.state, loan.readable) == (state, readable)


@pytest.mark.parametrize(
    "changes", [{"committed": 9}, {"target": 9}, {"committed": 4, "sent": 4, "target": 3}, {"committed": 1}]
)
def test_numbers_out_of_order_are_caught(changes):
    with pytest.raises(AssertionError):
        make_loan(**changes).check()


def test_timers_at_the_bound_pass_and_beyond_it_name_the_numbers():
    """(2 + 1)·2 s + 2.8 s + 1 s = 9.8 s = 10 s · (1 − 2 · 0.01)."""
    check_timers(SchedulerParams(lease_s=10.0, renew_s=2.0), round_trip_s=2.8)
    with pytest.raises(InputError, match=r"lease_s 10 .* renew_s 2.* = 9\.81 s \(allowed: at most 9\.8 s"):
        check_timers(SchedulerParams(lease_s=10.0, renew_s=2.0), round_trip_s=2.81)


@given(
    debtor_rate=st.floats(1 - CLOCK_DRIFT, 1 + CLOCK_DRIFT),
    creditor_rate=st.floats(1 - CLOCK_DRIFT, 1 + CLOCK_DRIFT),
    lease_s=st.floats(0.1, 1000.0),
)
def test_the_debtor_gives_up_before_the_creditor_closes(debtor_rate, creditor_rate, lease_s):
    """In true time, for clocks that drift by up to ρ; the ledger was sent before it was received, which only helps."""
    params = SchedulerParams(lease_s=lease_s)
    assert debtor_lease_s(params) / debtor_rate <= lease_s / creditor_rate
