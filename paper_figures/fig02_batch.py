"""Figure 2a-c: batch size, memory and compute utilisation of one instance against the length of its requests.

Claim: with short requests compute saturates long before memory is full; with long ones memory is full at a batch of a few,
and compute idles. Reproduced: at length 20 a batch of 800 takes about 42 % of the memory and computes as well as the largest
one; at length 20K three requests fit. Model: LLaMA2-13B, one GPU, blocks of 16 tokens, 0.9 of the memory: these reproduce
the paper's counts [us].
"""

import sys

import numpy as np
import pandas as pd
from known import value
from matplotlib.figure import Figure
from sheet import legend_below, main, panels, paper_marks, tokens_axis
from study import Study, cost_of, layers_util

from experiments.plotstyle import CYCLE, MARKERS

FIGURE = "2"
TITLE = "Batch, memory and compute utilisation of an instance, LLaMA2-13B"
PARTS = (
    "Analytic: blocks that fit, from the memory account; utilisation of the non-attention layers, from the A100 pack "
    "(engine `graphs`)."
)
WHY = (
    "Counts differ by what is set aside for activations and the runtime, which is not known of the paper's engine. "
    "Compute utilisation at 800 and at the largest batch differ by what is left of the ramp."
)
MODEL = "llama2-13b"
LENGTHS = (20, 200, 2_000, 20_000)
REFERENCE_BATCH = 800


def table(study: Study) -> pd.DataFrame:
    """Rows of kind "fit" (a length: the batch that fits) and "batch" (a length and batch: shares of memory and compute)."""
    cost = cost_of(MODEL)
    instance = cost.instance
    rows = []
    for length in LENGTHS:
        blocks = -(-length // instance.block_tokens)
        largest = instance.num_blocks // blocks
        for batch in sorted({*batches_up_to(largest), largest, min(REFERENCE_BATCH, largest)}):
            kind = "fit" if batch == largest else "batch"
            rows.append((kind, length, batch, batch * blocks / instance.num_blocks, layers_util(cost, batch)))
    frame = pd.DataFrame(rows, columns=["kind", "length_tokens", "batch", "memory_util_frac", "compute_util_frac"])
    return frame.assign(fit_requests=instance.num_blocks / np.ceil(frame["length_tokens"] / instance.block_tokens))


def batches_up_to(largest: int) -> list[int]:
    return [int(batch) for batch in np.unique(np.geomspace(1, largest, 40).astype(int))]


def draw(frame: pd.DataFrame) -> Figure:
    figure, axes = panels(3)
    fit, memory, compute = axes
    largest = frame[frame["kind"] == "fit"]
    fit.plot(largest["length_tokens"], largest["batch"], color=CYCLE[0], marker="o", label="largest batch")
    tokens_axis(fit, LENGTHS)
    fit.set(title="a. Requests that fit", xlabel="length, tokens", ylabel="requests", yscale="log")
    for i, length in enumerate(LENGTHS):
        line = frame[frame["length_tokens"] == length].sort_values("batch")
        look = {"color": CYCLE[i + 1], "label": f"length {length:,}", "marker": MARKERS[i], "markevery": [-1]}
        memory.plot(line["batch"], 100 * line["memory_util_frac"], **look)
        compute.plot(line["batch"], 100 * line["compute_util_frac"], **look)
    memory.set(title="b. Memory", xlabel="batch, requests", ylabel="KV memory in use, %", xscale="log")
    compute.set(title="c. Compute", xlabel="batch, requests", ylabel="compute utilisation, %", xscale="log")
    paper_marks(fit, (20, 20_000), [value(FIGURE, name) for name in (FITS_SHORT, FITS_LONG)])
    paper_marks(memory, [REFERENCE_BATCH], [value(FIGURE, MEMORY)])
    legend_below(figure, axes, 6)
    return figure


FITS_SHORT, FITS_LONG = "requests of length 20 that fit", "batch at length 20K"
MEMORY, COMPUTE = (
    "memory that 800 requests of length 20 take",
    "compute utilisation at 800 over that at the largest batch",
)


def ours(frame: pd.DataFrame) -> dict[str, float]:
    short = frame[frame["length_tokens"] == LENGTHS[0]].set_index("batch")
    long = frame[frame["length_tokens"] == LENGTHS[-1]]
    at_reference = short.loc[REFERENCE_BATCH]
    return {
        FITS_SHORT: short["fit_requests"].iloc[0],
        FITS_LONG: long["fit_requests"].iloc[0],
        MEMORY: 100 * at_reference["memory_util_frac"],
        COMPUTE: at_reference["compute_util_frac"] / short["compute_util_frac"].iloc[-1],
    }


if __name__ == "__main__":
    main(sys.modules[__name__])
