"""`infsim calibrate`: options only; the work is in experiments.calibrate and experiments.fidelity."""

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    *,
    sources: Annotated[
        list[str],
        typer.Option(
            "--from", metavar="FORMAT=PATH", help="aiconfigurator, vidur or profile; the first fits, later ones check"
        ),
    ],
    out: Annotated[Path | None, typer.Option(metavar="PACK", help="write the profile pack there")] = None,
    gpu: Annotated[str | None, typer.Option(help="catalogue name (default: as the first source says)")] = None,
    report: Annotated[
        bool, typer.Option("--report", help="held-out and cross-source errors, as a table and a picture")
    ] = False,
) -> None:
    """Fit measured operators to a profile pack, and say how well it holds."""
    from experiments.calibrate import calibrate as run

    for line in run(sources, out, gpu, report):
        if isinstance(line, str):
            typer.echo(line)
        else:
            from rich.console import Console

            Console(width=max(165, Console().width)).print(line)
