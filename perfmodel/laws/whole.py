"""Laws of a machine on which one model was measured whole: tables of what was measured, linear in between.

On a CPU weights stream through the caches of an entire forward pass, and an eager framework's own time is a good part of small
batches: neither shows where an operator is measured alone. Here a layer without its attention is one operator, by its tokens; the
LM head another, by its rows; attention is that of all layers in turn. Nothing is said about other models.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from perfmodel.basis import Along, Basis, Domain, basis_along, basis_in
from perfmodel.laws.attention import Heads, linear
from perfmodel.laws.gemm import Floats


@dataclass(frozen=True)
class WholeKnots:
    """Seconds along tokens (a layer without attention) or rows (the head); linear between knots and beyond the last."""

    tokens: tuple[float, ...]
    time_s: tuple[float, ...]
    domain: Domain | None = None

    def times_s(self, tokens: Floats) -> Floats:
        return linear(tokens, self.tokens, self.time_s)

    def basis(self, tokens: float) -> Basis:
        return basis_in(self.domain, tokens=tokens)


@dataclass(frozen=True)
class WholeDecode:
    """Decode attention of one layer: for each measured batch size the lower of two lines in ΣS, linear between sizes.

    The early line is steeper, or the same: what is small enough to lie in a cache, or is worked off together, is another case.
    """

    rows: tuple[float, ...]
    base_s: tuple[float, ...]
    s_per_token: tuple[float, ...]
    early_s: tuple[float, ...]
    early_s_per_token: tuple[float, ...]
    domain: Domain | None = None

    def affine(self, rows: Any, heads: Any, kv_heads: Any, head_dim: Any, kv_dtype_bytes: Any) -> tuple[Floats, ...]:
        count = np.asarray(rows, float)
        late = linear(count, self.rows, self.base_s), np.interp(count, self.rows, self.s_per_token)
        early = linear(count, self.rows, self.early_s), np.interp(count, self.rows, self.early_s_per_token)
        return np.zeros_like(count), *late, *early

    def basis_along_context(self, rows: int, shape: Heads) -> Along:
        return basis_along(self.domain, "context_tokens", rows=rows)


@dataclass(frozen=True)
class WholeChunks:
    """Attention of a chunk, one layer: for each measured chunk a line in the KV tokens that one of its queries reads on average,
    linear between chunks. What the lines have no common formula for is whether a chunk's scores lie in a cache.
    """

    tokens: tuple[float, ...]
    base_s: tuple[float, ...]
    s_per_kv_token: tuple[float, ...]
    domain: Domain | None = None

    def time_s(self, tokens: int, kv_tokens: int, pairs: int, shape: Heads) -> float:
        base_s, slope_s = (
            linear(np.float64(tokens), self.tokens, values) for values in (self.base_s, self.s_per_kv_token)
        )
        return float(base_s + slope_s * pairs / tokens)

    def basis_along_prefix(self, tokens: int, shape: Heads) -> Along:
        return basis_along(self.domain, "prefix_tokens", tokens=tokens)
