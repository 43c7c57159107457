"""Fits the laws of a machine on which one model was measured whole: means into tables, affine functions by relative error.

Means: a run pays for the slow moments of a machine, too."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from perfmodel.basis import Domain
from perfmodel.calibrate import FitError, Floats, fit_error
from perfmodel.errors import InputError
from perfmodel.laws.attention import linear
from perfmodel.laws.whole import WholeChunks, WholeDecode, WholeKnots


def fit_knots(tokens: Floats, time_s: Floats) -> tuple[WholeKnots, FitError]:
    """A table. Raises InputError for fewer than two sizes."""
    sizes = np.unique(tokens)
    if len(sizes) < 2:
        raise InputError(f"{len(sizes)} sizes (allowed: 2 or more)")
    times = [float(np.mean(time_s[tokens == size])) for size in sizes]
    domain = Domain({"tokens": (float(sizes[0]), float(sizes[-1]))}, {"tokens": tuple(sizes.tolist())})
    law = WholeKnots(tuple(sizes.tolist()), tuple(times), domain)
    return law, fit_error(law.times_s(tokens), time_s)


def fit_whole_decode(rows: Floats, context_tokens: Floats, time_s: Floats) -> tuple[WholeDecode, FitError]:
    """Raises InputError where no batch size was measured at two contexts."""
    counts, lines = [], []
    for count in np.unique(rows):
        here = rows == count
        if len(np.unique(context_tokens[here])) > 1:
            counts.append(float(count))
            lines.append(two_lines(count * context_tokens[here], time_s[here]))
    if not counts:
        raise InputError("decode_attention: no batch size at two contexts")
    ranges = {
        "rows": (counts[0], counts[-1]),
        "context_tokens": (float(context_tokens.min()), float(context_tokens.max())),
    }
    base_s, s_per_token, early_s, early_s_per_token = (tuple(column) for column in zip(*lines, strict=True))
    law = WholeDecode(tuple(counts), base_s, s_per_token, early_s, early_s_per_token, Domain(ranges))
    return law, fit_error(decode_s(law, rows, context_tokens), time_s)


def decode_s(law: WholeDecode, rows: Floats, context_tokens: Floats) -> Floats:
    """What a law says of batches of equal rows."""
    _, base_s, s_per_token, early_s, early_s_per_token = law.affine(rows, 0, 0, 0, 0)
    kv_tokens = rows * context_tokens
    times: Floats = np.minimum(base_s + s_per_token * kv_tokens, early_s + early_s_per_token * kv_tokens)
    return times


def two_lines(kv_tokens: Floats, time_s: Floats) -> tuple[float, float, float, float]:
    """Base and slope of a late and of an early line, whose lower one is nearest; one line where none bends down."""
    one = _line(kv_tokens, time_s, np.full(len(time_s), True))
    best, best_error = (one[0], one[1], one[0], one[1]), _error(one, one, kv_tokens, time_s)
    inner = np.unique(kv_tokens)[1:-1]  # the lines share a point, or have two or more each
    for last, first in [*((size, size) for size in inner), *pairwise(inner)]:
        early, late = (_line(kv_tokens, time_s, part) for part in (kv_tokens <= last, kv_tokens >= first))
        error = _error(early, late, kv_tokens, time_s)
        if early[1] > late[1] and error < best_error:
            best, best_error = (late[0], late[1], early[0], early[1]), error
    return best


def _line(kv_tokens: Floats, time_s: Floats, part: NDArray[np.bool_]) -> list[float]:
    return relative_nnls([np.ones(part.sum()), kv_tokens[part]], time_s[part])


def _error(early: list[float], late: list[float], kv_tokens: Floats, time_s: Floats) -> float:
    lower_s = np.minimum(early[0] + early[1] * kv_tokens, late[0] + late[1] * kv_tokens)
    return float(np.square(lower_s / time_s - 1).sum())


def fit_whole_prefill(tokens: Floats, prefix_tokens: Floats, time_s: Floats) -> tuple[WholeChunks, FitError]:
    """Raises InputError for fewer than two chunks that were measured behind two prefixes."""
    kv_tokens = prefix_tokens + (tokens + 1) / 2  # that a query reads on average
    sizes = [float(size) for size in np.unique(tokens) if len(np.unique(prefix_tokens[tokens == size])) > 1]
    if len(sizes) < 2:
        raise InputError(f"prefill_attention: {len(sizes)} chunks behind two prefixes (allowed: 2 or more)")
    lines = [_line(kv_tokens, time_s, tokens == size) for size in sizes]
    base_s, s_per_kv_token = (tuple(column) for column in zip(*lines, strict=True))
    ranges = {
        "tokens": (sizes[0], sizes[-1]),
        "prefix_tokens": (float(prefix_tokens.min()), float(prefix_tokens.max())),
    }
    law = WholeChunks(tuple(sizes), base_s, s_per_kv_token, Domain(ranges))
    priced_s = linear(tokens, law.tokens, base_s) + linear(tokens, law.tokens, s_per_kv_token) * kv_tokens
    return law, fit_error(priced_s, time_s)


def relative_nnls(columns: list[Floats], time_s: Floats) -> list[float]:
    """Coefficients ≥ 0 of least squared relative error."""
    found, _ = nnls(np.stack(columns, axis=1) / time_s[:, None], np.ones(len(time_s)))
    return [float(value) for value in found]
