"""Laws of a machine on which one model was measured whole: they give back what was measured, and the line in between."""

import numpy as np
import pytest

from perfmodel.basis import Basis
from perfmodel.calibrate_whole import fit_knots, fit_whole_decode, fit_whole_prefill
from perfmodel.errors import InputError
from perfmodel.laws.attention import Heads

SHAPE = Heads(9, 3, 64, 4)


def test_knots_are_met_and_joined_by_lines():
    law, error = fit_knots(np.array([1.0, 4.0, 4.0, 10.0]), np.array([1.0, 4.0, 4.0, 16.0]))
    assert law.times_s(np.array([1.0, 4.0, 7.0, 10.0, 13.0])).tolist() == [1, 4, 10, 16, 22]
    assert error.mape == 0
    assert [law.basis(n) for n in (4, 7, 20)] == [Basis.MEASURED, Basis.INTERPOLATED, Basis.EXTRAPOLATED]
    with pytest.raises(InputError, match="1 sizes"):
        fit_knots(np.array([1.0]), np.array([1.0]))


def test_decode_finds_the_affine_law_of_each_batch_size():
    rows = np.repeat([1.0, 4.0, 16.0], 3)
    contexts = np.tile([64.0, 512.0, 2048.0], 3)
    law, error = fit_whole_decode(rows, contexts, 1e-4 * rows + 1e-7 * rows * contexts)
    assert error.mape < 1e-6
    floor_s, base_s, s_per_token, *_ = law.affine(np.array([4, 10]), *SHAPE)
    assert floor_s.tolist() == [0, 0]
    assert base_s == pytest.approx([4e-4, 1e-3])
    assert s_per_token == pytest.approx([1e-7, 1e-7])
    assert law.basis_along_context(4, SHAPE).basis(100) == Basis.INTERPOLATED
    assert law.basis_along_context(64, SHAPE).basis(100) == Basis.EXTRAPOLATED


def test_a_batch_size_whose_time_bends_down_has_two_lines():
    contexts = np.array([64.0, 256.0, 1024.0, 4096.0])
    time_s = np.minimum(1e-4 + 4e-6 * contexts, 9e-4 + 1e-6 * contexts)
    law, error = fit_whole_decode(np.ones(4), contexts, time_s)
    assert error.mape < 1e-6
    late, early = (law.base_s[0], law.s_per_token[0]), (law.early_s[0], law.early_s_per_token[0])
    assert late == pytest.approx((9e-4, 1e-6)) and early == pytest.approx((1e-4, 4e-6))


def test_prefill_has_a_line_for_each_chunk():
    """The larger chunk takes twice as long for each pair, as where its scores no longer lie in a cache."""
    tokens, prefix = np.repeat([16.0, 256.0], 3), np.tile([0.0, 256.0, 2048.0], 2)
    base_s, pair_s = np.repeat([1e-4, 9e-4], 3), np.repeat([1e-9, 2e-9], 3)
    pairs = tokens * prefix + tokens * (tokens + 1) / 2
    law, error = fit_whole_prefill(tokens, prefix, base_s + pair_s * pairs)
    assert error.mape < 1e-6
    assert law.time_s(16, 116, 1736, SHAPE) == pytest.approx(1e-4 + 1e-9 * 1736)
    assert law.time_s(256, 356, 58496, SHAPE) == pytest.approx(9e-4 + 2e-9 * 58496)
    between = law.time_s(136, 236, 136 * 200, SHAPE)  # 200 KV tokens a query
    assert between == pytest.approx((1e-4 + 1e-9 * 16 * 200 + 9e-4 + 2e-9 * 256 * 200) / 2)
    assert law.time_s(8, 100, 800, SHAPE) == law.time_s(16, 100, 1600, SHAPE), "a smaller chunk takes as long"
    with pytest.raises(InputError, match="1 chunks behind two prefixes"):
        fit_whole_prefill(tokens[:4], prefix[:4], base_s[:4])
