"""FlashAttention-2's decode attention: waves over the multiprocessors, splits of grouped heads, one SM for a row that is not."""

import numpy as np
import pytest

from perfmodel.basis import Basis, Domain
from perfmodel.curves import analytic_curves
from perfmodel.laws.attention import DecodeTerms, Heads
from perfmodel.laws.flash2 import KV_BLOCK_TOKENS, Flash2Decode, SplitUngrouped, splitting_all_heads
from perfmodel.specs import GpuSpec

SM, ALL = 22e9, 1.6e12
PLACES = 216  # of 108 multiprocessors


def flash2(**changes) -> Flash2Decode:
    defaults = {
        "num_sms": 108,
        "sm_bytes_per_s": SM,
        "bytes_per_s": ALL,
        "late_share": 1.4,
        "base_s": 8e-6,
        "row_head_s": 1e-9,
        "grouped_floor_s": 18e-6,
        "grouped_row_head_floor_s": 1e-9,
        "grouped_base_s": 16e-6,
        "grouped_row_head_s": 1.5e-9,
        "gather_s": 4e-6,
        "split_s": 0.17e-6,
    }
    return Flash2Decode(**defaults | changes)


def mha(kv_heads: int) -> Heads:
    return Heads(kv_heads, kv_heads, 128, 2)


def gqa(kv_heads: int, group: int = 8) -> Heads:
    return Heads(group * kv_heads, kv_heads, 128, 2)


def at(rows: int, shape: Heads, context_tokens: int) -> float:
    return flash2().terms(rows, shape).at(rows * context_tokens)


def split_at(rows: int, shape: Heads, context_tokens: int) -> float:
    return DecodeTerms(*splitting_all_heads(flash2(), shape).affine(rows, *shape)).at(rows * context_tokens)


