"""Pictures of a sweep: latency against throughput, and who lends KV blocks to whom over time."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from experiments.plotstyle import BLUE, GREY, RED, log_scale, looks, new_figure, save, styled
from experiments.points import Point, paired_difference, points_of, rival

if TYPE_CHECKING:
    from experiments.capacity import Found
    from experiments.runs import Runs

LATENCY_PANELS = (  # title, median, 99th percentile, limit
    ("Time to first token", "ttft_s_p50", "ttft_s_p99", "ttft_s"),
    ("Time per output token", "tpot_s_p50", "tpot_s_p99", "tpot_s"),
)


def draw_sweep(runs: "Runs") -> list[Path]:
    """All pictures of a sweep's folder; none where every run failed."""
    points = points_of(runs.manifests)
    paths = save(throughput_latency(points), runs.folder / "throughput-latency") if points else []
    ledger = busiest_ledger(runs)
    if ledger is not None:
        paths += save(ledger_picture(*ledger), runs.folder / "ledger")
    return paths


@styled
def throughput_latency(points: Sequence[Point]) -> Figure:
    """A row a scenario: TTFT and TPOT (median and p99) against output tok/s, and goodput against the load.

    With replicates a fourth panel has the paired difference of goodput to the first contender.
    """
    scenarios = list(dict.fromkeys(point.scenario for point in points))
    contenders = list(dict.fromkeys(point.contender for point in points))
    loads = sorted({point.load for point in points if point.load is not None})
    paired = len(contenders) > 1 and any(len(point.manifests) > 1 for point in points)
    figure, grid = new_figure(len(scenarios), 4 if paired else 3)
    styles = looks(contenders)
    for scenario, row in zip(scenarios, grid, strict=True):
        for contender in contenders:
            line = [p for p in points if p.scenario == scenario and p.contender == contender]
            if line:
                draw_contender(row, line, styles[contender], bool(loads))
            if line and paired:
                draw_paired(row[3], line, points, styles[contender])
        finish_row(row, [p for p in points if p.scenario == scenario], scenario, loads)
    handles, labels = grid[0][0].get_legend_handles_labels()
    handles.append(Line2D([], [], color=GREY, ls="--", marker="o", mfc="white"))
    figure.legend(handles, [*labels, "p99 (filled: median)"], loc="outside lower center", ncols=4)
    return figure


def draw_contender(row: Sequence[Axes], line: Sequence[Point], style: dict[str, Any], has_load: bool) -> None:
    """One contender's points, in order of the load, on the three panels."""
    for axes, (_, median, p99, _) in zip(row, LATENCY_PANELS, strict=False):
        draw_line(axes, line, "output_tok_per_s", median, style | {"label": line[0].contender})
        draw_line(axes, line, "output_tok_per_s", p99, style | {"ls": "--", "mfc": "white"})
    draw_line(row[2], line, "load" if has_load else "output_tok_per_s", "goodput_rps", style)


def draw_paired(axes: Axes, line: Sequence[Point], points: Sequence[Point], style: dict[str, Any]) -> None:
    """Goodput less that of the first contender at the same load, seed by seed, with 95 % intervals."""
    axes.set(title=f"Goodput less {points[0].contender}'s", ylabel="requests per s, paired by seed")
    axes.axhline(0, color=GREY, lw=0.8, ls=":")
    axes.set_xlabel("offered load" if line[0].load is not None else "")
    pairs = [(point, other) for point in line if (other := rival(point, points)) is not None]
    if pairs:
        differences = [paired_difference(*pair, "goodput_rps") for pair in pairs]
        loads = [float(point.load or 0.0) for point, _ in pairs]
        means, widths = zip(*differences, strict=True)
        axes.errorbar(loads, means, yerr=np.nan_to_num(widths), capsize=2, **style)


def draw_line(axes: Axes, line: Sequence[Point], x: str, y: str, style: dict[str, Any]) -> None:
    """Means over replicates, with bars for their 95 % intervals."""
    xs = [float(p.load or 0.0) if x == "load" else p.mean(x) for p in line]
    ys, widths = [p.mean(y) for p in line], [p.half_width(y) for p in line]
    if any(isfinite(width) for width in widths):
        axes.errorbar(xs, ys, yerr=np.nan_to_num(widths), capsize=2, **style)
    else:
        axes.plot(xs, ys, **style)


def finish_row(row: Sequence[Axes], points: Sequence[Point], scenario: str, loads: Sequence[float]) -> None:
    """Scales, limits and labels of one scenario's panels."""
    slo = points[0].manifests[0]["config"]["slo"]
    for axes, (title, _, _, limit) in zip(row, LATENCY_PANELS, strict=False):
        axes.set(xlabel="output tokens per s", ylabel="seconds", xlim=(0, None))
        axes.set_title(title, pad=14)
        log_scale(axes)
        at_least = " and more for long prompts" if limit == "ttft_s" and slo["ttft_s_per_1k_tokens"] else ""
        axes.axhline(slo[limit], color=GREY, lw=0.8, ls=":")
        axes.annotate(
            f"dotted: SLO {slo[limit]:g} s{at_least}", (0.5, 1), xycoords="axes fraction", ha="center", **NOTE
        )
    axis = next((axis for axis in points[0].axes if axis.endswith(("rate_rps", "users"))), "")
    row[2].set_title("Goodput", pad=14)
    row[2].set(ylabel="requests per s in the SLO", ylim=(0, None), xlim=(0, None))
    names = {"workload.rate_rps": "offered requests per s", "workload.users": "users"}
    row[2].set_xlabel(names.get(axis, "output tokens per s"))
    if axis == "workload.rate_rps":
        row[2].plot([0, loads[-1]], [0, loads[-1]], color=GREY, lw=0.8, ls=":")
        row[2].set_ylim(0, 1.08 * loads[-1])
        row[2].annotate("all offered", (loads[-1], loads[-1]), **(NOTE | {"ha": "right", "xytext": (-12, -2)}))
    if scenario:
        row[0].annotate(scenario, (0, 1.14), xycoords="axes fraction", fontweight="bold", color=GREY)


