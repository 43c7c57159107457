"""Laws of single operators: shape, bounds, what they do beyond their domain."""

import numpy as np
import pytest

from perfmodel.basis import Basis, Domain, basis_in, worst
from perfmodel.curves import Band
from perfmodel.laws.allreduce import KnotAllReduce, Knots, RingAllReduce
from perfmodel.laws.attention import Heads, PrefillLaw, StreamedDecode
from perfmodel.laws.gemm import Tile, TileGemm, smooth_max
from perfmodel.laws.stream import StreamLaw
from perfmodel.specs import LinkSpec

PEAK_BYTES, PEAK_FLOPS = 2e12, 300e12


def tile_gemm(*tiles: Tile, **changes) -> TileGemm:
    defaults = {
        "launch_s": 2e-6,
        "bytes_per_s": 1.5e12,
        "split_s": 1e-6,
        "split_bytes_per_s": 1e12,
        "splits": (1,),
        "num_sms": 100,
        "dtype_bytes": 2,
        "peak_bytes_per_s": PEAK_BYTES,
        "peak_flops_per_s": PEAK_FLOPS,
    }
    return TileGemm(tiles=tiles, **defaults | changes)


def one(law: TileGemm, m: int, n: int, k: int) -> float:
    return float(law.times_s(np.array([float(m)]), n, k)[0])


def test_a_tile_more_than_a_wave_costs_a_wave_more():
    """100 tiles of 128 × 128 fit 100 SMs; the 101st waits for a second wave."""
    law = tile_gemm(Tile(128, 128, 1e-6, 20e-9))
    full, more = one(law, 128, 12_800, 4096), one(law, 129, 12_800, 4096)
    assert one(law, 1, 12_800, 4096) == pytest.approx(full, rel=0.02)
    assert more - full == pytest.approx(1e-6 + 4096 * 20e-9, rel=0.2)


def test_the_better_kernel_is_picked():
    small, large = Tile(64, 64, 1e-6, 5e-9), Tile(256, 128, 2e-6, 15e-9)
    both, alone = tile_gemm(small, large), (tile_gemm(small), tile_gemm(large))
    sizes = [(8, 2048, 2048), (4096, 8192, 8192)]
    times = [[one(law, *size) for law in alone] for size in sizes]
    assert [np.argmin(pair) for pair in times] == [0, 1]
    assert [one(both, *size) for size in sizes] == [min(pair) for pair in times]


def test_splitting_k_helps_few_tiles_with_a_long_k():
    plain, split = (tile_gemm(Tile(64, 64, 1e-6, 5e-9), splits=splits) for splits in ((1,), (1, 8)))
    assert one(split, 1, 1024, 16_384) < 0.5 * one(plain, 1, 1024, 16_384)
    assert one(split, 4096, 4096, 1024) == one(plain, 4096, 4096, 1024)


def test_no_product_is_faster_than_the_peaks():
    impossible = tile_gemm(Tile(128, 128, 1e-12, 1e-15), launch_s=0.0, bytes_per_s=1e15)
    assert one(impossible, 1, 4096, 4096) == pytest.approx(2 * (4096 * 4096 + 8192) / PEAK_BYTES)
    assert one(impossible, 8192, 8192, 8192) == pytest.approx(2 * 8192**3 / PEAK_FLOPS)


def test_times_that_overlap_are_a_little_more_than_the_longer():
    a, b = np.array([3.0, 1.0]), np.array([1.0, 1.0])
    assert smooth_max(a, b).tolist() == pytest.approx([82**0.25, 2**0.25])


def decode_law(**changes) -> StreamedDecode:
    defaults = {
        "units": (1.0, 100.0),
        "floor_s": (10e-6, 20e-6),
        "base_s": (5e-6, 6e-6),
        "streams": (1.0, 10.0),
        "bytes_frac": (0.1, 0.8),
        "peak_bytes_per_s": PEAK_BYTES,
    }
    return StreamedDecode(**defaults | changes)


MHA, GQA = Heads(8, 8, 128, 2), Heads(32, 8, 128, 2)


def test_decode_knots_are_joined_and_led_on():
    """units = rows × kv_heads: beyond the last knot the last slope goes on, not a constant."""
    law = decode_law()
    per_unit = 10e-6 / 99
    assert law.terms(5, MHA).floor_s == pytest.approx(10e-6 + 39 * per_unit)
    assert law.terms(50, MHA).floor_s == pytest.approx(10e-6 + 399 * per_unit)


def test_few_streams_read_more_slowly_and_none_above_the_peak():
    law = decode_law(min_rows=1.0)
    single = Heads(4, 1, 128, 2)
    assert law.terms(1, single).s_per_token == pytest.approx(512 / (0.1 * PEAK_BYTES))
    assert law.terms(10, single).s_per_token == pytest.approx(512 / (0.8 * PEAK_BYTES))
    greedy = decode_law(bytes_frac=(0.1, 5.0))
    assert greedy.terms(10, single).s_per_token == pytest.approx(512 / PEAK_BYTES)


def test_splitting_kernels_read_with_a_row_as_with_many():
    law = decode_law(grouped_min_rows=10.0)
    assert law.terms(1, Heads(4, 1, 128, 2)).s_per_token == law.terms(10, Heads(4, 1, 128, 2)).s_per_token


