"""Throughput-latency curves of two systems over the reconstructed traces: what figures 10a and 10b share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sheet import legend_below, panels, paper_band
from study import ENGINES, LINKS, SPLITS, Study

from experiments.plotstyle import CYCLE, MARKERS, SYSTEM_COLOURS, log_scale

TEXT_OF_RATIO = "throughput over {}"
Case = tuple[str, str]  # names of engine and link
REFERENCE: Case = ("graphs", "100 Gb/s")


@dataclass(frozen=True)
class Plan:
    """A figure's sweep. rates_rps: of the curves; the last one also carries the comparison of engines and links.

    variants: (engine, link) besides the reference, at the last rate and every trace and split.
    """

    name: str
    rival: str
    traces: tuple[int, ...]
    rates_rps: tuple[float, ...]
    num_requests: int
    base: Mapping[str, Any]
    splits: tuple[str, ...] = SPLITS
    variants: tuple[Case, ...] = ()

    @property
    def systems(self) -> tuple[str, str]:
        return (self.rival, "infinite-llm")


ALL_VARIANTS = tuple((engine, link) for engine in ENGINES for link in LINKS if (engine, link) != REFERENCE)


def table(study: Study, plan: Plan) -> pd.DataFrame:
    """A row a run: trace, split, engine, link, system, rate_rps, metrics, run."""
    cases = cases_of(plan)
    found = study.summary(plan.name, {"base": base_of(plan), "points": [point_of(*case) for case in cases]})
    head = pd.DataFrame(cases, columns=["trace", "split", "engine", "link", "system", "rate_rps"])
    columns = ["output_tok_per_s", "request_per_s", "e2e_s_mean", "tpot_s_p50", "num_finished", "num_rejected"]
    columns += ["served_token_frac", "kv_util_frac", "batch_mean", "num_moves", "run"]
    return pd.concat([head, found[columns]], axis=1)


def cases_of(plan: Plan) -> list[tuple[int, str, str, str, str, float]]:
    curves = [(*REFERENCE, rate) for rate in plan.rates_rps]
    settings = curves + [(*variant, plan.rates_rps[-1]) for variant in plan.variants]
    return [
        (trace, split, engine, link, system, rate)
        for trace in plan.traces
        for split in plan.splits
        for engine, link, rate in settings
        for system in plan.systems
    ]


def base_of(plan: Plan) -> dict[str, Any]:
    workload = {"num_requests": plan.num_requests, "arrivals": "poisson"}
    return {"model": "llama2-7b", **plan.base, "workload": workload}


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
    """Highest tokens/s of infinite-llm over that of the rival, by trace, split, engine and link."""
    keys = ["trace", "split", "engine", "link"]
    best = frame.groupby([*keys, "system"], sort=False)["output_tok_per_s"].max().unstack("system")
    return (best["infinite-llm"] / best[rival]).rename("ratio").reset_index()


def ratio_range(frame: pd.DataFrame, rival: str) -> tuple[float, float]:
    """(least, most) over traces and splits, in the reference setting."""
    found = ratios(frame, rival)
    chosen = found[(found["engine"] == REFERENCE[0]) & (found["link"] == REFERENCE[1])]["ratio"]
    return float(chosen.min()), float(chosen.max())


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
    legend_below(figure, axes, 4)
    return figure


def draw_curves(axes: Axes, frame: pd.DataFrame, systems: Sequence[str]) -> None:
    chosen = frame[(frame["engine"] == REFERENCE[0]) & (frame["link"] == REFERENCE[1])]
    for marker, system in zip(MARKERS, systems, strict=False):
        line = chosen[chosen["system"] == system]
        look = {"color": SYSTEM_COLOURS[system], "marker": marker, "label": system}
        axes.plot(line["output_tok_per_s"], line["e2e_s_mean"], **look)
    axes.set(xlabel="output tokens per s", ylabel="mean latency, s", xlim=(0, None))
    log_scale(axes)


def draw_ratios(axes: Axes, found: pd.DataFrame, split: str, traces: Sequence[int]) -> None:
    """A marker an engine, a colour a link, side by side over each trace."""
    cases = [(engine, link) for engine in ENGINES for link in LINKS]
    for i, (engine, link) in enumerate(cases):
        dots = found[(found["split"] == split) & (found["engine"] == engine) & (found["link"] == link)]
        look = {
            "color": CYCLE[3 + list(LINKS).index(link)],
            "marker": MARKERS[list(ENGINES).index(engine)],
            "ls": "none",
        }
        places = [traces.index(trace) + 0.12 * (i - 2.5) for trace in dots["trace"]]
        if places:
            axes.plot(places, dots["ratio"], **look, label=f"{engine}, {link}")
    axes.axhline(1.0, color="black", lw=0.8, ls=":")
    axes.set_xticks(range(len(traces)), [f"trace {trace}" for trace in traces])
    axes.set_xlim(-0.5, len(traces) - 0.5)
    axes.grid(axis="x")
