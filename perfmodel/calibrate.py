"""Fitting, in general: robust least squares on logarithms of time, parameters positive, pulled gently to a prior.

The prior decides only what the data do not: one unit of `pull` weighs as much as one row that is off by a factor e^sigma.
Takes arrays, returns laws; opens no file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Floats = NDArray[np.float64]
TOLERANCE = 0.05  # errors beyond about this count linearly: stray measurements do not bend a curve


@dataclass(frozen=True)
class FitError:
    """Relative errors |law / measured − 1| of a law over the rows it was fitted to."""

    rows: int
    mape: float
    median: float
    p90: float


def fit_error(law_s: Floats, measured_s: Floats) -> FitError:
    error = np.abs(law_s / measured_s - 1.0)
    return FitError(len(error), float(error.mean()), float(np.median(error)), float(np.quantile(error, 0.9)))


@dataclass(frozen=True)
class Prior:
    """Named positive parameters: expected value, and by which factor e^sigma it may well be off."""

    names: tuple[str, ...]
    expected: Floats
    sigma: Floats
    pull: float = 0.5

    @classmethod
    def of(cls, pull: float = 0.5, **named: tuple[float | Sequence[float], float]) -> "Prior":
        """`name=(expected value or values, sigma)`; a name with several values becomes name.0, name.1, …"""
        names, expected, sigma = [], [], []
        for name, (values, spread) in named.items():
            many = [values] if isinstance(values, float | int) else list(values)
            names += [name if len(many) == 1 else f"{name}.{i}" for i in range(len(many))]
            expected += many
            sigma += [spread] * len(many)
        return cls(tuple(names), np.array(expected, float), np.array(sigma, float), pull)

    def take(self, values: Floats, name: str) -> Floats:
        """The values of one name."""
        return values[[i for i, known in enumerate(self.names) if known.partition(".")[0] == name]]

    def one(self, values: Floats, name: str) -> float:
        return float(self.take(values, name)[0])


def fit(
    prior: Prior,
    time_s: Callable[[Floats], Floats],
    measured_s: Floats,
    slopes: Callable[[Floats], Floats] | None = None,
    weights: Floats | None = None,
) -> Floats:
    """Parameters that minimise the robust error of log time. `slopes(values)`: ∂ log time / ∂ log parameter, [rows, params]."""
    start = np.log(prior.expected)
    pull = prior.pull / prior.sigma

    def residuals(logs: Floats) -> Floats:
        errors = np.log(time_s(np.exp(logs)) / measured_s)
        return np.concatenate([errors if weights is None else weights * errors, pull * (logs - start)])

    def jacobian(logs: Floats) -> Floats:
        assert slopes and weights is None
        return np.vstack([slopes(np.exp(logs)), np.diag(pull)])

    # lsmr: an exact solver calls threaded LAPACK on tiny matrices, which takes ten times as long on a busy machine
    options = {"loss": "soft_l1", "f_scale": TOLERANCE, "max_nfev": 100, "x_scale": prior.sigma, "tr_solver": "lsmr"}
    found = least_squares(residuals, start, jacobian if slopes else "2-point", **options)
    fitted: Floats = np.exp(found.x)
    return fitted


def robust_error(law_s: Floats, measured_s: Floats) -> float:
    """What `fit` minimises, without weights and prior: to choose between fits."""
    error = np.log(law_s / measured_s) / TOLERANCE
    return float(np.mean(np.sqrt(1.0 + error * error)))
