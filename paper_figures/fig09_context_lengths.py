"""Figure 9: throughput at the largest batch against context length, three models, three systems.

Claim: Infinite-LLM serves contexts 2-19 times as long as vLLM-multi at equal throughput on short ones, and has 1.4-5.3 times
vLLM-single's throughput on short ones. Reproduced: its curve is vLLM-multi's where that ends, and goes on. Setting [us]: 32
A100s, tensor parallel 1, 1 and 4; as many equal requests as fit, 256 tokens of them output; the rate while most decode.
Reduced size: at 125 MB/s one model, and only what one instance holds.
"""

import sys
from itertools import product
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sheet import Ours, by_setting, legend_below, main, panels, tokens_axis
from study import LINKS, TENSOR_PARALLEL, Study, decode_tok_per_s, fixed, fullest_s

from experiments.catalogue import load_model
from experiments.plan import plan_cluster
from experiments.plotstyle import MARKERS, SYSTEM_COLOURS
from experiments.runfolder import read_table
from experiments.sweepfile import load_sweep
from perfmodel.cluster import ClusterSpec

FIGURE = "9"
TITLE = "Throughput at the largest batch against context length, 32 A100s"
PARTS = "Simulated: output tokens/s of all requests while most of them decode (A100 pack, engine `graphs`)."
WHY = (
    "The ratio of contexts is the number of instances, less what each keeps back: 32 for one GPU an instance, 8 for "
    "four; the paper's 2-19 is of its own choice of instances a model. How the paper cut LLaMA2-7B and 13B over all GPUs "
    "is not known: here the tensor parallel degree must divide the heads, which leaves few heads a GPU and all-reduces "
    "across nodes, and `graphs` does not split the KV of a row of all heads (figure 10b). At 125 MB/s a context that "
    "spans nodes decodes at the pace of its queries' round trips (figure 6)."
)
SYSTEMS = ("vllm-multi", "vllm-single", "infinite-llm")
LENGTHS = (1_000, 10_000, 50_000, 100_000, 300_000, 1_000_000)
OUTPUT_TOKENS = 256
SHORT, LINK = LENGTHS[0], "100 Gb/s"


def table(study: Study) -> pd.DataFrame:
    lengths = study.pick((10_000,), (1_000, 10_000, 100_000, 300_000), LENGTHS)
    models = study.pick(("llama2-7b",), tuple(TENSOR_PARALLEL), tuple(TENSOR_PARALLEL))
    most = study.pick(4, 10_000, 10_000)
    links = study.pick((LINK,), tuple(LINKS), tuple(LINKS))
    cases = [case for case in product(models, links, SYSTEMS, lengths) if study.size == "full" or is_quick(*case)]
    counts = {case: min(most, largest_batch(*case)) for case in cases}
    held = [case for case in cases if counts[case]]
    points = [point_of(*case, counts[case]) for case in held]
    runs = study.runs("fig09", {"base": {"workload": fixed(1_000, OUTPUT_TOKENS, 1)}, "points": points})
    rows = []
    for case, folder, manifest in zip(held, runs.folders, runs.manifests, strict=True):
        requests = read_table(folder, "requests")
        rate = decode_tok_per_s(requests, *fullest_s(requests))
        longest = manifest["pool"]["longest_request_tokens"]
        rows.append((*case, counts[case], rate, longest, str(folder.relative_to(study.out))))
    columns = [
        "model",
        "link",
        "system",
        "context_tokens",
        "num_requests",
        "tok_per_s",
        "longest_context_tokens",
        "run",
    ]
    return pd.DataFrame(rows, columns=columns)


def is_quick(model: str, link: str, system: str, length: int) -> bool:
    """At 125 MB/s prefill over several instances takes hours, of virtual time and then some of ours."""
    return link == LINK or (model == "llama2-7b" and length <= 100_000)


def point_of(model: str, link: str, system: str, length: int, num_requests: int) -> dict[str, Any]:
    return setting_of(model, link, system) | {"workload": fixed(length, OUTPUT_TOKENS, num_requests)}


def setting_of(model: str, link: str, system: str) -> dict[str, Any]:
    parallel = {"instance.tensor_parallel": TENSOR_PARALLEL[model]}
    return {"model": model, "system": system, "cluster.inter_link": LINKS[link], **parallel}


def largest_batch(model: str, link: str, system: str, length: int) -> int:
    """Requests of a length that the system's memory holds at once: of each instance, or of the pool where one does not do."""
    cluster = cluster_of(model, link, system)
    tokens = int(cluster.num_blocks * (1 - cluster.headroom_frac)) * cluster.instance.block_tokens
    if length <= tokens:
        return cluster.num_instances * (tokens // length)
    return tokens * cluster.num_instances // length if cluster.placement else 0


def cluster_of(model: str, link: str, system: str) -> ClusterSpec:
    base = {"workload": fixed(1_000, OUTPUT_TOKENS, 1)}
    return plan_cluster(
        load_sweep({"base": base, "points": [setting_of(model, link, system)]}).runs[0].config.resolved()
    )


def draw(frame: pd.DataFrame) -> Figure:
    models, links = list(dict.fromkeys(frame["model"])), list(dict.fromkeys(frame["link"]))
    figure, axes = panels(len(models), len(links), width=3.8, height=2.8)
    for i, link in enumerate(links):
        for j, model in enumerate(models):
            one, line = axes[i * len(models) + j], frame[(frame["model"] == model) & (frame["link"] == link)]
            if line.empty:
                one.set_axis_off()
                continue
            draw_model(one, line)
            parallel = TENSOR_PARALLEL[model]
            one.set(
                title=f"{load_model(model).name}, TP{parallel}, {link}",
                xlabel="context, tokens",
                ylabel="output tokens per s",
            )
    legend_below(figure, axes)
    return figure


def draw_model(axes: Axes, frame: pd.DataFrame) -> None:
    for marker, system in zip(MARKERS, SYSTEMS, strict=False):
        line = frame[frame["system"] == system]
        above = (
            {"mfc": "none", "ms": 9, "zorder": 4} if system == "vllm-multi" else {}
        )  # where it ends on infinite-llm's line
        look = {"color": SYSTEM_COLOURS[system], "marker": marker, "label": system, **above}
        axes.plot(line["context_tokens"], line["tok_per_s"], **look)
    tokens_axis(axes, (1_000, 10_000, 100_000, 1_000_000))
    axes.set_yscale("log")


def ours(frame: pd.DataFrame) -> Ours:
    """100 Gb/s; the largest of the models where the paper gives a range."""
    return compared(frame[frame["link"] == LINK])


def settings(frame: pd.DataFrame) -> dict[str, Ours]:
    return by_setting(frame, ("model", "link"), compared)


def compared(part: pd.DataFrame) -> Ours:
    longest = part.groupby(["model", "system"])["longest_context_tokens"].max().unstack("system")
    shortest = part[part["context_tokens"] == part["context_tokens"].min()]
    rates = shortest.pivot_table(index="model", columns="system", values="tok_per_s")
    return {
        "longest context over vLLM-multi": (longest["infinite-llm"] / longest["vllm-multi"]).max(),
        "short-context throughput over vLLM-multi": (rates["infinite-llm"] / rates["vllm-multi"]).mean(),
        "short-context throughput over vLLM-single": (rates["infinite-llm"] / rates["vllm-single"]).max(),
    }


if __name__ == "__main__":
    main(sys.modules[__name__])
