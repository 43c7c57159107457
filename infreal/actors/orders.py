"""What rank 0 of an instance has all its ranks do, and what they answer. An instance of one rank obeys itself.

Orders reach every rank in one order. They say what is done, with which blocks and which peers: whoever gets one decides nothing.
"""

from dataclasses import dataclass

from infreal.layout import ReadRow, StepRow
from perfmodel.messages import LoanId

States = dict[int, int]  # of pairs, in which an exchange was agreed on: see `infreal.actors.pairs`


# ---- for the thread of iterations ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Accept:
    """A new attempt of a request comes to the instance."""

    req_id: int


@dataclass(frozen=True, slots=True)
class Drop:
    """A request has ended, or goes elsewhere."""

    req_id: int


@dataclass(frozen=True, slots=True)
class BeginStep:
    """reads: creditor → (number of the read, which tokens of the batch read there) · stale: loans that are not served after all ·
    states: of the pairs with the creditors."""

    number: int
    max_iterations: int
    rows: list[StepRow]
    reads: dict[int, tuple[int, list[int]]]
    stale: tuple[LoanId, ...]
    states: States


@dataclass(frozen=True, slots=True)
class Iterate:
    """One more iteration. added: blocks that each row has got since the last one."""

    added: list[list[int]]


@dataclass(frozen=True, slots=True)
class EndStep:
    """The step has ended, and with it what it reads."""


OfSteps = Accept | Drop | BeginStep | Iterate | EndStep


# ---- jobs: beside the iterations -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ServeRead:
    """Answer the queries of a read until it ends. tables: the blocks that each row sees."""

    reader: int
    read: int
    rows: tuple[ReadRow, ...]
    tables: list[list[int]]
    states: States


@dataclass(frozen=True, slots=True)
class SendCopy:
    """blocks: none to say that there is nothing to copy · pace_blocks: in an iteration, 0: as fits."""

    peer: int
    tag: int
    blocks: list[int]
    pace_blocks: int
    states: States


@dataclass(frozen=True, slots=True)
class ReceiveCopy:
    peer: int
    tag: int
    blocks: list[int]
    states: States


@dataclass(frozen=True, slots=True)
class Renew:
    """Join the next generation of the pair with this peer."""

    peer: int


@dataclass(frozen=True, slots=True)
class Job:
    """Ends when every rank has said that it is done."""

    number: int
    work: ServeRead | SendCopy | ReceiveCopy | Renew


Order = OfSteps | Job


# ---- reports ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Done:
    """ok: it was carried out · nothing: there was nothing to copy."""

    job: int
    ok: bool = True
    nothing: bool = False


@dataclass(frozen=True, slots=True)
class Suspect:
    """An exchange with this peer has failed."""

    peer: int
    why: str


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing else to say."""


@dataclass(frozen=True, slots=True)
class Gone:
    """The ranks have lost each other."""

    why: str


@dataclass(frozen=True, slots=True)
class Broken:
    """A rank has an error; text: the traceback."""

    text: str


Report = Done | Suspect | Alive | Gone | Broken
