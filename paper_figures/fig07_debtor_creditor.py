"""Figure 7a-c: throughput of a debtor, of its creditor and of both against the KV moved, model against what runs.

Claim: the debtor gains as its batch grows into the freed memory, the creditor loses slowly and then falls off a cliff when its
own batch has to shrink, and the sum has a maximum between. Reproduced: these three shapes, and the model's best point near
that of the run. Setting [us]: two LLaMA2-7B instances of one node; the debtor has one request of 100K tokens and a queue of
short ones, the creditor a queue of short ones; 64 rows at most.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from known import value
from matplotlib.figure import Figure
from sheet import legend_below, main, panels
from study import LINKS, Study, cost_of, decode_tok_per_s

from experiments.catalogue import load_link
from experiments.plotstyle import BLUE, GREEN, ORANGE
from perfmodel.gain import Pricer
from perfmodel.view import ClusterView, Load, Movable, SchedulerParams

FIGURE = "7"
TITLE = "Debtor, creditor and both against KV moved: model and simulated instances, LLaMA2-7B"
PARTS = (
    "Simulated: dots, rates over 30 s of decoding with a loan as large as the cap allows (policies.py:LendToCap). "
    "Analytic: lines, the gain model that Algorithm 1 uses (perfmodel.gain), fed with the state of the run that lends "
    "nothing."
)
WHY = (
    "The absolute rates are those of our setting; what is compared is the gain at the best point. Two things separate the "
    "model from the run: it admits waiting prompts at prompt + 1 tokens, as the scheduler must, although they grow while "
    "they decode; and it takes the creditor's running rows as given, although they end and their successors need room."
)
MODEL, LINK = "llama2-7b", LINKS["100 Gb/s"]
LONG, SHORT = (100_000, 2_500), (1_000, 500)  # tokens in and out
MAX_BATCH = 64
SETTLE_S, WINDOW_S = 20.0, 30.0
SIDES = {"debtor": BLUE, "creditor": ORANGE, "total": GREEN}


def table(study: Study) -> pd.DataFrame:
    """Rows of kind "simulated" (a run each) and "model"."""
    num_short = study.pick(400, 700, 700)
    caps = study.pick([0.0, 0.5], [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], [i / 20 for i in range(18)])
    runs = study.runs("fig07", config_of(study, num_short, caps))
    rows = []
    for folder, manifest in zip(runs.folders, runs.manifests, strict=True):
        cap = manifest["axes"]["scheduler.lent_cap_frac"]
        keep = runs.requests["scheduler.lent_cap_frac"] == cap
        samples = runs.instances[runs.instances["scheduler.lent_cap_frac"] == cap]
        rows += simulated(runs.requests[keep], samples, str(folder.relative_to(study.out)))
    frame = pd.DataFrame(rows, columns=["kind", "side", "moved_tokens", "tok_per_s", "run"])
    still = runs.instances[runs.instances["scheduler.lent_cap_frac"] == caps[0]]
    long = runs.requests[runs.requests["scheduler.lent_cap_frac"] == caps[0]].iloc[0]
    return pd.concat([frame, modelled(still, long["first_token_s"] + SETTLE_S, frame["moved_tokens"].max())])


def config_of(study: Study, num_short: int, caps: list[float]) -> dict[str, Any]:
    """Round robin: the long request and every second short one go to instance 0."""
    requests = [(0.0, *LONG), *((0.001 * i, *SHORT) for i in range(1, num_short + 1))]
    base = {
        "model": MODEL,
        "cluster": {"nodes": 1, "gpus_per_node": 2},
        "instance": {"max_batch": MAX_BATCH},
        "dispatch": "round-robin",
        "placement": f"{Path(__file__).with_name('policies.py')}:LendToCap",
        "scheduler": {"move_tokens_per_iteration": 16_384},
        "workload": study.workload("fig07", requests),
    }
    return {"base": base, "axes": {"scheduler.lent_cap_frac": caps}}


def simulated(requests: pd.DataFrame, samples: pd.DataFrame, run: str) -> list[tuple[str, str, float, float, str]]:
    start_s = requests["first_token_s"].iloc[0] + SETTLE_S
    during = samples[(samples["t_s"] >= start_s) & (samples["t_s"] < start_s + WINDOW_S)]
    moved = 16 * during[during["instance"] == 0]["borrowed_blocks"].mean()
    of = {side: requests[requests["instance"] == i] for i, side in enumerate(("debtor", "creditor"))} | {
        "total": requests
    }
    return [("simulated", side, moved, decode_tok_per_s(of[side], start_s, start_s + WINDOW_S), run) for side in SIDES]


def modelled(samples: pd.DataFrame, t_s: float, most_tokens: float) -> pd.DataFrame:
    """The gain model over the same range, from the state at `t_s` of a run that lends nothing."""
    cost = cost_of(MODEL)
    later = samples[samples["t_s"] >= t_s]
    loads = {i: load_of(later[later["instance"] == i].iloc[0], cost.instance.num_blocks) for i in (0, 1)}
    view = ClusterView(loads, cost, SchedulerParams(), 16, lambda a, b: load_link("nvlink3"))
    pricer = Pricer(view, loads)
    pair = pricer.pair(0, 1, pricer.reads(0, 1))
    blocks = np.unique(np.linspace(1, most_tokens / 16, 120).astype(int))
    debtor, creditor = np.array([pair.tok_per_s(k) for k in blocks.tolist()]).T
    rates = {"debtor": debtor, "creditor": creditor, "total": debtor + creditor}
    frames = [
        pd.DataFrame({"side": side, "moved_tokens": 16 * blocks, "tok_per_s": rate}) for side, rate in rates.items()
    ]
    return pd.concat(frames).assign(kind="model")


def load_of(row: pd.Series, total_blocks: int) -> Load:
    """What a heartbeat would have said; prompts wait as far as the largest batch lets them in."""
    waiting = min(int(row["waiting"]), MAX_BATCH - int(row["batch"]))
    context = 16 * int(row["local_blocks"])
    longest = (Movable(0, LONG[0], LONG[0] // 16),)
    return Load(
        total_blocks, int(row["free_blocks"]), 0, 0, total_blocks // 100, int(row["batch"]), context,
        (), (), (SHORT[0],) * waiting, longest, 0.03,
    )  # fmt: skip


def draw(frame: pd.DataFrame) -> Figure:
    figure, axes = panels(3)
    for one, (letter, side) in zip(axes, zip("abc", SIDES, strict=True), strict=True):
        dots, line = (frame[(frame["side"] == side) & (frame["kind"] == kind)] for kind in ("simulated", "model"))
        one.plot(
            dots["moved_tokens"] / 1e3,
            dots["tok_per_s"],
            color=SIDES[side],
            marker="o",
            ls=":",
            label=f"{side}, simulated",
        )
        if len(line):
            one.plot(line["moved_tokens"] / 1e3, line["tok_per_s"], color="black", lw=1, label="model")
        one.set(
            title=f"{letter}. {side.capitalize()}",
            xlabel="KV moved, K tokens",
            ylabel="output tokens per s",
            ylim=(0, None),
        )
    best, before = (value(FIGURE, f"total throughput {when}") for when in ("at the best point", "before any move"))
    total = frame[(frame["side"] == "total") & (frame["kind"] == "simulated")]["tok_per_s"]
    axes[2].axhline(
        total.iloc[0] * best / before, color="black", ls="--", lw=0.8, label="the paper's best gain, on our start"
    )
    legend_below(figure, axes, 5)
    return figure


def ours(frame: pd.DataFrame) -> dict[str, float]:
    total = frame[(frame["side"] == "total") & (frame["kind"] == "simulated")]["tok_per_s"]
    start, best = total.iloc[0], total.max()
    names = ("total throughput before any move", "total throughput at the best point", "gain at the best point")
    return dict(zip(names, (start, best, best / start), strict=True))


if __name__ == "__main__":
    main(sys.modules[__name__])
