"""Metrics of one run, from its tables and counters. Owns the window they are taken over and their exact definitions.

Window: for arrivals, from the first arrival after 10 % of the arrivals to the last one; for closed and saturated
workloads from the finish of 10 % of the requests to the finish of 90 %. The driver marks both ends. The whole run is the
window (`whole`) where a mark is missing, fewer than `MIN_REQUESTS` requests are in it, or it is shorter than the median
latency.

Requests of the window: those that arrived in it; by finishes, those that finished in it and all that never finished
(rejected ones end at time 0 of a saturated run, and must stay misses). Token rates are over tokens emitted in the
window, counts over all requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.records import Counters, RunResult

MIN_REQUESTS = 10
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
STATISTICS = ("mean", "p50", "p90", "p99")
STATUSES = ("finished", "rejected", "failed", "aborted")
BREAKDOWN = ("queue_s", "prefill_s", "decode_s", "remote_wait_s", "preempted_s", "other_s")

# Columns of summary.csv behind the axes and the replicate, in order. `wall_s` is the host's and no result of the run.
METRICS = (
    "num_requests",
    *(f"num_{status}" for status in STATUSES),
    "num_preemptions",
    "makespan_s",
    "window_s",
    "window_kind",
    "output_tok_per_s",
    "request_per_s",
    "served_token_frac",
    *(f"{latency}_{statistic}" for latency in LATENCIES for statistic in STATISTICS),
    "slo_attainment_frac",
    "goodput_rps",
    "kv_util_frac",
    "compute_util_frac",
    "batch_mean",
    "num_moves",
    "num_refused",
    "remote_tokens_peak",
    "moved_bytes",
    "wall_s",
)

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of one request: TTFT ≤ ttft_s + ttft_s_per_1k_tokens × input/1000, TPOT ≤ tpot_s."""

    ttft_s: float
    ttft_s_per_1k_tokens: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the cluster could have used (sums over all instances), and the FLOPs of each kind of work."""

    num_instances: int
    num_blocks: int
    block_tokens: int
    peak_flops_per_s: float
    flops_per_token: float
    flops_per_pair: float
    flops_per_output_token: float


@dataclass(frozen=True, slots=True)
class Window:
    """Its kind, the counters at its ends, and a mask of its requests."""

    kind: str
    start: Counters
    end: Counters
    chosen: Bools

    @property
    def length_s(self) -> float:
        return self.end.t_s - self.start.t_s


@dataclass(frozen=True, slots=True)
class Requests:
    """Columns of requests.parquet as arrays; what is undefined is nan."""

    finished: Bools
    arrival_s: Floats
    input_tokens: Floats
    output_tokens: Floats
    first_token_s: Floats
    finish_s: Floats

    @property
    def ttft_s(self) -> Floats:
        return np.where(self.finished, self.first_token_s - self.arrival_s, np.nan)

    @property
    def tpot_s(self) -> Floats:
        """Undefined for one token."""
        gaps = np.where(self.finished & (self.output_tokens > 1), self.output_tokens - 1, np.nan)
        return (self.finish_s - self.first_token_s) / gaps

    @property
    def e2e_s(self) -> Floats:
        return np.where(self.finished, self.finish_s - self.arrival_s, np.nan)


def summarise(result: RunResult, slo: Slo, capacity: Capacity) -> dict[str, Any]:
    """All of `METRICS` but `wall_s`. Undefined values are nan."""
    requests = as_arrays(result.requests)
    window = choose_window(result, requests)
    good = within_slo(requests, slo) & window.chosen
    return {
        **counts(result, requests),
        **rates(window, requests),
        **latencies(requests, window.chosen & requests.finished),
        "slo_attainment_frac": ratio(good.sum(), window.chosen.sum()),
        "goodput_rps": ratio(good.sum(), window.length_s),
        **utilisation(window, capacity),
        **moves(result, capacity.block_tokens),
    }


def as_arrays(table: dict[str, list[Any]]) -> Requests:
    columns = ("arrival_s", "input_tokens", "output_tokens", "first_token_s", "finish_s")
    arrays = (np.array([np.nan if v is None else v for v in table[name]], dtype=np.float64) for name in columns)
    finished = np.array([status == "finished" for status in table["status"]], dtype=np.bool_)
    return Requests(finished, *arrays)


def choose_window(result: RunResult, requests: Requests) -> Window:
    """The marked window, or the whole run."""
    start, end = result.marks.get("window_start"), result.marks.get("window_end")
    whole = Window("whole", result.marks["start"], result.marks["end"], np.ones(len(requests.finished), dtype=np.bool_))
    if start is None or end is None:
        return whole
    by_arrival = result.window_kind == "arrivals"
    time_s = requests.arrival_s if by_arrival else requests.finish_s
    inside = (time_s >= start.t_s) & (time_s <= end.t_s)
    if not by_arrival:
        inside &= requests.finished
    if inside.sum() < MIN_REQUESTS or end.t_s - start.t_s < median_latency_s(requests):
        return whole
    return Window(result.window_kind, start, end, inside if by_arrival else inside | ~requests.finished)


def median_latency_s(requests: Requests) -> float:
    return float(np.median(requests.e2e_s[requests.finished])) if requests.finished.any() else 0.0


def within_slo(requests: Requests, slo: Slo) -> Bools:
    """Finished with TTFT and TPOT (where defined) inside their limits."""
    ttft_late, tpot_late = beyond_slo(requests, slo)
    return requests.finished & ~ttft_late & ~tpot_late


def beyond_slo(requests: Requests, slo: Slo) -> tuple[Bools, Bools]:
    """(TTFT late, TPOT late). What is undefined is not late: one token has no gap to be late in."""
    allowance_s = slo.ttft_s + slo.ttft_s_per_1k_tokens * requests.input_tokens / 1000
    return requests.ttft_s > allowance_s, requests.tpot_s > slo.tpot_s


def counts(result: RunResult, requests: Requests) -> dict[str, Any]:
    statuses = result.requests["status"]
    return {
        "num_requests": len(statuses),
        **{f"num_{status}": statuses.count(status) for status in STATUSES},
        "num_preemptions": sum(result.requests["num_preemptions"]),
        "makespan_s": result.makespan_s,
    }


def rates(window: Window, requests: Requests) -> dict[str, Any]:
    finish_s = requests.finish_s[requests.finished]
    ended = ((finish_s >= window.start.t_s) & (finish_s <= window.end.t_s)).sum()
    tokens = requests.input_tokens + requests.output_tokens
    return {
        "window_s": window.length_s,
        "window_kind": window.kind,
        "output_tok_per_s": ratio(window.end.output_tokens - window.start.output_tokens, window.length_s),
        "request_per_s": ratio(ended, window.length_s),
        "served_token_frac": ratio(tokens[requests.finished].sum(), tokens.sum()),
    }


def latencies(requests: Requests, chosen: Bools) -> dict[str, float]:
    """Mean and quantiles (linear interpolation) of every latency over the chosen requests."""
    found: dict[str, float] = {}
    for name in LATENCIES:
        values = getattr(requests, name)[chosen]
        values = values[~np.isnan(values)]
        numbers = [values.mean(), *np.quantile(values, (0.5, 0.9, 0.99))] if values.size else [np.nan] * 4
        found |= {f"{name}_{statistic}": float(n) for statistic, n in zip(STATISTICS, numbers, strict=True)}
    return found


def utilisation(window: Window, capacity: Capacity) -> dict[str, float]:
    """Time means over the window."""
    start, end, length_s = window.start, window.end, window.length_s
    flops = (
        capacity.flops_per_token * (end.computed_tokens - start.computed_tokens)
        + capacity.flops_per_pair * (end.attention_pairs - start.attention_pairs)
        + capacity.flops_per_output_token * (end.output_tokens - start.output_tokens)
    )
    return {
        "kv_util_frac": ratio(end.kv_block_s - start.kv_block_s, capacity.num_blocks * length_s),
        "compute_util_frac": ratio(flops, capacity.peak_flops_per_s * length_s),
        "batch_mean": ratio(end.batch_s - start.batch_s, capacity.num_instances * length_s),
    }


def moves(result: RunResult, block_tokens: int) -> dict[str, int]:
    """Committed moves; the peak is the largest sum of borrowed tokens in a sample, or that of one request if larger."""
    committed = [i for i, t_s in enumerate(result.moves["committed_s"]) if t_s is not None]
    return {
        "num_moves": len(committed),
        "num_refused": result.num_refused,
        "remote_tokens_peak": max(borrowed_peak(result) * block_tokens, *result.requests["remote_tokens_max"], 0),
        "moved_bytes": sum(result.moves["num_bytes"][i] for i in committed),
    }


def borrowed_peak(result: RunResult) -> int:
    """Largest cluster-wide sum of borrowed blocks over the sample times."""
    sums: dict[float, int] = {}
    for t_s, blocks in zip(result.instances["t_s"], result.instances["borrowed_blocks"], strict=True):
        sums[t_s] = sums.get(t_s, 0) + blocks
    return max(sums.values(), default=0)


def breakdown(table: dict[str, list[Any]]) -> dict[str, float]:
    """Mean of every part of the latency over the finished requests (empty without one)."""
    finished = [i for i, status in enumerate(table["status"]) if status == "finished"]
    if not finished:
        return {}
    return {part: float(np.mean([table[part][i] for i in finished])) for part in BREAKDOWN}


def shares(seconds: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    """Every name's share of the sum (all 0 where the sum is)."""
    total = sum(seconds.values())
    return {name: ratio(seconds.get(name, 0.0), total) if total else 0.0 for name in names}


def ratio(above: float, below: float) -> float:
    """Quotient, nan where undefined."""
    return float(above / below) if below else float("nan")
