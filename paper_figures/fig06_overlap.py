"""Figure 6: what is hidden behind local work: remote attention (left), and the movement of KV (right).

Claim: remote MicroAttention and the query's way are free while they end before the debtor's own attention does, so remote KV
is capped; KV movement is free while a step's tokens are across the link before the step ends. Reproduced: both curves are
flat up to a point and rise beyond it. Setting [us]: LLaMA2-7B, one GPU an instance, a debtor of 32 rows with 100K tokens of
KV in all; the creditor runs a decode batch of its own.
"""

import sys

import pandas as pd
from known import value
from matplotlib.figure import Figure
from sheet import Ours, by_setting, legend_below, main, panels, tokens_axis
from study import ENGINES, LINKS, Study, cost_of

from experiments.catalogue import load_link
from experiments.plotstyle import BLACK, CYCLE, MARKERS, log_scale
from perfmodel.borrowing import remote_layer_s
from perfmodel.cost import CostModel

FIGURE = "6"
TITLE = "Overlap of remote attention, and of KV movement, with a decode step, LLaMA2-7B"
PARTS = (
    "Analytic: the price of borrowing that the simulator charges (perfmodel.borrowing), and bytes over the link's rate."
)
WHY = (
    "How many tokens a step hides is link rate × step time / KV bytes a token: not a constant. It differs by engine and "
    "batch through the step time, and by link in proportion to its rate."
)
MODEL = "llama2-7b"
ROWS, CONTEXT_TOKENS = 32, 100_000
SHARES = tuple(share / 20 for share in range(20))
GRAINS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LINKS_LEFT = {"NVLink": "nvlink3", **LINKS}


def table(study: Study) -> pd.DataFrame:
    """Rows of kind "remote" (x: share of the KV that is remote) and "move" (x: tokens moved in a step)."""
    rows = []
    for engine, preset in ENGINES.items():
        cost = cost_of(MODEL, engine=preset)
        rows += [
            ("remote", engine, name, share, *remote_step(cost, link, share))
            for name, link in LINKS_LEFT.items()
            for share in SHARES
        ]
        rows += [
            ("move", engine, name, tokens, *moving_step(cost, link, tokens))
            for name, link in LINKS.items()
            for tokens in GRAINS
        ]
    return pd.DataFrame(rows, columns=["kind", "engine", "link", "x", "step_s", "hidden_s"])


def remote_step(cost: CostModel, link: str, share: float) -> tuple[float, float]:
    """(a debtor's step with this share of its KV remote, the same were the remote part free)."""
    layers, remote_tokens = cost.instance.model.num_layers, share * CONTEXT_TOKENS
    local_s = cost.decode_attention_s(ROWS, CONTEXT_TOKENS - remote_tokens)
    creditor_s = step_s(cost, cost.decode_attention_s(ROWS, CONTEXT_TOKENS))
    remote_s = layers * remote_layer_s(cost, load_link(link), ROWS, remote_tokens, creditor_s) if share else 0.0
    return step_s(cost, max(local_s, remote_s), share > 0), step_s(cost, local_s, share > 0)


def step_s(cost: CostModel, attention_s: float, exchanges: bool = False) -> float:
    kernel_s, launch_s, host_s = cost.iteration_terms(ROWS, ROWS, ROWS)
    engine, layers = cost.instance.engine, cost.instance.model.num_layers
    return max(kernel_s + attention_s, launch_s + exchanges * layers * engine.exchange_s_per_layer_per_peer) + host_s


def moving_step(cost: CostModel, link: str, tokens: int) -> tuple[float, float]:
    """(a step that ends when its tokens have moved, the step alone)."""
    alone_s = step_s(cost, cost.decode_attention_s(ROWS, CONTEXT_TOKENS))
    return max(alone_s, cost.transfer_s(tokens * cost.instance.model.kv_bytes_per_token, load_link(link))), alone_s


def draw(frame: pd.DataFrame) -> Figure:
    figure, axes = panels(2, len(ENGINES), width=4.2, height=2.8)
    for row, engine in enumerate(ENGINES):
        remote, move = axes[2 * row : 2 * row + 2]
        for i, link in enumerate(LINKS_LEFT):
            look = {"color": CYCLE[i], "marker": MARKERS[i], "markevery": 3, "label": link}
            line = rows_of(frame, "remote", engine, link)
            remote.plot(100 * line["x"], 1e3 * line["step_s"], **look)
            line = rows_of(frame, "move", engine, link)
            if len(line):
                move.plot(line["x"], 1e3 * line["step_s"], **look)
        line = rows_of(frame, "remote", engine, "NVLink")
        remote.plot(100 * line["x"], 1e3 * line["hidden_s"], color=BLACK, ls=":", label="all hidden")
        remote.set(
            title=f"Remote attention, {engine}",
            xlabel="share of KV that is remote, %",
            ylabel="decode step, ms",
            yscale="log",
        )
        move.set(
            title=f"KV movement, {engine}", xlabel="KV tokens moved in a step", ylabel="decode step, ms", yscale="log"
        )
        move.axvline(value(FIGURE, HIDDEN), color=BLACK, lw=0.8, ls="--", label="paper: 16 tokens are hidden")
        tokens_axis(move, (1, 4, 16, 64, 256, 1024))
        for one in (remote, move):
            log_scale(one)
    legend_below(figure, axes, 5)
    return figure


HIDDEN = "tokens moved in a step without loss"


def rows_of(frame: pd.DataFrame, kind: str, engine: str, link: str) -> pd.DataFrame:
    return frame[(frame["kind"] == kind) & (frame["engine"] == engine) & (frame["link"] == link)]


def hidden_tokens(line: pd.DataFrame) -> float:
    """Tokens whose way takes as long as the step."""
    last = line.iloc[-1]
    return float(last["x"] * last["hidden_s"] / last["step_s"])


def ours(frame: pd.DataFrame) -> Ours:
    """At 125 MB/s, the link as the paper states it."""
    return settings(frame)["graphs, 125 MB/s"]


def settings(frame: pd.DataFrame) -> dict[str, Ours]:
    moves = frame[frame["kind"] == "move"]
    return by_setting(moves, ("engine", "link"), lambda line: {HIDDEN: hidden_tokens(line)})


if __name__ == "__main__":
    main(sys.modules[__name__])
