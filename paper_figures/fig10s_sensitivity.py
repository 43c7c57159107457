"""Sensitivity of figures 10a and 10b: their headline ratios against what the paper does not say.

Claim: none of the paper's; this shows which of the unknowns would explain ratios like its 1.35-1.73 and 1.4-3.4. One thing at
a time is changed in a small setting (balanced outputs, 2 nodes, 100 Gb/s, more arrives than can be served; 10a: trace 0 on 4
GPUs, 10b: trace 4 on 8): link speed between nodes, spread of lengths (the traces), number of instances, share of outputs.
Reproduced: does not apply.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from known import known_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sheet import legend_below, main, panels, paper_band, spread
from study import Study

from experiments.plotstyle import CYCLE, MARKERS

FIGURE = "10s"
TITLE = "What would move the ratios of figure 10, LLaMA2-7B"
PARTS = "Simulated: every point is pairs of runs with the same seeds; bars are the range over the seeds."
WHY = (
    "Each panel changes one thing; where no point comes near the paper's band, that thing alone does not explain the "
    "difference."
)
LINKS = {"1 Gb/s": "ethernet-1g", "25 Gb/s": "ethernet-25g", "100 Gb/s": "ethernet-100g", "400 Gb/s": "infiniband-400g"}
NODES = {2: (1, 2), 4: (2, 2), 8: (2, 4), 16: (2, 8)}
SHARES = ("prompt-heavy", "balanced", "chat", "share-50")
NAMES = {"link": "link between nodes", "trace": "lengths", "instances": "GPUs", "split": "outputs"}


@dataclass(frozen=True)
class Half:
    """One of the two figures. traces: number → what its lengths are; rate_rps and num_requests are of a GPU."""

    figure: str
    rival: str
    traces: Mapping[int, str]
    reference: Mapping[str, Any]
    rate_rps: float
    num_requests: int


SHORT_TRACES, LONG_TRACES = {2: "SD 4K", 1: "SD 8K", 0: "SD 12K"}, {3: "to 200K", 5: "to 600K", 7: "to 1,500K"}
COMMON = {"link": "100 Gb/s", "split": "balanced"}


def halves(study: Study) -> tuple[Half, Half]:
    return (
        Half("10a", "vllm-multi", SHORT_TRACES, COMMON | {"trace": 0, "instances": 4}, 0.5, study.pick(10, 50, 200)),
        Half("10b", "vllm-single", LONG_TRACES, COMMON | {"trace": 4, "instances": 8}, 0.1, study.pick(3, 5, 100)),
    )


def table(study: Study) -> pd.DataFrame:
    """A row a setting and seed: the figure, what is varied, its value, the ratio, and both runs."""
    replicates = study.pick(1, 2, 5)
    return pd.concat([table_of(study, half, replicates) for half in halves(study)], ignore_index=True)


def table_of(study: Study, half: Half, replicates: int) -> pd.DataFrame:
    largest = half.reference["instances"] * 2
    instances = study.pick((), [count for count in NODES if count <= largest], list(NODES))
    varied = {"link": list(LINKS), "trace": list(half.traces), "instances": instances, "split": list(SHARES)}
    kept = study.pick({"split": ["balanced", "chat"]}, varied, varied)
    cases = [(name, value) for name, values in kept.items() for value in values]
    points = [
        {**point_of(half, {**half.reference, name: value}), "system": system}
        for name, value in cases
        for system in (half.rival, "infinite-llm")
    ]
    base = {"model": "llama2-7b", "replicates": replicates, "workload": {"generator": "paper-0", "rate_rps": 1.0}}
    found = study.summary(f"fig10s-{half.figure}", {"base": base, "points": points})
    rival, pooled = (found[found["system"] == name].reset_index(drop=True) for name in (half.rival, "infinite-llm"))
    head = pd.DataFrame([case for case in cases for _ in range(replicates)], columns=["varied", "value"])
    ratio = pooled["output_tok_per_s"] / rival["output_tok_per_s"]
    rows = head.astype({"value": str}).assign(ratio=ratio, run=pooled["run"], rival_run=rival["run"])
    return rows.assign(figure=half.figure, rival=half.rival)


def point_of(half: Half, setting: Mapping[str, Any]) -> dict[str, Any]:
    nodes, gpus_per_node = NODES[setting["instances"]]
    return {
        "cluster.nodes": nodes,
        "cluster.gpus_per_node": gpus_per_node,
        "cluster.inter_link": LINKS[setting["link"]],
        "workload.generator": f"paper-{setting['trace']}",
        "workload.output": setting["split"],
        "workload.num_requests": half.num_requests * setting["instances"],
        "workload.rate_rps": half.rate_rps * setting["instances"],
    }


def draw(frame: pd.DataFrame) -> Figure:
    cells = list(frame.groupby(["figure", "varied"], sort=False))
    figure, axes = panels(len(cells) // frame["figure"].nunique(), frame["figure"].nunique(), width=3.0)
    for one, ((name, varied), rows) in zip(axes, cells, strict=True):
        draw_cell(one, rows, name, varied)
    legend_below(figure, axes)
    return figure


def draw_cell(axes: Axes, rows: pd.DataFrame, figure: str, varied: str) -> None:
    mean, bars = spread(rows.groupby("value", sort=False)["ratio"])
    number = list(NAMES).index(varied)
    places = range(len(mean))
    axes.errorbar(places, mean, yerr=bars, color=CYCLE[number], marker=MARKERS[number], capsize=2)
    lengths = {str(trace): text for trace, text in (SHORT_TRACES | LONG_TRACES).items()}
    axes.set_xticks(places, [lengths[value] if varied == "trace" else value for value in mean.index], rotation=20)
    known = known_of(figure)[0]
    paper_band(axes, known.value, known.high or known.value, "the paper's range")
    axes.axhline(1.0, color="black", lw=0.8, ls=":")
    title = f"{figure}: over {rows['rival'].iloc[0]}"
    axes.set(title=title, xlabel=NAMES[varied], ylabel="throughput, ratio", ylim=(0, None))


def ours(frame: pd.DataFrame) -> dict[str, float]:
    """Nothing of the paper's of its own to compare with."""
    return {}


if __name__ == "__main__":
    main(sys.modules[__name__])
