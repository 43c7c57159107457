"""The same runs of two folders side by side: error per metric, per request and per shape.

A, the reference, is the first folder, but where that was simulated and the others ran on hardware: reality is the reference. Of
several folders that repeat the same runs the means count, and how far they differ is the noise that an error is to be held against.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.runfolder import read_table
from experiments.runs import Runs, load_runs
from experiments.sweep import HARDWARE, SIMULATION
from experiments.sweepfile import label
from perfmodel.errors import InputError
from perfmodel.metrics import METRICS

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
NOT_COMPARED = ("wall_s", "window_kind")
KEY_METRICS = (
    "output_tok_per_s",
    "goodput_rps",
    *(f"{latency}_{which}" for latency in LATENCIES for which in ("mean", "p50", "p90", "p99")),
)
NUM_SHAPES = 4  # bins of input and of output length


@dataclass(frozen=True)
class Comparison:
    """metrics: run, metric, a, b, error_frac, noise_frac · requests: the latencies of both sides and their errors, a row a request;
    `borrowed`: it had KV on other instances.

    `name_a`, `name_b`: the folders · `only_a`, `only_b`: runs without a counterpart · `logs`: event logs of runs that have one on
    both sides. Errors are (b − a)/a; noise is the standard deviation of a repeated run by its mean, NaN without repetition.
    """

    name_a: str
    name_b: str
    metrics: pd.DataFrame
    requests: pd.DataFrame
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    logs: dict[str, tuple[Path, ...]]


@dataclass(frozen=True)
class Side:
    """Folders that hold the same runs. runs: what two sweeps call the same run → its folder and manifest, once a folder."""

    name: str
    runs: dict[str, list[tuple[Path, Any]]]

    @property
    def drivers(self) -> set[str]:
        return {manifest.get("driver", SIMULATION) for found in self.runs.values() for _, manifest in found}


def compare(dir_a: Path, *dirs_b: Path) -> Comparison:
    """Runs are matched by their axes and replicate. Raises InputError where none match."""
    a, b = side_of([dir_a]), side_of(dirs_b)
    if a.drivers == {SIMULATION} and b.drivers == {HARDWARE}:
        a, b = b, a
    both = [key for key in a.runs if key in b.runs]
    if not both:
        raise InputError(f"{a.name} and {b.name} have no run in common ({names(a.runs)} there, {names(b.runs)} here)")
    return Comparison(
        a.name,
        b.name,
        metrics=pd.concat([compare_metrics(key, a.runs[key], b.runs[key]) for key in both], ignore_index=True),
        requests=pd.concat([compare_requests(key, a.runs[key], b.runs[key]) for key in both], ignore_index=True),
        only_a=tuple(key for key in a.runs if key not in b.runs),
        only_b=tuple(key for key in b.runs if key not in a.runs),
        logs={key: logs for key in both if len(logs := event_logs(a.runs[key], b.runs[key])) == 2},
    )


def event_logs(*sides: list[tuple[Path, Any]]) -> tuple[Path, ...]:
    """Of the first of each side's folders, where it has one."""
    return tuple(log for side in sides if (log := side[0][0] / "events.jsonl").exists())


def side_of(folders: Sequence[Path]) -> Side:
    """Runs that all of the folders hold."""
    each = [keyed(load_runs(folder)) for folder in folders]
    shared = [key for key in each[0] if all(key in runs for runs in each)]
    name = str(folders[0]) + (f" and {len(folders) - 1} more" if len(folders) > 1 else "")
    return Side(name, {key: [runs[key] for runs in each] for key in shared})


def keyed(runs: Runs) -> dict[str, tuple[Path, Any]]:
    """What two sweeps call the same run → its folder and manifest; failed runs are left out."""
    pairs = [(f, m) for f, m in zip(runs.folders, runs.manifests, strict=True) if m["status"] == "done"]
    return {run_key(manifest): (folder, manifest) for folder, manifest in pairs}


def run_key(manifest: Any) -> str:
    axes = [f"{key}={label(value)}" for key, value in sorted(manifest["axes"].items())]
    return ", ".join([*axes, *([f"replicate={manifest['replicate']}"] if manifest["replicate"] else [])]) or "the run"


def names(runs: dict[str, Any]) -> str:
    return "; ".join(list(runs)[:3]) or "none done"


def compare_metrics(key: str, a: list[tuple[Path, Any]], b: list[tuple[Path, Any]]) -> pd.DataFrame:
    rows = []
    for metric in (m for m in METRICS if m not in NOT_COMPARED):
        left, right = ([manifest["metrics"][metric] for _, manifest in side] for side in (a, b))
        if None not in left + right:
            x, y = float(np.mean(left)), float(np.mean(right))
            rows.append((key, metric, x, y, error_frac(x, y), noise_frac(left if len(left) > 1 else right)))
    return pd.DataFrame(rows, columns=["run", "metric", "a", "b", "error_frac", "noise_frac"])


