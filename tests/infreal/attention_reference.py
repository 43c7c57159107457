"""An independent attention, fp64 in plain loops over numpy, and cases whose pools hold NaN wherever no valid token is.

Knows nothing of the kernels but the layout of their arguments.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
GARBAGE = 2**30  # a block id that no pool has: reading it is out of range


def one_head_state(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> tuple[np.ndarray, float, float]:
    """q `[head_dim]` against k, v `[tokens, head_dim]`: the paper's (MA, m, e), token after token."""
    scores = [scale * float(np.dot(q, token)) for token in k]
    m = max(scores, default=-math.inf)
    acc, e = np.zeros(len(q)), 0.0
    for score, value in zip(scores, v, strict=True):
        weight = math.exp(score - m)
        e += weight
        acc = acc + weight * value
    return acc, m, e


def reference_state(q, k, v, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q `[heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`; every head by itself against its KV head."""
    q, k, v = (np.asarray(t.detach().cpu().double()) for t in (q, k, v))
    group = q.shape[0] // k.shape[1]
    states = [one_head_state(q[h], k[:, h // group], v[:, h // group], scale) for h in range(q.shape[0])]
    return tuple(np.array([state[i] for state in states]) for i in range(3))


def reference_output(q, k, v, scale: float) -> np.ndarray:
    acc, _, e = reference_state(q, k, v, scale)
    return np.divide(acc, e[:, None], out=np.zeros_like(acc), where=e[:, None] > 0)


@dataclass
class Case:
    """keys and values: one dense `[tokens, kv_heads, head_dim]` per row, as they were put into the pool."""

    q: torch.Tensor
    kv_pool: torch.Tensor
    block_table: torch.Tensor
    num_tokens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    layer: int
    scale: float


def make_case(
    lengths: list[int],
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    *,
    block_tokens: int = 16,
    num_queries: int | None = None,
    seed: int = 0,
) -> Case:
    """Rows of these lengths over scattered blocks; NaN in every other slot, garbage in the table beyond a row's end."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    counts = [-(-n // block_tokens) for n in lengths]
    pool = torch.full((sum(counts) + 3, 2, 2, block_tokens, kv_heads, head_dim), torch.nan, dtype=dtype)
    free = torch.randperm(len(pool), generator=generator).tolist()
    table = torch.full((len(lengths), max(counts, default=0) + 2), GARBAGE, dtype=torch.int32)
    keys, values = [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        ids = [free.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(ids, dtype=torch.int32)
        keys.append(normal(length, kv_heads, head_dim))
        values.append(normal(length, kv_heads, head_dim))
        for i in range(length):
            pool[ids[i // block_tokens], 1, 0, i % block_tokens] = keys[-1][i]
            pool[ids[i // block_tokens], 1, 1, i % block_tokens] = values[-1][i]
    q = normal(len(lengths) if num_queries is None else num_queries, heads, head_dim)
    num_tokens = torch.tensor(lengths, dtype=torch.int32)
    tensors = (t.to(DEVICE) for t in (q, pool, table, num_tokens))
    return Case(*tensors, keys, values, layer=1, scale=head_dim**-0.5)


def close(actual: torch.Tensor, expected: np.ndarray, dtype: torch.dtype = torch.float32) -> bool:
    """Within the dtype's tolerance, relative beyond 1; no NaN on either side."""
    actual = np.asarray(actual.detach().cpu().double())
    return np.allclose(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=False)
