"""The one merge kernel, parts-major: splits of a row, answers of creditors, and states that were merged before."""

import triton
import triton.language as tl

from infreal.kernels.launch import Launch
from infreal.kernels.partial import Partial
from infreal.kernels.sizes import ceil_div, next_power_of_2

TILE_ELEMENTS = 4096  # parts × states × dims of one tile: 32 registers a thread
MAX_BLOCK_D = 64


@triton.jit
def merge_kernel(
    acc,
    m,
    e,
    out_acc,
    out_m,
    out_e,
    parts,
    states,
    stride_acc,
    stride_m,
    stride_e,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (tiles of states, tiles of head_dim); a state is one (row, head).

    Weights of zero are selected away: the acc and e of an empty part are not even read.
    """
    state = (tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
    is_state = state < states
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    m_all = tl.full([BLOCK_S], float("-inf"), tl.float32)
    for start in range(0, parts, BLOCK_P):
        p = (start + tl.arange(0, BLOCK_P)).to(tl.int64)[:, None]
        m_part = tl.load(m + p * stride_m + state[None, :], mask=(p < parts) & is_state[None, :], other=float("-inf"))
        m_all = tl.maximum(m_all, tl.max(m_part, 0))
    shift = tl.where(m_all == float("-inf"), 0.0, m_all)
    e_all = tl.full([BLOCK_S], 0.0, tl.float32)
    acc_all = tl.full([BLOCK_S, BLOCK_D], 0.0, tl.float32)
    for start in range(0, parts, BLOCK_P):
        p = (start + tl.arange(0, BLOCK_P)).to(tl.int64)[:, None]
        m_part = tl.load(m + p * stride_m + state[None, :], mask=(p < parts) & is_state[None, :], other=float("-inf"))
        seen = m_part != float("-inf")
        weight = tl.where(seen, tl.exp(m_part - shift[None, :]), 0.0)
        e_part = tl.load(e + p * stride_e + state[None, :], mask=seen, other=0.0)
        e_all += tl.sum(e_part * weight, 0)
        offsets = (p * stride_acc + state[None, :] * HEAD_DIM)[:, :, None] + dims[None, None, :]
        acc_part = tl.load(acc + offsets, mask=seen[:, :, None] & is_dim[None, None, :], other=0.0)
        acc_all += tl.sum(acc_part * weight[:, :, None], 0)
    targets = out_acc + state[:, None] * HEAD_DIM + dims[None, :]
    tl.store(targets, acc_all, mask=is_state[:, None] & is_dim[None, :])
    if tl.program_id(1) == 0:
        tl.store(out_m + state, m_all, mask=is_state)
        tl.store(out_e + state, e_all, mask=is_state)


def merge_launch(parts: Partial, out: Partial) -> Launch:
    """parts: acc `[parts, …, head_dim]`, dense within a part; out dense."""
    num_parts, head_dim = parts.acc.shape[0], parts.acc.shape[-1]
    block_d = min(next_power_of_2(head_dim), MAX_BLOCK_D)
    block_p = min(next_power_of_2(num_parts), TILE_ELEMENTS // block_d)
    block_s = TILE_ELEMENTS // block_d // block_p
    states = out.m.numel()
    strides = (parts.acc.stride(0), parts.m.stride(0), parts.e.stride(0))
    return Launch(
        kernel=merge_kernel,
        grid=(ceil_div(states, block_s), ceil_div(head_dim, block_d)),
        args=(parts.acc, parts.m, parts.e, out.acc, out.m, out.e, num_parts, states, *strides),
        constants={"HEAD_DIM": head_dim, "BLOCK_P": block_p, "BLOCK_S": block_s, "BLOCK_D": block_d},
    )
