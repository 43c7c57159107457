"""The same runs of two folders side by side: error per metric, per request and per shape. A is the reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.plotstyle import BLUE, CYCLE, GREY, new_figure, styled
from experiments.runfolder import read_table
from experiments.runs import Runs, load_runs
from experiments.sweepfile import label
from perfmodel.errors import InputError
from perfmodel.metrics import METRICS

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
NOT_COMPARED = ("wall_s", "window_kind")
KEY_METRICS = (
    "output_tok_per_s",
    "goodput_rps",
    "ttft_s_p50",
    "ttft_s_p99",
    "tpot_s_p50",
    "tpot_s_p99",
    "e2e_s_p50",
    "e2e_s_p99",
)
NUM_SHAPES = 4  # bins of input and of output length


@dataclass(frozen=True)
class Comparison:
    """metrics: run, metric, a, b, error_frac · requests: the latencies of both sides and their errors, a row a request.

    `only_a`, `only_b`: runs without a counterpart. Errors are (b − a)/a.
    """

    metrics: pd.DataFrame
    requests: pd.DataFrame
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def compare(dir_a: Path, dir_b: Path) -> Comparison:
    """Runs are matched by their axes and replicate. Raises InputError where none match."""
    a, b = keyed(load_runs(dir_a)), keyed(load_runs(dir_b))
    both = [key for key in a if key in b]
    if not both:
        raise InputError(f"{dir_a} and {dir_b} have no run in common ({names(a)} there, {names(b)} here)")
    return Comparison(
        metrics=pd.concat([compare_metrics(key, a[key][1], b[key][1]) for key in both], ignore_index=True),
        requests=pd.concat([compare_requests(key, a[key][0], b[key][0]) for key in both], ignore_index=True),
        only_a=tuple(key for key in a if key not in b),
        only_b=tuple(key for key in b if key not in a),
    )


def keyed(runs: Runs) -> dict[str, tuple[Path, Any]]:
    """What two sweeps call the same run → its folder and manifest; failed runs are left out."""
    pairs = [(f, m) for f, m in zip(runs.folders, runs.manifests, strict=True) if m["status"] == "done"]
    return {run_key(manifest): (folder, manifest) for folder, manifest in pairs}


def run_key(manifest: Any) -> str:
    axes = [f"{key}={label(value)}" for key, value in sorted(manifest["axes"].items())]
    return ", ".join([*axes, *([f"replicate={manifest['replicate']}"] if manifest["replicate"] else [])]) or "the run"


def names(runs: dict[str, Any]) -> str:
    return "; ".join(list(runs)[:3]) or "none done"


def compare_metrics(key: str, a: Any, b: Any) -> pd.DataFrame:
    found = [(m, a["metrics"][m], b["metrics"][m]) for m in METRICS if m not in NOT_COMPARED]
    rows = [(key, m, x, y, error_frac(x, y)) for m, x, y in found if x is not None and y is not None]
    return pd.DataFrame(rows, columns=["run", "metric", "a", "b", "error_frac"])


def error_frac(a: Any, b: Any) -> Any:
    """(b − a)/a; 0 where both are 0, infinite where only a is. Numbers or arrays."""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(a == b, 0.0, (b - a) / a)[()]


def compare_requests(key: str, a: Path, b: Path) -> pd.DataFrame:
    """Requests that finished on both sides, matched by req_id."""
    left, right = (with_latencies(read_table(folder, "requests")) for folder in (a, b))
    joined = left.merge(right, on="req_id", suffixes=("_a", "_b"))
    joined.insert(0, "run", key)
    for name in LATENCIES:
        joined[f"{name}_error_frac"] = error_frac(joined[f"{name}_a"], joined[f"{name}_b"])
    return joined


def with_latencies(requests: pd.DataFrame) -> pd.DataFrame:
    done = requests[requests["status"] == "finished"]
    gaps = (done["output_tokens"] - 1).where(done["output_tokens"] > 1)
    return pd.DataFrame(
        {
            "req_id": done["req_id"],
            "input_tokens": done["input_tokens"],
            "output_tokens": done["output_tokens"],
            "ttft_s": done["first_token_s"] - done["arrival_s"],
            "tpot_s": (done["finish_s"] - done["first_token_s"]) / gaps,
            "e2e_s": done["finish_s"] - done["arrival_s"],
        }
    )


def metric_table(comparison: Comparison) -> pd.DataFrame:
    """Per key metric: mean and largest |error|, and the run it is largest in."""
    rows = []
    for metric in KEY_METRICS:
        found = comparison.metrics[comparison.metrics["metric"] == metric]
        if len(found):
            errors = found["error_frac"].abs()
            worst = found.iloc[int(np.argmax(errors))]
            rows.append((metric, errors.mean(), worst["error_frac"], worst["run"]))
    return pd.DataFrame(rows, columns=["metric", "mean_abs_error_frac", "largest_error_frac", "run"])


def request_table(comparison: Comparison) -> pd.DataFrame:
    """Per latency: median and 90th percentile of |error| over the requests, and the median error (its sign)."""
    rows = []
    for name in LATENCIES:
        errors = comparison.requests[f"{name}_error_frac"].dropna()
        if len(errors):
            rows.append((name, errors.abs().median(), errors.abs().quantile(0.9), errors.median()))
    return pd.DataFrame(rows, columns=["latency", "median_abs_error_frac", "p90_abs_error_frac", "median_error_frac"])


def shape_table(comparison: Comparison) -> pd.DataFrame:
    """Median error of e2e_s by quarter of input (rows) and of output length (columns)."""
    frame = comparison.requests
    bins = [length_bins(frame[f"{side}_tokens_a"]) for side in ("input", "output")]
    return frame["e2e_s_error_frac"].groupby(bins, observed=True).median().unstack()


def length_bins(tokens: "pd.Series[int]") -> "pd.Series[int]":
    """Every length's bin, named by its upper end: quarters of the requests, fewer where lengths repeat."""
    ends = np.unique(np.quantile(tokens, np.arange(1, NUM_SHAPES + 1) / NUM_SHAPES, method="higher"))
    return pd.Series(ends[np.searchsorted(ends, tokens)], index=tokens.index, name=tokens.name)


