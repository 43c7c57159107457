"""Fits the law of element-wise kernels."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.basis import Domain
from perfmodel.calibrate import FitError, Floats, Prior, fit, fit_error
from perfmodel.errors import InputError
from perfmodel.laws.stream import StreamLaw
from perfmodel.specs import GpuSpec

LEAST_ROWS = 10


@dataclass(frozen=True)
class StreamRows:
    """One kind of kernel: tokens, bytes read and written for each, seconds."""

    tokens: Floats
    bytes_per_token: Floats
    time_s: Floats

    def __len__(self) -> int:
        return len(self.tokens)

    def pick(self, keep: NDArray[Any]) -> "StreamRows":
        return StreamRows(self.tokens[keep], self.bytes_per_token[keep], self.time_s[keep])


def fit_stream(rows: StreamRows, gpu: GpuSpec) -> tuple[StreamLaw, FitError]:
    """The law and its error. Never faster than the memory's peak. Raises InputError for too few rows."""
    if len(rows) < LEAST_ROWS:
        raise InputError(f"element-wise kernels: {len(rows)} rows (allowed: {LEAST_ROWS} or more)")
    peak = gpu.memory_bytes_per_s
    prior = Prior.of(launch_s=(3e-6, 1.0), bytes_per_s=(0.8 * peak, 1.0), token_bytes_per_s=(0.01 * peak, 2.0))

    def law_of(values: Floats) -> StreamLaw:
        launch_s, bytes_per_s, token_bytes_per_s = values.tolist()
        return StreamLaw(launch_s, min(bytes_per_s, peak), token_bytes_per_s)

    values = fit(prior, lambda values: stream_s(law_of(values), rows), rows.time_s)
    ranges = {"tokens": (float(rows.tokens.min()), float(rows.tokens.max()))}
    law = replace(law_of(values), domain=Domain(ranges))
    return law, fit_error(stream_s(law, rows), rows.time_s)


def stream_s(law: StreamLaw, rows: StreamRows) -> Floats:
    """What a law says of the rows."""
    alone_s = rows.bytes_per_token / law.token_bytes_per_s
    return law.launch_s + np.maximum(alone_s, rows.tokens * rows.bytes_per_token / law.bytes_per_s)
