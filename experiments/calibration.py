"""From measured profiles to a pack: the first source that holds an operator fits it, the others check it.

A later source adds a law where it measured heads the first did not. Where sources of one GPU disagree, the band says by how
much, along tokens or rows.
"""

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from experiments.packs import FORMAT, Pack
from experiments.profile import Profile
from perfmodel.basis import Domain
from perfmodel.calibrate import FitError, Floats
from perfmodel.calibrate_allreduce import AllReduceRows, all_reduce_times, fit_all_reduce
from perfmodel.calibrate_attention import SHORTEST_DECODE, AttentionRows, decode_s, fit_decode, fit_prefill, prefill_s
from perfmodel.calibrate_gemm import GemmRows, fit_gemm, gemm_s
from perfmodel.calibrate_stream import StreamRows, fit_stream, stream_s
from perfmodel.curves import ALL_REDUCE_S, STREAMS
from perfmodel.errors import InputError
from perfmodel.laws.allreduce import RingAllReduce
from perfmodel.laws.attention import HEAD_DIM
from perfmodel.specs import GpuSpec

UNITS = {"time": "s", "rates": "bytes/s and FLOP/s", "sizes": "bytes, tokens", "attention": "one layer on one rank"}
Rows = Any  # one of the row classes of perfmodel.calibrate_*


@dataclass(frozen=True)
class Operator:
    """How an operator is fitted: its rows from a table, its law from rows, what a law says of rows."""

    rows: Callable[[pd.DataFrame], Rows]
    fit: Callable[[Rows, GpuSpec], tuple[Any, FitError]]
    times: Callable[[Any, Rows], Floats]


def floats(table: pd.DataFrame, name: str) -> Floats:
    return table[name].to_numpy(float)


def gemm_rows(table: pd.DataFrame) -> GemmRows:
    width = 4 if set(table["dtype"].dropna()) == {"float32"} else 2
    return GemmRows(floats(table, "m"), floats(table, "n"), floats(table, "k"), floats(table, "time_s"), width)


def attention_rows(table: pd.DataFrame) -> AttentionRows:
    """The law is for heads of 128; others scale from it."""
    table = table[table["head_dim"] == HEAD_DIM]
    tokens = table["tokens"].fillna(1.0).to_numpy(float)
    columns = floats(table, "heads"), floats(table, "kv_heads"), floats(table, "time_s")
    return AttentionRows(floats(table, "rows"), tokens, floats(table, "context_tokens") - tokens, *columns)


def stream_rows(table: pd.DataFrame) -> StreamRows:
    tokens = floats(table, "tokens")
    return StreamRows(tokens, floats(table, "num_bytes") / tokens, floats(table, "time_s"))


def all_reduce_rows(table: pd.DataFrame) -> AllReduceRows:
    return AllReduceRows(floats(table, "num_bytes"), floats(table, "ranks"), floats(table, "time_s"))


def fit_reduce(rows: AllReduceRows, gpu: GpuSpec) -> tuple[Any, FitError]:
    return fit_all_reduce(rows, gpu.link, RingAllReduce(ALL_REDUCE_S))


OPERATORS: dict[str, Operator] = {
    "gemm": Operator(gemm_rows, fit_gemm, gemm_s),
    "decode_attention": Operator(attention_rows, fit_decode, decode_s),
    "prefill_attention": Operator(attention_rows, fit_prefill, prefill_s),
    "all_reduce": Operator(all_reduce_rows, fit_reduce, all_reduce_times),
} | {name: Operator(stream_rows, fit_stream, stream_s) for name in STREAMS}


@dataclass(frozen=True)
class Fitted:
    """A law, how well it fits, and the source it was fitted to."""

    law: Any
    error: FitError
    source: Profile


def fit_all(profiles: Sequence[Profile], gpu: GpuSpec) -> dict[str, list[Fitted]]:
    """Every operator's laws. Raises InputError where no source holds enough rows of any."""
    found: dict[str, list[Fitted]] = {}
    for name, operator in OPERATORS.items():
        for profile in profiles:
            rows = operator.rows(profile.operator(name))
            if len(rows) and (name not in found or adds_heads(name, rows, found[name])):
                found.setdefault(name, []).append(Fitted(*operator.fit(rows, gpu), profile))
    if not found:
        raise InputError(f"no operator to fit (known: {', '.join(OPERATORS)})")
    return found


def adds_heads(name: str, rows: Rows, laws: Sequence[Fitted]) -> bool:
    """Decode attention alone has a law per range of KV heads."""
    if name != "decode_attention":
        return False
    covered = max(fitted.law.domain.ranges["kv_heads"][1] for fitted in laws)
    return bool(rows.kv_heads.min() > covered)


def make_pack(name: str, profiles: Sequence[Profile], gpu: GpuSpec, fitted: dict[str, list[Fitted]]) -> Pack:
    """The pack, not yet signed."""
    first = profiles[0]
    width = fitted["gemm"][0].law.dtype_bytes if "gemm" in fitted else 2
    peaks = ("name", "memory_bytes", "peak_flops_per_s", "memory_bytes_per_s", "num_sms")
    return {
        "format": FORMAT,
        "name": name,
        "gpu": {key: getattr(gpu, key) for key in peaks},
        "device": str(first.table["gpu"].dropna().iloc[0]) if first.table["gpu"].notna().any() else gpu.name,
        "software": first.software,
        "date": datetime.date.today().isoformat(),
        "units": UNITS,
        "dtype_bytes": width,
        "sources": [source_entry(profile) for profile in profiles],
        "operators": {name: [law_entry(law) for law in laws] for name, laws in fitted.items()},
        "bands": bands(profiles, fitted),
    }


def label(profile: Profile) -> str:
    """The format and the last two folders of a source: `vidur vidur/a100`."""
    parts = [part for part in profile.path.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return f"{profile.format} {'/'.join(parts[-2:])}"


def source_entry(profile: Profile) -> dict[str, Any]:
    counts = profile.table.groupby("operator").size()
    return {
        "source": label(profile),
        "software": profile.software,
        "sha256": dict(profile.sha256),
        "rows": {str(name): int(count) for name, count in counts.items()},
        "dropped": {reason: count for reason, count in profile.dropped.items() if count},
    }


def law_entry(fitted: Fitted) -> dict[str, Any]:
    parameters = asdict(fitted.law)
    domain: Domain = fitted.law.domain
    del parameters["domain"]
    return {
        "law": type(fitted.law).__name__,
        "source": label(fitted.source),
        "fit": {key: short(value) for key, value in asdict(fitted.error).items()},
        "domain": {"ranges": {k: list(v) for k, v in domain.ranges.items()}, "points": dict(domain.points)},
        "parameters": short(parameters),
    }


def short(value: Any) -> Any:
    """Numbers with six digits: a law is not known better."""
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


# --- bands -------------------------------------------------------------------------------------------------------------

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
