"""The laws of one GPU, gathered: what a cost model prices its operators with, and how sure it is of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from perfmodel.laws.allreduce import AllReduceLaw, RingAllReduce
from perfmodel.laws.attention import DecodeLaw, PrefillLaw, StreamedDecode
from perfmodel.laws.gemm import GemmLaw, RooflineGemm
from perfmodel.laws.stream import StreamLaw
from perfmodel.laws.whole import WholeChunks, WholeKnots
from perfmodel.specs import GpuSpec

ENDS = ("low", "high")
STREAMS = ("norm", "add", "rope", "kv_write", "activation", "embedding", "copy")


@dataclass(frozen=True)
class Band:
    """By how much data sets disagree about a part: factors on its time, `low` and `high`, along `at` (tokens, rows, bytes)."""

    at: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def factor(self, end: str, x: float) -> float:
        return float(np.interp(x, self.at, self.low if end == "low" else self.high))


@dataclass(frozen=True)
class Curves:
    """Laws of one GPU for one width of numbers. `source` is what a manifest says of them.

    `decode` holds one law per range of heads, best first. `end` prices at one end of the bands ("" for the middle).
    """

    gemm: GemmLaw
    streams: Mapping[str, StreamLaw]
    decode: tuple[DecodeLaw, ...]
    prefill: PrefillLaw | WholeChunks
    all_reduce: AllReduceLaw
    source: str
    bands: Mapping[str, Band] = field(default_factory=dict)
    end: str = ""
    layer: WholeKnots | None = None  # of this very model, measured whole, in place of its products and streams
    head: WholeKnots | None = None

    def decode_law(self, heads: int, kv_heads: int) -> DecodeLaw:
        """The law measured on such heads, else the one whose heads come nearest."""

        def misses(law: DecodeLaw) -> float:
            ranges = law.domain.ranges if law.domain else {}
            low, high = ranges.get("kv_heads", (0, float("inf")))
            return max(low / kv_heads, kv_heads / high, 1.0)

        return min(self.decode, key=misses)

    def factor(self, part: str, x: float) -> float:
        """Factor on a part's time: 1, or the chosen end of its band."""
        return self.bands[part].factor(self.end, x) if self.end and part in self.bands else 1.0

    def at_end(self, end: str) -> "Curves":
        """These curves at an end of their bands."""
        return replace(self, end=end, source=f"{self.source}, {end} end")


# Fractions of the data-sheet peaks reached, and floors. From Vidur's A100 profiles of LLaMA2-7B and 70B (non-attention
# time flat to 64 tokens, then linear) and from the decode attention of Vidur and AIConfigurator on A100 (75–85 % of the
# bandwidth, about 15 µs a layer at least). Prefill attention: AIConfigurator's A100 table, long sequences. Bandwidth of
# element-wise kernels and their launch: AIConfigurator's system.yaml (0.8 and 3 µs).
GEMM_BYTES_FRAC, GEMM_FLOPS_FRAC, KERNEL_S = 0.75, 0.65, 3e-6
STREAM_BYTES_FRAC = 0.8
DECODE_BYTES_FRAC, DECODE_FLOOR_S, DECODE_ROW_HEAD_S = 0.8, 15e-6, 3e-9
PREFILL_FLOPS_FRAC = 0.55
ALL_REDUCE_S = 5e-6  # AIConfigurator, A100, vLLM's custom all-reduce in a CUDA graph, small messages


def analytic_curves(gpu: GpuSpec, dtype_bytes: int) -> Curves:
    """Roofline at the fractions of the peaks above, with the measured floors."""
    peak_bytes, peak_flops = gpu.memory_bytes_per_s, gpu.flops_per_s(dtype_bytes)
    stream = StreamLaw(KERNEL_S, STREAM_BYTES_FRAC * peak_bytes)
    return Curves(
        gemm=RooflineGemm(KERNEL_S, GEMM_BYTES_FRAC * peak_bytes, GEMM_FLOPS_FRAC * peak_flops, dtype_bytes),
        streams=dict.fromkeys(STREAMS, stream),
        decode=(
            StreamedDecode(
                units=(1.0,),
                floor_s=(DECODE_FLOOR_S,),
                base_s=(KERNEL_S,),
                streams=(1.0,),
                bytes_frac=(DECODE_BYTES_FRAC,),
                peak_bytes_per_s=peak_bytes,
                row_head_base_s=DECODE_ROW_HEAD_S,
            ),
        ),
        prefill=PrefillLaw(
            floor_s=DECODE_FLOOR_S,
            flops_per_s=PREFILL_FLOPS_FRAC * peak_flops,
            peak_flops_per_s=peak_flops,
            peak_bytes_per_s=STREAM_BYTES_FRAC * peak_bytes,
        ),
        all_reduce=RingAllReduce(ALL_REDUCE_S),
        source=f"analytic roofline of {gpu.name}",
    )
