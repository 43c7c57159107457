"""Prefill MicroAttention: a chunk of queries per row against a paged pool, causal at the row's offset or not at all.

The queries of a row and the heads of a KV head's group form one long axis (query × group + head), cut into tiles of
BLOCK_M: any group size fills the tile, and K and V are read once per tile and KV head.
"""

import torch
import triton
import triton.language as tl

from infreal.kernels.launch import Launch, needs_upcast
from infreal.kernels.partial import Partial
from infreal.kernels.sizes import ceil_div, next_power_of_2
from infreal.kernels.triton_common import add_tokens, find_row, store_state

# (BLOCK_M, BLOCK_N, warps, stages): half precision spills no register on sm_80 and sm_90 (tests/infreal/test_aot.py)
HALF_TILE = (128, 32, 8, 3)
PADDED_HALF_TILE = (64, 32, 4, 3)  # a head_dim that is no power of two: its masks take registers
FLOAT_TILE = (16, 32, 4, 2)


def tile_of(dtype: torch.dtype, head_dim: int) -> tuple[int, int, int, int]:
    if dtype == torch.float32:
        return FLOAT_TILE
    return HALF_TILE if head_dim == next_power_of_2(head_dim) else PADDED_HALF_TILE


@triton.jit
def prefill_kernel(
    q,
    query_start,
    keys,
    values,
    block_table,
    num_kv_tokens,
    causal_offset,
    out_acc,
    out_m,
    out_e,
    scale,
    num_queries,
    rows,
    stride_q_token,
    stride_q_head,
    stride_table,
    stride_block,
    stride_token,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (KV head, at least as many programs as there are tiles). Row `rows` is the padding behind the last query."""
    r = tl.arange(0, ROWS)
    first = tl.load(query_start + r, mask=r <= rows, other=num_queries)
    behind = tl.load(query_start + r + 1, mask=r < rows, other=num_queries)
    counts = ((behind - first) * GROUP + BLOCK_M - 1) // BLOCK_M
    if tl.program_id(1) < tl.sum(counts, 0):
        row, tile = find_row(counts, tl.program_id(1))
        chunk = tl.sum(tl.where(r == row, first, 0), 0)
        chunk_queries = tl.sum(tl.where(r == row, behind - first, 0), 0)
        length = tl.load(num_kv_tokens + row, mask=row < rows, other=0)

        index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        query = index // GROUP
        is_query = query < chunk_queries
        head = tl.program_id(0) * GROUP + index % GROUP
        visible = tl.full([BLOCK_M], 0, tl.int32) + length
        stop = length
        if CAUSAL:
            offset = tl.load(causal_offset + row, mask=row < rows, other=0)
            visible = tl.minimum(visible, query + offset + 1)
            last = tl.minimum(chunk_queries, ((tile + 1) * BLOCK_M + GROUP - 1) // GROUP)
            stop = tl.minimum(stop, last + offset)  # behind the last token that this tile's last query sees

        dims = tl.arange(0, BLOCK_D)
        is_dim = dims < HEAD_DIM
        q_offsets = (chunk + query).to(tl.int64)[:, None] * stride_q_token + head[:, None] * stride_q_head
        queries = tl.load(q + q_offsets + dims[None, :], mask=is_query[:, None] & is_dim[None, :], other=0.0)
        if UPCAST:
            queries = queries.to(tl.float32)
        acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        e = tl.full([BLOCK_M], 0.0, tl.float32)
        table = block_table + row.to(tl.int64) * stride_table
        kv_head = tl.program_id(0) * HEAD_DIM
        for start in range(0, stop, BLOCK_N):
            acc, m, e = add_tokens(
                (acc, m, e),
                queries,
                keys + kv_head,
                values + kv_head,
                table,
                start + tl.arange(0, BLOCK_N),
                stop,
                visible,
                scale,
                stride_block,
                stride_token,
                HEAD_DIM,
                BLOCK_TOKENS,
                BLOCK_D,
                UPCAST,
            )
        slots = (chunk + query).to(tl.int64) * (KV_HEADS * GROUP) + head
        store_state((acc, m, e), out_acc, out_m, out_e, slots, is_query, HEAD_DIM, BLOCK_D)


def prefill_launch(
    q: torch.Tensor,
    query_start: torch.Tensor,
    kv: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    scale: float,
    out: Partial,
) -> Launch:
    """kv: one layer of the pool; table: (block_table, num_kv_tokens, causal_offset or None)."""
    block_table, num_kv_tokens, causal_offset = table
    num_queries, heads, head_dim = q.shape
    rows, group = num_kv_tokens.shape[0], heads // kv.shape[3]
    block_m, block_n, warps, stages = tile_of(q.dtype, head_dim)
    strides = (*q.stride()[:2], block_table.stride(0), kv.stride(0), kv.stride(2))
    lengths = (num_kv_tokens, num_kv_tokens if causal_offset is None else causal_offset)
    state = (out.acc, out.m, out.e)
    return Launch(
        kernel=prefill_kernel,
        grid=(kv.shape[3], (ceil_div(num_queries * group, block_m) + rows) * (num_queries > 0)),
        args=(q, query_start, kv[:, 0], kv[:, 1], block_table, *lengths, *state, scale, num_queries, rows, *strides),
        constants={
            "CAUSAL": causal_offset is not None,
            "GROUP": group,
            "KV_HEADS": kv.shape[3],
            "HEAD_DIM": head_dim,
            "BLOCK_TOKENS": kv.shape[2],
            "ROWS": next_power_of_2(rows + 1),
            "BLOCK_D": max(16, next_power_of_2(head_dim)),
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "UPCAST": needs_upcast(prefill_kernel, q.dtype),
        },
        num_warps=warps,
        num_stages=stages,
    )
