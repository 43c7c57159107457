"""Figures kept as JSON with the commit, one file a run of the benchmark; the comparison with the last one, and the picture."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infsim.bench.cases import SIZES, SYSTEMS

Figures = dict[str, dict[str, float]]  # case → metric → value


def commit() -> str:
    """Of the sources at hand, with a + where they have changed since; "unknown" without git."""
    root = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=10"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def last(out: Path) -> dict[str, Any] | None:
    """What the run before has kept."""
    files = sorted(out.glob("bench-*.json"))
    return json.loads(files[-1].read_text(encoding="utf-8")) if files else None


def keep(out: Path, figures: Figures) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"bench-{len(list(out.glob('bench-*.json'))):04d}.json"
    kept = {"commit": commit(), "figures": figures}
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return path


def compare(figures: Figures, before: Mapping[str, Any]) -> list[str]:
    """Lines: what has become of every figure that was there before."""
    lines = [f"# against {before['commit']}: now / then"]
    for case, metrics in figures.items():
        then = before["figures"].get(case, {})
        ratios = [f"{metric} {value / then[metric]:.2f}" for metric, value in metrics.items() if then.get(metric)]
        lines += [f"# {case}: {', '.join(ratios)}"] if ratios else []
    return lines


def draw(out: Path, figures: Figures) -> Path | None:
    """cost.png: CPU time of a request against the number of instances (case s)."""
    from experiments.plotstyle import looks, new_figure, save, styled

    sizes = {system: [n for n in SIZES if f"s-{n}-{system}" in figures] for system in SYSTEMS}
    if not any(sizes.values()):
        return None

    @styled
    def picture() -> Path:
        figure, [[axes]] = new_figure(1, 1, width=4.4, height=3.2)
        for system, look in looks(SYSTEMS).items():
            cost_us = [figures[f"s-{n}-{system}"]["us_per_request"] for n in sizes[system]]
            axes.plot(sizes[system], cost_us, label=system, **look)
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES, [str(n) for n in SIZES])
        axes.set_ylim(bottom=0)
        axes.set(xlabel="instances", ylabel="CPU time of a request [µs]")
        axes.set_title("Simulating a request of 512 + 128 tokens")
        axes.legend()
        return save(figure, out / "cost")[0]

    path: Path = picture()
    return path
