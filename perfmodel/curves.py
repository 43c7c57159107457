"""Times of single operators on one GPU: laws with few parameters, each with the domain it was fitted on.

A law answers `*_s(...)` (seconds) and `basis(...)`: how it knows. Laws are plain data; where they come from (a profile
pack, or `analytic_curves`) is not their business.
"""

from dataclasses import dataclass
from enum import StrEnum

from perfmodel.specs import GpuSpec


class Basis(StrEnum):
    """How a time is known, best first."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    EXTRAPOLATED = "extrapolated"
    ANALYTIC = "analytic"


def worst(*bases: Basis) -> Basis:
    """The weakest of several."""
    order = list(Basis)
    return max(bases, key=order.index)


@dataclass(frozen=True, slots=True)
class GemmLaw:
    """Matrix product [m, k] × [k, n]: launch_s + max(bytes / bytes_per_s, FLOPs / flops_per_s)."""

    launch_s: float
    bytes_per_s: float
    flops_per_s: float
    dtype_bytes: int

    def time_s(self, m: int, n: int, k: int) -> float:
        num_bytes = self.dtype_bytes * (n * k + m * (n + k))
        return self.launch_s + max(num_bytes / self.bytes_per_s, 2.0 * m * n * k / self.flops_per_s)

    def basis(self, m: int, n: int, k: int) -> Basis:
        return Basis.ANALYTIC


@dataclass(frozen=True, slots=True)
class StreamLaw:
    """Element-wise kernels: launch_s + bytes / bytes_per_s."""

    launch_s: float
    bytes_per_s: float

    def time_s(self, num_bytes: float) -> float:
        return self.launch_s + num_bytes / self.bytes_per_s

    def basis(self, num_bytes: float) -> Basis:
        return Basis.ANALYTIC


@dataclass(frozen=True, slots=True)
class DecodeTerms:
    """Decode attention of one layer: max(floor_s, base_s + s_per_byte × KV bytes read)."""

    floor_s: float
    base_s: float
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class DecodeLaw:
    """Decode attention of one layer: max(floor_s, base_s + row_s · rows + KV bytes / bytes_per_s)."""

    floor_s: float
    base_s: float
    row_s: float
    bytes_per_s: float

    def terms(self, rows: int, heads: int, kv_heads: int, head_dim: int) -> DecodeTerms:
        return DecodeTerms(self.floor_s, self.base_s + self.row_s * rows, 1.0 / self.bytes_per_s)

    def basis(self, rows: int, heads: int, kv_heads: int, context_tokens: float) -> Basis:
        return Basis.ANALYTIC


@dataclass(frozen=True, slots=True)
class PrefillLaw:
    """Attention of a chunk, one layer: floor_s + max(FLOPs / flops_per_s, bytes / bytes_per_s)."""

    floor_s: float
    flops_per_s: float
    bytes_per_s: float

    def time_s(self, flops: float, num_bytes: float) -> float:
        return self.floor_s + max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)

    def basis(self, tokens: int, prefix_tokens: int, heads: int, kv_heads: int) -> Basis:
        return Basis.ANALYTIC


@dataclass(frozen=True, slots=True)
class AllReduceLaw:
    """All-reduce inside a node: base_s + hop_s · ⌈log2 ranks⌉ + 2 (ranks − 1)/ranks · bytes / link rate."""

    base_s: float

    def time_s(self, num_bytes: float, ranks: int, bytes_per_s: float, latency_s: float) -> float:
        steps = (ranks - 1).bit_length()
        return self.base_s + latency_s * steps + 2 * (ranks - 1) / ranks * num_bytes / bytes_per_s

    def basis(self, num_bytes: float, ranks: int) -> Basis:
        return Basis.ANALYTIC


@dataclass(frozen=True, slots=True)
class Curves:
    """The laws of one GPU and width of numbers. `source`: what a manifest says about them."""

    gemm: GemmLaw
    stream: StreamLaw
    decode: DecodeLaw
    prefill: PrefillLaw
    all_reduce: AllReduceLaw
    source: str


# Fractions of the data-sheet peaks reached, and floors. From Vidur's A100 profiles of LLaMA2-7B and 70B (non-attention
# time flat to 64 tokens, then linear) and from the decode attention of Vidur and AIConfigurator on A100 (75–85 % of the
# bandwidth, about 15 µs a layer at least). Prefill attention: AIConfigurator's A100 table, long sequences.
GEMM_BYTES_FRAC, GEMM_FLOPS_FRAC, KERNEL_S = 0.75, 0.65, 3e-6
STREAM_BYTES_FRAC = 0.8
DECODE_BYTES_FRAC, DECODE_FLOOR_S, DECODE_ROW_S = 0.8, 15e-6, 0.1e-6
PREFILL_FLOPS_FRAC = 0.55
ALL_REDUCE_S = 5e-6  # AIConfigurator, A100, vLLM's custom all-reduce in a CUDA graph, small messages


def analytic_curves(gpu: GpuSpec, dtype_bytes: int) -> Curves:
    """Roofline at the fractions of the peaks above, with the measured floors."""
    peak_bytes, peak_flops = gpu.memory_bytes_per_s, gpu.flops_per_s(dtype_bytes)
    return Curves(
        gemm=GemmLaw(KERNEL_S, GEMM_BYTES_FRAC * peak_bytes, GEMM_FLOPS_FRAC * peak_flops, dtype_bytes),
        stream=StreamLaw(KERNEL_S, STREAM_BYTES_FRAC * peak_bytes),
        decode=DecodeLaw(DECODE_FLOOR_S, KERNEL_S, DECODE_ROW_S, DECODE_BYTES_FRAC * peak_bytes),
        prefill=PrefillLaw(DECODE_FLOOR_S, PREFILL_FLOPS_FRAC * peak_flops, STREAM_BYTES_FRAC * peak_bytes),
        all_reduce=AllReduceLaw(ALL_REDUCE_S),
        source=f"analytic roofline of {gpu.name}",
    )
