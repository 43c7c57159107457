"""The highest request rate that keeps the SLO, by bisection, and which limit binds just above it."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.config import Config
from experiments.plan import RunPlan, plan_run
from experiments.points import mean
from experiments.sweep import Recording, RunOne, Workers, parallel
from experiments.sweepfile import Sweep, choice_name, label
from perfmodel.errors import InputError
from perfmodel.metrics import as_arrays, beyond_slo, breakdown, summarise
from perfmodel.records import RunResult

RATE = "workload.rate_rps"
PRECISION = 1.05  # bisection ends when the failing rate is at most this much above the passing one
MAX_DOUBLINGS = 20


@dataclass(frozen=True)
class CapacityPoint:
    """An axis point; `configs` are its replicates."""

    axes: dict[str, Any]
    configs: list[Config]

    @property
    def name(self) -> str:
        return ", ".join(choice_name(axis, value) for axis, value in self.axes.items()) or "the configuration"


@dataclass(frozen=True)
class Probe:
    """One rate tried: means over the replicates of every metric and part of the latency."""

    rate_rps: float
    numbers: dict[str, float]
    num_gpus: int

    @property
    def attainment(self) -> float:
        return self.numbers["slo_attainment_frac"]

    @property
    def rejected_frac(self) -> float:
        return self.numbers["num_rejected"] / self.numbers["num_requests"]

    def share(self, part: str) -> float:
        """Of the mean latency."""
        return self.numbers.get(part, 0.0) / self.numbers["e2e_s_mean"] if self.numbers["e2e_s_mean"] > 0 else 0.0


@dataclass(frozen=True)
class Found:
    """A point's capacity: `best` is the highest rate that keeps the SLO (None: no rate does); `limit` binds above it."""

    point: CapacityPoint
    probes: tuple[Probe, ...]
    best: Probe | None
    limit: str

    def row(self) -> dict[str, Any]:
        """A line of capacity.csv."""
        best = self.best
        return {
            **{
                key: value if isinstance(value, int | float) else label(value) for key, value in self.point.axes.items()
            },
            "rate_rps": best.rate_rps if best else 0.0,
            "goodput_rps": best.numbers["goodput_rps"] if best else 0.0,
            "output_tok_per_s_per_gpu": best.numbers["output_tok_per_s"] / best.num_gpus if best else 0.0,
            "slo_attainment_frac": best.attainment if best else None,
            "limit": self.limit,
        }


# What binds at the lowest rate that fails: the first that holds.
LIMITS: tuple[tuple[str, Callable[[Probe], bool]], ...] = (
    (
        "KV memory",
        lambda p: p.rejected_frac > 0.05 or p.share("preempted_s") > 0.05 or p.numbers["waits_when_full"] > 0.5,
    ),
    ("link", lambda p: p.share("remote_wait_s") > 0.1),
    ("compute", lambda p: p.numbers["late_tpot"] > p.numbers["late_ttft"]),  # iterations are too slow
    ("queue", lambda p: p.numbers["waits_beside_idle"] > 0.5 or p.numbers["batch_is_full"] > 0.5),
    ("prefill", lambda p: True),  # prompts wait although memory and rows are free
)


def find_capacity(
    points: Sequence[CapacityPoint], attainment: float, run_one: RunOne, workers: Workers
) -> Iterator[Found]:
    """Every point's capacity, as they are found."""
    from joblib import delayed

    yield from parallel([delayed(bisect)(point, attainment, run_one) for point in points], workers)


def points_without_rate(sweep: Sweep) -> list[CapacityPoint]:
    """A sweep's axis points. A rate axis is left out: the rate is what is looked for."""
    groups: dict[str, CapacityPoint] = {}
    for run in sweep.runs:
        axes = {key: value for key, value in run.axes.items() if key != RATE}
        point = groups.setdefault(label(axes), CapacityPoint(axes, []))
        if all(config.seed != run.config.seed for config in point.configs):
            point.configs.append(run.config)
    return list(groups.values())


