"""Is a simulation within what is allowed of the runs that it stands for? Verdicts, the order of systems, what was remote."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.compare import Comparison, compare, keyed, with_latencies
from experiments.eventlog import Replay, read_log
from experiments.explain import validate
from experiments.plan import plan_cluster
from experiments.runfolder import read_table
from experiments.runs import load_runs
from perfmodel.messages import Address, Command, Event, IterationsDone, StartIterations

LIMITS = {"output_tok_per_s": 0.05, "tpot_s_mean": 0.05, "ttft_s_mean": 0.10, "ttft_s_p90": 0.10}
E2E, E2E_LIMIT = "e2e_s_mape", 0.10
NOISE_TIMES, MOST = 2.0, 0.20
MORE_IS_BETTER = ("output_tok_per_s",)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One metric of one run. noise_frac: of the repeated real runs; NaN where there is but one."""

    run: str
    metric: str
    simulated: float
    real: float
    error_frac: float
    noise_frac: float

    @property
    def limit_frac(self) -> float:
        return LIMITS.get(self.metric, E2E_LIMIT)

    @property
    def by_noise(self) -> bool:
        """The noise floor decides what is allowed."""
        return NOISE_TIMES * self.noise_frac > self.limit_frac

    @property
    def allowed_frac(self) -> float:
        return min(MOST, NOISE_TIMES * self.noise_frac) if self.by_noise else self.limit_frac

    @property
    def holds(self) -> bool:
        return abs(self.error_frac) <= self.allowed_frac

    @property
    def word(self) -> str:
        return "within" if self.holds else "falls short"

    @property
    def rule(self) -> str:
        """What is allowed, and which rule said so."""
        return f"{self.allowed_frac:.1%} ({'noise' if self.by_noise else 'limit'})"

    def __str__(self) -> str:
        numbers = f"{self.simulated:>10.4g} {self.real:>10.4g} {self.error_frac:>+8.1%}"
        return f"{self.run:<30} {self.metric:<17} {numbers} {self.rule:>14} {self.word}"


def verdicts(simulated: Path, reals: Sequence[Path]) -> list[Verdict]:
    """Of all runs that both sides hold, by run and metric. What is undefined (nobody finished) has none."""
    comparison = compare(simulated, *reals)
    return [verdict for run in comparison.metrics["run"].unique() for verdict in of_run(comparison, run, reals)]


def of_run(comparison: Comparison, run: str, reals: Sequence[Path]) -> Iterator[Verdict]:
    rows, case = comparison.metrics[comparison.metrics["run"] == run].set_index("metric"), case_of(run)
    for metric in (m for m in LIMITS if m in rows.index):
        simulated, real, error, noise = (float(rows[name][metric]) for name in ("b", "a", "error_frac", "noise_frac"))
        yield Verdict(case, metric, simulated, real, error, noise)
    requests = comparison.requests[comparison.requests["run"] == run]
    if len(requests):
        error = float(requests["e2e_s_error_frac"].abs().mean())
        simulated, real = (float(requests[f"e2e_s_{side}"].mean()) for side in ("b", "a"))
        yield Verdict(case, E2E, simulated, real, error, request_noise_frac(run, reals))


def case_of(run: str) -> str:
    """A run's axis values alone: workload/system."""
    values = [axis.partition("=")[2].removesuffix(".csv") for axis in run.split(", ")]
    return "/".join(reversed(values))


def request_noise_frac(run: str, reals: Sequence[Path]) -> float:
    """What the error of a single real run would be, were the mean of all of them the truth: mean over requests and runs."""
    if len(reals) < 2:
        return float("nan")
    folders = [keyed(load_runs(folder))[run][0] for folder in reals]
    each = [with_latencies(read_table(folder, "requests")).set_index("req_id")["e2e_s"] for folder in folders]
    table = pd.concat(each, axis="columns", join="inner")
    return float(
        table.sub(table.mean(axis="columns"), axis="index").abs().div(table.mean(axis="columns"), 0).mean().mean()
    )


@dataclass(frozen=True, slots=True)
class Order:
    """Which of two systems is better at a metric, in both worlds; "neither" where they are equal."""

    place: str
    metric: str
    simulated: str
    real: str

    def __str__(self) -> str:
        word = "same" if self.simulated == self.real else "differs"
        return f"{self.place:<30} {self.metric:<17} simulated {self.simulated}, real {self.real}: {word}"


def orders(found: Sequence[Verdict], systems: tuple[str, str]) -> list[Order]:
    """Where the real systems differ by more than their noise, which must be known. Runs of a pair differ in the system."""
    by_name = {(verdict.run, verdict.metric): verdict for verdict in found if verdict.metric in LIMITS}
    first, second = systems
    answers = []
    for (run, metric), a in by_name.items():
        b = by_name.get((run.replace(first, second), metric)) if first in run else None
        if b is None or not differ(a, b):
            continue
        best = [better(*pair, metric, systems) for pair in ((a.simulated, b.simulated), (a.real, b.real))]
        answers.append(Order(run.replace(first, "").strip("/"), metric, *best))
    return answers


def better(first: float, second: float, metric: str, systems: tuple[str, str]) -> str:
    if first == second:
        return "neither"
    return systems[int((first < second) == (metric in MORE_IS_BETTER))]


def differ(a: Verdict, b: Verdict) -> bool:
    noise = NOISE_TIMES * np.hypot(a.noise_frac * a.real, b.noise_frac * b.real)
    return bool(abs(a.real - b.real) > noise)


def remote_frac(log: Path) -> float:
    """Of the KV tokens that all iterations of a run read, the share on other instances."""
    header, lines = read_log(log)
    steps: dict[Address, StartIterations] = {}
    read = {"home": 0, "remote": 0}

    def see(t_s: float, machine: Address, event: Event, commands: list[Command]) -> None:
        if isinstance(event, IterationsDone) and machine in steps:
            step, times = steps[machine], event.num_iterations
            read["home"] += times * step.decode_context_tokens
            read["home"] += times * sum(chunk.prefix_tokens - chunk.remote_tokens for chunk in step.chunks)
            read["remote"] += times * sum(part.tokens for part in step.remote)
            read["remote"] += times * sum(chunk.remote_tokens for chunk in step.chunks)
        for command in commands:
            if isinstance(command, StartIterations):
                steps[machine] = command

    Replay(plan_cluster(validate(header["config"], f"{log}, line 1")), see).run(lines)
    return read["remote"] / max(1, sum(read.values()))
