"""Attention of one layer on one rank: decode rows over their KV, and a chunk of a prompt over its prefix and itself."""

from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from perfmodel.basis import Along, Domain, basis_along
from perfmodel.laws.gemm import smooth_max

Floats = NDArray[np.float64]
Numbers = Any  # a number, or an array of them

HEAD_DIM = 128  # of every measurement; other sizes scale
TILE_TOKENS = 128  # queries of one thread block


class Heads(NamedTuple):
    """Shape of attention on one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype_bytes: int

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim * self.kv_dtype_bytes


class DecodeTerms(NamedTuple):
    """Decode attention over ΣS KV tokens: max(floor_s, min(early_s + early_s_per_token × ΣS, base_s + s_per_token × ΣS)).

    The early line, where there is one, is the steeper: what splitting the KV of a few rows costs grows with their context until
    the GPU is full.
    """

    floor_s: float
    base_s: float
    s_per_token: float
    early_s: float = inf
    early_s_per_token: float = 0.0

    def at(self, kv_tokens: float) -> float:
        """Seconds over `kv_tokens` KV tokens in all."""
        late_s = self.base_s + self.s_per_token * kv_tokens
        return max(self.floor_s, min(self.early_s + self.early_s_per_token * kv_tokens, late_s))

    def plus(self, seconds: float) -> "DecodeTerms":
        """With `seconds` more, whatever the context."""
        return DecodeTerms(
            self.floor_s + seconds,
            self.base_s + seconds,
            self.s_per_token,
            self.early_s + seconds,
            self.early_s_per_token,
        )

    def times(self, factor: float, token_factor: float) -> "DecodeTerms":
        """All terms `factor` times, those per token `token_factor` times."""
        return DecodeTerms(
            factor * self.floor_s,
            factor * self.base_s,
            token_factor * self.s_per_token,
            factor * self.early_s,
            token_factor * self.early_s_per_token,
        )


class DecodeLaw(Protocol):
    """Decode attention of one layer on one rank."""

    @property
    def domain(self) -> Domain | None: ...

    def affine(
        self, rows: Numbers, heads: Numbers, kv_heads: Numbers, head_dim: Numbers, kv_dtype_bytes: Numbers
    ) -> tuple[Floats, ...]:
        """The columns of `DecodeTerms`, for numbers or arrays of them."""

    def basis_along_context(self, rows: int, shape: Heads) -> Along: ...


def decode_basis(domain: Domain | None, kv_dtype_bytes: int, rows: int, shape: Heads) -> Along:
    """How a batch of `rows` is known, by the mean context of its rows; other sizes than were measured are extrapolated."""
    along = basis_along(domain, "context_tokens", rows=rows, heads=shape.heads, kv_heads=shape.kv_heads)
    if domain and (shape.head_dim != HEAD_DIM or shape.kv_dtype_bytes != kv_dtype_bytes):
        return along.extrapolated()
    return along


@dataclass(frozen=True)
class StreamedDecode:
    """Decode attention, affine in the KV tokens of the batch for given rows.

    rows × kv_heads work units set the floor and the base (at the knots `units`; linear between and beyond them). Grouped
    heads (GQA) pay for splitting the KV and merging, and for gathering queries where rows and KV heads both exceed one.
    kv_heads × max(rows, min_rows) streams read KV at `bytes_frac` of the peak (knots `streams`); each query head adds a
    little per token. KV bytes never go faster than the peak.

    Benchmarks repeat themselves: KV of up to `cache_bytes` they find in the L2 cache, `cache_gain` times as fast as in memory. A
    served model does not, as its weights and other layers pass in between: only `warm_s_per_token` knows of it.
    """

    units: tuple[float, ...]
    floor_s: tuple[float, ...]
    base_s: tuple[float, ...]
    streams: tuple[float, ...]
    bytes_frac: tuple[float, ...]
    peak_bytes_per_s: float
    row_head_floor_s: float = 0.0
    row_head_base_s: float = 0.0
    head_token_s: float = 0.0
    grouped_floor_s: float = 0.0
    grouped_base_s: float = 0.0
    gather_s: float = 0.0
    min_rows: float = 1.0
    grouped_min_rows: float = 1.0
    grouped_streams: float = 1.0  # streams of a work unit when heads are grouped
    cache_bytes: int = 0
    cache_gain: float = 1.0
    kv_dtype_bytes: int = 2  # as measured
    domain: Domain | None = None

    def terms(self, rows: int, shape: Heads) -> DecodeTerms:
        """Terms of one layer for a batch of `rows`."""
        return DecodeTerms(*(float(term) for term in self.affine(rows, *shape)))

    def affine(
        self, rows: Numbers, heads: Numbers, kv_heads: Numbers, head_dim: Numbers, kv_dtype_bytes: Numbers
    ) -> tuple[Floats, Floats, Floats]:
        """(floor_s, base_s, s_per_token) of one layer, for numbers or arrays of them."""
        units, row_heads, grouped = rows * kv_heads, rows * heads, np.greater(heads, kv_heads)
        gather_s = self.gather_s * (grouped & np.greater(rows, 1) & np.greater(kv_heads, 1))
        floor_s = linear(units, self.units, self.floor_s) + self.row_head_floor_s * row_heads
        base_s = linear(units, self.units, self.base_s) + self.row_head_base_s * row_heads
        least = np.where(grouped, self.grouped_min_rows, self.min_rows)
        streams = kv_heads * np.maximum(rows, least) * np.where(grouped, self.grouped_streams, 1.0)
        frac = np.exp(np.interp(np.log(streams), np.log(self.streams), np.log(self.bytes_frac)))
        s_per_token = 2.0 * kv_heads * head_dim * kv_dtype_bytes / (self.peak_bytes_per_s * np.minimum(1.0, frac))
        s_per_token += self.head_token_s * heads * head_dim / HEAD_DIM
        return (
            floor_s + gather_s + self.grouped_floor_s * grouped,
            base_s + gather_s + self.grouped_base_s * grouped,
            s_per_token,
        )

    def warm_s_per_token(self, s_per_token: Floats, token_bytes: Numbers, kv_tokens: Numbers) -> Floats:
        """As a benchmark measures it: the memory's share of a token's time is the cache's where all KV fits there."""
        memory_s = token_bytes / (self.peak_bytes_per_s * self.bytes_frac[-1])
        beside_s = np.maximum(s_per_token**4 - memory_s**4, 0.0) ** 0.25  # as in smooth_max
        warm_s = smooth_max(beside_s, memory_s / self.cache_gain)
        return np.where(token_bytes * kv_tokens <= self.cache_bytes, warm_s, s_per_token)

    def basis_along_context(self, rows: int, shape: Heads) -> Along:
        return decode_basis(self.domain, self.kv_dtype_bytes, rows, shape)