def bisect(point: CapacityPoint, attainment: float, run_one: RunOne) -> Found:
    """Bracket by doubling or halving, then halve the bracket (geometrically)."""
    configs = point.configs
    probes: list[Probe] = []

    def passes(rate_rps: float) -> bool:
        probes.append(probe(configs, rate_rps, run_one))
        return probes[-1].attainment >= attainment

    low, high = bracket(start_rate(configs[0]), passes, lambda: probes[-1].rejected_frac > 1 - attainment)
    while low and high and high / low > PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if passes(middle) else (low, middle)
    by_rate = {p.rate_rps: p for p in probes}
    return Found(point, tuple(sorted(probes, key=lambda p: p.rate_rps)), by_rate.get(low), limit_of(by_rate.get(high)))


def bracket(start_rps: float, passes: Callable[[float], bool], hopeless: Callable[[], bool]) -> tuple[float, float]:
    """(rate that passes or 0, rate that fails or 0)."""
    rate_rps = start_rps
    if passes(rate_rps):
        for _ in range(MAX_DOUBLINGS):
            if not passes(2 * rate_rps):
                return rate_rps, 2 * rate_rps
            rate_rps *= 2
        return rate_rps, 0.0
    for _ in range(MAX_DOUBLINGS):
        if hopeless():
            break
        if passes(rate_rps / 2):
            return rate_rps / 2, rate_rps
        rate_rps /= 2
    return 0.0, rate_rps


def start_rate(config: Config) -> float:
    """The configuration's own rate, or the recorded one."""
    workload = plan_run(config).workload
    if workload.window_kind != "arrivals" or workload.arrival_s[-1] <= 0:
        raise InputError("capacity: the workload has no rate (allowed: a trace, or arrivals that take rate_rps)")
    return getattr(config.workload, "rate_rps", None) or (len(workload) - 1) / float(workload.arrival_s[-1])


def probe(configs: Sequence[Config], rate_rps: float, run_one: RunOne) -> Probe:
    """Every replicate at one rate."""
    workloads = [config.workload.model_copy(update={"rate_rps": rate_rps}) for config in configs]
    plans = [plan_run(c.model_copy(update={"workload": w})) for c, w in zip(configs, workloads, strict=True)]
    runs = [probe_one(plan, run_one) for plan in plans]
    means = {name: mean([numbers[name] for numbers in runs if name in numbers]) for name in runs[0]}
    return Probe(rate_rps, means, plans[0].facts["pool"]["num_gpus"])


def probe_one(plan: RunPlan, run_one: RunOne) -> dict[str, float]:
    """Metrics, mean parts of the latency, late requests and shares of waiting of one run."""
    with tempfile.TemporaryDirectory() as folder:
        result = run_one(plan, Path(folder), Recording())
    metrics = summarise(result, plan.slo, plan.capacity)
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    return numbers | breakdown(result.requests) | late_counts(result, plan) | waiting_shares(result, plan)


def late_counts(result: RunResult, plan: RunPlan) -> dict[str, int]:
    """Finished requests beyond each limit."""
    ttft_late, tpot_late = beyond_slo(as_arrays(result.requests), plan.slo)
    return {"late_ttft": int(ttft_late.sum()), "late_tpot": int(tpot_late.sum())}


def waiting_shares(result: RunResult, plan: RunPlan) -> dict[str, float]:
    """Of all waiting (requests × samples): at an instance without room for a long prompt, beside an idle instance, and
    at a full batch.
    """
    samples = {name: np.array(result.instances[name]) for name in ("t_s", "batch", "waiting", "free_blocks")}
    prompt_tokens = float(np.quantile(plan.workload.input_tokens, 0.9))
    room_blocks = max(0.1 * plan.spec.num_blocks, prompt_tokens / plan.spec.instance.block_tokens)
    idle_times = samples["t_s"][(samples["batch"] == 0) & (samples["waiting"] == 0)]
    conditions = {
        "waits_when_full": samples["free_blocks"] <= room_blocks,
        "waits_beside_idle": np.isin(samples["t_s"], idle_times),
        "batch_is_full": samples["batch"] >= 0.95 * (plan.spec.max_batch or np.inf),
    }
    total = max(1, samples["waiting"].sum())
    return {name: float(samples["waiting"][holds].sum() / total) for name, holds in conditions.items()}


def limit_of(failing: Probe | None) -> str:
    if failing is None:
        return "none found"
    return next(name for name, binds in LIMITS if binds(failing))
