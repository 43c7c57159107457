"""The picture of `infsim compare`."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from experiments.compare import LATENCIES, Comparison, shape_table
from experiments.plotstyle import BLUE, CYCLE, GREY, ORANGE, new_figure, plain_numbers, styled

LATENCY_NAMES = {"ttft_s": "Time to first token", "tpot_s": "Time per output token", "e2e_s": "Latency of a request"}


@styled
def picture(comparison: Comparison) -> Figure:
    """Latencies of each request on both sides, how they are distributed, the share of requests within an error, and the error by
    shape."""
    figure, (scatters, distributions) = new_figure(2, 4, width=3.2, height=3.0)
    for name, above, below in zip(LATENCIES, scatters, distributions, strict=False):
        draw_scatter(above, comparison, name)
        draw_distribution(below, comparison, name)
    draw_errors(scatters[3], comparison.requests)
    draw_shapes(distributions[3], shape_table(comparison) * 100)
    return figure


def draw_scatter(axes: Axes, comparison: Comparison, name: str) -> None:
    """A dot a request; those that had KV on other instances apart."""
    frame = comparison.requests[comparison.requests[f"{name}_a"].notna()]
    for borrowed, colour in ((False, BLUE), (True, ORANGE)):
        part = frame[frame["borrowed"] == borrowed]
        if len(part):
            label = "borrowed" if borrowed else "all KV at home"
            axes.plot(
                part[f"{name}_a"], part[f"{name}_b"], ".", ms=3, alpha=0.4, color=colour, rasterized=True, label=label
            )
    low, high = frame[[f"{name}_a", f"{name}_b"]].min().min(), frame[[f"{name}_a", f"{name}_b"]].max().max()
    axes.plot([low, high], [low, high], color=GREY, lw=0.8)
    axes.set(title=f"{LATENCY_NAMES[name]}, s", xlabel=comparison.name_a, ylabel=comparison.name_b)
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        few_numbers(axis, low, high)
    if frame["borrowed"].any():
        axes.legend(markerscale=2)


def draw_distribution(axes: Axes, comparison: Comparison, name: str) -> None:
    for side, who, style in (("a", comparison.name_a, "-"), ("b", comparison.name_b, "--")):
        values = np.sort(comparison.requests[f"{name}_{side}"].dropna().to_numpy())
        axes.plot(values, share_up_to(len(values)), style, color=BLUE if side == "a" else ORANGE, label=who)
    axes.set(title="Share of requests within a time", xlabel=name, xscale="log", ylim=(0, 1))
    few_numbers(axes.xaxis, *axes.get_xlim())
    axes.legend(loc="lower right")


def few_numbers(axis: Axis, low: float, high: float) -> None:
    """Plain numbers, no more than fit."""
    plain_numbers(axis, (1.0, 2.0, 5.0) if high < 50 * low else (1.0,))


def draw_errors(axes: Axes, frame: pd.DataFrame) -> None:
    for name, colour in zip(LATENCIES, CYCLE, strict=False):
        errors = np.sort(frame[f"{name}_error_frac"].abs().dropna().to_numpy())
        axes.plot(errors * 100, share_up_to(len(errors)), color=colour, label=name)
    axes.set(title="Share of requests within an error", xlabel="|error|, %", xlim=(0, 50), ylim=(0, 1))
    axes.legend(loc="lower right")


def share_up_to(count: int) -> Any:
    return np.arange(1, count + 1) / max(1, count)


def draw_shapes(axes: Any, percent: pd.DataFrame) -> None:
    """A field a shape, with its number."""
    columns, index = ([f"≤ {tokens:,.0f}" for tokens in side] for side in (percent.columns, percent.index))
    top = 1.5 * max(5.0, float(np.nanmax(np.abs(percent.to_numpy()))))  # no shade too dark to read on
    axes.imshow(percent, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
    axes.set_xticks(range(percent.shape[1]), columns)
    axes.set_yticks(range(percent.shape[0]), index)
    for (i, j), value in np.ndenumerate(percent.to_numpy()):
        axes.text(j, i, "" if np.isnan(value) else f"{value:+.1f}", ha="center", va="center")
    axes.set(title="Median error of e2e_s by shape, %", xlabel="output tokens", ylabel="input tokens")
    axes.grid(False)
