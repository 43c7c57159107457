"""Figure 5: four instances A-D, batch and compute utilisation without sharing, with reactive and with proactive moves.

Claim: A holds one long request and nothing else, D a hundred middling ones, B and C many short ones; moving KV only when
memory has run out costs D its batch, moving ahead of that lets A and D grow. Reproduced: proactive batches of A and D are
larger than without sharing, and those of B and C stay. Setting [us]: LLaMA2-7B, one GPU each; A one request of 118,500 tokens and
short ones waiting behind it; D requests of 1,000 tokens, more than fit; B and C requests of 20 tokens at the rate at which
the cost model says that the paper's 443 and 454 rows are busy. The start is thus set, what sharing makes of it is the result.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from known import known_of, value
from matplotlib.figure import Figure
from sheet import Ours, by_setting, legend_below, main, panels, paper_marks
from study import ENGINES, Study, cost_of, layers_util

from experiments.plotstyle import CYCLE, MARKERS
from experiments.runfolder import read_table

FIGURE = "5"
TITLE = "Four instances: utilisation against batch, and batches under three ways to place KV, LLaMA2-7B"
PARTS = "Analytic: the curve (A100 pack, engine). Simulated: batches, means over 15 s of decoding."
WHY = (
    "Lengths and arrivals of the paper's four instances are not known, nor how its reactive baseline moves. The start is "
    "set; what a policy makes of it also depends on the queues behind the long request and at D, which are our choice. "
    "The curve depends on the engine: `graphs` is what kernels alone allow, `eager-2023` pays host time for every row, "
    "fitted up to 64 rows and extrapolated here."
)
BATCHES = (1, 16, 32, 64, 100, 131, 156, 200, 250, 300, 350, 400, 443, 512)
WAYS = {"no sharing": "none", "reactive": "reactive", "proactive": "greedy"}
FLOWS = {
    "A": (0, 200, 300),
    "B": (443, 20, 200),
    "C": (454, 20, 200),
    "D": (0, 1_000, 300),
}  # rows (0: a queue), in, out
QUEUED = {"A": 400, "D": 800}
LONG = (118_500, 1_500)
FROM_S, UNTIL_S = 25.0, 40.0


def table(study: Study) -> pd.DataFrame:
    """Rows of kind "curve" (engine, batch → utilisation) and "batch" (way, instance → mean batch)."""
    curve = [
        ("curve", name, "", batch, layers_util(cost_of("llama2-7b", 1, engine), batch), "")
        for name, engine in ENGINES.items()
        for batch in BATCHES
    ]
    runs = study.runs("fig05", config_of(study, study.pick(0.05, 1.0, 1.0)))
    rows = []
    for way, folder in zip(WAYS, runs.folders, strict=True):
        samples = read_table(folder, "instances")
        during = samples[(samples["t_s"] >= FROM_S) & (samples["t_s"] < UNTIL_S)]
        mean = during.groupby("instance")["batch"].mean()
        cost = cost_of("llama2-7b")
        rows += [
            ("batch", way, name, mean[i], layers_util(cost, max(1, round(mean[i]))), str(folder.relative_to(study.out)))
            for i, name in enumerate(FLOWS)
        ]
    return pd.DataFrame(curve + rows, columns=["kind", "way", "instance", "batch", "compute_util_frac", "run"])


def config_of(study: Study, share: float) -> dict[str, Any]:
    """`share` of the requests of every instance."""
    requests = [(0.0, *LONG)]
    for i, (name, flow) in enumerate(FLOWS.items()):
        requests += [(t_s, tokens + i, output) for t_s, tokens, output in flow_of(*flow, share, QUEUED.get(name, 0))]
    base = {
        "system": "infinite-llm",
        "model": "llama2-7b",
        "cluster": {"nodes": 1, "gpus_per_node": 4},
        "dispatch": f"{Path(__file__).with_name('policies.py')}:ByLastDigit",
        "scheduler": {"batch_threshold": 256},
        "workload": study.workload("fig05", sorted(requests)),
    }
    return {"base": base, "axes": {"placement": list(WAYS.values())}}


def flow_of(rows: int, tokens: int, output: int, share: float, queued: int) -> list[tuple[float, int, int]]:
    """A queue of `queued` requests; or `rows` that are half way on average, and successors as fast as they end."""
    if not rows:
        return [(0.001, tokens, output)] * round(share * queued)
    count = round(share * rows)
    running = [(0.001, tokens, 1 + n * output // count) for n in range(count)]
    gap_s = output * step_s(rows, tokens, output) / count
    return running + [(0.001 + n * gap_s, tokens, output) for n in range(round(UNTIL_S / gap_s))]


def step_s(rows: int, input_tokens: int, output_tokens: int) -> float:
    """An iteration of an instance with this many rows in decode, and as many prompts coming in as leave."""
    cost = cost_of("llama2-7b")
    kernel_s, launch_s, host_s = cost.iteration_terms(round(rows * (1 + input_tokens / output_tokens)), rows, rows)
    attention_s = cost.decode_attention_s(rows, rows * (input_tokens + output_tokens / 2))
    return max(kernel_s + attention_s, launch_s) + host_s


def draw(frame: pd.DataFrame) -> Figure:
    figure, [curve, *ways] = panels(4, width=2.9, height=3.2)
    for i, engine in enumerate(ENGINES):
        line = frame[(frame["kind"] == "curve") & (frame["way"] == engine)]
        curve.plot(
            line["batch"], line["compute_util_frac"], color=CYCLE[i], marker=MARKERS[i], markevery=3, label=engine
        )
    batches = [int(known.name.rpartition(" ")[2]) for known in known_of(FIGURE) if known.name.startswith("utilisation")]
    paper_marks(curve, batches, [value(FIGURE, f"utilisation at batch {batch}") for batch in batches])
    curve.set(title="Non-attention layers", xlabel="batch, requests", ylabel="compute utilisation", ylim=(0, None))
    for one, way in zip(ways, WAYS, strict=True):
        dots = frame[(frame["kind"] == "batch") & (frame["way"] == way)]
        bars = one.bar(np.arange(4) - 0.15, dots["batch"], color=CYCLE[4], width=0.5, label="batch, simulated")
        one.bar_label(bars, [f"{batch:.0f}" for batch in dots["batch"]], fontsize=7, padding=1)
        paper_marks(one, np.arange(4) + 0.25, [value(FIGURE, f"batch of {name}, {way}") for name in FLOWS])
        one.set(title=way.capitalize(), xlabel="instance", ylabel="batch, requests", ylim=(0, 560))
        one.set_xticks(range(4), FLOWS)
    legend_below(figure, [curve, *ways], 5)
    return figure


def ours(frame: pd.DataFrame) -> Ours:
    """Utilisation under `graphs`."""
    batches = frame[frame["kind"] == "batch"]
    return settings(frame)["graphs"] | {
        f"batch of {row.instance}, {row.way}": row.batch for row in batches.itertuples()
    }


def settings(frame: pd.DataFrame) -> dict[str, Ours]:
    """Utilisation by engine."""
    curves = frame[frame["kind"] == "curve"]
    return by_setting(curves, ("way",), lambda line: utilisations(line.set_index("batch")["compute_util_frac"]))


def utilisations(curve: pd.Series) -> Ours:
    names = [known.name for known in known_of(FIGURE) if known.name.startswith("utilisation")]
    return {name: curve[int(name.rpartition(" ")[2])] for name in names}


if __name__ == "__main__":
    main(sys.modules[__name__])
