"""The picture of a workload: how long its requests are and when they come. Draws what `traces.describe` counts."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from experiments.plotstyle import BLUE, GREY, RED, new_figure, save, styled
from perfmodel.errors import InputError
from traces import Trace
from traces.trace import Ints

LENGTH_BINS = 60
TIME_BINS = 120
REQUESTS_PER_BIN = 10  # on average and at least, so that a short trace is no comb


@styled
def plot_trace(trace: Trace, title: str, stem: Path) -> list[Path]:
    """Writes `stem`.png and `stem`.svg: length distribution on the left, arrivals over time on the right."""
    figure, [[lengths, arrivals]] = new_figure(1, 2, width=4.8)
    edges = np.geomspace(0.9, int(max(trace.input_tokens.max(), trace.output_tokens.max())) * 1.1, LENGTH_BINS + 1)
    draw_lengths(lengths, "input", trace.input_tokens, edges.tolist())
    draw_lengths(lengths, "output", trace.output_tokens, edges.tolist())
    lengths.legend(loc="upper center", ncols=2)
    draw_arrivals(arrivals, trace)
    figure.suptitle(title, fontsize=10)
    try:
        return save(figure, stem)
    except OSError as error:
        raise InputError(f"{stem}.png: cannot be written ({error.strerror or error})") from None


def draw_lengths(axes: Axes, side: str, tokens: Ints, edges: list[float]) -> None:
    """Share of requests per logarithmic bin of tokens, with the median."""
    colour, line = {"input": (BLUE, "-"), "output": (RED, "--")}[side]
    share = np.histogram(tokens, edges)[0] / len(tokens)
    median = int(np.percentile(tokens, 50, method="inverted_cdf"))
    axes.stairs(share, edges, color=colour, alpha=0.12, fill=True)
    axes.stairs(share, edges, color=colour, linestyle=line, linewidth=1.5, label=f"{side} (median {median:,})")
    axes.set(xscale="log", xlabel="tokens", ylabel="share of requests per bin", title="Length of requests")
    axes.set_ylim(0.0, max(axes.get_ylim()[1], 1.25 * float(share.max())))


def draw_arrivals(axes: Axes, trace: Trace) -> None:
    """Requests per second over time; a workload without times says so."""
    axes.set(title="Arrivals", xlabel="time in s", ylabel="requests per s")
    if trace.duration_s == 0.0:
        text = "all requests at 0"
        if trace.closed is not None:
            text = f"closed loop: {trace.closed.users} users, mean think time {trace.closed.think_s.mean():.3g} s"
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=GREY)
        return
    num_bins = int(np.clip(len(trace) // REQUESTS_PER_BIN, 1, TIME_BINS))
    counts, edges = np.histogram(trace.arrival_s, bins=num_bins, range=(0.0, trace.duration_s))
    width_s = float(edges[1] - edges[0])
    axes.stairs(counts / width_s, edges, color=BLUE, linewidth=1.2, label=f"in steps of {width_s:.3g} s")
    axes.axhline(trace.mean_rate_rps, color=GREY, linestyle=":", label=f"mean {trace.mean_rate_rps:.3g}/s")
    axes.set_ylim(0.0, 1.25 * float(counts.max()) / width_s)
    axes.legend(loc="upper right", ncols=2)
