"""Fits find laws again from their own times, stray measurements among them; too few rows are refused."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.catalogue import load_gpu
from perfmodel.calibrate import Prior, fit, fit_error
from perfmodel.calibrate_allreduce import AllReduceRows, all_reduce_times, fit_all_reduce, fit_knots
from perfmodel.calibrate_attention import AttentionRows, decode_s, fit_decode, fit_prefill, prefill_s
from perfmodel.calibrate_gemm import Design, GemmRows, fit_gemm, gemm_s
from perfmodel.calibrate_stream import StreamRows, fit_stream, stream_s
from perfmodel.errors import InputError
from perfmodel.laws.allreduce import RingAllReduce
from perfmodel.laws.attention import Heads, PrefillLaw, StreamedDecode
from perfmodel.laws.flash2 import Flash2Decode
from perfmodel.laws.gemm import Tile, TileGemm
from perfmodel.laws.stream import StreamLaw

GPU = load_gpu("a100-80gb")
SEED = 20240101


def noisy(times, spread=0.02, strays=0.01):
    """Measurements: noise, and one in a hundred three times too long."""
    rng = np.random.default_rng(SEED)
    factor = np.exp(rng.normal(0.0, spread, len(times)))
    return times * np.where(rng.random(len(times)) < strays, 3.0, factor)


def grid(*columns):
    return [column.ravel().astype(float) for column in np.meshgrid(*columns, indexing="ij")]


def gemm_rows(time_s=None):
    m, n, k = grid([1, 8, 32, 64, 128, 256, 1024, 4096], [512, 1536, 4096, 8192, 12288], [512, 2048, 4096, 11008])
    return GemmRows(m, n, k, np.ones(len(m)) if time_s is None else time_s)


def true_gemm():
    tiles = (Tile(64, 64, 1e-6, 5e-9), Tile(128, 128, 3e-6, 13e-9), Tile(128, 256, 4.5e-6, 23e-9))
    peaks = GPU.memory_bytes_per_s, GPU.peak_flops_per_s
    return TileGemm(2.5e-6, 1.5e12, 2e-6, 2e12, tiles, (1, 2, 4, 8), 108, 2, *peaks)


def test_products_are_found_again():
    exact = gemm_s(true_gemm(), gemm_rows())
    law, error = fit_gemm(gemm_rows(noisy(exact)), GPU)
    assert error.median < 0.04, f"seed {SEED}"
    held = GemmRows(*grid([16, 100, 700, 2048], [3072, 5120], [1024, 8192]), np.ones(16))
    assert fit_error(gemm_s(law, held), gemm_s(true_gemm(), held)).mape < 0.05


def test_slopes_of_the_fit_are_those_of_its_times():
    """The analytic derivative against differences, where no row changes its kernel."""
    design = Design(gemm_rows(gemm_s(true_gemm(), gemm_rows())), GPU)
    values, step = design.prior.expected, 1e-6
    slopes = design.slopes(values)
    for i in range(len(values)):
        up, down = (values * np.exp(step * sign * (np.arange(len(values)) == i)) for sign in (1, -1))
        numeric = (np.log(design.time_s(up)) - np.log(design.time_s(down))) / (2 * step)
        assert np.allclose(slopes[:, i], numeric, atol=1e-4), design.prior.names[i]


def attention_rows(tokens, prefixes, rows=(1, 2, 8, 32, 128), heads=((8, 8), (32, 8), (8, 1))):
    count, new, prefix, pair = grid(rows, tokens, prefixes, range(len(heads)))
    shapes = np.array(heads, float)[pair.astype(int)]
    return AttentionRows(count, new, prefix, shapes[:, 0], shapes[:, 1], np.ones(len(count)))


def with_times(rows, times):
    return AttentionRows(rows.rows, rows.tokens, rows.prefix_tokens, rows.heads, rows.kv_heads, times)


def test_decode_attention_is_found_again_and_extrapolates():
    law = StreamedDecode(
        units=(1.0, 64.0, 1024.0),
        floor_s=(12e-6, 13e-6, 40e-6),
        base_s=(8e-6, 9e-6, 20e-6),
        streams=(1.0, 32.0, 1024.0),
        bytes_frac=(0.05, 0.6, 0.8),
        peak_bytes_per_s=GPU.memory_bytes_per_s,
        grouped_base_s=4e-6,
        min_rows=1.0,
        grouped_min_rows=12.0,
    )
    rows = attention_rows([1.0], [255, 511, 1023, 2047, 4095, 8191, 16383, 32767])
    found, error = fit_decode(with_times(rows, noisy(decode_s(law, rows))), GPU)
    assert error.median < 0.03, f"seed {SEED}"
    far = attention_rows([1.0], [131_071.0])
    assert fit_error(decode_s(found, far), decode_s(law, far)).mape < 0.06
    assert found.domain.ranges["context_tokens"] == (256.0, 32768.0)


FLASH2 = Flash2Decode(
    num_sms=108,
    sm_bytes_per_s=22e9,
    bytes_per_s=1.6e12,
    late_share=1.4,
    base_s=8e-6,
    row_head_s=1e-9,
    grouped_floor_s=18e-6,
    grouped_row_head_floor_s=1e-9,
    grouped_base_s=16e-6,
    grouped_row_head_s=1.5e-9,
    gather_s=4e-6,
    split_s=0.17e-6,
)


def test_kernels_that_split_only_grouped_heads_are_found_again():
    rows = attention_rows([1.0], [255, 511, 1023, 2047, 4095, 8191, 16383, 32767], rows=(1, 2, 8, 16, 32, 128))
    found, error = fit_decode(with_times(rows, noisy(decode_s(FLASH2, rows))), GPU)
    assert isinstance(found, Flash2Decode)
    assert error.median < 0.03, f"seed {SEED}"
    assert found.sm_bytes_per_s == pytest.approx(22e9, rel=0.05)
    far = attention_rows([1.0], [131_071.0], rows=(1, 2, 8))
    assert fit_error(decode_s(found, far), decode_s(FLASH2, far)).mape < 0.03


def test_what_a_benchmark_finds_in_its_cache_is_not_promised():
    """KV of up to 40 MiB is read three times as fast there; the law of a served model knows memory alone."""
    law = StreamedDecode(
        units=(1.0, 1024.0),
        floor_s=(12e-6, 30e-6),
        base_s=(10e-6, 20e-6),
        streams=(1.0, 1024.0),
        bytes_frac=(0.8, 0.8),
        peak_bytes_per_s=GPU.memory_bytes_per_s,
        cache_bytes=GPU.cache_bytes,
        cache_gain=3.0,
    )
    rows = attention_rows([1.0], [255, 511, 1023, 2047, 4095, 8191, 16383, 32767])
    warm = decode_s(law, rows)
    found, error = fit_decode(with_times(rows, noisy(warm, strays=0.0)), GPU)
    assert error.mape < 0.03, f"seed {SEED}"
    fits = rows.rows * rows.context_tokens * rows.kv_heads * 512 <= GPU.cache_bytes
    cold = np.array([found.terms(int(n), Heads(int(h), int(k), 128, 2)).at(n * s) for n, h, k, s in shapes_of(rows)])
    truth = np.array([law.terms(int(n), Heads(int(h), int(k), 128, 2)).at(n * s) for n, h, k, s in shapes_of(rows)])
    assert fits.any() and (warm[fits] < 0.8 * truth[fits]).any()
    assert fit_error(cold, truth).mape < 0.06


def shapes_of(rows):
    return zip(rows.rows, rows.heads, rows.kv_heads, rows.context_tokens, strict=True)


def test_one_law_for_numbers_and_for_arrays():
    rows = attention_rows([1.0], [999.0])
    cacheless = replace(GPU, cache_bytes=0)
    seen = with_times(attention_rows([1.0], [255, 1023, 4095, 16383]), np.geomspace(1e-5, 1e-3, 60))
    law, _ = fit_decode(seen, cacheless)
    for one in (law, FLASH2):
        for i, time_s in enumerate(decode_s(one, rows)):
            terms = one.terms(int(rows.rows[i]), Heads(int(rows.heads[i]), int(rows.kv_heads[i]), 128, 2))
            assert time_s == pytest.approx(terms.at(rows.rows[i] * 1000))


def test_prefill_attention_is_found_again_behind_a_prefix():
    peaks = GPU.peak_flops_per_s, GPU.memory_bytes_per_s
    law = PrefillLaw(9e-6, 0.55 * peaks[0], *peaks, 0.3e-9, 1e-9, 20e-9, 15e-9, 2.0, 0.7)
    rows = attention_rows([128, 256, 512, 1024, 2048, 8192], [0, 512, 4096], rows=[1])
    found, error = fit_prefill(with_times(rows, noisy(prefill_s(law, rows))), GPU)
    assert error.median < 0.03, f"seed {SEED}"
    far = attention_rows([2048.0], [65_536.0], rows=[1])
    assert fit_error(prefill_s(found, far), prefill_s(law, far)).mape < 0.06


def test_streams_are_found_again():
    law = StreamLaw(4e-6, 1.2e12, 20e9)
    tokens, per_token = grid([1, 8, 64, 256, 1024, 4096], [8192, 40_000])
    rows = StreamRows(tokens, per_token, np.ones(len(tokens)))
    found, error = fit_stream(StreamRows(tokens, per_token, noisy(stream_s(law, rows), strays=0.0)), GPU)
    assert error.mape < 0.05, f"seed {SEED}"
    assert found.bytes_per_s == pytest.approx(1.2e12, rel=0.1)
    assert found.bytes_per_s <= GPU.memory_bytes_per_s


def all_reduce_rows():
    """Latency and rate, another algorithm above 1 MiB, one stray."""
    num_bytes, ranks = grid(2.0 ** np.arange(7, 28), [2, 4])
    small = num_bytes <= 2**20
    times = np.where(small, 5e-6 + num_bytes / 100e9, 40e-6 + num_bytes / 90e9) * np.where(ranks == 2, 1.0, 1.4)
    times[4] *= 2.5
    return AllReduceRows(num_bytes, ranks, times)


def test_all_reduce_keeps_the_jump_and_forgets_the_stray():
    rows = all_reduce_rows()
    law, error = fit_all_reduce(rows, "nvlink3", RingAllReduce(5e-6))
    times = all_reduce_times(law, rows)
    assert error.median < 0.01
    assert times[4] < 0.5 * rows.time_s[4]
    jump = fit_knots(rows.pick(rows.ranks == 2), 2)
    assert jump.at(2**20) == pytest.approx(5e-6 + 2**20 / 100e9, rel=0.02)
    assert jump.at(1.5 * 2**20) == pytest.approx(40e-6 + 1.5 * 2**20 / 90e9, rel=0.02)


def test_all_reduce_times_rise():
    law, _ = fit_all_reduce(all_reduce_rows(), "nvlink3", RingAllReduce(5e-6))
    for knots in law.knots:
        assert all(np.diff(knots.time_s) >= 0)
        assert len(knots.num_bytes) <= 14


def test_a_prior_decides_what_the_data_do_not():
    """Time depends on a alone: b stays where it was expected, a goes where the data are."""
    prior = Prior.of(a=(1.0, 1.0), b=(7.0, 1.0))
    found = fit(prior, lambda values: np.full(50, values[0]), np.full(50, 3.0))
    assert prior.one(found, "a") == pytest.approx(3.0, rel=0.01)
    assert prior.one(found, "b") == pytest.approx(7.0)


def test_priors_of_several_values_are_told_apart():
    prior = Prior.of(x=([1.0, 2.0], 0.5), y=(3.0, 1.0))
    assert prior.names == ("x.0", "x.1", "y")
    assert prior.take(np.array([4.0, 5.0, 6.0]), "x").tolist() == [4.0, 5.0]


@pytest.mark.parametrize(
    ("refuse", "message"),
    [
        (lambda: fit_gemm(gemm_rows().pick(np.arange(9)), GPU), "gemm: 9 rows .allowed: 20"),
        (lambda: fit_decode(attention_rows([1.0], [63.0]), GPU), "decode_attention: 0 rows"),
        (lambda: fit_prefill(attention_rows([64.0], [0.0]), GPU), "prefill_attention: 0 rows"),
        (lambda: fit_stream(StreamRows(*[np.ones(5)] * 3), GPU), "5 rows .allowed: 10"),
        (lambda: fit_knots(AllReduceRows(np.ones(9), np.ones(9), np.ones(9)), 2), "over 2 ranks: 1 message sizes"),
    ],
)
def test_too_few_rows_are_refused(refuse, message):
    with pytest.raises(InputError, match=message):
        refuse()
