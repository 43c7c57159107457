"""Figure 10a: throughput-latency on the short traces 0-2, Infinite-LLM against vLLM-multi.

Claim: 1.35-1.73 times the throughput, more with the spread of lengths (trace 0 most) and with the number of instances.
Reproduced: the ratio of the highest throughputs is above 1 and grows from trace 2 to trace 0. The traces are our reconstruction
(only their ranges are known), and how a context splits into input and output is not known: all splits are shown, none is
"the" result. Setting [us]: LLaMA2-7B, one GPU an instance; reduced size: 2 nodes of 2 GPUs, full: 4 of 8.
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

FIGURE = "10a"
TITLE = "Throughput and latency on traces 0-2 against vLLM-multi, LLaMA2-7B"
PARTS = "Simulated: every point is a run (A100 pack; engine and link as named)."
WHY = (
    "The paper's lengths, outputs and arrivals are not known, and they decide how often memory runs out at one "
    "instance while others have room. Both systems dispatch by running and waiting work here; the paper's router is not "
    "known. Figure 10s varies what is unknown, one thing at a time."
)
RIVAL = "vllm-multi"


def plan_of(study: Study) -> Plan:
    nodes, gpus_per_node = study.pick((1, 2), (2, 2), (4, 8))
    return Plan(
        "fig10a",
        RIVAL,
        traces=study.pick((0,), (0, 1, 2), (0, 1, 2)),
        rates_rps=study.pick((4.0,), (0.25, 0.5, 2.0), (1.0, 2.0, 4.0, 6.0, 8.0, 16.0)),
        num_requests=study.pick(20, 120, 2_000),
        base={"cluster": {"nodes": nodes, "gpus_per_node": gpus_per_node}},
        splits=study.pick(("balanced",), SPLITS, SPLITS),
        variants=study.pick((), ALL_VARIANTS[::2], ALL_VARIANTS),
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
