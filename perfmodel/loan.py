"""Loans: fixed, ordered lists of sealed blocks of one request, moving from a debtor to a creditor.

`num_blocks` and `keep` only fall and a stored position never changes, so (loan, num_blocks) is the epoch: no clock, loss or
reordering makes an answer wrong; timers only return memory. The protocol's specification is model-checked; this module holds
its state, its transition table and its timers. What is not in the table is illegal and raises.

{table}
"""

from dataclasses import dataclass, field
from enum import StrEnum

from perfmodel.errors import InputError
from perfmodel.messages import LoanId, TransferId
from perfmodel.view import SchedulerParams

CLOCK_DRIFT = 0.01  # ρ: bound of the relative drift between two machines' clocks
LOSSES = 2  # k: consecutive ledgers that may be lost without a false lease end
CONTROL_PAUSE_S = 1.0  # longest time a manager may be silent (garbage collection, a busy host)


class State(StrEnum):
    """A debtor's loan: asked (not listed yet), granted (committed < target), held (equal), closing (target < num_blocks)."""

    ASKED = "asked"
    GRANTED = "granted"
    HELD = "held"
    CLOSING = "closing"
    GONE = "gone"


class Cause(StrEnum):
    """What moves a loan."""

    LISTED = "listed"  # the creditor's answer names it
    STORED = "stored"  # … with more stored than committed
    KEEP = "keep"  # … with a lower keep
    ENDED = "ended"  # its request finished, was aborted, preempted or failed
    FETCHED = "fetched"  # its tail is back
    FENCED = "fenced"  # no iteration or fetch uses positions ≥ target any more
    LOST = "lost"  # absent, Stale, new creditor incarnation, PeerLost, lease over


TRANSITIONS: dict[tuple[State, Cause], tuple[State, ...]] = {
    (State.ASKED, Cause.LISTED): (State.GRANTED,),
    (State.ASKED, Cause.ENDED): (State.CLOSING,),
    (State.ASKED, Cause.LOST): (State.GONE,),
    (State.GRANTED, Cause.STORED): (State.GRANTED, State.HELD),
    (State.GRANTED, Cause.KEEP): (State.GRANTED, State.CLOSING),
    (State.GRANTED, Cause.ENDED): (State.CLOSING,),
    (State.GRANTED, Cause.LOST): (State.GONE,),
    (State.HELD, Cause.KEEP): (State.HELD,),
    (State.HELD, Cause.FETCHED): (State.CLOSING,),
    (State.HELD, Cause.ENDED): (State.CLOSING,),
    (State.HELD, Cause.LOST): (State.GONE,),
    (State.CLOSING, Cause.LISTED): (State.CLOSING,),
    (State.CLOSING, Cause.KEEP): (State.CLOSING,),
    (State.CLOSING, Cause.FETCHED): (State.CLOSING,),
    (State.CLOSING, Cause.ENDED): (State.CLOSING,),
    (State.CLOSING, Cause.LOST): (State.GONE,),
    (State.CLOSING, Cause.FENCED): (State.HELD, State.GRANTED, State.GONE),
}


def table_text() -> str:
    """The transition table as text, one line a pair."""
    lines = ["state    cause    becomes", "-------  -------  -------"]
    lines += [f"{state:<8} {cause:<8} {' or '.join(to)}" for (state, cause), to in TRANSITIONS.items()]
    return "\n".join(lines)


__doc__ = __doc__.format(table=table_text())


@dataclass(slots=True, eq=False)
class DebtorLoan:
    """The debtor's side. committed ≤ target ≤ num_blocks; positions committed … target − 1 are pledged.

    positions: block-table positions, in the loan's order · sent: first position of the loan not sent yet · keep: how many the
    creditor is willing to hold · capacity: granted with others for a whole prompt, all or nothing.
    """

    id: LoanId
    req_id: int
    positions: tuple[int, ...]
    kind: str
    ordered_s: float
    opened_s: float
    num_blocks: int
    target: int
    keep: int
    committed: int = 0
    sent: int = 0
    listed: bool = False
    transfer: TransferId | None = None
    fetch: TransferId | None = None
    fetch_from: int = 0
    committed_s: float | None = None
    recorded: bool = False

    @property
    def capacity(self) -> bool:
        return self.kind == "capacity"

    @property
    def pledged(self) -> int:
        return self.target - self.committed

    @property
    def readable(self) -> int:
        """Positions that the request's next iteration reads there: none of a loan that is closing."""
        return min(self.committed, self.target)

    @property
    def state(self) -> State:
        if self.target < self.num_blocks:
            return State.CLOSING
        if not self.listed:
            return State.ASKED
        return State.GRANTED if self.committed < self.target else State.HELD

    def check(self) -> None:
        assert 0 <= self.committed <= self.num_blocks, self
        assert self.target <= self.num_blocks, self
        assert self.target == 0 or self.committed <= self.target, self
        assert self.committed <= self.sent or not self.target, self


@dataclass(slots=True, eq=False)
class CreditorLoan:
    """The creditor's side: positions < stored are lent, the others reserved.

    readers: reads in progress, (reader, read) → how many positions each uses.
    """

    id: LoanId
    blocks: list[int]
    capacity: bool
    lease_end_s: float
    keep: int
    stored: int = 0
    receiving: TransferId | None = None
    last_transfer: TransferId | None = None
    readers: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)


def transition(before: State, cause: Cause, after: State) -> None:
    """Raises AssertionError for a step the table does not have."""
    allowed = TRANSITIONS.get((before, cause), ())
    assert after in allowed, f"a loan in state {before} became {after} by {cause} (allowed: {allowed})"


def check_timers(params: SchedulerParams, round_trip_s: float) -> None:
    """No false lease end with `LOSSES` losses: (k + 1)·renew_s + round_trip_s + control_pause_s ≤ lease_s·(1 − 2ρ)."""
    needed_s = (LOSSES + 1) * params.renew_s + round_trip_s + CONTROL_PAUSE_S
    allowed_s = params.lease_s * (1 - 2 * CLOCK_DRIFT)
    if needed_s > allowed_s:
        raise InputError(
            f"scheduler: lease_s {params.lease_s:g} is too short for renew_s {params.renew_s:g}: "
            f"{LOSSES + 1} × {params.renew_s:g} s + round trip {round_trip_s:g} s + pause {CONTROL_PAUSE_S:g} s = "
            f"{needed_s:g} s (allowed: at most {allowed_s:g} s = lease_s × {1 - 2 * CLOCK_DRIFT:g})"
        )


def debtor_lease_s(params: SchedulerParams) -> float:
    """The debtor gives up this long after sending the newest acknowledged ledger: before the creditor closes, at any drift."""
    return params.lease_s * (1 - 2 * CLOCK_DRIFT)
