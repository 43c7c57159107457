"""The Triton twins: each builds its launches and runs them. Shapes as in the kernels' contract."""

import torch

from infreal.kernels.partial import Partial, partial_bytes
from infreal.kernels.triton_blocks import copy_blocks_launch, write_kv_launch
from infreal.kernels.triton_decode import SCRATCH_BYTES, decode_launch, max_splits
from infreal.kernels.triton_merge import merge_launch
from infreal.kernels.triton_prefill import prefill_launch


def micro_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_table: torch.Tensor,
    num_local_tokens: torch.Tensor,
    scale: float,
    out: Partial,
) -> None:
    """kv: one layer of the pool, `[blocks, 2, block_tokens, kv_heads, head_dim]`."""
    splits = max_splits(block_table, kv.shape[2])
    if splits == 1:
        decode_launch(q, kv, block_table, num_local_tokens, scale, _as_one_part(out)).run()
        return
    rows, heads, head_dim = q.shape
    step = max(1, SCRATCH_BYTES // (splits * partial_bytes(1, heads, head_dim)))
    for rows_now in (slice(first, first + step) for first in range(0, rows, step)):
        parts = Partial.empty((splits, *q[rows_now].shape), q.device)
        parts.m.fill_(-torch.inf)  # a short row has fewer splits: its other slots stay empty parts
        decode_launch(q[rows_now], kv, block_table[rows_now], num_local_tokens[rows_now], scale, parts).run()
        merge_launch(parts, out[rows_now]).run()


def _as_one_part(out: Partial) -> Partial:
    return Partial(out.acc.unsqueeze(0), out.m.unsqueeze(0), out.e.unsqueeze(0))


def prefill_micro_attention(
    q: torch.Tensor,
    query_start: torch.Tensor,
    kv: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    scale: float,
    out: Partial,
) -> None:
    """table: (block_table, num_kv_tokens, causal_offset or None)."""
    prefill_launch(q, query_start, kv, table, scale, out).run()


def merge(parts: Partial, out: Partial) -> None:
    merge_launch(parts, out).run()


def write_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    write_kv_launch(k, v, kv, slots).run()


def gather_blocks(kv_pool: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    data = kv_pool.new_empty((ids.shape[0], *kv_pool.shape[1:]))
    copy_blocks_launch(kv_pool, ids, data, scatter=False).run()
    return data


def scatter_blocks(kv_pool: torch.Tensor, ids: torch.Tensor, data: torch.Tensor) -> None:
    copy_blocks_launch(kv_pool, ids, data, scatter=True).run()
