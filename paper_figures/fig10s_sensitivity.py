"""Sensitivity of figure 10a: its headline ratio against what the paper does not say.

Claim: none of the paper's; this shows which of the unknowns would explain a ratio like its 1.35-1.73. One thing at a time is
changed in a setting of the reduced figure 10a (trace 0, balanced outputs, 2 nodes of 2 GPUs, 100 Gb/s, more arrives than can
be served): link speed between nodes, spread of lengths (the traces), number of instances, share of outputs. Reproduced: does
not apply.
"""

import sys
from typing import Any

import pandas as pd
from known import known_of
from matplotlib.figure import Figure
from sheet import legend_below, main, panels, paper_band
from study import Study

from experiments.plotstyle import CYCLE, MARKERS

FIGURE = "10s"
TITLE = "What would move the ratio of figure 10a: throughput over vLLM-multi, LLaMA2-7B"
PARTS = (
    "Simulated: every point is a pair of runs, at 0.5 requests/s an instance; bars are the range over the seeds (full "
    "size)."
)
WHY = (
    "Each panel changes one thing; where no point comes near the paper's band, that thing alone does not explain the "
    "difference."
)
RATE_RPS = 0.5  # an instance
LINKS = {"1 Gb/s": "ethernet-1g", "25 Gb/s": "ethernet-25g", "100 Gb/s": "ethernet-100g", "400 Gb/s": "infiniband-400g"}
NODES = {2: (1, 2), 4: (2, 2), 8: (2, 4), 16: (2, 8)}
SPREADS = {2: "4K", 1: "8K", 0: "12K"}  # trace → SD of its lengths, tokens
SHARES = ("prompt-heavy", "balanced", "chat", "share-50")
REFERENCE = {"link": "100 Gb/s", "instances": 4, "trace": 0, "split": "balanced"}


def table(study: Study) -> pd.DataFrame:
    """A row a setting and seed: what is varied, its value, the ratio, and both runs."""
    varied = study.pick({"split": ["balanced", "chat"]}, values_of(LINKS, (2, 4, 8)), values_of(LINKS, tuple(NODES)))
    settings = [(name, value) for name, values in varied.items() for value in values]
    num_requests, replicates = study.pick((10, 1), (50, 1), (200, 5))
    points = [
        {**point_of({**REFERENCE, name: value}, num_requests), "system": system}
        for name, value in settings
        for system in ("vllm-multi", "infinite-llm")
    ]
    base = {"model": "llama2-7b", "replicates": replicates, "workload": {"generator": "paper-0", "rate_rps": 1.0}}
    found = study.summary("fig10s", {"base": base, "points": points})
    multi, pooled = (found[found["system"] == name].reset_index(drop=True) for name in ("vllm-multi", "infinite-llm"))
    head = pd.DataFrame([setting for setting in settings for _ in range(replicates)], columns=["varied", "value"])
    ratio = pooled["output_tok_per_s"] / multi["output_tok_per_s"]
    return head.astype({"value": str}).assign(ratio=ratio, run=pooled["run"], rival_run=multi["run"])


def values_of(links: dict[str, str], instances: tuple[int, ...]) -> dict[str, list[Any]]:
    return {"link": list(links), "trace": list(SPREADS), "instances": list(instances), "split": list(SHARES)}


def point_of(setting: dict[str, Any], num_requests: int) -> dict[str, Any]:
    """`num_requests` an instance."""
    nodes, gpus_per_node = NODES[setting["instances"]]
    return {
        "cluster.nodes": nodes,
        "cluster.gpus_per_node": gpus_per_node,
        "cluster.inter_link": LINKS[setting["link"]],
        "workload.generator": f"paper-{setting['trace']}",
        "workload.output": setting["split"],
        "workload.num_requests": num_requests * setting["instances"],
        "workload.rate_rps": RATE_RPS * setting["instances"],
    }


NAMES = {"link": "link between nodes", "trace": "SD of lengths, tokens", "instances": "instances", "split": "outputs"}


def draw(frame: pd.DataFrame) -> Figure:
    varied = list(dict.fromkeys(frame["varied"]))
    figure, axes = panels(len(varied), width=3.0)
    known = known_of("10a")[0]
    for i, (one, name) in enumerate(zip(axes, varied, strict=True)):
        lines = frame[frame["varied"] == name].groupby("value", sort=False)["ratio"]
        mean, low, high = lines.mean(), lines.min(), lines.max()
        places = range(len(mean))
        one.errorbar(places, mean, yerr=(mean - low, high - mean), color=CYCLE[i], marker=MARKERS[i], capsize=2)
        ticks = [SPREADS.get(int(value), value) if name == "trace" else value for value in mean.index]
        one.set_xticks(places, ticks, rotation=20)
        paper_band(one, known.value, known.high or known.value, "the paper's range")
        one.axhline(1.0, color="black", lw=0.8, ls=":")
        one.set(xlabel=NAMES[name], ylabel="throughput, ratio", ylim=(0, None))
    legend_below(figure, axes)
    return figure


def ours(frame: pd.DataFrame) -> dict[str, float]:
    """Nothing of the paper's to compare with."""
    return {}


if __name__ == "__main__":
    main(sys.modules[__name__])
