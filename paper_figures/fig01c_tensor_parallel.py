"""Figure 1c: compute utilisation of the non-attention layers against the tensor-parallel degree.

Claim: cutting the same layers over more GPUs wastes them; 8 GPUs do about a third, each, of what one does. Reproduced:
utilisation falls with every doubling, at any batch and engine. Model: LLaMA2-7B, decode batch 100 [us]: the batch is not
known, and 100 is where the paper's figure 5 has the utilisation that its figure 1c shows for one GPU.
"""

import sys
from itertools import product

import pandas as pd
from known import known_of, value
from matplotlib.figure import Figure
from sheet import Ours, by_setting, legend_below, main, panels, paper_marks
from study import ENGINES, LINKS, Study, cost_of, layers_util

from experiments.plotstyle import CYCLE, MARKERS

FIGURE = "1c"
TITLE = "Compute utilisation of the non-attention layers against tensor parallelism, LLaMA2-7B"
PARTS = (
    "Analytic, from the cost model: matrix products and collectives from the A100 pack (measured up to TP8, "
    "extrapolated beyond a node), the engine's launches and host time from its preset."
)
WHY = (
    "The batch behind the paper's figure is not known, nor its collectives' software; the last column also varies the "
    "batch from 25 to 200. Beyond a node the all-reduces cross the inter-node link, and their times are extrapolated."
)
MODEL = "llama2-7b"
DEGREES = (1, 2, 4, 8, 16, 32)
BATCH = 100  # of the picture
BATCHES = (25, 50, BATCH, 200)


def table(study: Study) -> pd.DataFrame:
    cases = product(ENGINES, LINKS, DEGREES, BATCHES)
    rows = [(*case, util_of(*case)) for case in cases]
    return pd.DataFrame(rows, columns=["engine", "link", "tensor_parallel", "batch", "compute_util_frac"])


def util_of(engine: str, link: str, degree: int, batch: int) -> float:
    return layers_util(cost_of(MODEL, degree, ENGINES[engine], LINKS[link]), batch)


def draw(frame: pd.DataFrame) -> Figure:
    figure, axes = panels(2)
    known = [(degree, value(FIGURE, f"utilisation at TP{degree}")) for degree in (1, 4, 8, 16, 32)]
    for one, link in zip(axes, LINKS, strict=True):
        for i, engine in enumerate(ENGINES):
            line = frame[(frame["engine"] == engine) & (frame["link"] == link) & (frame["batch"] == BATCH)]
            one.plot(
                line["tensor_parallel"], line["compute_util_frac"], color=CYCLE[i], marker=MARKERS[i], label=engine
            )
        paper_marks(one, *zip(*known, strict=True))
        one.set(title=f"{link} between nodes", xlabel="GPUs an instance (TP)", ylabel="compute utilisation")
        one.set_xscale("log", base=2)
        one.set_xticks(DEGREES, [str(degree) for degree in DEGREES])
        one.set_ylim(0, None)
    legend_below(figure, axes)
    return figure


def ours(frame: pd.DataFrame) -> Ours:
    return settings(frame)[f"graphs, 100 Gb/s, batch {BATCH}"]


def settings(frame: pd.DataFrame) -> dict[str, Ours]:
    named = frame.assign(batch="batch " + frame["batch"].astype(str))
    return by_setting(named, ("engine", "link", "batch"), compared)


def compared(part: pd.DataFrame) -> Ours:
    util = part.set_index("tensor_parallel")["compute_util_frac"]
    found = {
        known.name: util[int(known.name.rpartition("TP")[2])]
        for known in known_of(FIGURE)
        if "utilisation" in known.name
    }
    return found | {"performance of a GPU at TP8 over TP1": util[8] / util[1]}


if __name__ == "__main__":
    main(sys.modules[__name__])
