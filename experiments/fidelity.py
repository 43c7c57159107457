"""How far fitted laws can be trusted: errors on rows the fit has not seen, and on other data sets.

Held-out slices are whole slices (a batch size, a head count, a shape, the top octave), because a random row has its
neighbours in the fit. Interpolation and extrapolation are told apart. Errors are |law / measured − 1|.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from experiments.bands import NCCL_BYTES
from experiments.fitting import OPERATORS, Fitted, Rows, floats, label
from experiments.profile import Profile
from perfmodel.calibrate import Floats, fit_error
from perfmodel.calibrate_attention import SHORTEST_DECODE, SHORTEST_PREFILL
from perfmodel.curves import STREAMS
from perfmodel.errors import InputError
from perfmodel.laws.attention import HEAD_DIM, StreamedDecode
from perfmodel.specs import GpuSpec

FIT, INTERPOLATION, EXTRAPOLATION, CROSS = "fit", "interpolation", "extrapolation", "other source"
PRICED = "as priced"  # what a simulation charges, where that is not meant to be what was measured


@dataclass(frozen=True)
class Slice:
    """Error of one operator's law over some rows; bias is the mean of law / measured − 1."""

    operator: str
    rows_are: str
    kind: str
    rows: int
    mape: float
    median: float
    p90: float
    bias: float
    source: str


@dataclass(frozen=True)
class HeldOut:
    """Rows that a fit does not see."""

    rows_are: str
    kind: str
    mask: Callable[[Rows], Any]


def equal(name: str, value: float) -> HeldOut:
    return HeldOut(f"{name} = {value:,.0f}", INTERPOLATION, lambda rows: getattr(rows, name) == value)


def top(name: str) -> HeldOut:
    return HeldOut(
        f"top octave of {name}", EXTRAPOLATION, lambda rows: getattr(rows, name) > getattr(rows, name).max() / 2
    )


def quarter_of_shapes(rows: Rows) -> Any:
    """Every fourth (n, k), in an order unrelated to their sizes."""
    _, which = np.unique(np.stack([rows.n, rows.k]), axis=1, return_inverse=True)
    order = np.random.default_rng(0).permutation(which.max() + 1)
    return order[which.ravel()] % 4 == 0


def largest_shapes(rows: Rows) -> Any:
    return (rows.n == rows.n.max()) | (rows.k == rows.k.max())


def every_other_size(rows: Rows) -> Any:
    sizes, which = np.unique(rows.num_bytes, return_inverse=True)
    return (which.ravel() % 2 == 1) & (rows.num_bytes < sizes[-1])


HELD_OUT: dict[str, tuple[HeldOut, ...]] = {
    "gemm": (
        HeldOut("a quarter of the (n, k)", INTERPOLATION, quarter_of_shapes),
        *(equal("m", m) for m in (16, 64, 256, 2048)),
        top("m"),
        HeldOut("the largest n and k", EXTRAPOLATION, largest_shapes),
    ),
    "decode_attention": (
        *(equal("rows", rows) for rows in (8, 64)),
        *(equal("heads", heads) for heads in (8, 32)),
        equal("kv_heads", 4),
        equal("context_tokens", 4096),
        top("context_tokens"),
        top("rows"),
    ),
    "prefill_attention": (
        *(equal("tokens", tokens) for tokens in (512, 2048)),
        *(equal("heads", heads) for heads in (8, 32)),
        top("tokens"),
    ),
    "all_reduce": (
        HeldOut("every other size", INTERPOLATION, every_other_size),
        equal("ranks", 4),
        top("num_bytes"),
    ),
} | {name: (equal("tokens", 256), top("tokens")) for name in STREAMS}


def measure(profiles: Sequence[Profile], gpu: GpuSpec, fitted: dict[str, list[Fitted]]) -> list[Slice]:
    """Errors of every operator: fit, held-out, as priced, against other sources."""
    found: list[Slice] = []
    for name, laws in fitted.items():
        for law in laws:
            rows = in_domain(name, OPERATORS[name].rows(law.source.operator(name)))
            found.append(slice_of(name, "all rows", FIT, law.law, rows, law.source))
            found += held_out(name, rows, law.source, gpu)
            found += priced(law) if name == "decode_attention" else ()
        others = [profile for profile in profiles if profile is not laws[0].source]
        found += [piece for profile in others for piece in cross(name, laws[0], profile)]
    return found


def in_domain(name: str, rows: Rows) -> Rows:
    """Rows that a law means to describe: attention of at least a few hundred tokens, single chunks."""
    if name == "decode_attention":
        return rows.pick(rows.context_tokens >= SHORTEST_DECODE)
    if name == "prefill_attention":
        return rows.pick((rows.tokens >= SHORTEST_PREFILL) & (rows.rows == 1))
    return rows


def held_out(name: str, rows: Rows, source: Profile, gpu: GpuSpec) -> Iterator[Slice]:
    for held in HELD_OUT[name]:
        mask = held.mask(rows)
        if not mask.any():
            continue
        try:
            law, _ = OPERATORS[name].fit(rows.pick(~mask), gpu)
        except InputError:  # the rest is too little to fit
            continue
        yield slice_of(name, held.rows_are, held.kind, law, rows.pick(mask), source)


