"""Time of one iteration of an instance (design.md §3): composed from operators, priced by the rows' own lengths.

Iteration = max(kernel_s + attention_s, launch_s) + host_s. Every method is pure and O(1); what depends on a few
integers is cached, because a simulation asks about once a scheduler step. Times are of the whole model: all layers, all
stages.

With f and g of the paper's §4: W(β)/f(β) is `iteration_terms(β, …)[0]` per layer, g(S) the inverse of
`decode_attention_terms(β).s_per_token`; both are rates there, times here.

Pipeline parallel p: p micro-batches of ⌈rows/p⌉ are in flight and an iteration takes p × (slowest stage + hop). The
values returned contain that, so callers never look at p.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel import operators
from perfmodel.basis import Along, Basis, worst
from perfmodel.collectives import all_reduce_basis, all_reduce_s, hop_s
from perfmodel.curves import Curves
from perfmodel.errors import InputError, unknown
from perfmodel.kernels import KernelTimes
from perfmodel.laws.attention import DecodeTerms
from perfmodel.laws.flash2 import splitting_all_heads
from perfmodel.specs import InstanceSpec, LinkSpec

SCALE_KEYS = ("non_attention", "prefill_attention", "decode_attention", "collectives", "host", "transfer")
PARTIAL_BYTES = 4  # partial states are fp32
ROWS_AT_ONCE = 64
SMALL_FRAC = 0.2  # parts below this share of a term do not decide how the term is known


@dataclass(frozen=True, slots=True)
class Batch:
    """What one iteration computes. `chunks`: (tokens, prefix_tokens) each; contexts count the new token."""

    decode_rows: int = 0
    decode_context_tokens: int = 0  # summed over the rows
    longest_context_tokens: int = 0  # of a single decode row; 0: not known
    chunks: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        return self.decode_rows + sum(tokens for tokens, _ in self.chunks)

    @property
    def rows(self) -> int:
        return self.decode_rows + len(self.chunks)


class IterationBasis(NamedTuple):
    """How the three terms of an iteration are known."""

    kernels: Basis
    attention: Basis
    host: Basis


class CostModel:
    """Prices an instance by `curves`; `scale` multiplies single parts (`SCALE_KEYS`), for what-if runs."""

    def __init__(self, instance: InstanceSpec, curves: Curves, scale: dict[str, float] | None = None) -> None:
        self.instance, self.curves = instance, curves
        self.scale = dict.fromkeys(SCALE_KEYS, 1.0) | check_scale(scale or {})
        self.times = KernelTimes(instance, curves)
        self.heads = operators.heads_per_rank(instance)
        law = curves.decode_law(self.heads.heads, self.heads.kv_heads)
        self._decode_law = splitting_all_heads(law, self.heads) if instance.engine.splits_all_heads else law
        self._kernels: dict[int, tuple[float, float]] = {}
        self._heads_s: dict[int, float] = {}
        self._decode: dict[int, DecodeTerms] = {}
        self._basis: dict[int, Basis] = {}
        self._micro: dict[int, DecodeTerms] = {}
        self._decode_table: NDArray[np.float64] = np.empty((6, 0))
        self._decode_known: dict[int, Along] = {}
        self._prefill_known: dict[int, Along] = {}

    # --- terms that do not depend on context -----------------------------------------------------------------

    def iteration_terms(self, tokens: int, decode_rows: int, logits_rows: int) -> tuple[float, float, float]:
        """(kernel_s, launch_s, host_s) of `tokens` new tokens, of which `logits_rows` rows sample a token.

        kernel_s: non-attention kernels and collectives; launch_s: the engine's launches; host_s: added serially.
        """
        engine, scale = self.instance.engine, self.scale["host"]
        kernels, collectives = self.kernel_terms(tokens)
        launch_s = engine.launch_s_per_layer * self.instance.model.num_layers * scale
        host_s = (engine.iteration_s + engine.row_s * max(decode_rows, logits_rows)) * scale
        return kernels + self.head_s(logits_rows) + collectives, launch_s, host_s

    def kernel_terms(self, tokens: int) -> tuple[float, float]:
        """(non-attention kernels of all layers with the embedding, collectives and hops) for `tokens` new tokens."""
        found = self._kernels.get(tokens)
        if found is None:
            found = self._kernels[tokens] = self._price_kernels(tokens)
        return found

    def _price_kernels(self, tokens: int) -> tuple[float, float]:
        instance, model = self.instance, self.instance.model
        stages = instance.pipeline_parallel
        micro = -(-tokens // stages)
        if micro == 0:
            return 0.0, 0.0
        kernels_s = model.num_layers * self.layer_s(micro) + stages * self.times.embedding_s(micro)
        state_bytes = micro * model.hidden_size * model.dtype_bytes
        reduce_s = all_reduce_s(self.curves.all_reduce, instance, state_bytes)
        reduce_s *= self.curves.factor("collectives", state_bytes)
        collectives_s = 2 * model.num_layers * reduce_s + stages * hop_s(instance, state_bytes)
        return kernels_s * self.scale["non_attention"], collectives_s * self.scale["collectives"]

    def layer_s(self, tokens: int) -> float:
        """Non-attention kernels of one layer on one rank: the W/f(β) of the paper, unscaled."""
        return self.times.products_s(tokens) + self.times.streams_s(tokens)

    def head_s(self, logits_rows: int) -> float:
        """Final norm, LM head and sampling of `logits_rows` rows (on the last stage, which then is the slowest)."""
        found = self._heads_s.get(logits_rows)
        if found is None:
            stages = self.instance.pipeline_parallel
            head_s = self.times.head_s(-(-logits_rows // stages)) if logits_rows else 0.0
            found = self._heads_s[logits_rows] = stages * head_s * self.scale["non_attention"]
        return found

    # --- attention --------------------------------------------------------------------------------------------

    def decode_attention_terms(self, rows: int) -> DecodeTerms:
        """Decode attention over ΣS, the summed context of the rows, new tokens included. All layers."""
        if rows not in self._decode:
            self._price_decode(rows - rows % ROWS_AT_ONCE)
        return self._decode[rows]

    def _price_decode(self, first: int) -> None:
        """Prices ROWS_AT_ONCE batch sizes: a law takes arrays. A pipeline waits for its largest micro-batch and its context."""
        stages, layers = self.instance.pipeline_parallel, self.instance.model.num_layers
        counts = np.arange(max(1, first), first + ROWS_AT_ONCE)
        micro = -(-counts // stages)
        columns = [column.tolist() for column in self._decode_law.affine(micro, *self.heads)]
        self._decode[0] = DecodeTerms(0.0, 0.0, 0.0)
        for rows, micro_rows, *terms in zip(counts.tolist(), micro.tolist(), *columns, strict=True):
            factor = layers * self.scale["decode_attention"] * self.curves.factor("decode_attention", rows)
            self._decode[rows] = DecodeTerms(*terms).times(factor, factor * micro_rows / rows)

    def decode_table(self, rows: int) -> NDArray[np.float64]:
        """kernel_s, launch_s, host_s, floor_s, base_s, s_per_token of decode iterations: [6, more than `rows`], by rows."""
        known = self._decode_table.shape[1]
        if rows >= known:
            more = range(known, max(rows + 1, 2 * known))
            terms = [(*self.iteration_terms(n, n, n), *self.decode_attention_terms(n)[:3]) for n in more]
            self._decode_table = np.hstack((self._decode_table, np.array(terms).T))
        return self._decode_table

    def decode_attention_s(self, rows: int, context_tokens: float, longest_tokens: float = 0.0) -> float:
        """Decode attention of `rows` rows over `context_tokens` tokens in all (0 for no row).

        Few rows read KV more slowly than many: a batch takes at least as long as its longest row alone, where that is known.
        """
        batch_s = self.decode_attention_terms(rows).at(context_tokens)
        return max(batch_s, self.decode_attention_s(1, longest_tokens)) if longest_tokens else batch_s

    def prefill_attention_s(self, tokens: int, prefix_tokens: int) -> float:
        """Causal attention of a chunk of `tokens` queries behind `prefix_tokens` KV tokens, all layers."""
        return self._chunk_s(tokens, tokens + prefix_tokens, tokens * prefix_tokens + tokens * (tokens + 1) // 2)

    def _chunk_s(self, query_tokens: int, kv_tokens: int, pairs: int) -> float:
        if query_tokens == 0 or kv_tokens == 0:
            return 0.0
        layer_s = self.curves.prefill.time_s(query_tokens, kv_tokens, pairs, self.heads)
        factor = self.scale["prefill_attention"] * self.curves.factor("prefill_attention", query_tokens)
        return self.instance.model.num_layers * layer_s * factor / self.instance.pipeline_parallel

    # --- MicroAttention for others ----------------------------------------------------------------------------

    def micro_attention_terms(self, rows: int) -> DecodeTerms:
        """MA served for `rows` decode rows of others; all layers.

        The decode attention's law, plus reading the queries and writing the partial states (fp32).
        """
        found = self._micro.get(rows)
        if found is None:
            found = self._micro[rows] = self._price_micro(rows)
        return found

    def _price_micro(self, rows: int) -> DecodeTerms:
        num_bytes = (self.query_bytes(rows) + self.partial_bytes(rows)) / self.instance.tensor_parallel
        state_s = self.instance.model.num_layers * num_bytes / self.instance.gpu.memory_bytes_per_s
        state_s *= self.scale["decode_attention"]
        return self.decode_attention_terms(rows).plus(state_s)

    def micro_attention_s(self, rows: int, kv_tokens: float) -> float:
        """MA served for `rows` decode rows of others over `kv_tokens` KV tokens in all; all layers."""
        return self.micro_attention_terms(rows).at(kv_tokens)

    def prefill_micro_attention_s(self, query_tokens: int, kv_tokens: int) -> float:
        """MA of a chunk's queries on a remote prefix: no mask; all layers."""
        return self._chunk_s(query_tokens, kv_tokens, query_tokens * kv_tokens)

    def query_bytes(self, rows: int) -> int:
        """Q of `rows` rows (or chunk tokens) on the wire, one layer."""
        model = self.instance.model
        return rows * model.num_heads * model.head_dim * model.dtype_bytes

    def partial_bytes(self, rows: int) -> int:
        """MA, m and e of `rows` rows on the wire, one layer (fp32)."""
        model = self.instance.model
        return rows * model.num_heads * (model.head_dim + 2) * PARTIAL_BYTES

    # --- moves ------------------------------------------------------------------------------------------------

    def transfer_s(self, num_bytes: float, link: LinkSpec) -> float:
        """A move of KV alone on `link`."""
        return link.transfer_s(num_bytes) * self.scale["transfer"]

    def copy_s(self, num_bytes: float) -> float:
        """Gathering (or scattering) KV blocks at one end of a move: read and written once, shared by the ranks."""
        per_gpu = 2 * num_bytes / self.instance.num_gpus
        return self.curves.streams["copy"].bulk_s(per_gpu) * self.scale["transfer"]

    # --- how it is known --------------------------------------------------------------------------------------

    def iteration_basis(self, tokens: int, decode_rows: int, context_tokens: int) -> IterationBasis:
        """Basis of (kernel_s, decode attention, host_s): a driver adds each term's seconds to it. Context is ΣS."""
        kernels = self._basis.get(tokens)
        if kernels is None:
            kernels = self._basis[tokens] = self._kernel_terms_basis(tokens)
        return IterationBasis(kernels, self.decode_basis(decode_rows, context_tokens), self.host_basis(decode_rows))

    def _kernel_terms_basis(self, tokens: int) -> Basis:
        kernels_s, collectives_s = self.kernel_terms(tokens)
        kernels = self.kernels_basis(tokens)
        if collectives_s > SMALL_FRAC * (kernels_s + collectives_s):
            kernels = worst(kernels, self.collectives_basis(tokens))
        return kernels

    def kernels_basis(self, tokens: int) -> Basis:
        """The weakest of the layer's matrix products, and of its streams where they matter."""
        micro = max(1, -(-tokens // self.instance.pipeline_parallel))
        products = self.times.products_basis(micro)
        if self.times.streams_s(micro) < SMALL_FRAC * self.layer_s(micro):
            return products
        return worst(products, self.times.streams_basis(micro))

    def decode_basis(self, rows: int, context_tokens: int) -> Basis:
        known = self._decode_known.get(rows)
        if known is None:
            known = self._decode_known[rows] = self._decode_law.basis_along_context(rows, self.heads)
        return known.basis(context_tokens / max(1, rows))

    def prefill_basis(self, tokens: int, prefix_tokens: int) -> Basis:
        known = self._prefill_known.get(tokens)
        if known is None:
            known = self._prefill_known[tokens] = self.curves.prefill.basis_along_prefix(tokens, self.heads)
        return known.basis(prefix_tokens)

    def collectives_basis(self, tokens: int) -> Basis:
        model = self.instance.model
        num_bytes = tokens * model.hidden_size * model.dtype_bytes
        return all_reduce_basis(self.curves.all_reduce, self.instance, num_bytes)

    def host_basis(self, rows: int) -> Basis:
        fitted = self.instance.engine.fitted_rows
        if not fitted:
            return Basis.ANALYTIC
        return Basis.INTERPOLATED if rows <= fitted else Basis.EXTRAPOLATED


def check_scale(scale: dict[str, float]) -> dict[str, float]:
    """Raises InputError for an unknown part or a factor that is not positive."""
    for key, factor in scale.items():
        if key not in SCALE_KEYS:
            raise unknown("scale", key, SCALE_KEYS)
        if not factor > 0:
            raise InputError(f"scale.{key}: {factor} (allowed: above 0)")
    return scale
