"""Writes of new K and V into slots, and copies of whole blocks out of and into a pool."""

import pytest
import torch
from attention_reference import DEVICE

from infreal.kernels import gather_blocks, scatter_blocks, write_kv

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def nan_pool(blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((blocks, 3, 2, 16, kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("dtype", "kv_heads", "head_dim"), list(zip(DTYPES, (1, 3, 8), (64, 80, 128), strict=True)))
def test_write_kv_touches_exactly_its_slots(backend, dtype, kv_heads, head_dim, index_dtype):
    pool = nan_pool(4, kv_heads, head_dim, dtype)
    slots = torch.tensor([0, 15, 16, 63, 40], dtype=index_dtype, device=DEVICE)
    k, v = torch.randn(2, 5, kv_heads, head_dim, device=DEVICE).to(dtype)
    write_kv(k, v, pool, slots, layer=1, backend=backend)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(pool[slot // 16, 1, 0, slot % 16], k[token])
        assert torch.equal(pool[slot // 16, 1, 1, slot % 16], v[token])
    assert (~torch.isnan(pool)).sum() == k.numel() + v.numel(), "every other slot and layer is as it was"


def test_write_kv_takes_views_of_a_fused_projection(backend):
    pool = nan_pool(2, 2, 64, torch.float32)
    fused = torch.randn(3, 8, 64, device=DEVICE)
    slots = torch.tensor([1, 2, 20], device=DEVICE)
    write_kv(fused[:, 4:6], fused[:, 6:8], pool, slots, layer=2, backend=backend)
    assert torch.equal(pool[0, 2, 0, 1:3], fused[:2, 4:6])
    assert torch.equal(pool[1, 2, 1, 4], fused[2, 6:8])


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_move_bit_for_bit(backend, dtype):
    """Garbage in unused slots included: a move is a copy."""
    source = torch.randn(6, 3, 2, 16, 2, 80, device=DEVICE).to(dtype)
    source[2, 1, 0, 5:] = torch.nan
    ids = torch.tensor([5, 2, 0], dtype=torch.int32, device=DEVICE)
    data = gather_blocks(source, ids, backend=backend)
    assert torch.equal(data.view(torch.uint8), source[ids.long()].view(torch.uint8))
    target = nan_pool(7, 2, 80, dtype)
    new_ids = torch.tensor([1, 6, 3], dtype=torch.int64, device=DEVICE)
    scatter_blocks(target, new_ids, data, backend=backend)
    assert torch.equal(target[new_ids].view(torch.uint8), data.view(torch.uint8))
    assert torch.isnan(target[[0, 2, 4, 5]]).all()


def test_nothing_to_copy(backend):
    pool = nan_pool(2, 1, 64, torch.float32)
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    data = gather_blocks(pool, none, backend=backend)
    assert data.shape == (0, 3, 2, 16, 1, 64)
    scatter_blocks(pool, none, data, backend=backend)
    write_kv(pool.new_empty(0, 1, 64), pool.new_empty(0, 1, 64), pool, none, layer=0, backend=backend)
    assert torch.isnan(pool).all()
