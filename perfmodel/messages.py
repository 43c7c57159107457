"""What machines hear, say and order: events (past tense), messages (nouns) and commands (imperative).

All are frozen, slotted dataclasses. Messages carry durations and counters, never absolute times: every side has its own clock.
Machines are addressed by integers: instances 0, 1, …; `DISPATCHER` and `GMANAGER` are negative.
"""

from dataclasses import dataclass

DISPATCHER = -1
GMANAGER = -2

Address = int


def machine_name(address: Address) -> str:
    """Name of a machine in logs and stories."""
    return {DISPATCHER: "dispatcher", GMANAGER: "gmanager"}.get(address, f"instance-{address}")


@dataclass(frozen=True, slots=True)
class Request:
    """What the core may know of a request. Output lengths belong to the driver; `max_output_tokens` is an API-level limit."""

    req_id: int
    input_tokens: int
    max_output_tokens: int | None = None


# ---- messages ----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """Dispatcher → instance. `sequence` is the dispatcher's arrival order; only the current `attempt` of a request counts."""

    request: Request
    attempt: int
    sequence: int


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Dispatcher → instance: the client has gone away."""

    req_id: int


@dataclass(frozen=True, slots=True)
class RequestDone:
    """Instance → dispatcher: this attempt has ended, and what the instance holds now.

    `received` counts the requests the instance had received when it reported `load_blocks`.
    """

    req_id: int
    attempt: int
    status: str
    received: int
    load_blocks: int


Message = SubmitRequest | AbortRequest | RequestDone


# ---- events ------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RequestArrived:
    request: Request


@dataclass(frozen=True, slots=True)
class RequestAborted:
    req_id: int


@dataclass(frozen=True, slots=True)
class MessageReceived:
    sender: Address
    message: Message


@dataclass(frozen=True, slots=True)
class IterationsDone:
    """`num_iterations` more iterations of step `step` are complete; batches change only where `ended`.

    `finished_ids`: requests whose last token came with the last of them (only where `ended`). `remote_wait_s`: time spent in
    these iterations waiting for other instances' MicroAttention.
    """

    step: int
    num_iterations: int
    finished_ids: tuple[int, ...]
    ended: bool
    remote_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The machine's own deadline has come."""


Event = RequestArrived | RequestAborted | MessageReceived | IterationsDone | TimerFired


# ---- commands ----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` prompt tokens of a request behind `prefix_tokens` computed ones; `last` yields the request's next token."""

    req_id: int
    tokens: int
    prefix_tokens: int
    last: bool


@dataclass(frozen=True, slots=True)
class StartIterations:
    """Run up to `max_iterations` iterations of one fixed batch.

    decode_rows, decode_context_tokens: rows of the decode batch and the tokens they read in the first iteration (Σ over rows,
    the new token included; every row reads one more in each later iteration). `joined` and `left` tell how the decode batch
    differs from that of the step before (`left`: without having finished).
    """

    step: int
    decode_rows: int
    decode_context_tokens: int
    chunks: tuple[Chunk, ...]
    max_iterations: int
    joined: tuple[int, ...]
    left: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CutIterations:
    """End step `step` at the next boundary between iterations."""

    step: int


@dataclass(frozen=True, slots=True)
class Send:
    receiver: Address
    message: Message


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How a request ended, with times on the clock of the machine that ended it (seconds; None where it never happened).

    `prefill_s`: first admission to first token; `preempted_s`: from each preemption after the first token until decoding again;
    `remote_wait_s`: waiting for remote MicroAttention while decoding.
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
    num_preemptions: int
    preempted_s: float
    remote_wait_s: float
    remote_tokens_max: int


@dataclass(frozen=True, slots=True)
class Finish:
    """A request has reached its one final status."""

    outcome: RequestOutcome


Command = StartIterations | CutIterations | Send | Finish
