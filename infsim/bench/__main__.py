"""Command: prints `case metric value`, one line a figure."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from infsim.bench.cases import CASES, DEFAULT, PLAN_SIZES, POOLED, SYSTEMS
from infsim.bench.ledger import Figures, compare, draw, keep, last


def bench(
    only: Annotated[str, typer.Option(help="cases to run, by letter")] = "",
    out: Annotated[Path, typer.Option(help="where figures are kept")] = Path("out/bench"),
) -> None:
    """Speed of the simulator and of the planner; seconds are of CPU."""
    chosen = only or DEFAULT
    if unknown := set(chosen) - set(CASES):
        raise typer.BadParameter(f"{min(unknown)!r} (allowed: letters of {''.join(CASES)})", param_hint="--only")
    figures: Figures = {}
    for case in chosen:
        typer.echo(f"# {case}: {CASES[case][0]}")
        figures |= run_case(case)
    before = last(out)
    typer.echo(f"# kept in {keep(out, figures)}")
    if picture := draw(out, figures):
        typer.echo(f"# drawn in {picture}")
    for line in compare(figures, before) if before else ():
        typer.echo(line)


def run_case(case: str) -> Figures:
    if case == "f":
        from infsim.bench.planning import measure

        return {f"f-{count}": echo(f"f-{count}", measure(count)) for count in PLAN_SIZES}
    found: Figures = {}
    for size, config in CASES[case][1].items():
        for system in ("infinite-llm",) if case in POOLED else SYSTEMS:
            name = f"{case}-{size}-{system}"
            found[name] = echo(name, in_process(json.dumps({**config, "system": system})))
    return found


def in_process(config: str) -> dict[str, float]:
    command = [sys.executable, "-m", "infsim.bench.child", config]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def echo(case: str, figures: dict[str, float]) -> dict[str, float]:
    for metric, value in figures.items():
        typer.echo(f"{case} {metric} {value:.4g}")
    return figures


if __name__ == "__main__":
    typer.run(bench)
