"""Pictures of a calibration: measured points under the laws, the paper's f and g, and where data sets disagree."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from experiments.fidelity import EXTRAPOLATION, INTERPOLATION, Slice, layer_sums
from experiments.fidelity_table import target_of
from experiments.fitting import OPERATORS, Fitted, Rows
from experiments.plotstyle import CYCLE, GREY, MARKERS, log_scale, new_figure, save, styled
from experiments.profile import Profile
from perfmodel.calibrate import Floats
from perfmodel.laws.attention import Heads

SHAPES = ((12288, 4096), (4096, 4096), (8192, 8192), (1024, 8192))  # [n, k] of the products shown, where measured
DECODE_ROWS = (1, 8, 64, 256)
HEADS = ((32, 8), (8, 1), (32, 32))  # of the attention shown: the first that was measured


@styled
def plot(
    fitted: dict[str, list[Fitted]], profiles: Sequence[Profile], slices: Sequence[Slice], stem: Path
) -> list[Path]:
    """`stem`.png and `stem`.svg; six panels, of which those without data stay empty."""
    figure, axes = new_figure(2, 3, width=3.9, height=3.1)
    draw_gemm(axes[0][0], fitted)
    draw_decode(axes[0][1], fitted)
    draw_prefill(axes[0][2], fitted)
    draw_all_reduce(axes[1][0], fitted)
    draw_other_sources(axes[1][1], fitted, profiles)
    draw_errors(axes[1][2], slices)
    return save(figure, stem)


def draw_gemm(axes: Axes, fitted: dict[str, list[Fitted]]) -> None:
    """f(β) of the paper, per product: FLOP/s against tokens."""
    title(axes, "Matrix products: f(β)", "tokens", "TFLOP/s a GPU")
    rows = rows_of(fitted, "gemm")
    if rows is None:
        return
    tokens = np.unique(np.geomspace(1, rows.m.max(), 200).astype(int)).astype(float)
    for (n, k), colour, marker in zip(SHAPES, CYCLE, MARKERS, strict=False):
        here = (rows.n == n) & (rows.k == k)
        if here.any():
            law_s = fitted["gemm"][0].law.times_s(tokens, n, k)
            axes.plot(tokens, 2e-12 * tokens * n * k / law_s, color=colour, linewidth=1.2)
            points = rows.pick(here)
            rate = 2e-12 * points.m * n * k / points.time_s
            axes.plot(points.m, rate, marker, color=colour, markersize=3.5, label=f"[{n}, {k}]")
    log_log(axes)


def draw_decode(axes: Axes, fitted: dict[str, list[Fitted]]) -> None:
    """g(S) of the paper is the slope: seconds against KV tokens."""
    title(axes, "Decode attention: 1/g(S) is the slope", "KV tokens of the batch", "µs a layer")
    rows = rows_of(fitted, "decode_attention")
    if rows is None:
        return
    heads, kv_heads = shown_heads(rows)
    for count, colour, marker in zip(DECODE_ROWS, CYCLE, MARKERS, strict=False):
        points = rows.pick((rows.heads == heads) & (rows.kv_heads == kv_heads) & (rows.rows == count))
        if len(points):
            kv_tokens = np.geomspace(points.context_tokens.min(), points.context_tokens.max(), 100) * count
            terms = fitted["decode_attention"][0].law.terms(count, Heads(heads, kv_heads, 128, 2))
            axes.plot(kv_tokens, [1e6 * terms.at(tokens) for tokens in kv_tokens], color=colour, linewidth=1.2)
            measured = count * points.context_tokens
            label = f"{count} row{'s' if count > 1 else ''}"
            axes.plot(measured, 1e6 * points.time_s, marker, color=colour, markersize=3.5, label=label)
    axes.set_title(f"{axes.get_title()} ({heads}/{kv_heads} heads)")
    log_log(axes)


def draw_prefill(axes: Axes, fitted: dict[str, list[Fitted]]) -> None:
    title(axes, "Prefill attention of one chunk", "tokens", "µs a layer")
    rows = rows_of(fitted, "prefill_attention")
    if rows is None:
        return
    for (heads, kv_heads), colour, marker in zip(HEADS, CYCLE, MARKERS, strict=False):
        points = rows.pick(
            (rows.heads == heads) & (rows.kv_heads == kv_heads) & (rows.rows == 1) & (rows.prefix_tokens == 0)
        )
        if len(points):
            tokens = np.geomspace(points.tokens.min(), points.tokens.max(), 100)
            axes.plot(tokens, 1e6 * chunk_s(fitted, tokens, heads, kv_heads), color=colour, linewidth=1.2)
            axes.plot(
                points.tokens,
                1e6 * points.time_s,
                marker,
                color=colour,
                markersize=3.5,
                label=f"{heads}/{kv_heads} heads",
            )
    log_log(axes)


def chunk_s(fitted: dict[str, list[Fitted]], tokens: Floats, heads: int, kv_heads: int) -> Floats:
    pairs = tokens * (tokens + 1) / 2
    law = fitted["prefill_attention"][0].law
    times: Floats = np.maximum.reduce(law.estimates_s(1, tokens, tokens, pairs, Heads(heads, kv_heads, 128, 2)))
    return times


def draw_all_reduce(axes: Axes, fitted: dict[str, list[Fitted]]) -> None:
    title(axes, "All-reduce", "message bytes", "µs")
    rows = rows_of(fitted, "all_reduce")
    if rows is None:
        return
    law = fitted["all_reduce"][0].law
    for ranks, knots, colour, marker in zip(law.ranks, law.knots, CYCLE, MARKERS, strict=False):
        points = rows.pick(rows.ranks == ranks)
        num_bytes = np.geomspace(points.num_bytes.min(), points.num_bytes.max(), 200)
        axes.plot(num_bytes, [1e6 * knots.at(x) for x in num_bytes], color=colour, linewidth=1.2)
        axes.plot(points.num_bytes, 1e6 * points.time_s, marker, color=colour, markersize=3.5, label=f"{ranks} ranks")
    log_log(axes)


def draw_other_sources(axes: Axes, fitted: dict[str, list[Fitted]], profiles: Sequence[Profile]) -> None:
    title(axes, "A layer's products in other sources", "tokens", "measured / law")
    if "gemm" not in fitted:
        return
    law = fitted["gemm"][0]
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    colours = iter(CYCLE)
    for profile in (profile for profile in profiles if profile is not law.source):
        lines = list(layer_sums(law, profile))
        for model in dict.fromkeys(model for model, _, _ in lines):
            sums = pd.concat([sums for name, _, sums in lines if name == model])
            half_octave = np.round(2 * np.log2(sums["m"])) / 2
            ratio = (sums["measured"] / sums["law"]).groupby(half_octave).quantile(np.array([0.1, 0.5, 0.9])).unstack()
            tokens, colour = 2.0 ** ratio.index.to_numpy(), next(colours)
            axes.fill_between(tokens, ratio[0.1], ratio[0.9], color=colour, alpha=0.15, linewidth=0)
            axes.plot(tokens, ratio[0.5], color=colour, label=f"{model} ({Path(profile.path).name})")
            axes.set_xscale("log")
            axes.margins(y=0.3)
            axes.legend(fontsize=7, loc="upper left")


def draw_errors(axes: Axes, slices: Sequence[Slice]) -> None:
    """Every slice as a dot, by kind."""
    title(axes, "Mean errors of slices", "MAPE", "")
    operators = list(dict.fromkeys(piece.operator for piece in slices))
    kinds = list(dict.fromkeys(piece.kind for piece in slices))
    for kind, colour, marker in zip(kinds, CYCLE, MARKERS, strict=False):
        mine = [piece for piece in slices if piece.kind == kind]
        offset = 0.15 * (kinds.index(kind) - (len(kinds) - 1) / 2)
        heights = [operators.index(piece.operator) + offset for piece in mine]
        axes.plot([piece.mape for piece in mine], heights, marker, color=colour, markersize=4, label=kind, alpha=0.8)
    for i, operator in enumerate(operators):
        held_out = (piece for piece in slices if piece.kind in (INTERPOLATION, EXTRAPOLATION))
        aim = next((target_of(piece) for piece in held_out if piece.operator == operator), None)
        if aim:
            axes.plot([aim, aim], [i - 0.4, i + 0.4], color=GREY, linewidth=1)
    axes.set_yticks(range(len(operators)), operators)
    axes.invert_yaxis()
    axes.set_xlim(0, None)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(fontsize=7)


def rows_of(fitted: dict[str, list[Fitted]], name: str) -> Rows | None:
    return OPERATORS[name].rows(fitted[name][0].source.operator(name)) if name in fitted else None


def shown_heads(rows: Rows) -> tuple[int, int]:
    measured = set(zip(rows.heads.tolist(), rows.kv_heads.tolist(), strict=True))
    return next((pair for pair in HEADS if pair in measured), (int(rows.heads[0]), int(rows.kv_heads[0])))


def title(axes: Axes, text: str, x: str, y: str) -> None:
    axes.set_title(text)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def log_log(axes: Axes) -> None:
    axes.set_xscale("log")
    log_scale(axes)
    handles: list[Any] = axes.get_legend_handles_labels()[0]
    if handles:
        axes.legend(fontsize=7)