def priced(fitted: Fitted) -> Iterator[Slice]:
    """Decode attention that no fit aims at: contexts under `SHORTEST_DECODE`, KV that only a benchmark finds in the L2 cache."""
    law, rows = fitted.law, OPERATORS["decode_attention"].rows(fitted.source.operator("decode_attention"))
    short = rows.context_tokens < SHORTEST_DECODE
    parts = [(f"contexts under {SHORTEST_DECODE} tokens", law, short)]
    if isinstance(law, StreamedDecode):
        token_bytes = 2 * HEAD_DIM * law.kv_dtype_bytes * rows.kv_heads
        cached = ~short & (token_bytes * rows.rows * rows.context_tokens <= law.cache_bytes)
        parts.append((f"KV of up to {law.cache_bytes >> 20} MiB, from memory", replace(law, cache_bytes=0), cached))
    for rows_are, law_so, mask in parts:
        if mask.any():
            yield slice_of("decode_attention", rows_are, PRICED, law_so, rows.pick(mask), fitted.source)


def slice_of(name: str, rows_are: str, kind: str, law: Any, rows: Rows, source: Profile) -> Slice:
    return errors(name, rows_are, kind, OPERATORS[name].times(law, rows), rows.time_s, label(source))


def errors(name: str, rows_are: str, kind: str, law_s: Floats, measured_s: Floats, source: str) -> Slice:
    error = fit_error(law_s, measured_s)
    bias = float((law_s / measured_s - 1).mean())
    return Slice(name, rows_are, kind, error.rows, error.mape, error.median, error.p90, bias, source)


# --- other sources -----------------------------------------------------------------------------------------------------

AGREE = (8, 128)  # tokens of an iteration for which data sets are expected to agree
TOKENS = ((1, 7), AGREE, (129, 256), (257, 1024), (1025, 4096))


def cross(name: str, fitted: Fitted, profile: Profile) -> Iterator[Slice]:
    """What a law says of another source: a layer's products by model and tokens, attention by rows, the rest as a whole."""
    table = profile.operator(name)
    if table.empty:
        return
    if name == "gemm":
        yield from cross_layers(fitted, profile)
        return
    rows = in_domain(name, OPERATORS[name].rows(table))
    if name == "decode_attention":
        many, long = rows.rows >= 8, rows.context_tokens >= 1024
        for rows_are, mask in (
            ("8 rows and more", many),
            ("8 rows and more, 1,024 tokens and more", many & long),
            ("fewer than 8 rows", ~many),
        ):
            if mask.any():
                yield slice_of(name, f"{heads_of(rows)}, {rows_are}", CROSS, fitted.law, rows.pick(mask), profile)
    elif name == "all_reduce":
        large = rows.num_bytes > NCCL_BYTES
        for rows_are, mask in (("more than 4 MiB", large), ("up to 4 MiB (another algorithm there)", ~large)):
            if mask.any():
                yield slice_of(name, rows_are, CROSS, fitted.law, rows.pick(mask), profile)
    elif len(rows):
        rows_are = f"{heads_of(rows)}, all" if name == "prefill_attention" else "all"
        yield slice_of(name, rows_are, CROSS, fitted.law, rows, profile)


def heads_of(rows: Rows) -> str:
    return "heads " + ", ".join(sorted({f"{h:.0f}/{kv:.0f}" for h, kv in zip(rows.heads, rows.kv_heads, strict=True)}))


def cross_layers(fitted: Fitted, profile: Profile) -> Iterator[Slice]:
    """The four products of a layer together, as an iteration runs them; where sources should agree, by ranks."""
    lines = list(layer_sums(fitted, profile))
    for low, high in TOKENS:
        for model in dict.fromkeys(model for model, _, _ in lines):
            mine = [(ranks, sums) for name, ranks, sums in lines if name == model]
            groups = mine if (low, high) == AGREE and len(mine) > 1 else []
            for ranks, sums in [*groups, ("", pd.concat([sums for _, sums in mine]))]:
                here = sums[(sums["m"] >= low) & (sums["m"] <= high)]
                if len(here):
                    rows_are = f"{model}{ranks}, {low}–{high} tokens"
                    yield errors("gemm", rows_are, CROSS, floats(here, "law"), floats(here, "measured"), label(profile))
    rows = OPERATORS["gemm"].rows(profile.operator("gemm"))
    for rows_are, mask in (
        ("single ones under 0.2 ms", rows.time_s < 2e-4),
        ("single ones over 1 ms", rows.time_s > 1e-3),
    ):
        if mask.any():
            yield slice_of("gemm", rows_are, CROSS, fitted.law, rows.pick(mask), profile)


def layer_sums(fitted: Fitted, profile: Profile) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(model, ranks, table of tokens m, measured and law seconds of a layer's products)."""
    table = profile.operator("gemm")
    if table.empty or table["tensor_parallel"].isna().all():
        return
    law_s = OPERATORS["gemm"].times(fitted.law, OPERATORS["gemm"].rows(table))
    frame = table[["software", "m"]].assign(tp=table["tensor_parallel"], measured=table["time_s"], law=law_s)
    for (software, tp), group in frame.groupby(["software", "tp"]):
        model = str(software).rpartition(", ")[2]
        yield model, f" TP{tp:.0f}", group.groupby("m")[["measured", "law"]].sum().reset_index()
