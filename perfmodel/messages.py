"""What machines hear, say and order: events (past tense), messages (nouns) and commands (imperative).

All are immutable: named tuples what comes with every request, step and heartbeat (made in a third of the time), frozen, slotted
dataclasses the rest. Messages carry durations and counters, never absolute times: every side has its own clock.
Machines are addressed by integers: instances 0, 1, …; `DISPATCHER` and `GMANAGER` are negative.
"""

from dataclasses import dataclass
from typing import NamedTuple

from perfmodel.view import Load, RemoteRead

DISPATCHER = -1
GMANAGER = -2
POST_S = 1.0  # a Store whose receive has not been posted by then is given up at the sender

Address = int


def machine_name(address: Address) -> str:
    """Name of a machine in logs and stories."""
    return {DISPATCHER: "dispatcher", GMANAGER: "gmanager"}.get(address, f"instance-{address}")


class Request(NamedTuple):
    """What the core may know of a request. Output lengths belong to the driver; `max_output_tokens` is an API-level limit."""

    req_id: int
    input_tokens: int
    max_output_tokens: int | None = None


# ---- messages ----------------------------------------------------------------------------------------------------------------
class SubmitRequest(NamedTuple):
    """Dispatcher → instance. `sequence` is the dispatcher's arrival order; only the current `attempt` of a request counts."""

    request: Request
    attempt: int
    sequence: int


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Dispatcher → instance: the client has gone away, or another attempt counts."""

    req_id: int
    attempt: int


class RequestOutcome(NamedTuple):
    """How an attempt ended, with times on the clock of the instance it ran on (seconds; None where it never happened).

    `preempted_s`: from each preemption after the first token until decoding again; `remote_wait_s`: waiting for remote
    MicroAttention while decoding.
    """

    req_id: int
    status: str
    reason: str
    instance: int | None
    output_tokens: int
    received_s: float
    admitted_s: float | None
    first_token_s: float | None
    finish_s: float
    num_preemptions: int = 0
    preempted_s: float = 0.0
    remote_wait_s: float = 0.0
    remote_tokens_max: int = 0


class RequestDone(NamedTuple):
    """Instance → dispatcher: this attempt has ended, and what the instance holds now."""

    attempt: int
    outcome: RequestOutcome
    load: "LoadReport"


class LoadReport(NamedTuple):
    """Instance → dispatcher, with each ending, and with a heartbeat where it has changed. `received` counts the requests it had
    received by then; `load_blocks`: KV blocks of running and waiting work, its own and others'."""

    received: int
    load_blocks: int


class LoanId(NamedTuple):
    """A loan, never reused: `seq` is that of the first ledger naming it."""

    debtor: int
    debtor_incarnation: int
    creditor: int
    creditor_incarnation: int
    seq: int
    part: int  # loans opened by one ledger are told apart by it


class OrderId(NamedTuple):
    """Orders of a gManager, in order."""

    gmanager_incarnation: int
    counter: int


class TransferId(NamedTuple):
    """A Store or a fetch of a debtor."""

    debtor: int
    debtor_incarnation: int
    number: int


@dataclass(frozen=True, slots=True)
class DebtorLedger:
    """Debtor → creditor: **all** loans of the pair, (loan, num_blocks, is it a capacity loan). The paper's try_move_kvcache is a
    ledger that names a new loan; a shorter count frees blocks; every ledger renews the lease."""

    debtor_incarnation: int
    creditor_incarnation: int
    seq: int
    loans: tuple[tuple[LoanId, int, bool], ...]