@styled
def picture(comparison: Comparison, names_: Sequence[str]) -> Figure:
    """Latency of each request on both sides, share of requests within an error, and error by shape."""
    figure, ((left, middle, right),) = new_figure(1, 3, width=3.8, height=3.2)
    frame = comparison.requests
    left.plot(frame["e2e_s_a"], frame["e2e_s_b"], ".", ms=2, alpha=0.4, color=BLUE, rasterized=True)
    low, high = frame[["e2e_s_a", "e2e_s_b"]].min().min(), frame[["e2e_s_a", "e2e_s_b"]].max().max()
    left.plot([low, high], [low, high], color=GREY, lw=0.8)
    left.set(title="Latency of each request, s", xlabel=names_[0], ylabel=names_[1], xscale="log", yscale="log")
    for name, colour in zip(LATENCIES, CYCLE, strict=False):
        errors = np.sort(frame[f"{name}_error_frac"].abs().dropna().to_numpy())
        middle.plot(errors * 100, np.arange(1, len(errors) + 1) / max(1, len(errors)), color=colour, label=name)
    middle.set(title="Share of requests within an error", xlabel="|error|, %", xlim=(0, 50), ylim=(0, 1))
    middle.legend()
    shapes = shape_table(comparison)
    draw_shapes(right, shapes * 100)
    return figure


def draw_shapes(axes: Any, percent: pd.DataFrame) -> None:
    """A field a shape, with its number."""
    columns, index = ([f"≤ {tokens:,.0f}" for tokens in side] for side in (percent.columns, percent.index))
    top = 1.5 * max(5.0, float(np.nanmax(np.abs(percent.to_numpy()))))  # no shade too dark to read on
    axes.imshow(percent, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
    axes.set_xticks(range(percent.shape[1]), columns)
    axes.set_yticks(range(percent.shape[0]), index)
    for (i, j), value in np.ndenumerate(percent.to_numpy()):
        axes.text(j, i, f"{value:+.1f}", ha="center", va="center")
    axes.set(title="Median error of e2e_s by shape, %", xlabel="output tokens", ylabel="input tokens")
    axes.grid(False)
