"""Public profile formats → one table: AIConfigurator's Parquet, Vidur's CSV, our own profile CSV.

Every importer takes a file or a folder, keeps 16-bit measurements of real kernels, counts what it drops, and names file,
row and column of what is wrong.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.profile import (
    COLUMNS,
    Profile,
    check_needs,
    column,
    file_sha256,
    make_table,
    numbers,
    read_csv,
    read_parquet,
)
from perfmodel.errors import InputError, unknown

Part = dict[str, Any]
MS = 1e-3
FP16 = 2


def read_profile(source: str) -> Profile:
    """`FORMAT=PATH` of the command line. Raises InputError for an unknown format or a file that is not one."""
    name, separator, path = source.partition("=")
    if not separator or not path:
        raise InputError(f"--from: {source!r} (FORMAT=PATH is expected, with a FORMAT of {', '.join(FORMATS)})")
    if name not in FORMATS:
        raise unknown("profile format", name, FORMATS)
    return FORMATS[name](Path(path))


def files_of(path: Path, suffix: str) -> list[Path]:
    """The file itself, or all such files below a folder, sorted."""
    found = [path] if path.is_file() else sorted(path.rglob(f"*{suffix}"))
    if not found:
        raise InputError(f"{path}: no such file, nor a folder with {suffix} files")
    return found


# --- AIConfigurator ----------------------------------------------------------------------------------------------------


def aiconfigurator(path: Path) -> Profile:
    """A folder of `*_perf.parquet` of one GPU (or one such file)."""
    parts, dropped, used = [], {"not 16-bit": 0, "another backend": 0}, {}
    for file in files_of(path, ".parquet"):
        read = AICONFIGURATOR.get(file.stem)
        if read is None:
            continue
        frame = read_parquet(file)
        part, kept = read(frame, file)
        dropped = {reason: count + kept.get(reason, 0) for reason, count in dropped.items()}
        parts.append(part | {"gpu": column(frame, "device", file).iloc[0], "dtype": "bfloat16"})
        used[file.name] = file_sha256(file)
        software = f"{frame['framework'].iloc[0]} {frame['version'].iloc[0]}"
    if not parts:
        raise InputError(f"{path}: none of {', '.join(f'{stem}.parquet' for stem in AICONFIGURATOR)}")
    return Profile("aiconfigurator", str(path), make_table(parts), used, software, dropped)


def _aic_gemm(frame: pd.DataFrame, file: Path) -> tuple[Part, dict[str, int]]:
    kept = frame[column(frame, "gemm_dtype", file) == "bfloat16"]
    sizes = {name: numbers(kept, name, file) for name in "mnk"}
    times = numbers(kept, "latency", file) * MS
    return {"operator": "gemm", **sizes, "time_s": times}, {"not 16-bit": len(frame) - len(kept)}


def _aic_attention(frame: pd.DataFrame, file: Path, decode: bool) -> tuple[Part, dict[str, int]]:
    """isl new tokens behind `step` in the cache; for decode isl is 1."""
    wide = (column(frame, "attn_dtype", file) == "bfloat16") & (column(frame, "kv_cache_dtype", file) == "bfloat16")
    kept = frame[wide]
    tokens, prefix = numbers(kept, "isl", file), numbers(kept, "step", file, above=False)
    part = {
        "operator": "decode_attention" if decode else "prefill_attention",
        "rows": numbers(kept, "batch_size", file),
        "tokens": tokens,
        "context_tokens": tokens + prefix,
        "heads": numbers(kept, "num_heads", file),
        "kv_heads": numbers(kept, "num_key_value_heads", file),
        "head_dim": numbers(kept, "head_dim", file),
        "time_s": numbers(kept, "latency", file) * MS,
    }
    return part, {"not 16-bit": len(frame) - len(kept)}


def _aic_decode(frame: pd.DataFrame, file: Path) -> tuple[Part, dict[str, int]]:
    return _aic_attention(frame, file, decode=True)


def _aic_prefill(frame: pd.DataFrame, file: Path) -> tuple[Part, dict[str, int]]:
    return _aic_attention(frame, file, decode=False)


def _aic_all_reduce(frame: pd.DataFrame, file: Path) -> tuple[Part, dict[str, int]]:
    """In a CUDA graph: the kernels alone. The eager ones wait for launches, which the engine's host side prices."""
    kept = frame[column(frame, "backend", file) == "vllm_graph"]
    part = {
        "operator": "all_reduce",
        "num_bytes": numbers(kept, "message_size", file),
        "ranks": numbers(kept, "num_gpus", file),
        "time_s": numbers(kept, "latency", file) * MS,
    }
    return part, {"another backend": len(frame) - len(kept)}


