"""Length distributions. Every draw is the inverse of a distribution function at a uniform number, one per request.

So the first n lengths of a seed are the same however many follow, and a changed parameter moves no other request's draw.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from perfmodel.errors import InputError
from traces.trace import Floats

_INVERSE_NORMAL = NormalDist().inv_cdf
TOLERANCE_FRAC = 1e-6


@dataclass(frozen=True)
class TruncatedLogNormal:
    """exp(N(mu, sigma²)) conditioned on [min_tokens, max_tokens]."""

    mu: float
    sigma: float
    min_tokens: float
    max_tokens: float

    @property
    def _bounds(self) -> tuple[float, float]:
        """The limits in standard units."""
        ends = (math.log(self.min_tokens), math.log(self.max_tokens))
        return (ends[0] - self.mu) / self.sigma, (ends[1] - self.mu) / self.sigma

    @property
    def mass(self) -> float:
        """Share of the log-normal that lies within the limits."""
        return _normal_mass(*self._bounds)

    def moment(self, order: int) -> float:
        """E[x^order] = exp(k mu + k² sigma²/2) · (Φ(b − k sigma) − Φ(a − k sigma)) / (Φ(b) − Φ(a))."""
        low, high = self._bounds
        shift = order * self.sigma
        return math.exp(order * self.mu + 0.5 * shift**2) * _normal_mass(low - shift, high - shift) / self.mass

    @property
    def mean(self) -> float:
        return self.moment(1)

    @property
    def sd(self) -> float:
        return math.sqrt(max(self.moment(2) - self.moment(1) ** 2, 0.0))

    def quantile(self, uniform: Floats) -> Floats:
        """x at which the distribution function is `uniform` in [0, 1)."""
        below = _normal_mass(-math.inf, self._bounds[0])
        share = np.clip(below + uniform * self.mass, 1e-300, 1.0 - 1e-16)
        normal = np.fromiter(map(_INVERSE_NORMAL, share.tolist()), dtype=np.float64, count=len(uniform))
        return np.clip(np.exp(self.mu + self.sigma * normal), self.min_tokens, self.max_tokens)


def _normal_mass(low: float, high: float) -> float:
    """Standard normal probability of [low, high], to full relative precision in the tails."""
    if low > 0:
        low, high = -high, -low
    return 0.5 * (math.erfc(-high / math.sqrt(2)) - math.erfc(-low / math.sqrt(2)))


@dataclass(frozen=True)
class LogUniform:
    """Uniform in the logarithm between the limits."""

    min_tokens: float
    max_tokens: float

    def quantile(self, uniform: Floats) -> Floats:
        values: Floats = self.min_tokens * (self.max_tokens / self.min_tokens) ** uniform
        return values


def checked_lognormal(mu: float, sigma: float, min_tokens: float, max_tokens: float) -> TruncatedLogNormal:
    """Raises `InputError` where the limits leave (almost) nothing of the log-normal."""
    shape = TruncatedLogNormal(mu, sigma, min_tokens, max_tokens)
    if shape.mass < 1e-12:
        raise InputError(f"lognormal: mu {mu:g}, sigma {sigma:g} lies outside [{min_tokens:g}, {max_tokens:g}] tokens")
    return shape


def fit_lognormal(mean: float, sd: float, min_tokens: float, max_tokens: float) -> TruncatedLogNormal:
    """The truncated log-normal whose mean and SD (after truncation) are given, by Newton's method in (mu, log sigma).

    Raises `InputError` where there is none: between two limits a mean admits only so large an SD.
    """
    log_var = math.log1p((sd / mean) ** 2)
    point = np.array([math.log(mean) - 0.5 * log_var, 0.5 * math.log(log_var)])
    target = np.array([math.log(mean), math.log(sd)])
    try:
        for _ in range(60):
            error = _log_moments(point, min_tokens, max_tokens) - target
            if np.abs(error).max() < TOLERANCE_FRAC:
                return TruncatedLogNormal(float(point[0]), math.exp(float(point[1])), min_tokens, max_tokens)
            point = _newton_step(point, error, min_tokens, max_tokens)
    except (OverflowError, ZeroDivisionError, np.linalg.LinAlgError):
        pass
    raise InputError(
        f"lognormal: no truncated log-normal on [{min_tokens:g}, {max_tokens:g}] has mean {mean:g} and SD {sd:g} tokens"
    )


def _log_moments(point: Floats, min_tokens: float, max_tokens: float) -> Floats:
    shape = TruncatedLogNormal(float(point[0]), math.exp(float(point[1])), min_tokens, max_tokens)
    return np.log(np.maximum([shape.mean, shape.sd], 1e-12))


def _newton_step(point: Floats, error: Floats, min_tokens: float, max_tokens: float) -> Floats:
    """One step with a numerical Jacobian, at most 0.5 in either coordinate, inside limits beyond which nothing is sane."""
    width = 1e-5
    columns = []
    for axis in np.eye(2) * width:
        above, below = (_log_moments(point + side * axis, min_tokens, max_tokens) for side in (1, -1))
        columns.append((above - below) / (2 * width))
    move = np.linalg.solve(np.array(columns).T, error)
    moved = point - move * min(1.0, 0.5 / max(float(np.abs(move).max()), 1e-12))
    return np.clip(moved, [-20.0, math.log(1e-3)], [30.0, math.log(8.0)])