@dataclass(frozen=True, slots=True)
class CreditorLedger:
    """Creditor → debtor: **all** loans of the pair, (loan, stored, keep). Absent with ack_seq ≥ the loan's seq: gone for ever."""

    creditor_incarnation: int
    debtor_incarnation: int
    ack_seq: int
    loans: tuple[tuple[LoanId, int, int], ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Debtor → creditor: blocks `first` … `first + num_blocks` − 1 of the loan are on their way; post a receive."""

    transfer: TransferId
    loan: LoanId
    first: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StoreRefused:
    """Creditor → debtor: no receive was posted; send again from what is committed."""

    transfer: TransferId


class RequestPlacementEntry(NamedTuple):
    """The paper's entry: `num_blocks` blocks of a request are on an instance; `local`: its home. 0 blocks: no longer."""

    req_id: int
    inst_id: int
    num_blocks: int
    local: bool


@dataclass(frozen=True, slots=True)
class Need:
    """A request that wants `num_blocks` blocks elsewhere: all of them for its prompt, or up to as many (`grows`).

    `sequence`: its arrival order. `more_blocks`: there is room for these at home, but they may be elsewhere as well.
    """

    req_id: int
    num_blocks: int
    sequence: int
    grows: bool = False
    more_blocks: int = 0


class Heartbeat(NamedTuple):
    """Instance → gManager. `entries`: changed placements, or all of them where `full`. `outcomes`: orders handled since the last
    heartbeat the gManager has answered; `open_order`: the capacity order being granted. `youngest`: sequence of the youngest
    admitted request and its req_id."""

    incarnation: int
    seq: int
    full: bool
    entries: tuple[RequestPlacementEntry, ...]
    load: Load
    needs: tuple[Need, ...]
    outcomes: tuple[tuple[OrderId, str], ...]
    open_order: OrderId | None
    youngest: tuple[int, int] | None


class HeartbeatReply(NamedTuple):
    """gManager → instance. `incarnations`: (instance, incarnation) of the live ones; `resync`: send everything next time;
    `barrier`: admit no request with a higher sequence (a capacity need waits), None: no barrier; `may_rest`: nobody needs blocks,
    an idle instance need not tell the same again every period."""

    gmanager_incarnation: int
    seq: int
    incarnations: tuple[tuple[int, int], ...]
    resync: bool
    barrier: int | None = None
    may_rest: bool = False


@dataclass(frozen=True, slots=True)
class MoveKvCache:
    """gManager → debtor, the paper's move_kvcache: lend blocks of a request to `parts` (creditor, its incarnation, blocks), in
    the order of their positions; a creditor may have several.

    Advice: the owner repeats every check. `heartbeat`: seq of the heartbeat it rests on. `kind`: "throughput" or "capacity".
    """

    order: OrderId
    heartbeat: int
    req_id: int
    parts: tuple[tuple[int, int, int], ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """gManager → instance: preempt this request, an older one needs its room."""

    order: OrderId
    heartbeat: int
    req_id: int


Message = (
    SubmitRequest
    | AbortRequest
    | RequestDone
    | LoadReport
    | DebtorLedger
    | CreditorLedger
    | Store
    | StoreRefused
    | Heartbeat
    | HeartbeatReply
    | MoveKvCache
    | Preempt
)


# ---- events ------------------------------------------------------------------------------------------------------------------
class RequestArrived(NamedTuple):
    request: Request


@dataclass(frozen=True, slots=True)
class RequestAborted:
    req_id: int


class MessageReceived(NamedTuple):
    sender: Address
    message: Message


class IterationsDone(NamedTuple):
    """`num_iterations` more iterations of step `step` are complete; batches change only where `ended`.

    `finished_ids`: requests whose last token came with the last of them (only where `ended`). `remote_wait_s`: time spent in
    these iterations waiting for other instances' MicroAttention. `stale`: loans a creditor would not serve: the iteration that
    wanted them does not count, nor does one that a lost peer kept waiting. `iteration_s`: duration of the last one.
    """

    step: int
    num_iterations: int
    finished_ids: tuple[int, ...]
    ended: bool
    remote_wait_s: float = 0.0
    stale: tuple[LoanId, ...] = ()
    iteration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferDone:
    """A Store or fetch has ended at this end: `ok`, or given up by the transport, or (a fetch) `stale`: the loan is gone."""

    transfer: TransferId
    loan: LoanId
    ok: bool
    stale: bool = False


@dataclass(frozen=True, slots=True)
class ReadStarted:
    """A debtor reads (loan, num_blocks) pairs here: for MicroAttention in its iterations, or to fetch blocks back."""

    reader: Address
    read: int
    reads: tuple[tuple[LoanId, int], ...]


@dataclass(frozen=True, slots=True)
class ReadEnded:
    reader: Address
    read: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The transport says that a machine is gone."""

    peer: Address


@dataclass(frozen=True, slots=True)
class PeerReturned:
    """The machine is back, empty, under a new incarnation."""

    peer: Address
    incarnation: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The machine's own deadline has come."""


Event = (
    RequestArrived
    | RequestAborted
    | MessageReceived
    | IterationsDone
    | TransferDone
    | ReadStarted
    | ReadEnded
    | PeerLost
    | PeerReturned
    | TimerFired
)


# ---- commands ----------------------------------------------------------------------------------------------------------------
class Chunk(NamedTuple):
    """`tokens` prompt tokens of a request behind `prefix_tokens` computed ones, `remote_tokens` of which are on other instances.

    `last` yields the request's next token.
    """

    req_id: int
    tokens: int
    prefix_tokens: int
    last: bool
    remote_tokens: int = 0


class StartIterations(NamedTuple):
    """Run up to `max_iterations` iterations of one fixed batch.

    decode_rows, decode_context_tokens, longest_tokens: rows of the decode batch, the tokens they read here in the first iteration
    (Σ over rows, the new token included; every row reads one more in each later iteration), and those of the longest row alone.
    `joined` and `left` tell how the decode batch differs from that of the step before (`left`: without having finished).
    `reads`: (loan, num_blocks) that rows of the decode batch and prompt chunks read on other instances in every iteration;
    `remote` and `chunk_remote`: the same as tokens by creditor, for decode rows and for the queries of chunks (`rows`: query
    tokens).
    """

    step: int
    decode_rows: int
    decode_context_tokens: int
    longest_tokens: int
    chunks: tuple[Chunk, ...]
    max_iterations: int
    joined: tuple[int, ...]
    left: tuple[int, ...]
    remote: tuple[RemoteRead, ...] = ()
    chunk_remote: tuple[RemoteRead, ...] = ()
    reads: tuple[tuple[LoanId, int], ...] = ()


class CutIterations(NamedTuple):
    """End step `step` at the next boundary between iterations."""

    step: int


class Send(NamedTuple):
    receiver: Address
    message: Message


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """Debtor: send these blocks to `peer` (a Store). The data flows once the creditor has posted its receive.

    `tokens_per_iteration` paces it while either end runs iterations.
    """

    transfer: TransferId
    loan: LoanId
    peer: Address
    blocks: tuple[int, ...]
    tokens_per_iteration: int


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Creditor: receive a Store of `peer` into these blocks."""

    transfer: TransferId
    loan: LoanId
    peer: Address
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Debtor: read blocks `first` … of the loan back from `peer` into these local blocks."""

    transfer: TransferId
    loan: LoanId
    peer: Address
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Serve:
    """Creditor: serve this read; its blocks stay until ReadEnded."""

    reader: Address
    read: int


@dataclass(frozen=True, slots=True)
class RefuseRead:
    """Creditor: these loans are gone or hold less (`Stale`)."""

    reader: Address
    read: int
    stale: tuple[LoanId, ...]


@dataclass(frozen=True, slots=True)
class RecordMove:
    """A move has ended (a row of moves.parquet). Times on the debtor's clock; None where it never came to that."""

    loan: LoanId | None
    req_id: int
    src: int
    dst: int
    num_blocks: int
    kind: str
    ordered_s: float
    tried_s: float | None
    committed_s: float | None
    outcome: str


class Finish(NamedTuple):
    """A request has reached its one final status."""

    outcome: RequestOutcome


Command = (
    StartIterations
    | CutIterations
    | Send
    | StartTransfer
    | PostReceive
    | StartFetch
    | Serve
    | RefuseRead
    | RecordMove
    | Finish
)
