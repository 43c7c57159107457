"""Throughput-latency curves of two systems over the reconstructed traces: what figures 10a and 10b share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sheet import Ours, by_setting, legend_below, panels, paper_band, spread
from study import ENGINES, LINKS, SPLITS, Study

from experiments.plotstyle import CYCLE, MARKERS, SYSTEM_COLOURS, log_scale

Case = tuple[str, str]  # names of engine and link
REFERENCE: Case = ("graphs", "100 Gb/s")


@dataclass(frozen=True)
class Plan:
    """A figure's sweep. rates_rps: of the curves; the last one also carries the comparison of engines and links.

    variants: (engine, link) besides the reference, at the last rate and every split, for `varied` traces (None: all).
    replicates: seeds of every point.
    """

    name: str
    rival: str
    traces: tuple[int, ...]
    rates_rps: tuple[float, ...]
    num_requests: int
    base: Mapping[str, Any]
    splits: tuple[str, ...] = SPLITS
    variants: tuple[Case, ...] = ()
    varied: tuple[int, ...] | None = None
    replicates: int = 1

    @property
    def systems(self) -> tuple[str, str]:
        return (self.rival, "infinite-llm")


SETTING = ["trace", "split", "engine", "link"]
ALL_VARIANTS = tuple((engine, link) for engine in ENGINES for link in LINKS if (engine, link) != REFERENCE)


def table(study: Study, plan: Plan) -> pd.DataFrame:
    """A row a run: trace, split, engine, link, system, rate_rps, replicate, metrics, run."""
    cases = cases_of(plan)
    found = study.summary(plan.name, {"base": base_of(plan), "points": [point_of(*case) for case in cases]})
    rows = [case for case in cases for _ in range(plan.replicates)]
    head = pd.DataFrame(rows, columns=[*SETTING, "system", "rate_rps"])
    columns = [
        "replicate",
        "output_tok_per_s",
        "request_per_s",
        "e2e_s_mean",
        "tpot_s_p50",
        "num_finished",
        "num_rejected",
    ]
    columns += ["window_kind", "served_token_frac", "kv_util_frac", "batch_mean", "num_moves", "run"]
    return pd.concat([head, found[columns]], axis=1)


def cases_of(plan: Plan) -> list[tuple[int, str, str, str, str, float]]:
    curves = [(*REFERENCE, rate) for rate in plan.rates_rps]
    variants = [(*variant, plan.rates_rps[-1]) for variant in plan.variants]
    return [
        (trace, split, engine, link, system, rate)
        for trace in plan.traces
        for split in plan.splits
        for engine, link, rate in curves + variants * (plan.varied is None or trace in plan.varied)
        for system in plan.systems
    ]


def base_of(plan: Plan) -> dict[str, Any]:
    workload = {"num_requests": plan.num_requests, "arrivals": "poisson"}
    return {"model": "llama2-7b", "replicates": plan.replicates, **plan.base, "workload": workload}


def point_of(trace: int, split: str, engine: str, link: str, system: str, rate_rps: float) -> dict[str, Any]:
    return {
        "workload.generator": f"paper-{trace}",
        "workload.output": split,
        "engine": ENGINES[engine],
        "cluster.inter_link": LINKS[link],
        "system": system,
        "workload.rate_rps": rate_rps,
    }


def ratios(frame: pd.DataFrame, rival: str) -> pd.DataFrame:
    """Highest tokens/s of infinite-llm over that of the rival with the same seed, by trace, split, engine, link and replicate."""
    keys = [*SETTING, "replicate"]
    best = frame.groupby([*keys, "system"], sort=False)["output_tok_per_s"].max().unstack("system")
    return (best["infinite-llm"] / best[rival]).rename("ratio").reset_index()


def settings(frame: pd.DataFrame, rival: str) -> dict[str, Ours]:
    """The ratio by trace, split, engine and link, means over the seeds."""
    named = ratios(frame, rival).assign(trace=lambda found: "trace " + found["trace"].astype(str))
    return by_setting(named, SETTING, lambda part: {f"throughput over {rival}": part["ratio"].mean()})


def highest(frame: pd.DataFrame, rival: str) -> Ours:
    """The highest ratio of all traces and splits in the reference setting."""
    found = settings(frame[is_reference(frame)], rival).values()
    name = f"throughput over {rival}"
    return {name: max(ours[name] for ours in found)}


WIDE_RATIO = 10  # from here on the paper's range would be a line at the bottom


def is_reference(frame: pd.DataFrame) -> "pd.Series[bool]":
    return (frame["engine"] == REFERENCE[0]) & (frame["link"] == REFERENCE[1])


def draw(frame: pd.DataFrame, rival: str, paper: tuple[float, float]) -> Figure:
    """A row a trace, a column a split; then the ratios of throughput, a column a split."""
    traces, splits = list(dict.fromkeys(frame["trace"])), list(dict.fromkeys(frame["split"]))
    figure, axes = panels(len(splits), len(traces) + 1, width=3.4, height=2.3)
    for row, trace in enumerate(traces):
        for column, split in enumerate(splits):
            one = axes[row * len(splits) + column]
            draw_curves(one, frame[(frame["trace"] == trace) & (frame["split"] == split)], (rival, "infinite-llm"))
            one.set_title(f"trace {trace}, {split}")
    for column, split in enumerate(splits):
        one = axes[len(traces) * len(splits) + column]
        draw_ratios(one, ratios(frame, rival), split, traces)
        paper_band(one, *paper, label=f"paper, {paper[0]:g}–{paper[1]:g}")
        one.set(title=f"over {rival}, {split}", ylabel="best throughput, ratio", ylim=(0, None))
        if one.get_ylim()[1] > WIDE_RATIO:
            one.set_ylim(0.8, None)
            log_scale(one)
    legend_below(figure, axes, 4)
    return figure


def draw_curves(axes: Axes, frame: pd.DataFrame, systems: Sequence[str]) -> None:
    """Means over the seeds; bars from the least to the most."""
    chosen = frame[is_reference(frame)]
    for marker, system in zip(MARKERS, systems, strict=False):
        line = chosen[chosen["system"] == system].groupby("rate_rps")
        (x, x_bars), (y, y_bars) = spread(line["output_tok_per_s"]), spread(line["e2e_s_mean"])
        look = {"color": SYSTEM_COLOURS[system], "marker": marker, "label": system}
        axes.errorbar(x, y, xerr=x_bars, yerr=y_bars, elinewidth=0.8, **look)
    most = float(chosen["output_tok_per_s"].max())
    axes.set(xlabel="output tokens per s", ylabel="mean latency, s", xlim=(0, 1.06 * most))
    log_scale(axes)


def draw_ratios(axes: Axes, found: pd.DataFrame, split: str, traces: Sequence[int]) -> None:
    """A marker an engine, a colour a link, side by side over each trace; bars from the least seed to the most."""
    cases = [(engine, link) for engine in ENGINES for link in LINKS]
    for i, (engine, link) in enumerate(cases):
        dots = found[(found["split"] == split) & (found["engine"] == engine) & (found["link"] == link)]
        look = {
            "color": CYCLE[3 + list(LINKS).index(link)],
            "marker": MARKERS[list(ENGINES).index(engine)],
            "ls": "none",
        }
        if len(dots):
            mean, bars = spread(dots.groupby("trace")["ratio"])
            places = [traces.index(trace) + 0.12 * (i - 2.5) for trace in mean.index]
            axes.errorbar(places, mean, yerr=bars, elinewidth=0.8, **look, label=f"{engine}, {link}")
    axes.axhline(1.0, color="black", lw=0.8, ls=":")
    axes.set_xticks(range(len(traces)), [f"trace {trace}" for trace in traces])
    axes.set_xlim(-0.5, len(traces) - 0.5)
    axes.grid(axis="x")
