"""Figure 12a: throughput against KV tokens moved in a decode step, the batch fixed.

Claim: moving 16 tokens a step costs nothing, 32 cost 8.6 %. Reproduced: no loss up to the tokens that the link carries in a
step, whatever that is. Setting [us]: two LLaMA2-7B instances on two nodes; the debtor decodes one request of 80K tokens and 15
of 1K, and moves the long one's KV to an instance that decodes 32 of 1K.
"""

import sys
from pathlib import Path
from typing import Any

import pandas as pd
from known import value
from matplotlib.figure import Figure
from sheet import Ours, by_setting, legend_below, main, panels, paper_marks
from study import ENGINES, LINKS, Study

from experiments.plotstyle import CYCLE, MARKERS
from experiments.runfolder import read_table

FIGURE = "12a"
TITLE = "Throughput while KV moves, against the tokens moved in a step, LLaMA2-7B"
PARTS = (
    "Simulated: rows / time per output token of both instances. At each pace all outputs are as long as the move "
    "lasts, and the loss is against the same requests without a move."
)
WHY = (
    "The simulator gives a move the link's spare rate and charges a copy at both ends; a step never waits for a move, "
    "so where no loss like the paper's appears, none is added to match. Where the link is too slow for the pace, the "
    "move takes longer instead. A loss would follow if a step ended only when its tokens had been sent (figure 6, right)."
)
PACES = (4, 8, 16, 32, 64, 128)
LONG_TOKENS, SHORT_TOKENS, DEBTOR_ROWS, CREDITOR_ROWS = 80_000, 1_000, 16, 32
POLICIES = Path(__file__).with_name("policies.py")


def table(study: Study) -> pd.DataFrame:
    paces = study.pick((32,), (8, 16, 32, 64), PACES)
    engines = study.pick(["graphs"], ["graphs", "eager-2023"], list(ENGINES))
    cases = [
        (engine, link, pace, moves) for engine in engines for link in LINKS for pace in paces for moves in (False, True)
    ]
    runs = study.runs("fig12a", {"base": BASE, "points": [point_of(study, *case) for case in cases]})
    rows = []
    for case, folder, manifest in zip(cases, runs.folders, runs.manifests, strict=True):
        rate = tok_per_s(read_table(folder, "requests"))
        rows.append((*case, manifest["metrics"]["moved_bytes"], rate, str(folder.relative_to(study.out))))
    columns = ["engine", "link", "move_tokens_per_iteration", "moves", "moved_bytes", "tok_per_s", "run"]
    frame = pd.DataFrame(rows, columns=columns)
    still, moving = (frame[frame["moves"] == moves].reset_index(drop=True) for moves in (False, True))
    return moving.drop(columns="moves").assign(
        loss_frac=1 - moving["tok_per_s"] / still["tok_per_s"], still_run=still["run"]
    )


BASE = {
    "model": "llama2-7b",
    "cluster": {"nodes": 2, "gpus_per_node": 1},
    "dispatch": f"{POLICIES}:ByLastDigit",
    "placement": f"{POLICIES}:LendToCap",
}


def point_of(study: Study, engine: str, link: str, pace: int, moves: bool) -> dict[str, Any]:
    """Prompts that end in 0 go to the debtor. Half of the long one's KV moves, or nothing."""
    output = LONG_TOKENS // 2 // pace
    debtor = [(LONG_TOKENS, output), *[(SHORT_TOKENS, output)] * (DEBTOR_ROWS - 1)]
    sizes = (*debtor, *[(SHORT_TOKENS + 1, output)] * CREDITOR_ROWS)
    return {
        "engine": ENGINES[engine],
        "cluster.inter_link": LINKS[link],
        "scheduler.move_tokens_per_iteration": pace,
        "scheduler.lent_cap_frac": 0.5 if moves else 0.0,
        "workload": study.workload(f"fig12a-{pace}", [(0.0, *size) for size in sizes]),
    }


def tok_per_s(requests: pd.DataFrame) -> float:
    """The long request decodes last and in every step of its instance, the creditor's rows in every step of theirs."""
    per_token_s = (requests["finish_s"] - requests["first_token_s"]) / (requests["output_tokens"] - 1)
    creditor = per_token_s[requests["instance"] == 1]
    return float(DEBTOR_ROWS / per_token_s.iloc[0] + (1 / creditor).sum())


def draw(frame: pd.DataFrame) -> Figure:
    figure, axes = panels(2, width=4.0)
    for one, link in zip(axes, LINKS, strict=True):
        for i, engine in enumerate(dict.fromkeys(frame["engine"])):
            line = frame[(frame["link"] == link) & (frame["engine"] == engine)]
            look = {"color": CYCLE[i], "marker": MARKERS[i], "label": engine}
            one.plot(line["move_tokens_per_iteration"], 100 * (1 - line["loss_frac"]), **look)
        paper_marks(one, (16, 32), [100 - value(FIGURE, f"loss at {tokens} tokens a step") for tokens in (16, 32)])
        one.set_xscale("log", base=2)
        paces = sorted({*frame["move_tokens_per_iteration"]})
        one.set_xticks(paces, [str(pace) for pace in paces])
        one.set(
            title=f"{link} between nodes",
            xlabel="KV tokens moved in a step, at most",
            ylabel="throughput, % of no move",
        )
        one.set_ylim(0, 110)
    legend_below(figure, axes)
    return figure


def ours(frame: pd.DataFrame) -> Ours:
    """At 125 MB/s, the link as the paper states it."""
    return settings(frame)["graphs, 125 MB/s"]


def settings(frame: pd.DataFrame) -> dict[str, Ours]:
    return by_setting(frame, ("engine", "link"), losses)


def losses(line: pd.DataFrame) -> Ours:
    loss = 100 * line.set_index("move_tokens_per_iteration")["loss_frac"]
    return {f"loss at {tokens} tokens a step": loss[tokens] for tokens in (16, 32) if tokens in loss}


if __name__ == "__main__":
    main(sys.modules[__name__])
