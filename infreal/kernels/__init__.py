"""DistAttention on one device: attention over a part of a request's KV, and the merge of such parts (paper.md §2).

Every function has two twins behind one signature: `backend="torch"` (any device, fast enough to serve on a CPU) and
`backend="triton"` (CUDA, or the CPU under `TRITON_INTERPRET=1`). This module owns the checks of the arguments' shapes
and dtypes; it must not know requests, instances or networks. Wrong arguments raise `ValueError`.

Values that live on the device (block ids, lengths, slots) are the caller's promise: they are never read back to check.
"""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch

from infreal.kernels.partial import Partial

__all__ = [
    "BACKENDS",
    "Partial",
    "gather_blocks",
    "merge",
    "micro_attention",
    "prefill_micro_attention",
    "scatter_blocks",
    "write_kv",
]

BACKENDS = {"torch": "infreal.kernels.torch_backend", "triton": "infreal.kernels.triton_backend"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def micro_attention(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    block_table: torch.Tensor,
    num_local_tokens: torch.Tensor,
    *,
    layer: int,
    scale: float,
    backend: str,
    out: Partial | None = None,
) -> Partial:
    """Decode: one query per row against the row's tokens held here.

    q `[rows, heads, head_dim]`; kv_pool `[blocks, layers, 2, block_tokens, kv_heads, head_dim]`, same dtype, contiguous;
    block_table `[rows, max_blocks]` int32, of which the first ceil(num_local_tokens / block_tokens) entries of a row are
    read and the rest may be garbage; num_local_tokens `[rows]` int32, 0 allowed. Returns acc `[rows, heads, head_dim]`
    and m, e `[rows, heads]`, every slot written; a row without tokens gives the neutral element. A row's result does not
    depend on the other rows of the batch.
    """
    _check_queries(q, kv_pool, layer)
    rows = q.shape[0]
    _check_index("block_table", block_table, (rows, None))
    _check_index("num_local_tokens", num_local_tokens, (rows,))
    out = _output(out, q)
    _module(backend).micro_attention(q, kv_pool[:, layer], block_table, num_local_tokens, scale, out)
    return out


def prefill_micro_attention(
    q: torch.Tensor,
    query_start: torch.Tensor,
    kv_pool: torch.Tensor,
    block_table: torch.Tensor,
    num_kv_tokens: torch.Tensor,
    causal_offset: torch.Tensor | None,
    *,
    layer: int,
    scale: float,
    backend: str,
    out: Partial | None = None,
) -> Partial:
    """Prefill: a chunk of queries per row against the row's tokens held here.

    q `[tokens, heads, head_dim]`, of which row r owns `query_start[r] .. query_start[r + 1]` (int32, `[rows + 1]`, first
    0, not decreasing; tokens behind the last row are padding and get the neutral element). causal_offset `[rows]` int32
    is the global position of a row's first query minus that of its first KV token: query i sees the KV tokens
    j <= i + causal_offset. None is a remote prefix, seen whole. Pool, table and partial state as in `micro_attention`.
    """
    _check_queries(q, kv_pool, layer)
    rows = num_kv_tokens.shape[0]
    _check_index("query_start", query_start, (rows + 1,))
    _check_index("block_table", block_table, (rows, None))
    _check_index("num_kv_tokens", num_kv_tokens, (rows,))
    if causal_offset is not None:
        _check_index("causal_offset", causal_offset, (rows,))
    out = _output(out, q)
    table = (block_table, num_kv_tokens, causal_offset)
    _module(backend).prefill_micro_attention(q, query_start, kv_pool[:, layer], table, scale, out)
    return out


def merge(parts: Partial | Sequence[Partial], *, backend: str, out: Partial | None = None) -> Partial:
    """One state out of parts over disjoint tokens: m_g = max m_j, e_g = Σ e_j exp(m_j − m_g), acc likewise (paper.md §2).

    `parts` carries a leading dimension `[parts, …]` (dense within a part, any stride between parts, so that a message can
    be received straight into its slot) or is a list, which is stacked. Associative and commutative; parts with m = −inf
    are selected away, whatever their acc and e hold. No part at all gives the neutral element.
    """
    stacked = parts if isinstance(parts, Partial) else Partial.stack(parts)
    _check_parts(stacked)
    shape = stacked.acc.shape[1:]
    out = Partial.empty(shape, stacked.acc.device) if out is None else _check_out(out, shape)
    _module(backend).merge(stacked, out)
    return out


def write_kv(
    k: torch.Tensor, v: torch.Tensor, kv_pool: torch.Tensor, slots: torch.Tensor, *, layer: int, backend: str
) -> None:
    """Store K (already rotated) and V of new tokens, `[tokens, kv_heads, head_dim]` each, into one layer of the pool.

    slots `[tokens]` int32 or int64, distinct: block id × block_tokens + offset within the block.
    """
    _check_pool(kv_pool, layer)
    _check_shape("k", k, (slots.shape[0], *kv_pool.shape[4:]))
    _check_shape("v", v, k.shape)
    if k.dtype != kv_pool.dtype or v.dtype != kv_pool.dtype:
        raise ValueError(f"k and v are {k.dtype} and {v.dtype}; the pool is {kv_pool.dtype}")
    _check_index("slots", slots, (None,), (torch.int32, torch.int64))
    _module(backend).write_kv(k, v, kv_pool[:, layer], slots)


def gather_blocks(kv_pool: torch.Tensor, ids: torch.Tensor, *, backend: str) -> torch.Tensor:
    """Copy of whole blocks `[len(ids), layers, 2, block_tokens, kv_heads, head_dim]`: what a move sends."""
    _check_pool(kv_pool, 0)
    _check_index("ids", ids, (None,), (torch.int32, torch.int64))
    return _module(backend).gather_blocks(kv_pool, ids)


def scatter_blocks(kv_pool: torch.Tensor, ids: torch.Tensor, data: torch.Tensor, *, backend: str) -> None:
    """Store whole blocks, `data` as `gather_blocks` returns it, at the distinct `ids`: what a move receives."""
    _check_pool(kv_pool, 0)
    _check_index("ids", ids, (None,), (torch.int32, torch.int64))
    _check_shape("data", data, (ids.shape[0], *kv_pool.shape[1:]))
    if data.dtype != kv_pool.dtype or not data.is_contiguous():
        raise ValueError(f"data must be contiguous {kv_pool.dtype}, not {data.dtype} with strides {data.stride()}")
    _module(backend).scatter_blocks(kv_pool, ids, data)


def _module(backend: str) -> ModuleType:
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    return import_module(BACKENDS[backend])


def _check_pool(kv_pool: torch.Tensor, layer: int) -> None:
    if kv_pool.ndim != 6 or kv_pool.shape[2] != 2 or not kv_pool.is_contiguous():
        shape = "[blocks, layers, 2, block_tokens, kv_heads, head_dim]"
        raise ValueError(f"kv_pool must be contiguous {shape}, not {list(kv_pool.shape)}")
    if kv_pool.dtype not in DTYPES:
        raise ValueError(f"kv_pool is {kv_pool.dtype}; allowed are float32, float16 and bfloat16")
    if not 0 <= layer < kv_pool.shape[1]:
        raise ValueError(f"layer {layer} is outside 0..{kv_pool.shape[1] - 1}")


def _check_queries(q: torch.Tensor, kv_pool: torch.Tensor, layer: int) -> None:
    _check_pool(kv_pool, layer)
    kv_heads, head_dim = kv_pool.shape[4:]
    if q.ndim != 3 or q.shape[1] % kv_heads or q.shape[2] != head_dim or q.stride(2) != 1:
        raise ValueError(
            f"q {list(q.shape)} must be [rows, multiple of {kv_heads} heads, {head_dim}], dense in the last"
        )
    if q.dtype != kv_pool.dtype:
        raise ValueError(f"q is {q.dtype}; the pool is {kv_pool.dtype}")


def _check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    fits = tensor.ndim == len(shape) and all(
        want in (None, size) for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, not {['*' if n is None else n for n in shape]}")


def _check_index(
    name: str, tensor: torch.Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype] = (torch.int32,)
) -> None:
    _check_shape(name, tensor, shape)
    if tensor.dtype not in dtypes or (tensor.numel() and tensor.stride(-1) != 1):
        raise ValueError(f"{name} must be dense {' or '.join(map(str, dtypes))}, not {tensor.dtype}")


def _check_parts(parts: Partial) -> None:
    acc, m, e = parts.acc, parts.m, parts.e
    if acc.ndim < 2 or m.shape != acc.shape[:-1] or e.shape != m.shape:
        raise ValueError(f"shapes of acc, m, e do not match: {list(acc.shape)}, {list(m.shape)}, {list(e.shape)}")
    if any(t.dtype != torch.float32 or (len(t) and not t[0].is_contiguous()) for t in (acc, m, e)):
        raise ValueError("a partial state is float32, dense within a part")


def _check_out(out: Partial, shape: Sequence[int]) -> Partial:
    _check_shape("out.acc", out.acc, shape)
    _check_shape("out.m", out.m, shape[:-1])
    _check_shape("out.e", out.e, shape[:-1])
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in (out.acc, out.m, out.e)):
        raise ValueError("out must be contiguous float32")
    return out


def _output(out: Partial | None, q: torch.Tensor) -> Partial:
    return Partial.empty(q.shape, q.device) if out is None else _check_out(out, q.shape)
