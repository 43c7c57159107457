"""How a figure's script becomes files: picture (PDF, PNG), plotted numbers (CSV), and ours beside the paper's (JSON).

A script is a module with FIGURE, TITLE, PARTS (what is measured, simulated, analytic), WHY (where ours differs, and what
explains it), `table(study)` → the plotted numbers, `draw(frame)` → Figure, and `ours(frame)` → our value by the name that
known.py gives the paper's. One whose numbers hold several settings also has `settings(frame)` → ours by setting, from which
the page takes the one that comes nearest to the paper.
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, isnan, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
from known import Known, known_of
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study import ROOT, Study

from experiments.plotstyle import BLACK, GREY, STYLE, new_figure

PAPER: dict[str, Any] = {"color": BLACK, "marker": "*", "ms": 9, "ls": "none", "mfc": "white", "zorder": 5}
SUFFIXES = (".png", ".pdf")
Ours = dict[str, float]  # our value by name


def paper_marks(axes: Axes, xs: Sequence[float], ys: Sequence[float], label: str = "paper") -> None:
    """The paper's values as stars."""
    axes.plot(xs, ys, **PAPER, label=label)


def paper_band(axes: Axes, low: float, high: float, label: str = "paper") -> None:
    """A range of the paper, across the axes."""
    axes.axhspan(low, high, color=GREY, alpha=0.18, lw=0, label=label)


def panels(columns: int, rows: int = 1, width: float = 3.6, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row after row."""
    figure, grid = new_figure(rows, columns, width, height)
    return figure, [axes for row in grid for axes in row]


def legend_below(figure: Figure, axes: Sequence[Axes], columns: int = 4) -> None:
    """One legend for several axes; a label that recurs is named once."""
    found = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns)


def spread(groups: Any) -> tuple[pd.Series, list[pd.Series]]:
    """(mean of every group, lengths of its bars down to the least and up to the most), as `errorbar` takes them."""
    mean = groups.mean()
    return mean, [mean - groups.min(), groups.max() - mean]


def tokens_axis(axes: Axes, ticks: Sequence[float] = ()) -> None:
    """A logarithmic x axis of tokens, as 1K, 32K, 1,000K."""
    axes.set_xscale("log")
    if ticks:
        axes.set_xticks(ticks)
        axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,g}" if tokens < 10_000 else f"{tokens / 1000:,g}K")


def make(script: ModuleType, study: Study) -> dict[str, Any]:
    """All files of one figure; the entry of the page. Raises NoData where its data is not here."""
    frame = script.table(study)
    study.out.mkdir(parents=True, exist_ok=True)
    stem = study.out / stem_of(script)
    frame.to_csv(stem.with_suffix(".csv"), index=False)
    with rc_context(STYLE):
        figure = script.draw(frame)
        for suffix in SUFFIXES:
            dates = {"CreationDate": None} if suffix == ".pdf" else {"Software": None}
            figure.savefig(stem.with_suffix(suffix), metadata=dates)
    found = entry(script, frame, study)
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def entry(script: ModuleType, frame: pd.DataFrame, study: Study) -> dict[str, Any]:
    """What the page says of a figure."""
    ours = script.ours(frame)
    names = [known.name for known in known_of(script.FIGURE)]
    assert set(ours) <= set(names), f"figure {script.FIGURE}: known.py lacks {set(ours) - set(names)}"
    settings = script.settings(frame) if hasattr(script, "settings") else {}
    rows = [row_of(known, ours.get(known.name, nan), settings) for known in known_of(script.FIGURE)]
    folders = frame["run"].dropna() if "run" in frame else ()
    runs = sorted({Path(run).parts[1] for run in folders if run})
    return {
        "figure": script.FIGURE,
        "stem": stem_of(script),
        "title": script.TITLE,
        "claim": (script.__doc__ or "").strip(),
        "parts": script.PARTS,
        "why": script.WHY,
        "size": study.size,
        "runs": runs,
        "stale": [name for name in runs if name in study.stale],
        "known": rows,
    }


def by_setting(frame: pd.DataFrame, keys: Sequence[str], ours: Callable[[pd.DataFrame], Ours]) -> dict[str, Ours]:
    """`ours` of each part of the numbers that agrees in `keys`; a setting is called by its values."""
    return {", ".join(map(str, values)): ours(part) for values, part in frame.groupby(list(keys), sort=False)}


def nearest(known: Known, settings: Mapping[str, Ours]) -> tuple[str, float] | None:
    """The setting, and our value in it, that is nearest to the paper's value, or to its range."""
    low, high = known.value, known.value if known.high is None else known.high
    found = {name: ours[known.name] for name, ours in settings.items() if known.name in ours}
    named = [(max(low - value, value - high, 0.0), name, value) for name, value in found.items() if isfinite(value)]
    return min(named)[1:] if named else None


def row_of(known: Known, ours: float, settings: Mapping[str, Ours]) -> dict[str, Any]:
    shown = None if isnan(ours) else float(ours)
    deviation = None if shown is None or known.value == 0 else known.deviation(shown)
    best = nearest(known, settings)
    return {
        "name": known.name,
        "unit": known.unit,
        "source": known.source,
        "paper": known.value,
        "paper_high": known.high,
        "ours": shown,
        "deviation_frac": deviation,
        "nearest": best and {"setting": best[0], "ours": float(best[1])},
    }


def stem_of(script: ModuleType) -> str:
    """A script's file name, which names its results."""
    return Path(script.__file__ or "").stem


def study_from(arguments: argparse.Namespace) -> Study:
    size = "full" if arguments.full else "reduced"
    return Study(arguments.out.resolve(), size, arguments.workers, arguments.fresh, arguments.ray)


def parser_of(description: str) -> argparse.ArgumentParser:
    """The options that every script has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the full sweep (default: reduced sizes)")
    parser.add_argument("--fresh", action="store_true", help="simulate anew what is there already")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at once (default: all cores)")
    parser.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster, or local (default: processes of this machine)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "figures", help="folder (default: out/figures)")
    return parser


def main(script: ModuleType) -> None:
    """A script called by itself."""
    arguments = parser_of(script.__doc__ or "").parse_args()
    found = make(script, study_from(arguments))
    for row in found["known"]:
        paper = f"{row['paper']:,g}" + (f"–{row['paper_high']:,g}" if row["paper_high"] else "")
        ours = "–" if row["ours"] is None else f"{row['ours']:,.4g}"
        print(f"{row['name']:<50} paper {paper:>12}   ours {ours:>10} {row['unit']}")
