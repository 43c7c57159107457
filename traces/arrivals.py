"""When requests come: renewal processes at rate 1, stretched by a rate or bent by a profile of rates.

Every process is drawn at rate 1 from its own stream and divided by the rate, so that t(rate r) = t(1)/r. The first n
arrivals do not depend on how many follow.
"""

import numpy as np

from perfmodel.errors import InputError
from traces.options import GenerateOptions
from traces.seeds import stream
from traces.trace import ClosedLoop, Floats

STEPS_PER_PERIOD = 288  # a diurnal day in steps of 5 minutes
_MIDDLES = (np.arange(STEPS_PER_PERIOD) + 0.5) / STEPS_PER_PERIOD
Profile = tuple[tuple[float, float], ...]


def unit_arrivals(num_requests: int, cv: float, seed: int) -> Floats:
    """Renewal arrivals with gaps of mean 1 and coefficient of variation `cv` (gamma; 1 is Poisson), the first at 0."""
    return np.cumsum(unit_gaps(num_requests, cv, stream(seed, "arrivals")))


def unit_gaps(num_requests: int, cv: float, rng: np.random.Generator) -> Floats:
    """0, then gaps of mean 1."""
    gaps = np.zeros(num_requests)
    if cv == 1.0:
        gaps[1:] = rng.standard_exponential(num_requests - 1)
    else:
        gaps[1:] = rng.standard_gamma(cv**-2, num_requests - 1) * cv**2
    return gaps


def open_arrivals(options: GenerateOptions, rate_rps: float) -> Floats:
    """Arrivals in seconds for every kind but closed and saturated, the first at 0."""
    arrival_s = unit_arrivals(options.num_requests, options.cv, options.seed) / rate_rps
    if options.arrivals == "piecewise":
        assert options.profile is not None
        arrival_s = bend(arrival_s, options.profile)
    elif options.arrivals == "ramp":
        arrival_s = bend(arrival_s, (*_steps(options, 1.0 - options.depth * (1.0 - _MIDDLES)), (options.period_s, 1.0)))
    elif options.arrivals == "diurnal":
        periods = np.floor(arrival_s / options.period_s) * options.period_s  # the mean share of a period is 1
        day = _steps(options, 1.0 + options.depth * np.sin(2 * np.pi * _MIDDLES))
        arrival_s = periods + bend(arrival_s - periods, day)
    since_first_s: Floats = arrival_s - arrival_s[0]
    return since_first_s


def _steps(options: GenerateOptions, shares: Floats) -> Profile:
    starts_s = np.arange(STEPS_PER_PERIOD) * (options.period_s / STEPS_PER_PERIOD)
    return tuple(zip(starts_s.tolist(), shares.tolist(), strict=True))


def bend(work_s: Floats, profile: Profile) -> Floats:
    """Times at which ∫ share dt reaches `work_s`: the inverse of a piecewise linear function, exact at every step."""
    starts_s = np.array([start_s for start_s, _ in profile])
    shares = np.array([share for _, share in profile])
    done_s = np.concatenate(([0.0], np.cumsum(np.diff(starts_s) * shares[:-1])))
    step = np.searchsorted(done_s, work_s, side="right") - 1
    bent_s: Floats = starts_s[step] + (work_s - done_s[step]) / shares[step]
    return bent_s


def closed_loop(options: GenerateOptions) -> ClosedLoop:
    """Users and think times (gamma with `think_cv`; 0 is constant)."""
    assert options.users is not None
    rng = stream(options.seed, "think")
    think_s = np.full(options.num_requests, options.think_s)
    if options.think_cv > 0.0:
        think_s = options.think_s * rng.standard_gamma(options.think_cv**-2, options.num_requests) * options.think_cv**2
    return ClosedLoop(options.users, think_s)


def arrivals_for(options: GenerateOptions, recorded_rps: float | None) -> tuple[Floats, ClosedLoop | None]:
    """Arrivals of any kind; `recorded_rps` stands in where no rate is given."""
    if options.arrivals == "saturated":
        return np.zeros(options.num_requests), None
    if options.arrivals == "closed":
        return np.zeros(options.num_requests), closed_loop(options)
    rate_rps = options.rate_rps or recorded_rps
    if rate_rps is None:
        raise InputError(f"rate_rps: arrivals {options.arrivals} need a rate, and the generator has none of its own")
    return open_arrivals(options, rate_rps), None
