"""Copies into and out of the pool: new K and V of a step, and whole blocks for moves."""

import torch
import triton
import triton.language as tl

from infreal.kernels.launch import Launch
from infreal.kernels.sizes import ceil_div, next_power_of_2

COPY_ELEMENTS = 4096  # elements of one program of a block copy


@triton.jit
def write_kv_kernel(
    k,
    v,
    keys,
    values,
    slots,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_block,
    stride_token,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (tokens): K and V of one token, all heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < KV_HEADS) & (dims < HEAD_DIM)
    target = (slot // BLOCK_TOKENS) * stride_block + (slot % BLOCK_TOKENS) * stride_token + head * HEAD_DIM + dims
    new_k = tl.load(k + token * stride_k_token + head * stride_k_head + dims, mask=mask)
    tl.store(keys + target, new_k, mask=mask)
    new_v = tl.load(v + token * stride_v_token + head * stride_v_head + dims, mask=mask)
    tl.store(values + target, new_v, mask=mask)


@triton.jit
def copy_blocks_kernel(pool, data, ids, block_elements, SCATTER: tl.constexpr, COPY_ELEMENTS: tl.constexpr):
    """Grid (blocks, pieces of a block): data[i] = pool[ids[i]], or the other way round."""
    i = tl.program_id(0).to(tl.int64)
    block = tl.load(ids + i).to(tl.int64)
    element = tl.program_id(1) * COPY_ELEMENTS + tl.arange(0, COPY_ELEMENTS)
    mask = element < block_elements
    in_pool = pool + block * block_elements + element
    in_data = data + i * block_elements + element
    if SCATTER:
        tl.store(in_pool, tl.load(in_data, mask=mask), mask=mask)
    else:
        tl.store(in_data, tl.load(in_pool, mask=mask), mask=mask)


def write_kv_launch(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> Launch:
    """kv: one layer of the pool, `[blocks, 2, block_tokens, kv_heads, head_dim]`."""
    block_tokens, kv_heads, head_dim = kv.shape[2:]
    strides = (*k.stride()[:2], *v.stride()[:2], kv.stride(0), kv.stride(2))
    return Launch(
        kernel=write_kv_kernel,
        grid=(slots.shape[0],),
        args=(k, v, kv[:, 0], kv[:, 1], slots, *strides),
        constants={
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_TOKENS": block_tokens,
            "BLOCK_H": next_power_of_2(kv_heads),
            "BLOCK_D": next_power_of_2(head_dim),
        },
    )


def copy_blocks_launch(kv_pool: torch.Tensor, ids: torch.Tensor, data: torch.Tensor, *, scatter: bool) -> Launch:
    block_elements = kv_pool[0].numel()
    return Launch(
        kernel=copy_blocks_kernel,
        grid=(ids.shape[0], ceil_div(block_elements, COPY_ELEMENTS)),
        args=(kv_pool, data, ids, block_elements),
        constants={"SCATTER": scatter, "COPY_ELEMENTS": COPY_ELEMENTS},
    )
