"""The attention of a layer: the seam between the decoder and whoever holds the KV.

The decoder calls `attend(layer, q, k, v)` once a layer, in order, and goes on with what it returns. `LocalAttention` is the
default, for requests whose KV is all here. DistAttention (paper.md §2) is another such callable made of the same pieces:

    post receives · send q to the creditors · local.write(layer, k, v) · local.partial(layer, q) · wait · merge → output
"""

from collections.abc import Callable

import torch

from infreal.kernels import Partial, micro_attention, prefill_micro_attention, write_kv
from infreal.model.batch import Batch

# (layer, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]), q and k rotated, tokens in the batch's order
# → the normalised attention [tokens, heads, head_dim] of any float dtype.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class LocalAttention:
    """Attention of a batch over the pool of one instance. Its scratch lives for one iteration, shared by all layers."""

    def __init__(self, batch: Batch, kv_pool: torch.Tensor, *, scale: float, backend: str) -> None:
        self.batch, self.kv_pool = batch, kv_pool
        self.options = {"scale": scale, "backend": backend}
        self.scratch: Partial | None = None

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.write(layer, k, v)
        if self.scratch is None:
            self.scratch = Partial.empty(q.shape, q.device)
        return self.partial(layer, q, self.scratch).output()

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store K and V of the new tokens; before `partial`, which reads them."""
        write_kv(k, v, self.kv_pool, self.batch.slots, layer=layer, backend=self.options["backend"])

    def partial(self, layer: int, q: torch.Tensor, out: Partial) -> Partial:
        """MicroAttention of every row over the KV held here; fills `out` `[tokens, heads, …]` and returns it."""
        batch, n = self.batch, self.batch.num_decode_rows
        if n:
            table = (batch.block_table[:n], batch.num_kv_tokens[:n])
            micro_attention(q[:n], self.kv_pool, *table, layer=layer, out=out[:n], **self.options)
        if n < batch.num_rows:
            table = (batch.block_table[n:], batch.num_kv_tokens[n:], batch.causal_offset[n:])
            rows = (q[n:], batch.prefill_start, self.kv_pool, *table)
            prefill_micro_attention(*rows, layer=layer, out=out[n:], **self.options)
        return out
