"""Pictures of one run for its report: KV memory and batch of every instance over time, latencies by length of the context."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from experiments.plots import over_time
from experiments.plotstyle import CYCLE, new_figure, styled

BUCKETS_TOKENS = (0, 1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000, np.inf)
MOST_STEPS = 200  # of a line: a percent is two of them
LATENCIES = (("ttft_s", "Time to first token"), ("tpot_s", "Time per output token"), ("e2e_s", "Whole latency"))


@styled
def instances_picture(instances: Any) -> Figure:
    """Share of KV blocks in use, and rows in decode, of every instance over time."""
    blocks = ["local_blocks", "reserved_blocks", "lent_blocks", "draining_blocks"]
    used = sum(over_time(instances, name) for name in blocks)
    total = used + over_time(instances, "free_blocks")
    figure, [[kv, batch]] = new_figure(1, 2, width=4.8)
    shade(figure, kv, 100 * used / total, "KV blocks in use, %", 100.0)
    rows = over_time(instances, "batch")
    shade(figure, batch, rows, "batch, rows in decode", max(1.0, float(rows.to_numpy().max())))
    return figure


def shade(figure: Figure, axes: Axes, table: Any, title: str, top: float) -> None:
    """Instances down, time across."""
    times = table.columns.to_numpy(dtype=float)
    shades = axes.pcolormesh(times, table.index, table, cmap="viridis", vmin=0, vmax=top, shading="nearest")
    axes.set(title=title, xlabel="time, s", ylabel="instance", ylim=(len(table) - 0.5, -0.5))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(False)
    figure.colorbar(shades, ax=axes)


@styled
def latencies_picture(requests: Any) -> Figure:
    """Cumulative distribution of three latencies, a line a bucket of context length."""
    figure, [panels] = new_figure(1, len(LATENCIES), width=3.4)
    for axes, (name, title) in zip(panels, LATENCIES, strict=True):
        for i, (label, bucket) in enumerate(buckets(requests)):
            values = bucket[name].dropna()
            if len(values):
                shares = np.linspace(0, 100, min(len(values), MOST_STEPS) + 1)[1:]
                steps = np.percentile(values, shares, method="inverted_cdf")
                axes.step(steps, shares, where="post", color=CYCLE[i % len(CYCLE)], label=label)
        axes.set(title=title, xlabel="s", ylabel="requests, %", xscale="log", ylim=(0, 101))
        axes.xaxis.set_major_locator(LogLocator(numticks=6))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def buckets(requests: Any) -> Iterator[tuple[str, Any]]:
    """(name, requests) of every bucket of context length that holds any."""
    context = requests["input_tokens"] + requests["output_tokens"]
    for low, high in pairwise(BUCKETS_TOKENS):
        bucket = requests[(context > low) & (context <= high)]
        if len(bucket):
            name = f"over {low / 1000:,g}K" if high == np.inf else f"{low / 1000:,g}–{high / 1000:,g}K tokens"
            yield f"{name} ({len(bucket):,})", bucket