def test_without_groups_units_alone_count():
    for units in (1, 8, 64, 256):
        times = {at(units // kv_heads, mha(kv_heads), 4096) for kv_heads in (1, 2, 4, 8) if units >= kv_heads}
        assert max(times) == pytest.approx(min(times), rel=1e-12)


def test_a_row_that_is_not_grouped_walks_its_kv_on_one_multiprocessor():
    """As measured on A100: 131,072 tokens take 3 ms a layer, for one row of one KV head as for 8 rows of 4."""
    for rows, kv_heads in ((1, 1), (1, 8), (8, 4)):
        assert at(rows, mha(kv_heads), 131_072) == pytest.approx(131_072 * 512 / SM, rel=0.02)
    assert at(1, gqa(8), 131_072) < 0.2 * at(1, mha(8), 131_072)


def test_a_unit_more_than_the_places_waits_for_another_wave():
    full, more = (at(units, mha(1), 16_384) for units in (PLACES, PLACES + 1))
    assert more - full == pytest.approx(16_384 * 512 * 1.4 / SM, rel=0.01)


def test_a_kv_block_is_walked_whole():
    for shape in (mha(4), gqa(4)):
        one, block, more = (at(64, shape, tokens) for tokens in (1, KV_BLOCK_TOKENS, 2 * KV_BLOCK_TOKENS))
        assert one == pytest.approx(block, rel=0.01) and more > 1.1 * block


def test_splitting_costs_more_the_longer_the_kv_until_the_gpu_is_full():
    terms = flash2().terms(1, gqa(1))
    assert terms.early_s_per_token - terms.s_per_token == pytest.approx(0.17e-6 / KV_BLOCK_TOKENS)
    full = 128 * KV_BLOCK_TOKENS
    assert terms.at(full) == pytest.approx(terms.base_s + terms.s_per_token * full, rel=1e-3)
    assert terms.at(full // 2) < terms.base_s + terms.s_per_token * full / 2
    far, farther = (at(1, gqa(1), tokens) for tokens in (1_000_000, 2_000_000))
    assert farther / far == pytest.approx(2.0, rel=0.1), "by its bytes, however long"


def test_groups_that_fill_the_gpu_are_not_split():
    assert flash2().terms(173, gqa(1)).s_per_token == pytest.approx(flash2().terms(173, mha(1)).s_per_token)


@pytest.mark.parametrize("shape", [mha(1), mha(4), mha(32), gqa(1), gqa(2), gqa(8), gqa(1, 64)])
@pytest.mark.parametrize("context_tokens", [1, 256, 2000, 8000, 14_000, 131_072, 2_000_000])
def test_more_rows_never_take_less_time(shape, context_tokens):
    times = [at(rows, shape, context_tokens) for rows in range(1, 1000)]
    assert np.all(np.diff(times) >= -1e-15)


def test_kv_is_never_read_faster_than_by_all_together():
    for shape in (mha(1), mha(8), gqa(1), gqa(8)):
        for rows in (1, 3, 50, 200, 3000):
            assert flash2().terms(rows, shape).s_per_token >= shape.kv_bytes_per_token / ALL * (1 - 1e-12)


def test_known_inside_what_was_measured():
    ranges = {"rows": (1, 64), "heads": (1, 64), "kv_heads": (1, 8), "context_tokens": (256, 1000)}
    law = flash2(domain=Domain(ranges))
    assert law.basis_along_context(8, gqa(8)).basis(512) == Basis.INTERPOLATED
    assert law.basis_along_context(8, gqa(16)).basis(512) == Basis.EXTRAPOLATED


CONTEXTS = (1, 128, 256, 1000, 4096, 16_384, 131_072, 2_000_000)


@pytest.mark.parametrize("kv_heads", [1, 3, 4, 8])
def test_splitting_all_heads_is_never_slower_and_changes_nothing_for_groups(kv_heads):
    for rows in (1, 2, 12, 25, 27, 31, 40, 43, 44, 108, 173, 500):
        for context in CONTEXTS:
            assert split_at(rows, mha(kv_heads), context) <= at(rows, mha(kv_heads), context)
            assert split_at(rows, gqa(kv_heads), context) == at(rows, gqa(kv_heads), context)


def test_splitting_all_heads_reads_a_long_row_with_the_whole_gpu():
    bytes_s = 131_072 * mha(4).kv_bytes_per_token / ALL
    assert bytes_s < split_at(1, mha(4), 131_072) < 1.5 * bytes_s
    assert split_at(1, mha(4), 131_072) == pytest.approx(split_at(1, gqa(4, 2), 131_072)), "as pairs of heads"
    assert split_at(200, mha(4), 131_072) == at(200, mha(4), 131_072), "units that fill the GPU are not split"


@pytest.mark.parametrize("kv_heads", [1, 4, 8])
@pytest.mark.parametrize("context_tokens", CONTEXTS)
def test_more_rows_never_take_less_time_where_all_heads_are_split(kv_heads, context_tokens):
    times = [split_at(rows, mha(kv_heads), context_tokens) for rows in range(1, 300)]
    assert np.all(np.diff(times) >= -1e-15)


@pytest.mark.parametrize("kv_heads", [1, 4, 5, 8])
def test_the_early_line_is_steeper_or_the_only_one_where_all_heads_are_split(kv_heads):
    """Else a step of many iterations would look in vain for where one line passes the other."""
    for rows in range(1, 300):
        terms = DecodeTerms(*SplitUngrouped(flash2()).affine(rows, *mha(kv_heads)))
        one_line = (terms.early_s, terms.early_s_per_token) == (terms.base_s, terms.s_per_token)
        assert one_line or (terms.early_s_per_token > terms.s_per_token and terms.early_s < terms.base_s), rows


def test_split_heads_that_were_measured_unsplit_are_extrapolated():
    law = SplitUngrouped(
        flash2(domain=Domain({"rows": (1, 64), "heads": (1, 64), "kv_heads": (1, 8), "context_tokens": (256, 1000)}))
    )
    known = [law.basis_along_context(rows, mha(8)).basis(512) for rows in (1, 21, 22, 60)]
    assert known == [Basis.EXTRAPOLATED] * 2 + [Basis.INTERPOLATED] * 2


def test_kernels_that_split_already_stay_as_they_are():
    (streamed,) = analytic_curves(GpuSpec("some", 80 << 30, 3e14, 2e12), 2).decode
    assert splitting_all_heads(streamed, mha(4)) is streamed
    assert splitting_all_heads(flash2(), mha(4)) == SplitUngrouped(flash2())
    assert splitting_all_heads(flash2(), gqa(4)) == flash2()
