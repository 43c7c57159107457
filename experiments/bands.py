"""By how much data sets disagree: factors on a part's time along tokens, rows or bytes, carried by a pack."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.fitting import OPERATORS, Fitted, Rows, floats, short
from experiments.profile import Profile
from perfmodel.calibrate import Floats
from perfmodel.calibrate_attention import SHORTEST_DECODE

OCTAVES = tuple(2**i for i in range(13))
BANDS = {  # part: operator, what it goes along, where it is told
    "non_attention": ("gemm", "m", OCTAVES),
    "decode_attention": ("decode_attention", "rows", OCTAVES[:8]),
    "prefill_attention": ("prefill_attention", "tokens", (1,)),
    "collectives": ("all_reduce", "num_bytes", tuple(2**i for i in range(20, 30, 2))),
}
LEAST_IN_BIN = 5
NCCL_BYTES = 4 << 20  # larger messages are NCCL's in every source; vLLM has its own kernel for small ones


def bands(profiles: Sequence[Profile], fitted: dict[str, list[Fitted]]) -> dict[str, Any]:
    """Factors on a part's time within which 10 to 90 % of every data set lie, never tighter than the fit's error."""
    return {part: band(*of, profiles, fitted[of[0]]) for part, of in BANDS.items() if of[0] in fitted}


def band(
    name: str, along: str, at: Sequence[int], profiles: Sequence[Profile], laws: Sequence[Fitted]
) -> dict[str, Any]:
    error = laws[0].error.mape
    low, high = np.full(len(at), 1.0 - error), np.full(len(at), 1.0 + error)
    told = -1
    for profile in profiles:
        if profile is laws[0].source:
            continue
        x, ratio = ratios(name, along, profile, laws)
        for i, here in enumerate(bins(x, at)):
            if here.sum() >= LEAST_IN_BIN:
                q10, q90 = np.quantile(ratio[here], (0.1, 0.9))
                low[i], high[i], told = min(low[i], q10), max(high[i], q90), max(told, i)
    if told >= 0:  # beyond the last size another source measured, doubts stay
        low[told:], high[told:] = low[told], high[told]
    return {"at": [float(x) for x in at], "low": short(low.tolist()), "high": short(high.tolist())}


def bins(x: Floats, at: Sequence[int]) -> Iterator[Any]:
    """Of each of `at`, the x that are nearest to it on a logarithmic axis."""
    edges = np.sqrt(np.array(at[1:], float) * np.array(at[:-1], float))
    which = np.digitize(x, edges)
    for i in range(len(at)):
        yield which == i


def ratios(name: str, along: str, profile: Profile, laws: Sequence[Fitted]) -> tuple[Floats, Floats]:
    """(x, measured / law) of another source, where it measured the same thing.

    Of products, a layer's four together: single ones err both ways. Not prefill attention: the other sources' kernels are
    older and two to three times slower, which is no doubt about this one.
    """
    operator, table = OPERATORS[name], profile.operator(name)
    rows = operator.rows(table)
    if not len(rows) or name == "prefill_attention":
        return np.zeros(0), np.zeros(0)
    if name == "gemm":
        return layer_ratios(table, operator.times(laws[0].law, rows))
    rows = rows.pick(comparable(name, rows, laws[0]))
    return getattr(rows, along), rows.time_s / operator.times(laws[0].law, rows)


def comparable(name: str, rows: Rows, law: Fitted) -> Any:
    """Rows that another source measured under the law's conditions."""
    if name == "all_reduce":
        return rows.num_bytes > NCCL_BYTES
    return (rows.kv_heads <= law.law.domain.ranges["kv_heads"][1]) & (rows.context_tokens >= SHORTEST_DECODE)


def layer_ratios(table: pd.DataFrame, law_s: Floats) -> tuple[Floats, Floats]:
    """Products of one layer summed: rows of one model with the same tokens and ranks belong together."""
    frame = pd.DataFrame(
        {
            "model": table["software"].fillna("").to_numpy(),
            "m": floats(table, "m"),
            "tp": table["tensor_parallel"].fillna(1.0).to_numpy(float),
            "measured": floats(table, "time_s"),
            "law": law_s,
        }
    )
    sums = frame.groupby(["model", "m", "tp"])[["measured", "law"]].sum().reset_index()
    return sums["m"].to_numpy(float), (sums["measured"] / sums["law"]).to_numpy(float)
