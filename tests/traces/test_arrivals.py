"""Arrival processes against theory."""

import numpy as np
import pytest

import traces
from traces import GenerateOptions
from traces.arrivals import bend

NUM = 40_000


def arrivals(**options):
    defaults = {"num_requests": NUM, "rate_rps": 5.0, "params": {"input_tokens": 1, "output_tokens": 1}}
    return traces.generate("fixed", GenerateOptions(**{**defaults, **options}))


@pytest.mark.parametrize(
    ("kind", "cv"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 1.0), ("gamma", 2.0), ("gamma", 3.0)]
)
def test_rate_and_variation_of_the_gaps(kind, cv):
    trace = arrivals(arrivals=kind, cv=cv)
    gaps = np.diff(trace.arrival_s)
    assert trace.arrival_s[0] == 0.0
    assert gaps.mean() == pytest.approx(0.2, rel=4 * cv / NUM**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03, "a renewal process"


def test_gamma_of_one_is_poisson():
    assert np.array_equal(arrivals(arrivals="gamma", cv=1.0).arrival_s, arrivals().arrival_s)


def test_saturated_is_all_at_once():
    trace = arrivals(arrivals="saturated", rate_rps=None)
    assert trace.is_saturated
    assert trace.closed is None


def test_closed_loop_has_users_and_think_times():
    trace = arrivals(arrivals="closed", rate_rps=None, users=8, think_s=2.0)
    assert trace.closed.users == 8
    assert not trace.arrival_s.any()
    assert trace.closed.think_s.mean() == pytest.approx(2.0, rel=0.03)
    assert trace.closed.think_s.std() == pytest.approx(2.0, rel=0.03)
    constant = arrivals(arrivals="closed", rate_rps=None, users=8, think_s=2.0, think_cv=0.0)
    assert set(constant.closed.think_s.tolist()) == {2.0}


def test_piecewise_rates_hold_in_each_step():
    profile = ((0, 0.5), (1000, 2.0), (2000, 0.0), (3000, 1.0))
    trace = arrivals(arrivals="piecewise", profile=profile)
    counts = np.histogram(trace.arrival_s, bins=[0, 1000, 2000, 3000, 4000])[0]
    assert counts[0] == pytest.approx(2500, rel=0.1)
    assert counts[1] == pytest.approx(10_000, rel=0.05)
    assert counts[2] == 0
    assert counts[3] == pytest.approx(5000, rel=0.1)


def test_piecewise_of_one_step_is_the_plain_process():
    assert np.array_equal(arrivals(arrivals="piecewise", profile=((0, 1.0),)).arrival_s, arrivals().arrival_s)


def test_piecewise_that_opens_idle_starts_at_its_first_request():
    trace = arrivals(arrivals="piecewise", profile=((0, 0.0), (100, 1.0)))
    assert np.allclose(trace.arrival_s, arrivals().arrival_s)


def test_ramp_grows_from_depth_below_to_the_full_rate():
    trace = arrivals(arrivals="ramp", period_s=2000, depth=0.8)
    counts = np.histogram(trace.arrival_s, bins=[0, 200, 1800, 2000, 4000])[0] / [200, 1600, 200, 2000]
    assert counts == pytest.approx([5 * 0.24, 5 * 0.6, 5 * 0.96, 5.0], rel=0.1)


def test_diurnal_keeps_the_mean_rate_over_whole_periods():
    trace = arrivals(arrivals="diurnal", period_s=1000, depth=0.5)
    phase = trace.arrival_s[trace.arrival_s < 7000] % 1000
    assert len(phase) == pytest.approx(35_000, rel=0.03)
    peak, trough = (np.count_nonzero((phase > a) & (phase < a + 100)) / 700 for a in (200, 700))
    assert peak == pytest.approx(5 * 1.49, rel=0.06)
    assert trough == pytest.approx(5 * 0.51, rel=0.08)
    assert np.all(np.diff(trace.arrival_s) >= 0)


def test_bend_inverts_the_integral_of_the_profile():
    profile = ((0.0, 0.5), (10.0, 2.0), (20.0, 0.0), (30.0, 1.0))
    assert bend(np.array([0.0, 4.0, 5.0, 24.9, 25.0, 26.0]), profile) == pytest.approx(
        [0.0, 8.0, 10.0, 19.95, 30.0, 31.0]
    )


def test_bursts_and_profiles_combine():
    trace = arrivals(arrivals="diurnal", period_s=1000, depth=0.0, cv=3.0)
    assert np.allclose(trace.arrival_s, arrivals(arrivals="gamma", cv=3.0).arrival_s)
