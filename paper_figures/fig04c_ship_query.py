"""Figure 4c: time of one layer's decode attention over remote KV: ship the query there, or ship the KV here.

Claim: shipping the query costs a fraction, and grows far more slowly with the context. Reproduced: the query wins at every
context and the ratio grows. Model: LLaMA2-13B, one request whose KV lies on one other GPU [us: the paper's share of remote
KV, its GPUs and its link are not known; its times for KV are those of one direction of NVLink].
"""

import sys
from itertools import product

import pandas as pd
from known import value
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sheet import Ours, by_setting, legend_below, main, panels
from study import ENGINES, Study, cost_of

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
    "last column varies all of these, and the engine. A time below that of reading the KV once, at the bandwidth of one "
    "GPU's memory, must be of KV that several GPUs read side by side. NVLink's rate is the sustained one, not its peak."
)
MODEL = "llama2-13b"
CONTEXTS = (4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
LINKS = {"NVLink": "nvlink3", "100 Gb/s": "ethernet-100g", "125 MB/s": "ethernet-1g"}
PLACES = {  # share of the KV that is remote, and the GPUs that share it evenly; the first is drawn
    "all KV on another GPU": (1.0, 1),
    "3/4 of the KV on another GPU": (0.75, 1),
    "1/2 of the KV on another GPU": (0.5, 1),
    "3/4 of the KV on 3 other GPUs": (0.75, 3),
}
DRAWN = next(iter(PLACES))
MARKED = {"8K": 8_192, "32K": 32_768, "128K": 131_072}
WAYS = {"ship query": "-", "ship KV": "--"}


def table(study: Study) -> pd.DataFrame:
    rows = []
    for engine, name, place, tokens in product(ENGINES, LINKS, PLACES, CONTEXTS):
        cost, link, (share, num_gpus) = cost_of(MODEL, engine=ENGINES[engine]), load_link(LINKS[name]), PLACES[place]
        remote_tokens = share * tokens
        model = cost.instance.model
        local_s, remote_s = (
            cost.micro_attention_s(1, part) / model.num_layers
            for part in (tokens - remote_tokens, remote_tokens / num_gpus)
        )
        query_s = max(local_s, num_gpus * exchange_s(cost, link, 1) + remote_s)
        kv_s = cost.transfer_s(remote_tokens * model.kv_bytes_per_token / model.num_layers, link)
        kv_s += cost.decode_attention_s(1, tokens) / model.num_layers
        setting = (engine, name, place, tokens)
        rows += [(*setting, "ship query", query_s), (*setting, "ship KV", kv_s)]
    return pd.DataFrame(rows, columns=["engine", "link", "place", "context_tokens", "way", "time_s"])


def draw(frame: pd.DataFrame) -> Figure:
    figure, panes = panels(len(ENGINES), width=4.4, height=4.2)
    for engine, axes in zip(ENGINES, panes, strict=True):
        draw_engine(axes, frame[(frame["engine"] == engine) & (frame["place"] == DRAWN)])
        axes.set_title(engine)
    legend_below(figure, panes, 4)
    return figure


def draw_engine(axes: Axes, frame: pd.DataFrame) -> None:
    for i, link in enumerate(LINKS):
        for way, dashes in WAYS.items():
            line = frame[(frame["link"] == link) & (frame["way"] == way)]
            look = {"color": CYCLE[i], "marker": MARKERS[i], "ls": dashes, "label": f"{way}, {link}"}
            axes.plot(line["context_tokens"], 1e3 * line["time_s"], **look)
    for way, filled in (("ship query", "black"), ("ship KV", "white")):
        times = [value(FIGURE, f"{way}, {name}") for name in MARKED]
        axes.plot(MARKED.values(), times, "k*", ms=9, mfc=filled, zorder=5, label=f"paper, {way}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(CONTEXTS, [f"{tokens // 1024}K" for tokens in CONTEXTS])
    axes.set(xlabel="context, tokens", ylabel="one layer, ms")
    log_scale(axes)


def ours(frame: pd.DataFrame) -> Ours:
    """Engine `graphs`, over NVLink."""
    return settings(frame)[f"graphs, NVLink, {DRAWN}"]


def settings(frame: pd.DataFrame) -> dict[str, Ours]:
    return by_setting(frame, ("engine", "link", "place"), compared)


def compared(part: pd.DataFrame) -> Ours:
    times = part.set_index(["way", "context_tokens"])["time_s"]
    return {f"{way}, {name}": 1e3 * times[way, tokens] for way in WAYS for name, tokens in MARKED.items()}


if __name__ == "__main__":
    main(sys.modules[__name__])
