"""The `infsim` command: options and their help. Every command imports its work when it is called, so that `--help` is fast."""

from pathlib import Path
from typing import Annotated

import typer

from infsim.calibrate_cli import calibrate
from infsim.predict_cli import predict
from infsim.traces_cli import app as traces_app

app = typer.Typer(
    name="infsim",
    help="Serve a workload in simulation and compare the ways to do it.",
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="a YAML file, or the name of a ready one (demo)")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change a key of base; repeatable")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="folder for the results (default: out/NAME)")]
Seed = Annotated[int | None, typer.Option(help="same as --set seed=N")]
NumWorkers = Annotated[
    int | None, typer.Option("--workers", metavar="N", min=1, help="runs at once (default: all cores)")
]


@app.command()
def run(
    config: Config,
    out: Out = None,
    set: Set = None,
    seed: Seed = None,
    workers: NumWorkers = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="run on a Ray cluster (or: local)")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="fail a run that needs an extrapolated time")] = False,
    events: Annotated[bool, typer.Option("--events", help="write events.jsonl (infsim replay)")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="write timeline.json (Perfetto)")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check the input and list the runs")] = False,
) -> int:
    """Sweep serving policies over a workload: table, pictures, run folders."""
    from experiments.run_command import Request, list_runs, run_command
    from experiments.sweep import Recording, Workers
    from infsim.runner import run_one

    request = Request(config, out, tuple(set or ()), seed)
    if dry_run:
        return list_runs(request)
    return run_command(request, run_one, Recording(events, timeline, strict), Workers(workers or 0, ray))


@app.command()
def capacity(
    config: Config,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="share of requests within the SLO to keep")
    ] = 0.9,
    out: Out = None,
    set: Set = None,
    seed: Seed = None,
    workers: NumWorkers = None,
) -> int:
    """Find the highest request rate that keeps the SLO, at every axis point."""
    from experiments.run_command import Request
    from infsim.commands import capacity_command

    return capacity_command(Request(config, out, tuple(set or ()), seed), attainment, workers or 0)


@app.command()
def compare(
    dir_a: Annotated[
        Path, typer.Argument(metavar="DIR_A", help="reference: a folder of `infsim run` or `infreal run`")
    ],
    dirs_b: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR_B...", help="what is compared with it; several repeat the same runs and show the noise"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="folder for compare.csv and the picture (default: the last DIR_B)"),
    ] = None,
) -> int:
    """Put the same runs of two folders side by side: error per metric, request and shape; decisions, where both have event logs."""
    from infsim.commands import compare_command

    return compare_command(dir_a, dirs_b, out or dirs_b[-1])


@app.command()
def replay(
    events: Annotated[Path, typer.Argument(metavar="EVENTS", help="an events.jsonl of `infsim run --events`")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder for the rebuilt run")],
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="simulate the same requests under the recorded times, and compare decisions"),
    ] = False,
) -> int:
    """Rebuild a run folder from an event log, by feeding it to fresh machines."""
    from infsim.commands import replay_command

    return replay_command(events, out, simulate)


@app.command()
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="a folder of `infsim run` or `infreal run`, a run in it, or a benchmark's CSV"
        ),
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="the page (default: DIR/report.html)")] = None,
) -> int:
    """Write one HTML file that explains a sweep or a run (no network, no server), or draw a benchmark's CSV."""
    from infsim.commands import report_command

    return report_command(folder, out)


@app.command("list")
def list_names(
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", help="models, gpus, links, systems, policies, generators, traces, packs, keys"),
    ],
) -> None:
    """What can be named in a configuration, one line each."""
    from experiments.listing import listing

    for name, text in listing(kind):
        typer.echo(f"{name:<34} {text}")


app.command("predict")(predict)
app.command("calibrate")(calibrate)
app.add_typer(traces_app, name="traces")
