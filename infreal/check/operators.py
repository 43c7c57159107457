"""Times of the operators of one layer, as rows of a profile: matrix products, decode and prefill attention, a copy."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from infreal.bench.contenders import BLOCK_TOKENS, Problem, Shape, ours_scattered, random_tensor
from infreal.bench.profile import ProfileRow, device_name, software
from infreal.bench.timing import measure
from infreal.kernels import prefill_micro_attention

HEADS = {"cpu": (9, 3, 64), "cuda": (32, 8, 128)}  # heads, KV heads, head_dim: SmolLM2-135M, LLaMA3-8B
DECODE = {"cpu": ((1, 256), (4, 512)), "cuda": ((1, 4096), (1, 65536), (16, 4096), (64, 4096), (64, 16384))}
PREFILL = {"cpu": ((64, 128), (128, 256)), "cuda": ((512, 512), (2048, 2048), (2048, 16384))}  # tokens, context_tokens
GEMM = {"cpu": (1, 64), "cuda": (1, 16, 64, 256, 2048)}  # rows
COPY_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}


def profile_operators(device: str, backend: str) -> Iterator[ProfileRow]:
    dtype = torch.float32 if device == "cpu" else torch.float16
    common = ProfileRow(
        "", device_name(device), software(backend), str(dtype).removeprefix("torch."), tensor_parallel=1
    )
    calls = dict(_calls(device, backend, dtype))
    for row, timing in measure(calls, device).items():
        times = {"time_s": timing.median_s, "time_s_std": timing.std_s, "repeats": timing.repeats}
        yield replace(row, gpu=common.gpu, software=common.software, dtype=common.dtype, tensor_parallel=1, **times)


def _calls(device: str, backend: str, dtype: torch.dtype) -> Iterator[tuple[ProfileRow, Callable[[], object]]]:
    heads, kv_heads, head_dim = HEADS[device]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for rows, context in DECODE[device]:
        problem = Problem(Shape("", heads, kv_heads, head_dim, rows, context), dtype, device, backend)
        row = ProfileRow("decode_attention", "", "", "", rows=rows, context_tokens=context, **sizes)
        yield row, ours_scattered(problem)
    for tokens, context in PREFILL[device]:
        problem = Problem(Shape("", heads, kv_heads, head_dim, 1, context), dtype, device, backend)
        row = ProfileRow("prefill_attention", "", "", "", rows=1, tokens=tokens, context_tokens=context, **sizes)
        yield row, _prefill(problem, tokens)
    hidden = heads * head_dim
    weights = random_tensor((hidden, 4 * hidden), dtype, device)
    for m in GEMM[device]:
        x = random_tensor((m, hidden), dtype, device)
        yield ProfileRow("gemm", "", "", "", m=m, n=4 * hidden, k=hidden), lambda x=x: x @ weights
    source = random_tensor((COPY_BYTES[device],), torch.uint8, device)
    target = torch.empty_like(source)
    yield ProfileRow("memory_copy", "", "", "", num_bytes=2 * source.nbytes), lambda: target.copy_(source)


def _prefill(problem: Problem, tokens: int) -> Callable[[], object]:
    """A chunk of `tokens` queries at the end of the problem's one row."""
    shape = problem.shape
    q = random_tensor((tokens, shape.heads, shape.head_dim), problem.dtype, problem.device)
    start, offset = (
        torch.tensor(values, dtype=torch.int32, device=problem.device)
        for values in ([0, tokens], [shape.context_tokens - tokens])
    )
    assert shape.context_tokens % BLOCK_TOKENS == 0, "a problem's blocks are full"
    table, options = problem.scattered_table, {"layer": 0, "scale": problem.scale, "backend": problem.backend}
    return lambda: prefill_micro_attention(q, start, problem.kv_pool, table, problem.num_tokens, offset, **options)