def noise_frac(values: Sequence[float]) -> float:
    """Standard deviation by mean; NaN for a single value, 0 where all are 0."""
    if len(values) < 2:
        return float("nan")
    return float(np.std(values, ddof=1) / abs(np.mean(values))) if np.any(values) else 0.0


def error_frac(a: Any, b: Any) -> Any:
    """(b − a)/a; 0 where both are 0, infinite where only a is. Numbers or arrays."""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(a == b, 0.0, (b - a) / a)[()]


def compare_requests(key: str, a: list[tuple[Path, Any]], b: list[tuple[Path, Any]]) -> pd.DataFrame:
    """Requests that finished in every run of both sides, matched by req_id."""
    left, right = (mean_latencies([folder for folder, _ in side]) for side in (a, b))
    joined = left.merge(right.drop(columns=["input_tokens", "borrowed"]), on="req_id", suffixes=("_a", "_b"))
    joined.insert(0, "run", key)
    for name in LATENCIES:
        joined[f"{name}_error_frac"] = error_frac(joined[f"{name}_a"], joined[f"{name}_b"])
    return joined


def mean_latencies(folders: Sequence[Path]) -> pd.DataFrame:
    """Of each request that finished in all of these runs; `borrowed`: in one of them at least."""
    each = pd.concat([with_latencies(read_table(folder, "requests")) for folder in folders])
    grouped = each.groupby("req_id")
    mean = grouped.mean().astype({"input_tokens": int}).assign(borrowed=grouped["borrowed"].max())
    return mean[grouped.size() == len(folders)].reset_index()


def with_latencies(requests: pd.DataFrame) -> pd.DataFrame:
    done = requests[requests["status"] == "finished"]
    gaps = (done["output_tokens"] - 1).where(done["output_tokens"] > 1)
    return pd.DataFrame(
        {
            "req_id": done["req_id"],
            "input_tokens": done["input_tokens"],
            "output_tokens": done["output_tokens"],
            "borrowed": done["remote_tokens_max"] > 0,
            "ttft_s": done["first_token_s"] - done["arrival_s"],
            "tpot_s": (done["finish_s"] - done["first_token_s"]) / gaps,
            "e2e_s": done["finish_s"] - done["arrival_s"],
        }
    )


def metric_table(comparison: Comparison) -> pd.DataFrame:
    """Per key metric: mean and largest |error|, the run it is largest in, and the noise of that run where it was repeated."""
    rows = []
    for metric in KEY_METRICS:
        found = comparison.metrics[comparison.metrics["metric"] == metric]
        if len(found):
            errors = found["error_frac"].abs()
            worst = found.iloc[int(np.argmax(errors))]
            rows.append((metric, errors.mean(), worst["error_frac"], worst["noise_frac"], worst["run"]))
    table = pd.DataFrame(
        rows, columns=["metric", "mean_abs_error_frac", "largest_error_frac", "noise_there_frac", "run"]
    )
    return table.dropna(axis="columns", how="all")


def request_table(comparison: Comparison) -> pd.DataFrame:
    """Per latency: mean, median and 90th percentile of |error| over the requests, and the median error (its sign); those that
    borrowed apart, where some did and some did not."""
    frame = comparison.requests
    parts = {"all": frame, "borrowed": frame[frame["borrowed"]], "all KV at home": frame[~frame["borrowed"]]}
    rows = []
    for name in LATENCIES:
        for who, part in parts.items() if len(frame) > len(parts["borrowed"]) > 0 else [("all", frame)]:
            errors = part[f"{name}_error_frac"].dropna()
            if len(errors):
                size = errors.abs()
                rows.append((name, who, size.mean(), size.median(), size.quantile(0.9), errors.median()))
    columns = ["mean_abs_error_frac", "median_abs_error_frac", "p90_abs_error_frac", "median_error_frac"]
    return pd.DataFrame(rows, columns=["latency", "requests", *columns])


def shape_table(comparison: Comparison) -> pd.DataFrame:
    """Median error of e2e_s by quarter of input (rows) and of output length (columns)."""
    frame = comparison.requests
    bins = [length_bins(frame[name]) for name in ("input_tokens", "output_tokens_a")]
    return frame["e2e_s_error_frac"].groupby(bins, observed=True).median().unstack()


def length_bins(tokens: "pd.Series[int]") -> "pd.Series[int]":
    """Every length's bin, named by its upper end: quarters of the requests, fewer where lengths repeat."""
    ends = np.unique(np.quantile(tokens, np.arange(1, NUM_SHAPES + 1) / NUM_SHAPES, method="higher"))
    return pd.Series(ends[np.searchsorted(ends, tokens)], index=tokens.index, name=tokens.name)
