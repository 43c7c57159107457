"""The page about all figures: picture, ours beside the paper's, by how much they differ, and why. Made of the figures' JSON."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEAD = """# The paper's figures, made again

Written by `python paper_figures --page` (`make figures` makes the pictures, PDFs and plotted numbers in `out/figures/`; `FIG=10a`
one of them, `FULL=1` the full sweeps, `FRESH=1` without what is kept). Column `run` of a figure's CSV names the run folder of
every simulated point, whose `manifest.json` has all of its configuration; a sweep NAME is made again, without any script of
these, by `infsim run out/figures/runs/NAME/sweep.yaml --out NAME`. Points without a run are analytic: the script computes them.

The paper's values come from accounts of it, since its text was not available: [A] abstract, or several accounts that agree ·
[1] one account · [fig] read off a picture. Nothing here is tuned to match them. Traces, lengths, engine and link of the paper's
runs are not known; each figure says what was taken instead. Deviations of more than 25 % are bold; beside them is the setting
among those of the figure that comes nearest to the paper's value, which says what would explain it and nothing more.
"""
INVESTIGATE_FRAC = 0.25


def write_page(source: Path, folder: Path, pictures: Path | None = None) -> Path:
    """README.md in `folder`, from the JSON in `source`; pictures are copied to `pictures` where that is given."""
    entries = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(source.glob("fig*.json"))]
    parts = [HEAD]
    for entry in entries:
        picture = source / f"{entry['stem']}.png"
        if pictures and picture.is_file():
            pictures.mkdir(exist_ok=True)
            picture = Path(shutil.copy2(picture, pictures))
        parts.append(section(entry, *(os.path.relpath(path, folder) for path in (picture, Path(__file__).parent))))
    page = folder / "README.md"
    page.write_text("\n".join(parts), encoding="utf-8")
    return page


def section(entry: Mapping[str, Any], picture: str, scripts: str) -> str:
    """One figure. `picture`, `scripts`: where they lie, seen from the page."""
    title = f"## Figure {entry['figure']}: {entry['title']}\n"
    if "skipped" in entry:
        return f"{title}\nNot made here: {entry['skipped']}\n"
    claim = entry["claim"].partition("\n\n")[2]
    stale = f" {', '.join(entry['stale'])}: from before the sources' last change." if entry["stale"] else ""
    runs = f" Runs: {', '.join(entry['runs'])}.{stale}" if entry["runs"] else ""
    script = f"[{entry['stem']}.py]({scripts}/{entry['stem']}.py)"
    return (
        f"{title}\n![{entry['title']}]({picture})\n\n{claim}\n\n{table(entry['known'])}\n\n{entry['why']}\n\n"
        f"{entry['parts']} Size: {entry['size']}. Script: {script}.{runs}\n"
    )


def table(rows: list[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    lines = ["| value | paper | ours | deviation | nearest of the figure's settings |", "|---|---|---|---|---|"]
    for row in rows:
        unit = f" {row['unit']}" if row["unit"] else ""
        paper = number(row["paper"]) + (f"–{number(row['paper_high'])}" if row["paper_high"] else "")
        ours = "–" if row["ours"] is None else f"{number(row['ours'])}{unit}"
        lines.append(
            f"| {row['name']} | {paper}{unit} [{row['source']}] | {ours} | {deviation(row)} | {nearest(row)} |"
        )
    return "\n".join(lines)


def number(value: float) -> str:
    """Three significant digits; whole numbers from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def deviation(row: Mapping[str, Any]) -> str:
    """In percent; bold where it wants an explanation."""
    frac = row["deviation_frac"]
    if frac is None:
        return "" if row["ours"] is None else f"{number(row['ours'] - row['paper'])} {row['unit']}"
    if row["paper_high"] and frac == 0:
        return "within"
    told = f"{100 * frac:+.0f} %"
    return f"**{told}**" if abs(frac) > INVESTIGATE_FRAC else told


def nearest(row: Mapping[str, Any]) -> str:
    """Where ours wants an explanation: the figure's setting that comes nearest to the paper's value."""
    found, frac = row["nearest"], row["deviation_frac"]
    wanted = abs(frac) > INVESTIGATE_FRAC if frac is not None else row["ours"] != row["paper"]
    if not found or not wanted:
        return ""
    return "none nearer" if found["ours"] == row["ours"] else f"{number(found['ours'])} ({found['setting']})"
