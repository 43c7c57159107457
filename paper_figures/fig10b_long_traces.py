"""Figure 10b: throughput-latency on the long traces 3-8, Infinite-LLM against vLLM-single.

Claim: 1.4-3.4 times the throughput, more with the range of lengths. Reproduced: the ratio of the highest throughputs is above
1. Served tokens are beside every point in the CSV: a system that rejects the longest requests would look faster than it is.
The traces are our reconstruction, and how a context splits into input and output is not known: all splits are shown, none is
"the" result. Setting [us]: LLaMA2-7B on 4 nodes of 8 GPUs, 32 instances against one of 32 GPUs; reduced size: other engines
and links on trace 3 alone.
"""

import sys

import pandas as pd
from curves import ALL_VARIANTS, Plan, highest
from curves import draw as draw_curves
from curves import settings as settings_of
from curves import table as table_of
from known import known_of
from matplotlib.figure import Figure
from sheet import Ours, main
from study import SPLITS, Study

FIGURE = "10b"
TITLE = "Throughput and latency on traces 3-8 against vLLM-single, LLaMA2-7B on 32 A100s"
PARTS = "Simulated: every point is a run (A100 pack, collectives beyond a node extrapolated; engine and link as named)."
WHY = (
    "How the paper laid vLLM-single out is not known. Here one instance of 32 GPUs has one head a GPU and all-reduces "
    "across nodes. Under `graphs` decode attention follows the measured kernels, which do not split the KV of a row of "
    "all heads, so a long row on one head keeps a GPU waiting; `eager-2023` splits it (compare `infsim predict --model "
    "llama2-7b --tp 32 --decode 1x150000` with `--engine eager-2023`). The last column says what that and the link make "
    "of the ratio. One pinned request of the longest length weighs heavily in a small sample. Figure 10s varies what is "
    "unknown, one thing at a time."
)
RIVAL = "vllm-single"


def plan_of(study: Study) -> Plan:
    return Plan(
        "fig10b",
        RIVAL,
        traces=study.pick((3,), (3, 5, 7), (3, 4, 5, 6, 7, 8)),
        rates_rps=study.pick((2.0,), (0.1, 1.0), (0.1, 0.2, 0.5, 1.0, 2.0, 4.0)),
        num_requests=study.pick(10, 60, 1_000),
        base={"cluster": {"nodes": 4, "gpus_per_node": 8}},
        splits=study.pick(("balanced",), SPLITS, SPLITS),
        variants=study.pick((), ALL_VARIANTS[::2], ALL_VARIANTS),
        varied=study.pick(None, (3,), None),
        replicates=study.pick(1, 2, 5),
    )


def table(study: Study) -> pd.DataFrame:
    return table_of(study, plan_of(study))


def draw(frame: pd.DataFrame) -> Figure:
    known = known_of(FIGURE)[0]
    return draw_curves(frame, RIVAL, (known.value, known.high or known.value))


def ours(frame: pd.DataFrame) -> Ours:
    """The highest of traces and splits, with `graphs` and 100 Gb/s."""
    return highest(frame, RIVAL)


def settings(frame: pd.DataFrame) -> dict[str, Ours]:
    return settings_of(frame, RIVAL)


if __name__ == "__main__":
    main(sys.modules[__name__])
