"""Decode MicroAttention on a CPU: a loop compiled by numba, which reads K and V once, where they lie.

Rows with much KV are cut into parts, so that several threads can work on one. Only valid tokens are touched: what lies in the pool
behind a row's end may be NaN.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cache

import numba
import numpy as np
import torch

from infreal.kernels.partial import Partial

PIECE_TOKENS = 128  # whose scores are kept at a time
SAFE_MATH = {"reassoc", "contract", "nsz", "arcp"}  # −inf and NaN keep their meaning
ONE_AT_A_TIME = threading.Lock()  # not every threading layer of numba can be entered twice


def attend_parts(
    queries: torch.Tensor,
    kv: torch.Tensor,
    block_table: torch.Tensor,
    parts: Sequence[tuple[int, int, int]],
    out: Partial,
) -> None:
    """Fill the states of parts, `[parts, kv_heads, group, …]`, on as many threads as torch may use here.

    queries `[batch, kv_heads, group, head_dim]` fp32, scaled; kv: one layer of the pool, fp32; parts: (row of the batch, its first
    token, number of tokens).
    """
    num_blocks, _, block_tokens, _, head_dim = kv.shape
    flat = kv.as_strided(((num_blocks - 1) * kv.stride(0) + kv[0].numel(),), (1,))
    arrays = [x.numpy() for x in (queries, flat, block_table, out.acc, out.m, out.e)]
    every = np.array(parts)
    num_threads = min(torch.get_num_threads(), len(parts), numba.config.NUMBA_NUM_THREADS)
    with ONE_AT_A_TIME:
        numba.set_num_threads(num_threads)
        _compile(head_dim)(*arrays, every, _shares(every[:, 2], num_threads), kv.stride(0), block_tokens)


def _shares(num_tokens: np.ndarray, num_threads: int) -> np.ndarray:
    """First part of each thread, and the end: of about as many tokens each, and no part left out."""
    work = num_tokens + 1
    ends = work.cumsum()
    return np.searchsorted(ends - work / 2, ends[-1] * np.arange(num_threads + 1) / num_threads)


@cache
def _compile(head_dim: int) -> Callable[..., None]:
    """The loop for heads of this size: known beforehand, it makes whole vector registers."""

    @numba.njit(nogil=True, cache=True, parallel=True, fastmath=SAFE_MATH)
    def attend(queries, kv, block_table, acc, m, e, parts, shares, block_stride, block_tokens):  # noqa: PLR0912
        kv_heads, group = queries.shape[1:3]
        values = block_tokens * kv_heads * head_dim  # where they begin in a block
        for thread in numba.prange(len(shares) - 1):
            scores = np.empty((group, PIECE_TOKENS), np.float32)
            places = np.empty(PIECE_TOKENS, np.int64)  # where the keys of a token begin
            for part in range(shares[thread], shares[thread + 1]):
                row, begin, num_tokens = parts[part]
                acc[part], m[part], e[part] = 0.0, -np.inf, 0.0
                for first in range(begin, begin + num_tokens, PIECE_TOKENS):
                    size = min(PIECE_TOKENS, begin + num_tokens - first)
                    for j in range(size):
                        block, offset = divmod(first + j, block_tokens)
                        places[j] = block_table[row, block] * block_stride + offset * kv_heads * head_dim
                    for h in range(kv_heads):
                        q, a, head = queries[row, h], acc[part, h], h * head_dim
                        for j in range(size):
                            key = kv[places[j] + head : places[j] + head + head_dim]
                            for g in range(group):
                                score = np.float32(0.0)
                                for d in range(head_dim):
                                    score += q[g, d] * key[d]
                                scores[g, j] = score
                        for g in range(group):
                            top = m[part, h, g]
                            for j in range(size):
                                top = max(top, scores[g, j])
                            decay = np.exp(m[part, h, g] - top)  # 0 at first
                            total = np.float32(0.0)
                            for j in range(size):
                                scores[g, j] = np.exp(scores[g, j] - top)
                                total += scores[g, j]
                            m[part, h, g], e[part, h, g] = top, e[part, h, g] * decay + total
                            for d in range(head_dim):
                                a[g, d] *= decay
                        for j in range(size):
                            value = kv[places[j] + head + values : places[j] + head + values + head_dim]
                            for g in range(group):
                                for d in range(head_dim):
                                    a[g, d] += scores[g, j] * value[d]

    return attend
