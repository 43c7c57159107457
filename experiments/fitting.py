"""From measured profiles to laws: the first source of an operator fits it; a later one adds heads that it lacks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.machine import fit_machine
from experiments.profile import Profile
from perfmodel.calibrate import FitError, Floats
from perfmodel.calibrate_allreduce import AllReduceRows, all_reduce_times, fit_all_reduce
from perfmodel.calibrate_attention import AttentionRows, decode_s, fit_decode, fit_prefill, prefill_s
from perfmodel.calibrate_gemm import GemmRows, fit_gemm, gemm_s
from perfmodel.calibrate_stream import StreamRows, fit_stream, stream_s
from perfmodel.curves import ALL_REDUCE_S, STREAMS
from perfmodel.errors import InputError
from perfmodel.laws.allreduce import RingAllReduce
from perfmodel.laws.attention import HEAD_DIM
from perfmodel.specs import GpuSpec

Rows = Any  # one of the row classes of perfmodel.calibrate_*


@dataclass(frozen=True)
class Operator:
    """How an operator is fitted: its rows from a table, its law from rows, what a law says of rows."""

    rows: Callable[[pd.DataFrame], Rows]
    fit: Callable[[Rows, GpuSpec], tuple[Any, FitError]]
    times: Callable[[Any, Rows], Floats]


def floats(table: pd.DataFrame, name: str) -> Floats:
    return table[name].to_numpy(float)


def width_of(table: pd.DataFrame) -> int:
    """Bytes of a number: a source is fitted for one width, 16-bit unless all of it is 32-bit."""
    return 4 if set(table["dtype"].dropna()) == {"float32"} else 2


def gemm_rows(table: pd.DataFrame) -> GemmRows:
    sizes = floats(table, "m"), floats(table, "n"), floats(table, "k")
    return GemmRows(*sizes, floats(table, "time_s"), width_of(table))


def attention_rows(table: pd.DataFrame) -> AttentionRows:
    """The law is for heads of 128; others scale from it."""
    table = table[table["head_dim"] == HEAD_DIM]
    tokens = table["tokens"].fillna(1.0).to_numpy(float)
    columns = floats(table, "heads"), floats(table, "kv_heads"), floats(table, "time_s")
    prefix = floats(table, "context_tokens") - tokens
    return AttentionRows(floats(table, "rows"), tokens, prefix, *columns, width_of(table))


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


def fit_all(profiles: Sequence[Profile], gpu: GpuSpec, notes: list[str]) -> dict[str, list[Fitted]]:
    """Every operator's laws; too few rows of one leave it analytic, which `notes` says. Raises InputError for none at all."""
    machines = [profile for profile in profiles if profile.format == "infreal"]
    if machines:
        if len(profiles) > 1:
            raise InputError("--from infreal=…: a machine's own profile stands alone (leave the other sources out)")
        return {name: [Fitted(*law, machines[0])] for name, law in fit_machine(machines[0]).items()}
    found: dict[str, list[Fitted]] = {}
    for name, operator in OPERATORS.items():
        for profile in profiles:
            rows = operator.rows(profile.operator(name))
            if not len(rows) or (name in found and not adds_heads(name, rows, found[name])):
                continue
            try:
                found.setdefault(name, []).append(Fitted(*operator.fit(rows, gpu), profile))
            except InputError as error:
                notes.append(f"{label(profile)}: {error}; not fitted")
    found = {name: laws for name, laws in found.items() if laws}
    if not found:
        raise InputError("; ".join(notes) or f"no operator to fit (known: {', '.join(OPERATORS)})")
    return found


def adds_heads(name: str, rows: Rows, laws: Sequence[Fitted]) -> bool:
    """Decode attention alone has a law per range of KV heads."""
    if not laws:
        return True
    if name != "decode_attention":
        return False
    covered = max(fitted.law.domain.ranges["kv_heads"][1] for fitted in laws)
    return bool(rows.kv_heads.min() > covered)


def label(profile: Profile) -> str:
    """The format and the last two folders of a source: `vidur vidur/a100`."""
    parts = [part for part in profile.path.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return f"{profile.format} {'/'.join(parts[-2:])}"


def short(value: Any) -> Any:
    """Numbers with six digits: a law is not known better."""
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
