"""Decode MicroAttention of rows with little KV on a CPU: a loop compiled by numba, which reads K and V once, where they lie.

Each row is one thread's, so its result does not depend on its neighbours. Only valid tokens are touched: what lies in the pool
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


def attend_rows(
    queries: torch.Tensor,
    kv: torch.Tensor,
    block_table: torch.Tensor,
    num_tokens: torch.Tensor,
    rows: Sequence[int],
    out: Partial,
) -> None:
    """Fill the states of some rows of a batch, on as many threads as torch may use here.

    queries `[batch, kv_heads, group, head_dim]` fp32, scaled; kv: one layer of the pool, fp32; num_tokens `[batch]` int32;
    out `[batch, kv_heads, group, …]`.
    """
    num_blocks, _, block_tokens, _, head_dim = kv.shape
    flat = kv.as_strided(((num_blocks - 1) * kv.stride(0) + kv[0].numel(),), (1,))
    arrays = [x.numpy() for x in (queries, flat, block_table, num_tokens, out.acc, out.m, out.e)]
    num_threads = min(torch.get_num_threads(), len(rows), numba.config.NUMBA_NUM_THREADS)
    with ONE_AT_A_TIME:
        numba.set_num_threads(num_threads)
        _compile(head_dim)(*arrays, np.array(rows), kv.stride(0), block_tokens)


@cache
def _compile(head_dim: int) -> Callable[..., None]:
    """The loop for heads of this size: known beforehand, it makes whole vector registers."""

    @numba.njit(nogil=True, cache=True, parallel=True, fastmath=SAFE_MATH)
    def attend(queries, kv, block_table, num_tokens, acc, m, e, rows, block_stride, block_tokens):  # noqa: PLR0912
        kv_heads, group = queries.shape[1:3]
        values = block_tokens * kv_heads * head_dim  # where they begin in a block
        for i in numba.prange(len(rows)):
            row = rows[i]
            acc[row], m[row], e[row] = 0.0, -np.inf, 0.0
            scores = np.empty((group, PIECE_TOKENS), np.float32)
            places = np.empty(PIECE_TOKENS, np.int64)  # where the keys of a token begin
            for first in range(0, num_tokens[row], PIECE_TOKENS):
                size = min(PIECE_TOKENS, num_tokens[row] - first)
                for j in range(size):
                    block, offset = divmod(first + j, block_tokens)
                    places[j] = block_table[row, block] * block_stride + offset * kv_heads * head_dim
                for h in range(kv_heads):
                    q, a, head = queries[row, h], acc[row, h], h * head_dim
                    for j in range(size):
                        key = kv[places[j] + head : places[j] + head + head_dim]
                        for g in range(group):
                            score = np.float32(0.0)
                            for d in range(head_dim):
                                score += q[g, d] * key[d]
                            scores[g, j] = score
                    for g in range(group):
                        top = m[row, h, g]
                        for j in range(size):
                            top = max(top, scores[g, j])
                        decay = np.exp(m[row, h, g] - top)  # 0 at first
                        total = np.float32(0.0)
                        for j in range(size):
                            scores[g, j] = np.exp(scores[g, j] - top)
                            total += scores[g, j]
                        m[row, h, g], e[row, h, g] = top, e[row, h, g] * decay + total
                        for d in range(head_dim):
                            a[g, d] *= decay
                    for j in range(size):
                        value = kv[places[j] + head + values : places[j] + head + values + head_dim]
                        for g in range(group):
                            for d in range(head_dim):
                                a[g, d] += scores[g, j] * value[d]

    return attend