AICONFIGURATOR: dict[str, Callable[[pd.DataFrame, Path], tuple[Part, dict[str, int]]]] = {
    "gemm_perf": _aic_gemm,
    "generation_attention_perf": _aic_decode,
    "context_attention_perf": _aic_prefill,
    "custom_allreduce_perf": _aic_all_reduce,
}

# --- Vidur (and its fork Frontier) -------------------------------------------------------------------------------------


def vidur(path: Path) -> Profile:
    """`mlp.csv`, `attention.csv`, `all_reduce.csv`, `send_recv.csv`, or a folder with any of them. Medians, fp16."""
    parts: list[Part] = []
    used = {}
    for file in files_of(path, ".csv"):
        frame = read_csv(file)
        read = next((read for mark, read in VIDUR.items() if f"time_stats.{mark}.median" in frame.columns), None)
        if read is None:
            raise InputError(f"{file}: none of the columns {', '.join(f'time_stats.{mark}.median' for mark in VIDUR)}")
        software = f"Vidur's profiler, {file.parent.name}"  # one model, or one kind of node, a folder
        parts += [part | {"dtype": "float16", "software": software} for part in read(frame, file)]
        used[f"{file.parent.name}/{file.name}"] = file_sha256(file)
    return Profile("vidur", str(path), make_table(parts), used, "Vidur's profiler", {})


def _median_s(frame: pd.DataFrame, operator: str, file: Path) -> np.ndarray[Any, Any]:
    return numbers(frame, f"time_stats.{operator}.median", file) * MS


def _vidur_layers(frame: pd.DataFrame, file: Path) -> Iterator[Part]:
    """Operators of a layer: shapes follow from the model's sizes, divided by the tensor-parallel workers."""
    sizes = {name: numbers(frame, name, file) for name in ("n_head", "n_kv_head", "n_embd", "n_expanded_embd")}
    tokens, tp = numbers(frame, "num_tokens", file), numbers(frame, "num_tensor_parallel_workers", file)
    hidden, heads = sizes["n_embd"], sizes["n_head"] / tp
    head_dim = hidden / sizes["n_head"]
    kv_heads = np.maximum(1.0, sizes["n_kv_head"] / tp)
    columns = sizes["n_expanded_embd"] / tp
    for operator, n, k in (
        ("attn_pre_proj", (heads + 2 * kv_heads) * head_dim, hidden),
        ("attn_post_proj", hidden, heads * head_dim),
        ("mlp_up_proj", 2 * columns, hidden),
        ("mlp_down_proj", hidden, columns),
    ):
        times = _median_s(frame, operator, file)
        yield {"operator": "gemm", "tensor_parallel": tp, "m": tokens, "n": n, "k": k, "time_s": times}
    for name, operator, per_token in (
        ("norm", "input_layernorm", 2 * hidden),
        ("norm", "post_attention_layernorm", 2 * hidden),
        ("add", "add", 3 * hidden),
        ("rope", "attn_rope", 2 * (heads + kv_heads) * head_dim),
        ("activation", "mlp_act", 3 * columns),
        ("embedding", "emb", 2 * hidden),
    ):
        times, num_bytes = _median_s(frame, operator, file), FP16 * tokens * per_token
        yield {"operator": name, "tensor_parallel": tp, "tokens": tokens, "num_bytes": num_bytes, "time_s": times}


