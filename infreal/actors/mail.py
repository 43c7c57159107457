"""What hosts send each other besides the events of the core, and what they write into their diaries.

All of it travels as control messages. Tensors never do: they have the data plane (`infreal.transport`).
"""

from dataclasses import dataclass
from typing import NamedTuple

from infreal.layout import ReadRow
from perfmodel.messages import Address, Command, Event, LoanId, StartIterations, TransferId
from perfmodel.records import Counters, Sample


# ---- between instances -------------------------------------------------------------------------------------------------------
class Stamp(NamedTuple):
    """State of a pair, as a sender knows it: its own incarnation, and the last `ResetPair` of the two. Compares as time goes."""

    incarnation: int
    reset: int


@dataclass(frozen=True, slots=True)
class OpenRead:
    """Debtor → creditor: serve these rows of my next step, until the data plane says that the read has ended."""

    reader: Address
    stamp: Stamp
    read: int
    rows: tuple[ReadRow, ...]


@dataclass(frozen=True, slots=True)
class ReadOpened:
    """Creditor → debtor: it is served, but for `stale` loans."""

    creditor: Address
    read: int
    stale: tuple[LoanId, ...]


@dataclass(frozen=True, slots=True)
class OpenFetch:
    """Debtor → creditor: send me blocks `first` … `end` − 1 of the loan."""

    reader: Address
    stamp: Stamp
    read: int
    transfer: TransferId
    loan: LoanId
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class ReceiverReady:
    """Creditor → debtor: a receive is posted for this Store."""

    creditor: Address
    stamp: Stamp
    transfer: TransferId


# ---- from the head -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ResetPair:
    """Both sides join the next generation of their pair: an exchange failed, and both are alive. number: grows.

    give_up: the link is not fit for what it is to carry; what was lent over it counts as lost here.
    """

    peer: Address
    number: int
    give_up: bool


@dataclass(frozen=True, slots=True)
class Look:
    """Write down your counters and state."""

    number: int


@dataclass(frozen=True, slots=True)
class Timed:
    """An event that happened at `t_s`, whenever it gets here."""

    t_s: float
    event: Event


# ---- diaries -----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Heard:
    """An event and its commands; event None: only the commands that the tables need are here."""

    t_s: float
    event: Event | None
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A step of an instance."""

    start_s: float
    end_s: float
    step: StartIterations


@dataclass(frozen=True, slots=True)
class Output:
    """The tokens of a request that has finished."""

    req_id: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class State:
    """An instance behind its last entry. progress_s: when an iteration or a copy last ended there · busy_s: in iterations ·
    core_s: of it, time in which their thread had its core."""

    t_s: float
    counters: Counters
    sample: Sample
    at_rest: bool
    progress_s: float
    num_iterations: int
    busy_s: float
    core_s: float


@dataclass(frozen=True, slots=True)
class Looked:
    """The answer to a `Look`."""

    number: int
    state: State


@dataclass(frozen=True, slots=True)
class Suspected:
    """An exchange with this peer has failed."""

    t_s: float
    peer: Address
    why: str


@dataclass(frozen=True, slots=True)
class Renewed:
    """This side of a pair has joined its next generation, for the `ResetPair` of that number, or (0) for a `PeerLost`."""

    peer: Address
    number: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank of this instance has lost another one: the instance cannot go on."""

    t_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The host itself is broken; text: the traceback."""

    text: str


Entry = Heard | Span | Output | Looked | Suspected | Renewed | Lost | Failed


@dataclass(frozen=True, slots=True)
class Page:
    """Entries of a diary, in order, and the state behind them (None: no instance)."""

    entries: tuple[Entry, ...]
    state: State | None
