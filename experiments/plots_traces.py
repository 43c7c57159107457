"""The picture of a workload: how long its requests are and when they come. Draws what `traces.describe` counts."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.errors import InputError
from traces import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#7F7F7F"  # Okabe and Ito: told apart by colour-blind eyes and in grey
LENGTH_BINS = 60
TIME_BINS = 120
SUFFIXES = (".png", ".svg")


def plot_trace(trace: Trace, title: str, stem: Path) -> list[Path]:
    """Writes `stem`.png and `stem`.svg: length distribution on the left, arrivals over time on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    lengths, arrivals = figure.subplots(1, 2)
    draw_lengths(lengths, trace)
    draw_arrivals(arrivals, trace)
    figure.suptitle(title, fontsize=11)
    for axes in (lengths, arrivals):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    return [_save(figure, stem.with_name(stem.name + suffix)) for suffix in SUFFIXES]


def draw_lengths(axes: "Axes", trace: Trace) -> None:
    """Share of requests per logarithmic bin of tokens, with the medians."""
    longest = int(max(trace.input_tokens.max(), trace.output_tokens.max()))
    edges = np.geomspace(0.9, longest * 1.1, LENGTH_BINS + 1)
    sides: list[tuple[str, Any, str, str]] = [
        ("input", trace.input_tokens, BLUE, "-"),
        ("output", trace.output_tokens, ORANGE, "--"),
    ]
    for name, tokens, colour, line in sides:
        share = np.histogram(tokens, edges)[0] / len(trace)
        median = int(np.percentile(tokens, 50, method="inverted_cdf"))
        axes.stairs(share, edges, color=colour, linestyle=line, linewidth=1.6, label=f"{name} (median {median:,})")
        axes.stairs(share, edges, color=colour, alpha=0.12, fill=True)
    axes.set(xscale="log", xlabel="tokens", ylabel="share of requests per bin", title="Length of requests")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.2)
    axes.legend(frameon=False, loc="best")


def draw_arrivals(axes: "Axes", trace: Trace) -> None:
    """Requests per second over time; a workload without times says so."""
    axes.set(title="Arrivals", xlabel="time in s", ylabel="requests per s")
    if trace.duration_s == 0.0:
        text = "all requests at 0"
        if trace.closed is not None:
            text = f"closed loop: {trace.closed.users} users, mean think time {trace.closed.think_s.mean():.3g} s"
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=GREY)
        return
    counts, edges = np.histogram(trace.arrival_s, bins=_num_bins(trace), range=(0.0, trace.duration_s))
    width_s = edges[1] - edges[0]
    axes.stairs(counts / width_s, edges, color=BLUE, linewidth=1.2, label=f"in steps of {width_s:.3g} s")
    axes.axhline(trace.mean_rate_rps, color=GREY, linestyle=":", label=f"mean {trace.mean_rate_rps:.3g}/s")
    axes.set_ylim(bottom=0, top=1.25 * float(counts.max()) / width_s)
    axes.legend(frameon=False, loc="upper right", ncols=2)


def _num_bins(trace: Trace) -> int:
    """About ten requests a bin at least, so that a short trace is no comb."""
    return int(np.clip(len(trace) // 10, 1, TIME_BINS))


def _save(figure: Any, path: Path) -> Path:
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None
    return path
