"""Decode attention of one layer as ours and others compute it, over KV of the same size.

Each maker gets a `Problem` and returns a call without arguments, or None where the contender has no business there: the
library is not installed, the device or dtype is not its own, the heads need no such form.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from infreal.kernels import micro_attention

BLOCK_TOKENS = 16
Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """Heads of one model; `rows` requests of `context_tokens` each."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    context_tokens: int

    def kv_bytes(self, dtype: torch.dtype) -> int:
        return 2 * self.rows * self.context_tokens * self.kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class Problem:
    """A pool of one layer, filled, and queries. Values are random, times do not depend on them."""

    shape: Shape
    dtype: torch.dtype
    device: str
    backend: str

    @cached_property
    def blocks_per_row(self) -> int:
        return -(-self.shape.context_tokens // BLOCK_TOKENS)

    @cached_property
    def kv_pool(self) -> torch.Tensor:
        s = self.shape
        pool_shape = (s.rows * self.blocks_per_row, 1, 2, BLOCK_TOKENS, s.kv_heads, s.head_dim)
        return random_tensor(pool_shape, self.dtype, self.device)

    @cached_property
    def q(self) -> torch.Tensor:
        return random_tensor((self.shape.rows, self.shape.heads, self.shape.head_dim), self.dtype, self.device)

    @cached_property
    def num_tokens(self) -> torch.Tensor:
        return torch.full((self.shape.rows,), self.shape.context_tokens, dtype=torch.int32, device=self.device)

    @cached_property
    def scattered_table(self) -> torch.Tensor:
        """Blocks in random order: what a pool looks like after a long time."""
        order = torch.randperm(len(self.kv_pool), generator=torch.Generator().manual_seed(0))
        return order.view(self.shape.rows, -1).int().to(self.device)

    @cached_property
    def run_table(self) -> torch.Tensor:
        """Each row's blocks one after the other: what a fresh pool looks like."""
        return torch.arange(len(self.kv_pool), dtype=torch.int32, device=self.device).view(self.shape.rows, -1)

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    @cached_property
    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[rows, kv_heads, tokens, head_dim]`: the pool's memory seen another way, values mixed up."""
        s = self.shape
        sides = self.kv_pool.view(2, s.rows, s.kv_heads, -1, s.head_dim)
        return sides[0][:, :, : s.context_tokens], sides[1][:, :, : s.context_tokens]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """One random megabyte, over and over: filling gigabytes with fresh numbers would take longer than the measurement."""
    piece = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    tensor = torch.empty(shape, dtype=dtype, device=device)
    for part in tensor.view(-1).split(len(piece)):
        part.copy_(piece[: len(part)])
    return tensor


def ours(problem: Problem, table: torch.Tensor, blocks: slice = slice(None)) -> Call:
    """MicroAttention over these blocks of every row's table."""
    part = table[:, blocks].contiguous()
    num_tokens = (problem.num_tokens - (blocks.start or 0) * BLOCK_TOKENS).clamp(0, part.shape[1] * BLOCK_TOKENS)
    q, pool, scale, backend = problem.q, problem.kv_pool, problem.scale, problem.backend
    return lambda: micro_attention(q, pool, part, num_tokens, layer=0, scale=scale, backend=backend)


def ours_scattered(problem: Problem) -> Call:
    return ours(problem, problem.scattered_table)


def ours_run(problem: Problem) -> Call:
    return ours(problem, problem.run_table)


def sdpa_contiguous(problem: Problem) -> Call:
    q, (k, v) = problem.q.unsqueeze(2), problem.contiguous
    gqa = problem.shape.heads != problem.shape.kv_heads
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)


def sdpa_expanded(problem: Problem) -> Call | None:
    """KV copied out to all query heads beforehand: group times the memory."""
    group = problem.shape.heads // problem.shape.kv_heads
    if group == 1:
        return None
    q = problem.q.unsqueeze(2)
    k, v = (side.repeat_interleave(group, 1) for side in problem.contiguous)
    return lambda: F.scaled_dot_product_attention(q, k, v)


def flash_attn(problem: Problem) -> Call | None:
    library = _library("flash_attn", problem)
    if library is None:
        return None
    s = problem.shape
    k, v = problem.kv_pool.view(2, s.rows, -1, s.kv_heads, s.head_dim)
    q, lengths, scale = problem.q.unsqueeze(1), problem.num_tokens, problem.scale
    return lambda: library.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, softmax_scale=scale)


def flashinfer(problem: Problem) -> Call | None:
    library = _library("flashinfer", problem)
    if library is None:
        return None
    s, blocks = problem.shape, problem.blocks_per_row
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=problem.device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=s.heads >= 4 * s.kv_heads)
    starts = torch.arange(s.rows + 1, dtype=torch.int32, device=problem.device) * blocks
    last = torch.full_like(problem.num_tokens, s.context_tokens - (blocks - 1) * BLOCK_TOKENS)
    heads = (s.heads, s.kv_heads, s.head_dim)
    wrapper.plan(
        starts, problem.scattered_table.view(-1), last, *heads, BLOCK_TOKENS,
        q_data_type=problem.dtype, kv_data_type=problem.dtype,
    )  # fmt: skip
    q, pages = problem.q, problem.kv_pool[:, 0]
    return lambda: wrapper.run(q, pages)


def _library(name: str, problem: Problem):
    """The module, or None where it cannot be imported or cannot take this device and dtype."""
    if problem.device != "cuda" or problem.dtype == torch.float32:
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


OURS = {"decode_attention": ours_scattered, "decode_attention_run": ours_run}
RIVALS = {
    "sdpa_contiguous": sdpa_contiguous,
    "sdpa_expanded": sdpa_expanded,
    "flash_attn": flash_attn,
    "flashinfer": flashinfer,
}
