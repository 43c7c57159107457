"""Figure 11: latency of attention over 4K-256K tokens on 4 GPUs, LLaMA2-13B's heads: DistAttention, tensor parallel, Ring.

Claim: DistAttention is 1-25 % faster than splitting the heads, and 7.7-19.8 times faster than Ring, which ships KV. Reproduced:
that order at every context. The benchmark runs all ranks on one device, in one process (`python -m infreal.bench attention
--out DIR`): its times show what is computed, its bytes what a link would carry; they are not four GPUs' latency.
"""

import os
import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from sheet import legend_below, main, panels
from study import ROOT, NoData, Study

from experiments.plotstyle import CYCLE, MARKERS, log_scale
from experiments.profile import read_csv

FIGURE = "11"
TITLE = "Attention over KV on four ranks, LLaMA2-13B's heads"
PARTS = "Measured: time of all ranks in one process, and bytes that they sent to each other."
WHY = (
    "One device serves all ranks, and the transport is its own memory: Ring's KV costs a copy here, where the paper's "
    "crosses a link between GPUs. The bytes say what a link adds."
)
CSV = "attention.csv"
WAYS = {"dist_attention": "DistAttention", "tensor_parallel_attention": "tensor parallel", "ring_attention": "Ring"}


def table(study: Study) -> pd.DataFrame:
    """From the CSV that BENCH_CSV names, or the last benchmark's in out/. Raises NoData where there is none."""
    path = bench_csv()
    profile = read_csv(path)
    found = profile[profile["operator"].isin(WAYS)]
    if found.empty:
        raise NoData(f"{path}: no rows of {', '.join(WAYS)} (python -m infreal.bench attention writes them)")
    columns = ["operator", "gpu", "software", "dtype", "ranks", "rows", "context_tokens", "num_bytes", "time_s"]
    return found[columns].assign(source=path.name)


def bench_csv() -> Path:
    named = os.environ.get("BENCH_CSV")
    candidates = (
        [Path(named)] if named else sorted((ROOT / "out").glob(f"**/{CSV}"), key=lambda path: path.stat().st_mtime)
    )
    if not candidates or not candidates[-1].is_file():
        raise NoData(f"no {CSV}: run `python -m infreal.bench attention --out out/bench`, or set BENCH_CSV to its CSV")
    return candidates[-1]


def draw(frame: pd.DataFrame) -> Figure:
    figure, [times, wire] = panels(2, width=4.2)
    for i, (operator, name) in enumerate(WAYS.items()):
        line = frame[frame["operator"] == operator].sort_values("context_tokens")
        look = {"color": CYCLE[i], "marker": MARKERS[i], "label": name}
        times.plot(line["context_tokens"], 1e3 * line["time_s"], **look)
        wire.plot(line["context_tokens"], line["num_bytes"] / 1e6, **look)
    times.set(title=f"All ranks in one process, {frame['gpu'].iloc[0]}", ylabel="ms")
    wire.set(title="Sent between ranks, one layer", ylabel="MB")
    contexts = sorted({*frame["context_tokens"].astype(int)})
    for one in (times, wire):
        one.set_xscale("log", base=2)
        one.set_xticks(contexts, [f"{tokens / 1024:g}K" for tokens in contexts])
        one.set_xlabel("context, tokens")
        log_scale(one)
    legend_below(figure, [times, wire])
    return figure


def ours(frame: pd.DataFrame) -> dict[str, float]:
    """At the longest context measured."""
    longest = frame[frame["context_tokens"] == frame["context_tokens"].max()].groupby("operator")["time_s"].min()
    ours_s = longest["dist_attention"]
    return {
        "time saved against tensor parallel": 100 * (1 - ours_s / longest["tensor_parallel_attention"]),
        "speed against Ring": longest["ring_attention"] / ours_s,
    }


if __name__ == "__main__":
    main(sys.modules[__name__])