def _vidur_attention(frame: pd.DataFrame, file: Path) -> Iterator[Part]:
    """Decode: kv_cache_size is the context. Prefill: a chunk behind kv_cache_size. Zero times were not measured."""
    prefill = column(frame, "is_prefill", file).astype(bool)
    tp = numbers(frame, "num_tensor_parallel_workers", file)
    heads, kv_heads = numbers(frame, "n_q_head", file) / tp, np.maximum(1.0, numbers(frame, "n_kv_head", file) / tp)
    shape = pd.DataFrame({"tp": tp, "heads": heads, "kv_heads": kv_heads}, index=frame.index)
    shape["head_dim"] = numbers(frame, "n_embd", file) / numbers(frame, "n_q_head", file)
    for operator, name, chosen in (
        ("attn_decode", "decode_attention", ~prefill),
        ("attn_prefill", "prefill_attention", prefill),
    ):
        kept, sizes = frame[chosen], shape[chosen]
        if kept.empty:
            continue
        tokens = numbers(kept, "prefill_chunk_size", file, above=False) if name == "prefill_attention" else 1.0
        yield {
            "operator": name,
            "tensor_parallel": sizes["tp"].to_numpy(),
            "rows": numbers(kept, "batch_size", file),
            "tokens": tokens,
            "context_tokens": numbers(kept, "kv_cache_size", file, above=False)
            + (tokens if name == "prefill_attention" else 0),
            "heads": sizes["heads"].to_numpy(),
            "kv_heads": sizes["kv_heads"].to_numpy(),
            "head_dim": sizes["head_dim"].to_numpy(),
            "time_s": _median_s(kept, operator, file),
        }


def _vidur_network(operator: str) -> Callable[[pd.DataFrame, Path], Iterator[Part]]:
    def read(frame: pd.DataFrame, file: Path) -> Iterator[Part]:
        """Collectives inside a node are on NVLink; those across nodes are not this GPU's business."""
        inside = numbers(frame, "devices_per_node", file) == numbers(frame, "num_workers", file)
        kept = frame[inside]
        yield {
            "operator": operator,
            "num_bytes": numbers(kept, "size", file),
            "ranks": numbers(kept, "num_workers", file),
            "time_s": _median_s(kept, operator, file),
        }

    return read


VIDUR: dict[str, Callable[[pd.DataFrame, Path], Iterator[Part]]] = {
    "attn_pre_proj": _vidur_layers,
    "attn_decode": _vidur_attention,
    "all_reduce": _vidur_network("all_reduce"),
    "send_recv": _vidur_network("send_recv"),
}

# --- our own -----------------------------------------------------------------------------------------------------------


# MicroAttention is attention that leaves its state unmerged: measured, it stands for the attention of its kind.
ALIASES = {"micro_attention": "decode_attention", "prefill_micro_attention": "prefill_attention"}


def infreal(path: Path) -> Profile:
    """What `infreal profile` wrote of one machine and one model."""
    return replace(own(path), format="infreal")


def own(path: Path) -> Profile:
    """A profile CSV (design.md §5), or a folder of them."""
    frames, used = [], {}
    for file in files_of(path, ".csv"):
        frame = read_csv(file)
        strange = [name for name in frame.columns if name not in COLUMNS]
        if strange:
            raise unknown(f"column of {file}", strange[0], COLUMNS)
        for name in ("operator", "time_s"):
            column(frame, name, file)
        frame["operator"] = frame["operator"].replace(ALIASES)
        check_needs(frame, file)
        frames.append(frame.reindex(columns=COLUMNS))
        used[file.name] = file_sha256(file)
    table = make_table([{name: frame[name].to_numpy() for name in COLUMNS} for frame in frames])
    software = ", ".join(sorted({str(name) for name in table["software"].dropna()}))
    return Profile("profile", str(path), table, used, software, {})


FORMATS: dict[str, Callable[[Path], Profile]] = {
    "aiconfigurator": aiconfigurator,
    "vidur": vidur,
    "profile": own,
    "infreal": infreal,
}
