"""Command: prints `case metric value`, one line a figure."""

import json
import os
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
    at: Annotated[
        Path, typer.Option(help="folder whose packages are measured, as `make compiled` builds one")
    ] = Path(),
) -> None:
    """Speed of the simulator and of the planner; seconds are of CPU."""
    chosen = only or DEFAULT
    if unknown := set(chosen) - set(CASES):
        raise typer.BadParameter(f"{min(unknown)!r} (allowed: letters of {''.join(CASES)})", param_hint="--only")
    figures: Figures = {}
    for case in chosen:
        typer.echo(f"# {case}: {CASES[case][0]}")
        figures |= run_case(case, at)
    before = last(out)
    typer.echo(f"# kept in {keep(out, figures)}")
    if picture := draw(out, figures):
        typer.echo(f"# drawn in {picture}")
    for line in compare(figures, before) if before else ():
        typer.echo(line)


def run_case(case: str, at: Path) -> Figures:
    if case == "f":
        return {f"f-{n}": echo(f"f-{n}", in_process("infsim.bench.planning", str(n), at)) for n in PLAN_SIZES}
    found: Figures = {}
    for size, config in CASES[case][1].items():
        for system in ("infinite-llm",) if case in POOLED else SYSTEMS:
            name = f"{case}-{size}-{system}"
            text = json.dumps({**config, "system": system})
            found[name] = echo(name, in_process("infsim.bench.child", text, at))
    return found


def in_process(module: str, argument: str, at: Path) -> dict[str, float]:
    """What a module of the packages in `at` prints."""
    command, env = [sys.executable, "-m", module, argument], {**os.environ, "PYTHONPATH": str(at.resolve())}
    done = subprocess.run(command, cwd=at, env=env, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def echo(case: str, figures: dict[str, float]) -> dict[str, float]:
    for metric, value in figures.items():
        typer.echo(f"{case} {metric} {value:.4g}")
    return figures


if __name__ == "__main__":
    typer.run(bench)
