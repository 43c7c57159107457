"""Figure 1a: throughput on 1K requests against the longest context that a system serves, LLaMA2-7B on 32 GPUs.

Claim: a static layout trades one for the other (DP32TP1, DP4TP8, DP1TP32); Infinite-LLM has the throughput of DP32TP1 and the
longest context of all. Reproduced: that ordering, and Infinite-LLM's throughput within a few percent of DP32TP1's. Setting
[us]: requests of 800 + 200 tokens, all there at once, batch at most 256 (the engine's default then), whole-run rates.
"""

import sys
from typing import Any

import pandas as pd
from known import value
from matplotlib.figure import Figure
from sheet import Ours, by_setting, legend_below, main, panels, paper_marks, tokens_axis
from study import ENGINES, LINKS, Study, fixed

from experiments.plotstyle import CYCLE, MARKERS, log_scale

FIGURE = "1a"
TITLE = "Throughput on 1K requests against the longest context, LLaMA2-7B on 32 A100s"
PARTS = (
    "Simulated throughput (A100 pack; launches and host time from the engine's preset); analytic longest context (KV "
    "blocks of the largest pool that one request may use)."
)
WHY = (
    "Contexts: what the paper's systems set aside beside the weights is not known; ours is the memory account of one "
    "instance. Infinite-LLM pools 32 instances, each with its own copy of the weights, so it holds less than DP1TP32. "
    "Throughput: how a 1K request splits into input and output, the engine and the link between nodes are not known."
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP32TP1": {"system": "vllm-multi", "instance.tensor_parallel": 1},
    "DP4TP8": {"system": "vllm-multi", "instance.tensor_parallel": 8},
    "DP1TP32": {"system": "vllm-single", "instance.tensor_parallel": 1},
    "Infinite-LLM": {"system": "infinite-llm", "instance.tensor_parallel": 1},
}
OUTPUT_TOKENS = 200


def table(study: Study) -> pd.DataFrame:
    num_requests = study.pick(64, 4_000, 16_000)
    engines = study.pick(["graphs"], list(ENGINES), list(ENGINES))
    points = [
        {**layout, "engine": ENGINES[engine], "cluster.inter_link": link}
        for layout in LAYOUTS.values()
        for engine in engines
        for link in LINKS.values()
    ]
    workload = fixed(1_000, OUTPUT_TOKENS, num_requests)
    base = {"model": "llama2-7b", "instance": {"max_batch": 256}, "workload": workload}
    found = study.summary("fig01a", {"base": base, "points": points})
    names = [(layout, engine, link) for layout in LAYOUTS for engine in engines for link in LINKS]
    head = pd.DataFrame(names, columns=["layout", "engine", "link"])
    kept = found[["output_tok_per_s", "num_finished", "num_moves", "pool.longest_request_tokens", "run"]]
    return pd.concat([head, kept.rename(columns={"pool.longest_request_tokens": "longest_context_tokens"})], axis=1)


def draw(frame: pd.DataFrame) -> Figure:
    figure, axes = panels(2, width=4.4, height=3.6)
    for one, link in zip(axes, LINKS, strict=True):
        for i, layout in enumerate(LAYOUTS):
            for engine, filled in zip(ENGINES, (True, False, False), strict=True):
                dots = frame[(frame["link"] == link) & (frame["layout"] == layout) & (frame["engine"] == engine)]
                face = CYCLE[i] if filled else "white" if engine == "eager-2023" else "#cccccc"
                look = {
                    "color": CYCLE[i],
                    "marker": MARKERS[i],
                    "mfc": face,
                    "ls": "none",
                    "ms": 4 if "h1" in engine else 7,
                }
                one.plot(
                    dots["longest_context_tokens"], dots["output_tok_per_s"], **look, label=layout if filled else None
                )
        static = [name for name in LAYOUTS if name != "Infinite-LLM"]
        contexts, rates = (
            [value(FIGURE, f"{what} of {name}") for name in static] for what in ("longest context", "throughput")
        )
        paper_marks(one, contexts, rates)
        one.set(title=f"{link} between nodes", xlabel="longest context, tokens", ylabel="output tokens per s")
        tokens_axis(one, (100_000, 300_000, 1_000_000, 3_000_000))
        log_scale(one)
    for face, engine in zip(("#666666", "white", "#cccccc"), ENGINES, strict=True):
        axes[0].plot([], [], color="#666666", marker="o", mfc=face, ls="none", label=engine)
    legend_below(figure, axes, 4)
    return figure


def ours(frame: pd.DataFrame) -> Ours:
    return settings(frame)["graphs, 100 Gb/s"]


def settings(frame: pd.DataFrame) -> dict[str, Ours]:
    return by_setting(frame, ("engine", "link"), compared)


def compared(part: pd.DataFrame) -> Ours:
    rate, context = (part.set_index("layout")[name] for name in ("output_tok_per_s", "longest_context_tokens"))
    static = [name for name in LAYOUTS if name != "Infinite-LLM"]
    found = {f"throughput of {name}": rate[name] for name in static}
    found |= {f"longest context of {name}": context[name] for name in static}
    found["throughput of Infinite-LLM over DP32TP1"] = rate["Infinite-LLM"] / rate["DP32TP1"]
    return found | {"context of Infinite-LLM over DP1TP32": context["Infinite-LLM"] / context["DP1TP32"]}


if __name__ == "__main__":
    main(sys.modules[__name__])
