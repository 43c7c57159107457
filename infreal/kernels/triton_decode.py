"""Decode MicroAttention: split-KV over a paged pool, the query heads of a KV head packed into one tile.

A row of n tokens is cut into splits of SPLIT_TOKENS (a multiple of it where there would be more than MAX_SPLITS), which
depends on n alone: the result of a row does not depend on its batch. A unit is one split of one row. Programs walk over the
units of all rows, so that a batch of very uneven contexts keeps the whole GPU busy and no program runs for nothing.
K and V are read once per KV head. Several splits are merged by the one merge kernel.
"""

import torch
import triton
import triton.language as tl

from infreal.kernels.launch import Launch, needs_upcast
from infreal.kernels.partial import Partial
from infreal.kernels.sizes import ceil_div, next_power_of_2
from infreal.kernels.triton_common import add_tokens, find_row, store_state

SPLIT_TOKENS = 512
MAX_SPLITS = 256  # bounds the scratch state; 128K tokens are cut at 512, one million at 4,096
TARGET_PROGRAMS = 2048  # at least 2 × the SMs of any GPU, many times over: programs even out
SCRATCH_BYTES = 256 << 20  # scratch of one launch; a larger batch is worked off in slices of rows
BLOCK_H = 16  # the least M of a tensor-core product; heads of a group beyond it take another tile
BLOCK_N = {torch.float32: 32, torch.float16: 64, torch.bfloat16: 64}


@triton.jit
def split_step(length, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Tokens of a split: the least multiple of SPLIT_TOKENS that cuts `length` tokens into no more than MAX_SPLITS."""
    return tl.maximum((length + SPLIT_TOKENS * MAX_SPLITS - 1) // (SPLIT_TOKENS * MAX_SPLITS), 1) * SPLIT_TOKENS


@triton.jit
def decode_kernel(
    q,
    keys,
    values,
    block_table,
    num_local_tokens,
    out_acc,
    out_m,
    out_e,
    scale,
    rows,
    stride_q_row,
    stride_q_head,
    stride_table,
    stride_block,
    stride_token,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (KV head × tile of its group, programs). State of split s, row r, head h: slot (s × rows + r) × heads + h."""
    kv_head = tl.program_id(0) % KV_HEADS
    head = (tl.program_id(0) // KV_HEADS) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < GROUP
    head = kv_head * GROUP + head
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM

    r = tl.arange(0, ROWS)
    lengths = tl.load(num_local_tokens + r, mask=r < rows, other=0)
    steps = split_step(lengths, SPLIT_TOKENS, MAX_SPLITS)
    counts = tl.where(r < rows, tl.maximum((lengths + steps - 1) // steps, 1), 0)  # an empty row too is written
    for unit in range(tl.program_id(1), tl.sum(counts, 0), tl.num_programs(1)):
        row, split = find_row(counts, unit)
        length = tl.load(num_local_tokens + row)
        step = split_step(length, SPLIT_TOKENS, MAX_SPLITS)
        q_offsets = row.to(tl.int64) * stride_q_row + head[:, None] * stride_q_head + dims[None, :]
        query = tl.load(q + q_offsets, mask=is_head[:, None] & is_dim[None, :], other=0.0)
        if UPCAST:
            query = query.to(tl.float32)
        acc = tl.full([BLOCK_H, BLOCK_D], 0.0, tl.float32)
        m = tl.full([BLOCK_H], float("-inf"), tl.float32)
        e = tl.full([BLOCK_H], 0.0, tl.float32)
        table = block_table + row.to(tl.int64) * stride_table
        stop = tl.minimum(length, (split + 1) * step)
        visible = tl.full([BLOCK_H], 0, tl.int32) + stop
        for start in range(split * step, stop, BLOCK_N):
            acc, m, e = add_tokens(
                (acc, m, e),
                query,
                keys + kv_head * HEAD_DIM,
                values + kv_head * HEAD_DIM,
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
        slots = (split.to(tl.int64) * rows + row) * (KV_HEADS * GROUP) + head
        store_state((acc, m, e), out_acc, out_m, out_e, slots, is_head, HEAD_DIM, BLOCK_D)


def max_splits(block_table: torch.Tensor, block_tokens: int) -> int:
    """The most splits that a row of this table can have (a longer row may have fewer than a shorter one)."""
    return min(max(ceil_div(block_table.shape[1] * block_tokens, SPLIT_TOKENS), 1), MAX_SPLITS)


def decode_launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_table: torch.Tensor,
    num_local_tokens: torch.Tensor,
    scale: float,
    out: Partial,
) -> Launch:
    """kv: one layer of the pool, as in `triton_backend`; out: a state per split, acc `[splits, rows, heads, head_dim]`."""
    rows, heads, head_dim = q.shape
    block_tokens, kv_heads = kv.shape[2:4]
    splits, group = out.m.shape[0], heads // kv_heads
    head_tiles = kv_heads * ceil_div(group, BLOCK_H)
    programs = min(rows * splits, ceil_div(TARGET_PROGRAMS, head_tiles))
    strides = (*q.stride()[:2], block_table.stride(0), kv.stride(0), kv.stride(2))
    state = (out.acc, out.m, out.e)
    return Launch(
        kernel=decode_kernel,
        grid=(head_tiles, programs),
        args=(q, kv[:, 0], kv[:, 1], block_table, num_local_tokens, *state, scale, rows, *strides),
        constants={
            "GROUP": group,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_TOKENS": block_tokens,
            "ROWS": next_power_of_2(rows),
            "BLOCK_D": max(16, next_power_of_2(head_dim)),
            "BLOCK_H": BLOCK_H,
            "BLOCK_N": BLOCK_N[q.dtype],
            "SPLIT_TOKENS": SPLIT_TOKENS,
            "MAX_SPLITS": MAX_SPLITS,
            "UPCAST": needs_upcast(decode_kernel, q.dtype),
        },
    )
