"""The cases of a validation: a small model, three workloads in ratio to an instance's memory, two systems, three loads."""

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SYSTEMS = ("vllm-multi", "infinite-llm")
NO_WAIT = "no-wait"  # all requests at once: actors cannot skip time
LOADS = (0.5, 0.95)  # of the measured capacity
SEED, BLOCK_TOKENS = 0, 16
BELIEF = "belief.json"
TAIL = 0.6  # exponent of the heavy tail
OUTPUTS = (12, 36)  # from, and below
Lengths = list[tuple[int, int]]  # (input, output) tokens of each request

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class Size:
    """How large a validation is. shape: of the model · blocks: KV blocks of an instance · requests: of each workload · repeats: of
    the real runs · profile: extra options."""

    shape: dict[str, int]
    blocks: int
    requests: int
    repeats: int
    workloads: tuple[str, ...]
    loads: tuple[float, ...] = LOADS
    profile: tuple[str, ...] = ()

    @property
    def instance_tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS


def shape_of(layers: int, hidden: int, heads: int, kv_heads: int, vocab: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


def short(size: Size, draw: np.random.Generator) -> Lengths:
    """Requests of which an instance holds many."""
    top = max(32, size.instance_tokens // 8)
    return [(int(draw.integers(16, top)), int(draw.integers(*OUTPUTS))) for _ in range(size.requests)]


def heavy(size: Size, draw: np.random.Generator) -> Lengths:
    """Inputs of a Pareto distribution, up to what nearly fills both instances; half as many requests, for they take long."""
    count = size.requests // 2
    ranks = (draw.permutation(count) + 0.5) / count
    inputs = np.minimum(32 * ranks ** (-1 / TAIL), 1.8 * size.instance_tokens)
    return [(int(tokens), int(draw.integers(*OUTPUTS))) for tokens in inputs]


def one_long(size: Size, draw: np.random.Generator) -> Lengths:
    """One request longer than an instance among short ones."""
    found = short(size, draw)
    found[len(found) // 3] = (3 * size.instance_tokens // 2, OUTPUTS[1])
    return found


WORKLOADS: dict[str, Callable[[Size, np.random.Generator], Lengths]] = {
    "short": short,
    "heavy": heavy,
    "one-long": one_long,
}

FULL = Size(shape_of(10, 576, 9, 3, 8192), 64, 32, 5, tuple(WORKLOADS))
QUICK = Size(shape_of(2, 64, 4, 2, 256), 32, 6, 2, ("one-long",), (0.5,), ("--pool-tokens", "2048"))


def write_model(folder: Path, size: Size) -> Path:
    path = folder / "model" / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head_dim = size.shape["hidden_size"] // size.shape["num_attention_heads"]
    path.write_text(json.dumps(LLAMA | size.shape | {"head_dim": head_dim}, indent=1))
    return path


def write_trace(folder: Path, size: Size, workload: str, load: float | str, rate_rps: float | None) -> str:
    """Its name. rate_rps None: all at once. The same requests at every load, at proportional times."""
    lengths = WORKLOADS[workload](size, np.random.default_rng(SEED))
    gaps = np.random.default_rng(SEED + 1).exponential(size=len(lengths))
    unit = np.concatenate(([0.0], np.cumsum(gaps)[:-1])) * len(lengths) / gaps.sum()
    arrival_s = np.zeros(len(lengths)) if rate_rps is None else unit / rate_rps
    name = f"{workload}@{load}.csv"
    with (folder / name).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("arrival_s", "input_tokens", "output_tokens", "id"))
        writer.writerows((f"{t:.6f}", *pair, i) for i, (t, pair) in enumerate(zip(arrival_s, lengths, strict=True)))
    return name


def write_sweep(folder: Path, name: str, size: Size, link: dict[str, Any], traces: list[str]) -> Path:
    """A configuration for both worlds: two instances of a core each."""
    config = {
        "base": {
            "model": "model/config.json",
            "dtype": "float32",
            "gpu": "cpu",
            "cluster": {"nodes": 1, "gpus_per_node": 2, "intra_link": link, "inter_link": link},
            "instance": {"blocks_per_gpu": size.blocks, "block_tokens": BLOCK_TOKENS, "token_budget": 256},
            "scheduler": {"period_s": 0.25, "heartbeat_s": 0.25},
            "truth": {"pack": f"./{BELIEF}"},
            "belief": {"pack": f"./{BELIEF}"},
            "workload": {"trace": "own", "path": traces[0]},
            "record": {"sample_s": 1.0},
            "seed": SEED,
        },
        "axes": {"workload.path": traces, "system": list(SYSTEMS)},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config, indent=1))
    return path
