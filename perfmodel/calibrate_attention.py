"""Fits the laws of decode and prefill attention to measured batches of equal rows."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.basis import Domain
from perfmodel.calibrate import FitError, Floats, Prior, fit, fit_error, robust_error
from perfmodel.errors import InputError
from perfmodel.laws.attention import HEAD_DIM, Heads, PrefillLaw, StreamedDecode
from perfmodel.laws.flash2 import BLOCKS_PER_SM, Flash2Decode
from perfmodel.specs import GpuSpec

UNITS = (1.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0)
STREAMS = (1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
SHORTEST_DECODE = (
    256  # shorter contexts take another kernel (no split of the KV), which a law affine in them cannot follow
)
LONG_TOKENS = 8192
SHORTEST_PREFILL = 128
KERNELS = ((1.5, 20.0), (14.0, 1.2))  # (least rows, streams of a unit): splits by work units, or to a number of streams
LEAST_ROWS = 20
MOST_ROWS = 2_500  # of a fit; more are thinned out evenly
MOST_EXPONENT = 8.0
MOST_LOSS = 9.0  # e^-9 of the bandwidth: keeps a fit's excursions finite


@dataclass(frozen=True)
class AttentionRows:
    """Measured batches: `rows` sequences of `tokens` queries each behind `prefix_tokens`; context counts both. Seconds a layer.

    Decode: tokens = 1.
    """

    rows: Floats
    tokens: Floats
    prefix_tokens: Floats
    heads: Floats
    kv_heads: Floats
    time_s: Floats
    dtype_bytes: int = 2

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def context_tokens(self) -> Floats:
        return self.tokens + self.prefix_tokens

    def pick(self, keep: NDArray[Any]) -> "AttentionRows":
        """Some of the rows: a mask or indices."""
        names = ("rows", "tokens", "prefix_tokens", "heads", "kv_heads", "time_s")
        return replace(self, **{name: getattr(self, name)[keep] for name in names})

    def domain(self, *names: str) -> Domain:
        """Ranges and measured values of some columns."""
        columns = {name: np.unique(getattr(self, name)) for name in names}
        ranges = {name: (float(values[0]), float(values[-1])) for name, values in columns.items()}
        few = all(len(values) <= 40 for values in columns.values())
        points = {name: tuple(float(v) for v in values) for name, values in columns.items()}
        return Domain(ranges, points if few else {})


MeasuredDecode = StreamedDecode | Flash2Decode


def fit_decode(rows: AttentionRows, gpu: GpuSpec) -> tuple[MeasuredDecode, FitError]:
    """The law of the kernel that explains the rows best, and its error over the contexts of 256 tokens and more.

    Raises InputError for too few rows.
    """
    rows = rows.pick(rows.context_tokens >= SHORTEST_DECODE)
    if len(rows) < LEAST_ROWS:
        raise InputError(
            f"decode_attention: {len(rows)} rows of {SHORTEST_DECODE} tokens or more (allowed: {LEAST_ROWS})"
        )
    laws: list[MeasuredDecode] = [fit_kernel(rows, StreamedDesign(rows, gpu, *kernel)) for kernel in KERNELS]
    laws.append(fit_kernel(rows, Flash2Design(rows, gpu)))
    law = min(laws, key=lambda law: robust_error(decode_s(law, rows), rows.time_s))
    return law, fit_error(decode_s(law, rows), rows.time_s)


def fit_kernel(rows: AttentionRows, design: "StreamedDesign | Flash2Design") -> MeasuredDecode:
    """The best law of one kind of kernel. Long contexts weigh more: they matter most, and extrapolation starts there."""
    rows = rows.pick(np.arange(0, len(rows), -(-len(rows) // MOST_ROWS)))
    weights = np.clip(np.sqrt(rows.context_tokens / LONG_TOKENS), 1.0, 4.0)
    return design.law(
        fit(design.prior, lambda values: decode_s(design.law(values), rows), rows.time_s, weights=weights)
    )


def decode_s(law: MeasuredDecode, rows: AttentionRows) -> Floats:
    """What a law says of the rows, a whole batch each, in a benchmark that repeats itself."""
    shape, kv_tokens = (rows.heads, rows.kv_heads, HEAD_DIM, rows.dtype_bytes), rows.rows * rows.context_tokens
    if isinstance(law, StreamedDecode):
        floor_s, base_s, s_per_token = law.affine(rows.rows, *shape)
        warm_s_per_token = law.warm_s_per_token(
            s_per_token, 2.0 * rows.kv_heads * HEAD_DIM * rows.dtype_bytes, kv_tokens
        )
        return np.maximum(floor_s, base_s + warm_s_per_token * kv_tokens)
    floor_s, base_s, s_per_token, early_s, early_s_per_token = law.affine(rows.rows, *shape)
    late_s = base_s + s_per_token * kv_tokens
    return np.maximum(floor_s, np.minimum(early_s + early_s_per_token * kv_tokens, late_s))


class StreamedDesign:
    """Parameters of a `StreamedDecode`: their prior, and the law they make."""

    def __init__(self, rows: AttentionRows, gpu: GpuSpec, min_rows: float, grouped_streams: float) -> None:
        self.gpu, self.domain = gpu, rows.domain("rows", "heads", "kv_heads", "context_tokens")
        self.dtype_bytes = rows.dtype_bytes
        step_s = np.diff((0.0, *UNITS)) * 0.03e-6
        self.prior = Prior.of(
            floor_s=(np.maximum(step_s, [10e-6] + [0.1e-6] * 8).tolist(), 1.0),
            base_s=(np.maximum(step_s / 2, [10e-6] + [0.1e-6] * 8).tolist(), 1.0),
            bytes_loss=([0.05, 0.05, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0], 1.5),
            row_head_floor_s=(0.3e-9, 2.0),
            row_head_base_s=(0.3e-9, 2.0),
            head_token_s=(1e-12, 2.0),
            grouped_floor_s=(0.5e-6, 2.0),
            grouped_base_s=(1e-6, 2.0),
            gather_s=(1e-6, 2.0),
            min_rows=(min_rows, 1.0),
            grouped_min_rows=(min_rows, 1.0),
            grouped_streams=(grouped_streams, 1.0),
            cache_gain=(1.5, 1.0),
        )

    def law(self, values: Floats) -> StreamedDecode:
        take, one = self.prior.take, self.prior.one
        loss = take(values, "bytes_loss")
        loss[1:] = np.minimum(loss[1:], np.diff(np.log(STREAMS))[::-1])  # twice the streams: at most twice as fast
        frac = np.exp(-np.minimum(np.cumsum(loss)[::-1], MOST_LOSS))  # rises with the streams, stays below 1
        single = (
            "row_head_floor_s",
            "row_head_base_s",
            "head_token_s",
            "grouped_floor_s",
            "grouped_base_s",
            "gather_s",
        )
        return StreamedDecode(
            units=UNITS,
            floor_s=tuple(np.cumsum(take(values, "floor_s")).tolist()),
            base_s=tuple(np.cumsum(take(values, "base_s")).tolist()),
            streams=STREAMS,
            bytes_frac=tuple(frac.tolist()),
            peak_bytes_per_s=self.gpu.memory_bytes_per_s,
            min_rows=one(values, "min_rows"),
            grouped_min_rows=one(values, "grouped_min_rows"),
            grouped_streams=one(values, "grouped_streams"),
            cache_bytes=self.gpu.cache_bytes,
            cache_gain=max(1.0, one(values, "cache_gain")),
            kv_dtype_bytes=self.dtype_bytes,
            domain=self.domain,
            **{name: one(values, name) for name in single},
        )


class Flash2Design:
    """Parameters of a `Flash2Decode`: their prior, and the law they make."""

    def __init__(self, rows: AttentionRows, gpu: GpuSpec) -> None:
        self.gpu, self.domain = gpu, rows.domain("rows", "heads", "kv_heads", "context_tokens")
        self.dtype_bytes = rows.dtype_bytes
        self.prior = Prior.of(
            sm_bytes_per_s=(gpu.memory_bytes_per_s / gpu.num_sms, 0.5),
            bytes_per_s=(0.8 * gpu.memory_bytes_per_s, 0.3),
            late_share=(1.5, 0.3),
            base_s=(8e-6, 1.0),
            row_head_s=(1e-9, 1.0),
            grouped_floor_s=(16e-6, 1.0),
            grouped_row_head_floor_s=(1e-9, 1.0),
            grouped_base_s=(14e-6, 1.0),
            grouped_row_head_s=(1e-9, 1.0),
            gather_s=(4e-6, 1.0),
            split_s=(0.2e-6, 1.0),
        )

    def law(self, values: Floats) -> Flash2Decode:
        named = dict(zip(self.prior.names, values.tolist(), strict=True))
        named["bytes_per_s"] = min(named["bytes_per_s"], self.gpu.memory_bytes_per_s)
        named["late_share"] = min(max(named["late_share"], 1.0), BLOCKS_PER_SM)
        return Flash2Decode(self.gpu.num_sms, **named, kv_dtype_bytes=self.dtype_bytes, domain=self.domain)


def fit_prefill(rows: AttentionRows, gpu: GpuSpec) -> tuple[PrefillLaw, FitError]:
    """The law of a chunk, from single chunks of 128 tokens and more. Raises InputError for too few rows."""
    rows = rows.pick((rows.tokens >= SHORTEST_PREFILL) & (rows.rows == 1))
    if len(rows) < LEAST_ROWS:
        raise InputError(
            f"prefill_attention: {len(rows)} rows of {SHORTEST_PREFILL} tokens or more (allowed: {LEAST_ROWS})"
        )
    peak = gpu.flops_per_s(rows.dtype_bytes)
    prior = Prior.of(
        floor_s=(11e-6, 0.5),
        flops_frac=(0.6, 0.3),
        head_token_s=(0.3e-9, 1.0),
        kv_token_s=(2e-9, 1.5),
        tile_s=(20e-9, 1.5),
        walk_s=(15e-9, 1.0),
        mixing=(2.0, 0.5),
        kv_exponent=(0.6, 0.7),
    )

    def law_of(values: Floats) -> PrefillLaw:
        named = dict(zip(prior.names, values.tolist(), strict=True))
        return PrefillLaw(
            floor_s=named["floor_s"],
            flops_per_s=min(1.0, named["flops_frac"]) * peak,
            peak_flops_per_s=peak,
            peak_bytes_per_s=gpu.memory_bytes_per_s,
            head_token_s=named["head_token_s"],
            kv_token_s=named["kv_token_s"],
            tile_s=named["tile_s"],
            walk_s=named["walk_s"],
            mixing=min(named["mixing"], MOST_EXPONENT),
            kv_exponent=min(named["kv_exponent"], MOST_EXPONENT),
        )

    values = fit(prior, lambda values: prefill_s(law_of(values), rows), rows.time_s)
    law = replace(law_of(values), domain=rows.domain("tokens", "prefix_tokens", "heads", "kv_heads"))
    return law, fit_error(prefill_s(law, rows), rows.time_s)


def prefill_s(law: PrefillLaw, rows: AttentionRows) -> Floats:
    """What a law says of the rows."""
    pairs = rows.tokens * rows.prefix_tokens + rows.tokens * (rows.tokens + 1) / 2
    shape = Heads(rows.heads, rows.kv_heads, HEAD_DIM, rows.dtype_bytes)  # type: ignore[arg-type]  # arrays in place of numbers
    times: Floats = np.maximum.reduce(law.estimates_s(rows.rows, rows.tokens, rows.context_tokens, pairs, shape))
    return times
