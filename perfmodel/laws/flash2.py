"""Decode attention of FlashAttention-2 (fwd_splitkv), which gives a thread block each row and KV head of a batch."""

from dataclasses import dataclass

import numpy as np

from perfmodel.basis import Along, Domain
from perfmodel.laws.attention import DecodeLaw, DecodeTerms, Floats, Heads, Numbers, decode_basis
from perfmodel.laws.gemm import smooth_max

# flash_api.cpp: `mha_varlen_fwd` splits the KV of grouped heads alone, `num_splits_heuristic` only below SPLIT_BELOW of the
# places, into as few parts of whole KV blocks as fill FILLED of what can be filled, at most MOST_SPLITS.
BLOCKS_PER_SM = 2
KV_BLOCK_TOKENS = 128
MOST_SPLITS = 128
SPLIT_BELOW = 0.8
FILLED = 0.85


@dataclass(frozen=True)
class Flash2Decode:
    """A unit is one row and KV head; grouped query heads are read together.

    Units that are not split walk the KV of their row, in waves of BLOCKS_PER_SM a multiprocessor: one alone reads at
    `sm_bytes_per_s`, all of them at `bytes_per_s` together, and the blocks of an unfinished last wave share their SMs
    `late_share` to one. So the batch waits for the last wave, and a long row that is not grouped for a single SM.
    Grouped heads that would leave SMs idle are split along their KV: each split costs `split_s` in the kernel that adds up.
    """

    num_sms: int
    sm_bytes_per_s: float
    bytes_per_s: float
    late_share: float
    base_s: float
    row_head_s: float
    grouped_floor_s: float
    grouped_row_head_floor_s: float
    grouped_base_s: float
    grouped_row_head_s: float
    gather_s: float  # where rows and KV heads both exceed one
    split_s: float
    kv_dtype_bytes: int = 2  # as measured
    domain: Domain | None = None

    def terms(self, rows: int, shape: Heads) -> DecodeTerms:
        return DecodeTerms(*(float(term) for term in self.affine(rows, *shape)))

    def affine(
        self, rows: Numbers, heads: Numbers, kv_heads: Numbers, head_dim: Numbers, kv_dtype_bytes: Numbers
    ) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """The `DecodeTerms` of one layer, for numbers or arrays of them."""
        units, row_heads, grouped = np.asarray(rows * kv_heads, float), rows * heads, np.greater(heads, kv_heads)
        split = grouped & self.leaves_idle(units)
        token_bytes = 2.0 * head_dim * kv_dtype_bytes
        walk_s = token_bytes * np.where(split, self._split_walk(units), self._walk(units))
        gather_s = self.gather_s * (grouped & np.greater(rows, 1) & np.greater(kv_heads, 1))
        single_s = self.base_s + self.row_head_s * row_heads
        early_s = np.where(grouped, self.grouped_base_s + gather_s + self.grouped_row_head_s * row_heads, single_s)
        split_floor_s = self.grouped_floor_s + gather_s + self.grouped_row_head_floor_s * row_heads
        splitting_s = grouped * self._splitting_s(units, token_bytes)
        return (
            np.where(split, split_floor_s, early_s + KV_BLOCK_TOKENS * walk_s),  # a KV block is walked whole
            early_s + splitting_s,
            walk_s / rows,
            early_s,
            (walk_s + grouped * self.split_s / KV_BLOCK_TOKENS) / rows,
        )

    def basis_along_context(self, rows: int, shape: Heads) -> Along:
        return decode_basis(self.domain, self.kv_dtype_bytes, rows, shape)

    def leaves_idle(self, units: Numbers) -> Numbers:
        """Whether so many units leave multiprocessors idle, and are split where the kernel may."""
        return units < SPLIT_BELOW * self._places

    @property
    def _places(self) -> int:
        return BLOCKS_PER_SM * self.num_sms

    def _walk(self, units: Floats) -> Floats:
        """Seconds in which every unit reads one byte, none split."""
        waves, rest = np.divmod(units, self._places)
        wave_s = smooth_max(np.array(BLOCKS_PER_SM / self.sm_bytes_per_s), np.array(self._places / self.bytes_per_s))
        share = np.where(waves > 0, self.late_share, np.ceil(rest / self.num_sms))
        rest_s = smooth_max(share / self.sm_bytes_per_s, rest / self.bytes_per_s)
        walk_s: Floats = waves * wave_s + np.where(rest > 0, rest_s, 0.0)
        return walk_s

    def _splits(self, units: Floats) -> Floats:
        """Parts of a row's KV once it is long enough."""
        splits: Floats = np.minimum(MOST_SPLITS, FILLED * self._places / units)
        return splits

    def _split_walk(self, units: Floats) -> Floats:
        """Seconds in which every unit reads one byte, split."""
        shared = BLOCKS_PER_SM / self._splits(units)
        return smooth_max(shared / self.sm_bytes_per_s, units / self.bytes_per_s)

    def _splitting_s(self, units: Floats, token_bytes: Numbers) -> Floats:
        """What the splits cost where the KV is long.

        More units have fewer of them; it falls no faster than the time of a KV block rises, so that more rows never take less time.
        """
        most = FILLED * self._places / MOST_SPLITS  # units that still have MOST_SPLITS
        block_s = KV_BLOCK_TOKENS * token_bytes * self._split_walk(np.array(2 * most)) / (2 * most)
        slowly = MOST_SPLITS * np.exp(-np.maximum(0.0, units - most) * block_s / self.split_s)
        splitting_s: Floats = self.split_s * np.maximum(self._splits(units), slowly)
        return splitting_s


@dataclass(frozen=True)
class SplitUngrouped:
    """Heads that are not grouped, under an engine that splits their KV too where that is sooner done.

    No measurement: a long row is priced as if its heads came in pairs, the smallest groups; a shorter one on the line there from
    the start of an unsplit one. Neither takes longer than was measured unsplit.
    """

    measured: Flash2Decode

    @property
    def domain(self) -> Domain | None:
        return self.measured.domain

    def affine(
        self, rows: Numbers, heads: Numbers, kv_heads: Numbers, head_dim: Numbers, kv_dtype_bytes: Numbers
    ) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """The `DecodeTerms` of one layer, for numbers or arrays of them."""
        sizes = kv_heads, head_dim, kv_dtype_bytes
        floor_s, _, unsplit_s_per_token, early_s, _ = self.measured.affine(rows, heads, *sizes)
        _, base_s, s_per_token, pairs_s, pairs_s_per_token = self.measured.affine(rows, 2 * kv_heads, *sizes)
        all_split_tokens = (base_s - pairs_s) / (pairs_s_per_token - s_per_token)
        early_s_per_token = s_per_token + (base_s - early_s) / all_split_tokens
        sooner = s_per_token < unsplit_s_per_token
        return (
            floor_s,
            np.where(sooner, base_s, early_s),
            np.where(sooner, s_per_token, unsplit_s_per_token),
            early_s,
            np.minimum(early_s_per_token, unsplit_s_per_token),
        )

    def basis_along_context(self, rows: int, shape: Heads) -> Along:
        along = self.measured.basis_along_context(rows, shape)
        return along.extrapolated() if self.measured.leaves_idle(rows * shape.kv_heads) else along


def splitting_all_heads(law: DecodeLaw, shape: Heads) -> DecodeLaw:
    """The law under an engine that splits all heads: others than FlashAttention-2's ungrouped ones were measured split."""
    if isinstance(law, Flash2Decode) and shape.heads == shape.kv_heads:
        return SplitUngrouped(law)
    return law
