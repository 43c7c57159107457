"""Records of a run: what happened to each request, the state of each instance over time, and cumulative counters.

Filled from commands alone, so simulated, real and replayed runs write the same tables. Column names and order are the contract
of the run folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from perfmodel.messages import RecordMove, RequestOutcome

Table = dict[str, list]  # type: ignore[type-arg]

REQUEST_COLUMNS = (
    "req_id",
    "arrival_s",
    "input_tokens",
    "output_tokens",
    "status",
    "reason",
    "instance",
    "first_token_s",
    "finish_s",
    "num_preemptions",
    "remote_tokens_max",
    "queue_s",
    "prefill_s",
    "decode_s",
    "remote_wait_s",
    "preempted_s",
    "other_s",
)


class Sample(NamedTuple):
    """State of an instance: a row of instances.parquet, behind its time and the instance."""

    batch: int
    waiting: int
    free_blocks: int
    local_blocks: int
    pledged_blocks: int
    reserved_blocks: int
    lent_blocks: int
    draining_blocks: int
    borrowed_blocks: int


INSTANCE_COLUMNS = ("t_s", "instance", *Sample._fields)
MOVE_COLUMNS = (
    "move_id",
    "req_id",
    "src",
    "dst",
    "num_blocks",
    "num_bytes",
    "kind",
    "ordered_s",
    "tried_s",
    "committed_s",
    "outcome",
)


@dataclass(slots=True)
class Counters:
    """Cumulative sums of one instance, or of a cluster, up to `t_s`.

    output_tokens · computed_tokens (through the non-attention layers) · attention_pairs (Σ query × context) · kv_block_s (∫
    local + lent blocks dt) · batch_s (∫ decode rows dt). `batch` and `blocks` are the current values.
    """

    t_s: float = 0.0
    output_tokens: int = 0
    computed_tokens: int = 0
    attention_pairs: int = 0
    kv_block_s: float = 0.0
    batch_s: float = 0.0
    batch: int = 0
    blocks: int = 0

    def pass_time(self, now_s: float, blocks: float) -> None:
        """Time up to `now_s` has passed with `blocks` blocks in use on average and the current batch."""
        elapsed = now_s - self.t_s
        self.kv_block_s += elapsed * blocks
        self.batch_s += elapsed * self.batch
        self.t_s = now_s

    def at(self, now_s: float) -> "Counters":
        """The counters at `now_s`, were nothing to happen until then."""
        later = Counters(*(getattr(self, f.name) for f in fields(self)))
        later.pass_time(now_s, self.blocks)
        return later


def total(counters: Sequence[Counters], now_s: float) -> Counters:
    """Cluster-wide sums at `now_s`."""
    at = [c.at(now_s) for c in counters]
    sums = {f.name: sum(getattr(c, f.name) for c in at) for f in fields(Counters)}
    return Counters(**{**sums, "t_s": now_s})


@dataclass(slots=True)
class RunResult:
    """Everything a run folder is made of.

    marks: cluster-wide counters at "start", "window_start", "window_end" and "end"; a window mark is absent where the run ended
    before it. basis_s: simulated seconds of instance time by how their price is known.
    """

    requests: Table
    instances: Table
    moves: Table
    marks: dict[str, Counters]
    window_kind: str
    num_refused: int
    basis_s: dict[str, float]
    makespan_s: float


@dataclass(slots=True)
class Collector:
    """Turns outcomes and samples into the tables of a run."""

    requests: Table = field(default_factory=lambda: {name: [] for name in REQUEST_COLUMNS})
    instances: Table = field(default_factory=lambda: {name: [] for name in INSTANCE_COLUMNS})
    moves: Table = field(default_factory=lambda: {name: [] for name in MOVE_COLUMNS})
    marks: dict[str, Counters] = field(default_factory=dict)
    num_refused: int = 0

    @property
    def num_ended(self) -> int:
        return len(self.requests["req_id"])

    def add_request(self, outcome: RequestOutcome, arrival_s: float, input_tokens: int, output_tokens: int) -> None:
        """One row of requests.parquet; `output_tokens` is what was asked for, or generated where that was not known.

        The breakdown sums to finish − arrival; what has no other name is `other_s`.
        """
        parts = _breakdown(outcome)
        row = (
            outcome.req_id,
            arrival_s,
            input_tokens,
            output_tokens,
            outcome.status,
            outcome.reason,
            outcome.instance,
            outcome.first_token_s,
            outcome.finish_s,
            outcome.num_preemptions,
            outcome.remote_tokens_max,
            *parts,
            outcome.finish_s - arrival_s - sum(parts, 0.0),
        )
        _append(self.requests, row)

    def add_sample(self, now_s: float, instance: int, state: Sample) -> None:
        """One row of instances.parquet."""
        _append(self.instances, (now_s, instance, *state))

    def add_move(self, move: RecordMove, block_bytes: int) -> None:
        """One row of moves.parquet."""
        self.num_refused += move.outcome == "refused"
        known = {"move_id": len(self.moves["move_id"]), "num_bytes": move.num_blocks * block_bytes}
        _append(self.moves, [known[name] if name in known else getattr(move, name) for name in MOVE_COLUMNS])

    def result(self, window_kind: str, basis_s: dict[str, float]) -> RunResult:
        """The run's tables; requests in order of `req_id`, whatever the order of their endings."""
        ids = self.requests["req_id"]
        order = sorted(range(len(ids)), key=ids.__getitem__)
        return RunResult(
            requests={name: [column[i] for i in order] for name, column in self.requests.items()},
            instances=self.instances,
            moves=self.moves,
            marks=self.marks,
            window_kind=window_kind,
            num_refused=self.num_refused,
            basis_s=basis_s,
            makespan_s=max(self.requests["finish_s"], default=0.0),
        )


def window_marks(kind: str, num_requests: int) -> dict[int, str]:
    """Which arrival (by index) or ending (by count) opens and closes the measured window."""
    if kind == "arrivals":
        return {num_requests // 10: "window_start", num_requests - 1: "window_end"}
    return {-(-num_requests // 10): "window_start", -(-9 * num_requests // 10): "window_end"}


def _breakdown(o: RequestOutcome) -> tuple[float, ...]:
    """Parts of a request's latency, as far as it came: queue, prefill, decode, remote wait, preempted."""
    admitted = o.finish_s if o.admitted_s is None else o.admitted_s
    first = o.finish_s if o.first_token_s is None else o.first_token_s
    decode = max(0.0, o.finish_s - first - o.preempted_s - o.remote_wait_s)
    return admitted - o.received_s, first - admitted, decode, o.remote_wait_s, o.preempted_s


def _append(table: Table, row: Sequence[object]) -> None:
    for column, value in zip(table.values(), row, strict=True):
        column.append(value)
