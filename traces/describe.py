"""What a workload is like, in numbers: counts, rate, percentiles, burstiness."""

from typing import Any

import numpy as np
import numpy.typing as npt

from traces.trace import Floats, Trace

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
MINUTE_S = 60.0


def describe(trace: Trace) -> dict[str, Any]:
    """Everything that `infsim traces describe` prints, fit for JSON."""
    return {
        "num_requests": len(trace),
        "duration_s": trace.duration_s,
        "rate_rps": _number(trace.mean_rate_rps),
        "input_tokens": spread(trace.input_tokens),
        "output_tokens": spread(trace.output_tokens),
        "context_tokens": spread(trace.context_tokens),
        "output_share_frac": float(trace.output_tokens.sum() / trace.context_tokens.sum()),
        "num_sessions": None if trace.session is None else len(np.unique(trace.session)),
        **burstiness(trace.arrival_s),
    }


def spread(tokens: npt.NDArray[np.int64]) -> dict[str, float]:
    """Mean, standard deviation (over n, as in workloads.md), extremes and percentiles (values that occur)."""
    values = np.percentile(tokens, PERCENTILES, method="inverted_cdf")
    return {
        "mean": float(tokens.mean()),
        "sd": float(tokens.std()),
        "min": int(tokens.min()),
        **{f"p{p}": int(value) for p, value in zip(PERCENTILES, values, strict=True)},
        "max": int(tokens.max()),
    }


def burstiness(arrival_s: Floats) -> dict[str, float | int | None]:
    """How uneven the arrivals are.

    `gap_cv`: SD / mean of the gaps (Poisson 1) · `dispersion_60s`: variance / mean of the counts per full minute (Poisson 1) ·
    `peak_60s_over_mean`: busiest minute over the mean one · `empty_minutes` · `longest_gap_s` · `same_instant_frac`: share of
    requests that arrive together with the one before. None where there is too little to say.
    """
    gaps = np.diff(arrival_s)
    counts = minute_counts(arrival_s)
    mean_gap, mean_count = (float(part.mean()) if len(part) else 0.0 for part in (gaps, counts))
    return {
        "gap_cv": float(gaps.std()) / mean_gap if mean_gap > 0 else None,
        "dispersion_60s": float(counts.var()) / mean_count if len(counts) > 1 and mean_count > 0 else None,
        "peak_60s_over_mean": float(counts.max()) / mean_count if mean_count > 0 else None,
        "empty_minutes": int(np.count_nonzero(counts == 0)),
        "longest_gap_s": float(gaps.max()) if len(gaps) else None,
        "same_instant_frac": float(np.mean(gaps == 0)) if len(gaps) else None,
    }


def minute_counts(arrival_s: Floats) -> npt.NDArray[np.int64]:
    """Requests in each full minute from the first arrival on."""
    num_minutes = int(arrival_s[-1] // MINUTE_S)
    inside = arrival_s[arrival_s < num_minutes * MINUTE_S]
    return np.bincount((inside // MINUTE_S).astype(np.int64), minlength=num_minutes)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value
