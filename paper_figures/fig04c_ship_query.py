"""Figure 4c: time of one layer's decode attention over remote KV: ship the query there, or ship the KV here.

Claim: shipping the query costs a fraction, and grows far more slowly with the context. Reproduced: the query wins at every
context and the ratio grows. Model: LLaMA2-13B, one request whose KV lies on one other GPU [us: the paper's share of remote
KV, its GPUs and its link are not known; its times for KV are those of one direction of NVLink].
"""

import sys
from itertools import product

import pandas as pd
from known import value
from matplotlib.figure import Figure
from sheet import Ours, by_setting, legend_below, main, panels
from study import Study, cost_of

from experiments.catalogue import load_link
from experiments.plotstyle import CYCLE, MARKERS, log_scale
from perfmodel.borrowing import exchange_s

FIGURE = "4c"
TITLE = "One layer's attention over remote KV: query shipped against KV shipped, LLaMA2-13B"
PARTS = (
    "Analytic, from the cost model: decode attention from the A100 pack; bytes over the link's sustained rate; "
    "launches for the exchange from the engine's preset."
)
WHY = (
    "The paper's accounts do not say which share of the KV is remote, on how many GPUs it lies, nor over which link; the "
    "last column varies share and link. A time below that of reading the KV once, at the bandwidth of one GPU's memory, "
    "must be of KV that several GPUs read side by side. One row fills a GPU only where the kernel splits its KV, which "
    "the A100 pack's law of decode attention takes into account. NVLink's rate is the sustained one, not its peak."
)
MODEL = "llama2-13b"
CONTEXTS = (4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
LINKS = {"NVLink": "nvlink3", "100 Gb/s": "ethernet-100g", "125 MB/s": "ethernet-1g"}
SHARES = (1.0, 0.75, 0.5, 0.25)  # of the KV that is remote; the first is drawn
MARKED = {"8K": 8_192, "32K": 32_768, "128K": 131_072}
WAYS = {"ship query": "-", "ship KV": "--"}


def table(study: Study) -> pd.DataFrame:
    cost = cost_of(MODEL)
    model = cost.instance.model
    rows = []
    for name, share, tokens in product(LINKS, SHARES, CONTEXTS):
        link, remote_tokens = load_link(LINKS[name]), share * tokens
        local_s, remote_s = (
            cost.micro_attention_s(1, part) / model.num_layers for part in (tokens - remote_tokens, remote_tokens)
        )
        query_s = max(local_s, exchange_s(cost, link, 1) + remote_s)
        kv_s = cost.transfer_s(remote_tokens * model.kv_bytes_per_token / model.num_layers, link)
        kv_s += cost.decode_attention_s(1, tokens) / model.num_layers
        rows += [(name, share, tokens, "ship query", query_s), (name, share, tokens, "ship KV", kv_s)]
    return pd.DataFrame(rows, columns=["link", "remote_share_frac", "context_tokens", "way", "time_s"])


def draw(frame: pd.DataFrame) -> Figure:
    figure, [axes] = panels(1, width=5.2, height=4.2)
    for i, link in enumerate(LINKS):
        for way, dashes in WAYS.items():
            line = frame[(frame["link"] == link) & (frame["way"] == way) & (frame["remote_share_frac"] == SHARES[0])]
            look = {"color": CYCLE[i], "marker": MARKERS[i], "ls": dashes, "label": f"{way}, {link}"}
            axes.plot(line["context_tokens"], 1e3 * line["time_s"], **look)
    for way, filled in (("ship query", "black"), ("ship KV", "white")):
        times = [value(FIGURE, f"{way}, {name}") for name in MARKED]
        axes.plot(MARKED.values(), times, "k*", ms=9, mfc=filled, zorder=5, label=f"paper, {way}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(CONTEXTS, [f"{tokens // 1024}K" for tokens in CONTEXTS])
    axes.set(xlabel="context, tokens", ylabel="one layer, ms")
    log_scale(axes)
    legend_below(figure, [axes], 2)
    return figure


def ours(frame: pd.DataFrame) -> Ours:
    """Over NVLink, all KV remote."""
    return settings(frame)["NVLink, 100 % of the KV remote"]


def settings(frame: pd.DataFrame) -> dict[str, Ours]:
    named = frame.assign(share=[f"{100 * share:.0f} % of the KV remote" for share in frame["remote_share_frac"]])
    return by_setting(named, ("link", "share"), compared)


def compared(part: pd.DataFrame) -> Ours:
    times = part.set_index(["way", "context_tokens"])["time_s"]
    return {f"{way}, {name}": 1e3 * times[way, tokens] for way in WAYS for name, tokens in MARKED.items()}


if __name__ == "__main__":
    main(sys.modules[__name__])
