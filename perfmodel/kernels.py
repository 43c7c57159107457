"""Times of the kernels that do not depend on context, for one rank: a layer's products and streams, the LM head.

Priced for 256 token counts at once and kept: a simulation asks for the same few hundred counts again and again.
A layer that was measured whole is all in its products.
"""

from collections.abc import Callable, Iterable

import numpy as np

from perfmodel import operators
from perfmodel.basis import Basis, worst
from perfmodel.curves import Curves
from perfmodel.laws.gemm import Floats
from perfmodel.specs import InstanceSpec

BLOCK = 256


class KernelTimes:
    """Seconds by number of tokens (one or more), at the chosen end of the band of `non_attention`."""

    def __init__(self, instance: InstanceSpec, curves: Curves) -> None:
        self._instance, self._curves = instance, curves
        self._gemms = operators.layer_gemms(instance)
        self._streams = operators.layer_streams(instance)
        self._kept: dict[tuple[Callable[[Floats], Floats], int], list[float]] = {}

    def products_s(self, tokens: int) -> float:
        """Matrix products of one layer."""
        return self._look_up(self._price_products, tokens)

    def streams_s(self, tokens: int) -> float:
        """Element-wise kernels of one layer."""
        return self._look_up(self._price_streams, tokens)

    def embedding_s(self, tokens: int) -> float:
        return self._look_up(self._price_embedding, tokens)

    def head_s(self, rows: int) -> float:
        """Final norm, LM head and sampling of `rows` rows."""
        return self._look_up(self._price_head, rows)

    def products_basis(self, tokens: int) -> Basis:
        if self._curves.layer:
            return self._curves.layer.basis(tokens)
        return worst(*(self._curves.gemm.basis(tokens, op.n, op.k) for op in self._gemms))

    def streams_basis(self, tokens: int) -> Basis:
        return worst(*(self._curves.streams[op.law].basis(tokens) for op in self._streams))

    def _look_up(self, price: Callable[[Floats], Floats], tokens: int) -> float:
        block, offset = divmod(tokens, BLOCK)
        times = self._kept.get((price, block))
        if times is None:
            counts = np.maximum(np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=float), 1.0)
            band = [self._curves.factor("non_attention", count) for count in counts]
            times = self._kept[price, block] = (price(counts) * band).tolist()
        return times[offset]

    def _price_products(self, tokens: Floats) -> Floats:
        if self._curves.layer:
            return self._curves.layer.times_s(tokens)
        return sum_of(self._curves.gemm.times_s(tokens, op.n, op.k) for op in self._gemms)

    def _price_streams(self, tokens: Floats) -> Floats:
        if self._curves.layer:
            return np.zeros_like(tokens)
        laws = self._curves.streams
        return sum_of(op.count * laws[op.law].times_s(tokens, op.bytes_per_token) for op in self._streams)

    def _price_embedding(self, tokens: Floats) -> Floats:
        if self._curves.layer:
            return np.zeros_like(tokens)
        return self._curves.streams["embedding"].times_s(tokens, operators.embedding_bytes_per_token(self._instance))

    def _price_head(self, rows: Floats) -> Floats:
        if self._curves.head:
            return self._curves.head.times_s(rows)
        instance, laws = self._instance, self._curves.streams
        head = operators.lm_head(instance)
        norm_s = laws["norm"].times_s(rows, 2 * instance.model.hidden_size * instance.model.dtype_bytes)
        sampling_s = laws["copy"].times_s(rows, operators.sampling_bytes_per_row(instance))
        return self._curves.gemm.times_s(rows, head.n, head.k) + norm_s + sampling_s


def sum_of(times: Iterable[Floats]) -> Floats:
    total: Floats = np.sum(list(times), axis=0)
    return total