NOTE: dict[str, Any] = {"xytext": (0, 2), "textcoords": "offset points", "color": GREY, "fontsize": 7}


def busiest_ledger(runs: "Runs") -> tuple[Any, Any, str] | None:
    """(instances, moves, name) of the run with most committed moves; None where nothing was lent."""
    from experiments.runfolder import read_table

    done = [(f, m) for f, m in zip(runs.folders, runs.manifests, strict=True) if m["status"] == "done"]
    busy = [(folder, manifest["metrics"]["num_moves"]) for folder, manifest in done if manifest["metrics"]["num_moves"]]
    if not busy:
        return None
    folder = max(busy, key=lambda pair: pair[1])[0]
    return read_table(folder, "instances"), read_table(folder, "moves"), folder.name


@styled
def ledger_picture(instances: Any, moves: Any, name: str) -> Figure:
    """Above: blocks every instance borrows or lends over time. Below: that both sums agree, and who lent to whom."""
    figure = Figure(figsize=(8.0, 5.6), layout="constrained")
    panels = figure.subplot_mosaic([["time", "time"], ["sums", "pairs"]], width_ratios=(3, 2), height_ratios=(3, 2))
    borrowed, lent = (over_time(instances, f"{side}_blocks") for side in ("borrowed", "lent"))
    draw_balance(figure, panels["time"], borrowed - lent)
    panels["time"].set_title(f"KV blocks borrowed and lent: {name}")
    draw_sums(panels["sums"], borrowed, lent, panels["time"].get_xlim())
    draw_pairs(figure, panels["pairs"], moves[moves["committed_s"].notna()], len(borrowed))
    return figure


def over_time(instances: Any, column: str) -> Any:
    """DataFrame [instance, sample time] of a column."""
    return instances.pivot_table(index="instance", columns="t_s", values=column, aggfunc="last").fillna(0)


def draw_balance(figure: Figure, axes: Axes, balance: Any) -> None:
    top = max(1.0, float(np.abs(balance.to_numpy()).max()))
    times = balance.columns.to_numpy(dtype=float)
    shades = axes.pcolormesh(times, balance.index, balance, cmap="RdBu_r", vmin=-top, vmax=top, shading="nearest")
    axes.set(ylabel="instance", xlabel="time, s", ylim=(len(balance) - 0.5, -0.5))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(False)
    figure.colorbar(shades, ax=axes, label="borrowed (+), lent (−)")


def draw_sums(axes: Axes, borrowed: Any, lent: Any, limits: tuple[float, float]) -> None:
    axes.plot(borrowed.columns, borrowed.sum(), color=RED, label="borrowed")
    axes.plot(lent.columns, lent.sum(), color=BLUE, ls="--", label="lent")
    axes.set(title="All instances", xlabel="time, s", ylabel="KV blocks", xlim=limits, ylim=(0, None))
    axes.legend()


def draw_pairs(figure: Figure, axes: Axes, moves: Any, num_instances: int) -> None:
    """Committed blocks by debtor and creditor, over the whole run; what comes back is not a debt."""
    debts = moves[~moves["kind"].isin(["reclaim", "back"])]
    pairs = np.zeros((num_instances, num_instances))
    np.add.at(pairs, (debts["src"].to_numpy(dtype=int), debts["dst"].to_numpy(dtype=int)), debts["num_blocks"])
    shades = axes.imshow(pairs, cmap="Purples", vmin=0)
    axes.set(title=f"{len(moves):,} moves: who lent to whom", xlabel="creditor", ylabel="debtor")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(False)
    figure.colorbar(shades, ax=axes, label="blocks")


@styled
def capacity_picture(found: Sequence["Found"], attainment: float) -> Figure:
    """Left: share of requests within the SLO at every rate tried. Right: the capacity, and what binds above it."""
    names = [one.point.name for one in found]
    figure, ((left, right),) = new_figure(1, 2, width=4.6, height=max(2.8, 0.4 * len(found) + 1))
    styles = looks(names)
    for one, name in zip(found, names, strict=True):
        left.plot([p.rate_rps for p in one.probes], [p.attainment for p in one.probes], label=name, **styles[name])
    left.axhline(attainment, color=GREY, lw=0.8, ls=":")
    left.set(
        title="Requests within the SLO", xlabel="offered requests per s", ylabel="share", xscale="log", ylim=(0, 1.02)
    )
    for formatter in (left.xaxis.set_major_formatter, left.xaxis.set_minor_formatter):
        formatter("{x:g}")
    left.legend()
    rates = [one.best.rate_rps if one.best else 0.0 for one in found]
    bars = right.barh(names, rates, color=[styles[name]["color"] for name in names])
    right.bar_label(
        bars, [f"{rate:.3g} req/s, then {one.limit}" for rate, one in zip(rates, found, strict=True)], padding=3
    )
    right.set(
        title=f"Highest rate with {100 * attainment:g} % within the SLO",
        xlabel="requests per s",
        xlim=(0, 1.9 * max(rates) or 1),
    )
    right.invert_yaxis()
    return figure