def test_grouped_heads_pay_for_splits_and_gathering():
    law = decode_law(grouped_floor_s=1e-6, grouped_base_s=3e-6, gather_s=2e-6)
    assert law.terms(1, GQA).base_s - law.terms(1, MHA).base_s == pytest.approx(3e-6)
    assert law.terms(2, GQA).base_s - law.terms(2, MHA).base_s == pytest.approx(5e-6)
    assert law.terms(2, GQA).floor_s - law.terms(2, MHA).floor_s == pytest.approx(3e-6)


def test_other_head_sizes_and_widths_scale_and_are_extrapolated():
    domain = Domain({"rows": (1, 64), "heads": (1, 64), "kv_heads": (1, 8), "context_tokens": (256, 1000)})
    law = decode_law(domain=domain)
    half, wide = Heads(32, 8, 64, 2), Heads(32, 8, 128, 4)
    assert law.terms(8, half).s_per_token == pytest.approx(law.terms(8, GQA).s_per_token / 2)
    assert law.terms(8, wide).s_per_token == pytest.approx(law.terms(8, GQA).s_per_token * 2)
    assert [law.basis_along_context(8, shape).basis(512) for shape in (GQA, half, wide)] == [
        Basis.INTERPOLATED,
        Basis.EXTRAPOLATED,
        Basis.EXTRAPOLATED,
    ]


def test_prefill_extrapolates_along_its_flops():
    """Twice the prefix is twice the time once the prefix rules: nothing flat."""
    law = PrefillLaw(10e-6, 0.5 * PEAK_FLOPS, PEAK_FLOPS, PEAK_BYTES, walk_s=1e-9)
    far, farther = (law.time_s(2048, 2048 + p, 2048 * p + 2048 * 2049 // 2, GQA) for p in (1_000_000, 2_000_000))
    assert farther / far == pytest.approx(2.0, rel=0.01)
    assert far >= 4 * 32 * 128 * 2048e6 / PEAK_FLOPS


def test_prefill_never_beats_the_memory():
    """One query on a long prefix: bytes, not FLOPs."""
    law = PrefillLaw(0.0, PEAK_FLOPS, PEAK_FLOPS, PEAK_BYTES)
    assert law.time_s(1, 100_000, 100_000, MHA) >= 100_000 * MHA.kv_bytes_per_token / PEAK_BYTES


def test_streams_take_the_longer_of_one_token_and_all():
    law = StreamLaw(1e-6, 1e12, token_bytes_per_s=1e9)
    assert law.times_s(np.array([1.0, 10_000.0]), 1000).tolist() == pytest.approx([2e-6, 11e-6])
    assert law.bulk_s(1e6) == pytest.approx(2e-6)


NVLINK = LinkSpec("nvlink3", 200e9, 2e-6)


def test_all_reduce_between_and_beyond_its_knots():
    law = KnotAllReduce(
        "nvlink3", (2, 8), (Knots((1e3, 1e6), (5e-6, 15e-6)), Knots((1e3, 1e6), (9e-6, 21e-6))), RingAllReduce(5e-6)
    )
    assert law.time_s(10, 2, NVLINK) == pytest.approx(5e-6)
    assert law.time_s(500_500, 2, NVLINK) == pytest.approx(10e-6)
    assert law.time_s(3e6, 2, NVLINK) == pytest.approx(45e-6), "bytes beyond the last size keep the last rate"
    assert law.time_s(1e6, 4, NVLINK) == pytest.approx(18e-6), "four ranks lie half-way between two and eight"


def test_all_reduce_on_another_link_or_more_ranks_is_analytic():
    domain = Domain({"num_bytes": (1e3, 1e6), "ranks": (2, 2)})
    law = KnotAllReduce("nvlink3", (2,), (Knots((1e3, 1e6), (5e-6, 15e-6)),), RingAllReduce(5e-6), domain)
    slow = LinkSpec("pcie4", 25e9, 10e-6)
    for ranks, link in ((2, slow), (4, NVLINK)):
        assert law.time_s(1e6, ranks, link) == law.other.time_s(1e6, ranks, link)
        assert law.basis(1e6, ranks, link) == Basis.ANALYTIC
    assert law.basis(1e6, 2, NVLINK) == Basis.INTERPOLATED
    assert law.basis(2e6, 2, NVLINK) == Basis.EXTRAPOLATED


def test_a_domain_tells_measured_interpolated_and_extrapolated():
    domain = Domain({"m": (1, 100), "n": (8, 16)}, {"m": (1, 10, 100), "n": (8, 16)})
    assert domain.basis(m=10, n=8) == Basis.MEASURED
    assert domain.basis(m=11, n=8) == Basis.INTERPOLATED
    assert domain.basis(m=101, n=8) == Basis.EXTRAPOLATED
    assert basis_in(None, m=1, n=1) == Basis.ANALYTIC
    assert Domain({"m": (1, 100)}).basis(m=1) == Basis.INTERPOLATED


def test_the_weakest_basis_counts():
    assert worst(Basis.MEASURED, Basis.EXTRAPOLATED, Basis.INTERPOLATED) == Basis.EXTRAPOLATED
    assert worst(Basis.ANALYTIC, Basis.EXTRAPOLATED) == Basis.ANALYTIC


def test_a_band_is_told_between_its_points():
    band = Band((1.0, 3.0), (0.8, 0.6), (1.1, 1.3))
    assert band.factor("low", 2.0) == pytest.approx(0.7)
    assert band.factor("high", 100.0) == pytest.approx(1.3)