@dataclass(frozen=True)
class PrefillLaw:
    """Attention of a chunk: floor_s + mix(throughput, the longest thread block).

    Throughput: (query, KV) pairs as FLOPs, plus queries, KV tokens and tiles of queries; the last tile walks all KV alone.
    Bounded below by FLOPs and bytes at the peaks.
    """

    floor_s: float
    flops_per_s: float
    peak_flops_per_s: float
    peak_bytes_per_s: float
    head_token_s: float = 0.0
    kv_token_s: float = 0.0
    tile_s: float = 0.0
    walk_s: float = 0.0
    mixing: float = 2.0
    kv_exponent: float = 1.0  # below 1: reading the KV of many heads overlaps better
    domain: Domain | None = None

    def time_s(self, tokens: int, kv_tokens: int, pairs: int, shape: Heads) -> float:
        """`tokens` queries against `kv_tokens` KV tokens, `pairs` of which are not masked; one layer."""
        time_s: float = max(self.estimates_s(1, tokens, kv_tokens, pairs, shape))
        return time_s

    def estimates_s(
        self, rows: Numbers, tokens: Numbers, kv_tokens: Numbers, pairs: Numbers, shape: Heads
    ) -> tuple[Numbers, Numbers, Numbers]:
        """By law, by FLOPs, by bytes: of `rows` equal chunks side by side, for numbers or arrays; the largest counts."""
        heads, kv_heads, head_dim, _ = shape
        wide, flops = head_dim / HEAD_DIM, 4.0 * rows * heads * head_dim * pairs
        token_s = tokens * self.head_token_s * heads + kv_tokens * self.kv_token_s * kv_heads**self.kv_exponent
        tiles = rows * heads * -(-tokens // TILE_TOKENS)
        busy_s = flops / self.flops_per_s + wide * rows * token_s + self.tile_s * tiles
        walk_s = wide * self.walk_s * kv_tokens
        mixed_s = busy_s * (1.0 + (walk_s / busy_s) ** self.mixing) ** (1.0 / self.mixing)
        num_bytes = rows * (kv_tokens * shape.kv_bytes_per_token + 4.0 * tokens * heads * head_dim)
        return self.floor_s + mixed_s, flops / self.peak_flops_per_s, num_bytes / self.peak_bytes_per_s

    def basis_along_prefix(self, tokens: int, shape: Heads) -> Along:
        """How a chunk of `tokens` is known, by the tokens before it."""
        along = basis_along(self.domain, "prefix_tokens", tokens=tokens, heads=shape.heads, kv_heads=shape.kv_heads)
        if self.domain and shape.head_dim != HEAD_DIM:
            return along.extrapolated()
        return along


def linear(x: Numbers, knots: tuple[float, ...], values: tuple[float, ...]) -> Floats:
    """Piecewise linear through the knots; flat before the first, the last slope beyond the last."""
    slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2]) if len(knots) > 1 else 0.0
    times: Floats = np.interp(x, knots, values) + slope * np.maximum(0.0, x - knots[-1])
    return times
