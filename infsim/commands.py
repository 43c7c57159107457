"""What the commands do and print: results on stdout, progress on stderr."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pandas as pd
from joblib import cpu_count
from rich import box
from rich.console import Console
from rich.table import Table

from experiments import runfolder
from experiments.capacity import find_capacity, points_without_rate
from experiments.compare import Comparison, compare, metric_table, picture, request_table, shape_table
from experiments.plots import capacity_picture, draw_sweep
from experiments.plotstyle import save
from experiments.progress import Progress
from experiments.runs import Runs
from experiments.summary import closing_lines, number, table_of
from experiments.sweep import Job, Loop, OtherSweepError, Recording, Workers, plan_jobs, run_jobs
from experiments.sweepfile import Sweep, load_sweep, parse_settings
from infsim.runner import run_one

WIDTH = 120  # of a table that no terminal limits


@dataclass(frozen=True)
class Request:
    """The options that say which sweep, and where to."""

    config: str
    out: Path | None
    settings: tuple[str, ...]
    seed: int | None

    def sweep(self) -> Sweep:
        seed = {} if self.seed is None else {"seed": self.seed}
        return load_sweep(self.config, parse_settings(self.settings) | seed)


def run_command(request: Request, recording: Recording, workers: Workers) -> int:
    """`infsim run`."""
    sweep = request.sweep()
    out, jobs = place(sweep, request.out)
    runfolder.make_folder(out)
    console = console_of()
    announce(console, sweep, jobs, out)
    at_once = workers.count or min(cpu_count(), max(1, sum(not job.done for job in jobs)))
    with Progress(len(jobs), sum(job.done for job in jobs)) as progress:
        runs = run_jobs(jobs, out, Loop(run_one, recording, Workers(at_once, workers.ray), progress.report))
    return conclude(console, runs)


def list_runs(request: Request) -> int:
    """`infsim run --dry-run`: input is checked, nothing runs and nothing is written."""
    sweep = request.sweep()
    console = console_of()
    for job in plan_jobs(sweep, request.out or Path("out") / sweep.name):
        console.print(f"{job.run.name}: {job.pool_line}")
    return 0


def place(sweep: Sweep, out: Path | None) -> tuple[Path, list[Job]]:
    """The output folder and its jobs. Without `--out`: out/NAME, or the next number where that holds another sweep."""
    if out is not None:
        return out, plan_jobs(sweep, out)
    for attempt in count(1):
        folder = Path("out") / (sweep.name if attempt == 1 else f"{sweep.name}-{attempt}")
        with suppress(OtherSweepError):
            return folder, plan_jobs(sweep, folder)
    raise AssertionError("there is always a next number")


def console_of() -> Console:
    """stdout; wide enough for a table where it is no terminal."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def announce(console: Console, sweep: Sweep, jobs: Sequence[Job], out: Path) -> None:
    done = sum(job.done for job in jobs)
    console.print(f"{sweep.name}: {len(jobs)} runs{f', {done} of them done already' if done else ''}, into {out}")
    for line in dict.fromkeys(f"  {job.run.config.system}, {job.pool_line}" for job in jobs):
        console.print(line)


def conclude(console: Console, runs: Runs) -> int:
    """Table, pictures, failures, and the three closing lines last."""
    console.print()
    console.print(table_of(runs.manifests, console.width))
    pictures = draw_sweep(runs)
    for folder, manifest in zip(runs.folders, runs.manifests, strict=True):
        if manifest["status"] == "failed":
            console.print(f"{folder.name} failed: {manifest['error']}")
    files = ["summary.csv", *(path.name for path in pictures if path.suffix == ".png")]
    console.print(f"{runs.folder}: {', '.join(files)}, runs/\n")
    for line in closing_lines(runs.manifests):
        console.print(line, soft_wrap=True)
    return int(any(manifest["status"] == "failed" for manifest in runs.manifests))


def capacity_command(request: Request, attainment: float, workers: int) -> int:
    """`infsim capacity`."""
    sweep = request.sweep()
    out = request.out or Path("out") / f"{sweep.name}-capacity"
    runfolder.make_folder(out)
    points = points_without_rate(sweep)
    at_once = workers or min(cpu_count(), len(points))
    with Progress(len(points), what="capacities") as progress:
        found = []
        for one in find_capacity(points, attainment, run_one, Workers(at_once)):
            progress.step(one.point.name, f"{number(one.row()['rate_rps'])} req/s after {len(one.probes)} runs")
            found.append(one)
    found.sort(key=lambda one: points.index(one.point))
    rows = pd.DataFrame([one.row() for one in found])
    rows.to_csv(out / "capacity.csv", index=False)
    save(capacity_picture(found, attainment), out / "capacity")
    console = console_of()
    print_frame(
        console, rows.rename(columns={"output_tok_per_s_per_gpu": "tok/s per GPU", "slo_attainment_frac": "in SLO"})
    )
    console.print(f"{out}: capacity.csv, capacity.png")
    return 0


def compare_command(dir_a: Path, dir_b: Path, out: Path) -> int:
    """`infsim compare`."""
    comparison = compare(dir_a, dir_b)
    runfolder.make_folder(out)
    comparison.metrics.to_csv(out / "compare.csv", index=False)
    save(picture(comparison, (str(dir_a), str(dir_b))), out / "compare")
    console = console_of()
    for title, frame in tables_of(comparison).items():
        console.print(f"\n{title}, (B − A)/A in %", style="bold")
        print_frame(console, frame)
    for side, only in (("A", comparison.only_a), ("B", comparison.only_b)):
        if only:
            console.print(f"only in {side}: {'; '.join(only)}")
    console.print(f"{out}: compare.csv, compare.png")
    return 0


def tables_of(comparison: Comparison) -> dict[str, pd.DataFrame]:
    """Titles and tables, errors in percent."""
    shapes = (shape_table(comparison) * 100).add_prefix("output ≤ ").rename_axis("input ≤").reset_index()
    return {
        "Error per metric": in_percent(metric_table(comparison)),
        "Error per request": in_percent(request_table(comparison)),
        "Median error of e2e_s by shape": shapes,
    }


def in_percent(frame: pd.DataFrame) -> pd.DataFrame:
    """Columns `*_error_frac` in percent, under their first words."""
    suffix = "_error_frac"
    columns = {str(column): frame[column] for column in frame}
    return pd.DataFrame(
        {k.removesuffix(suffix): column * 100 if k.endswith(suffix) else column for k, column in columns.items()}
    )


def replay_command(events: Path, out: Path) -> int:
    """`infsim replay`."""
    from infsim.replay import replay_run

    runs = replay_run(events, out)
    return conclude(console_of(), runs)


def report_command(folder: Path, file: Path | None) -> int:
    """`infsim report`: of a folder a page, of a benchmark's profile CSV its picture, beside it."""
    if folder.suffix == ".csv":
        from experiments.plots_bench import plot_attention_bench

        for path in plot_attention_bench(folder, folder.parent):
            console_of().print(str(path), soft_wrap=True)
        return 0
    from experiments.report import write_report

    console_of().print(str(write_report(folder, file)), soft_wrap=True)
    return 0


def print_frame(console: Console, frame: pd.DataFrame) -> None:
    """A DataFrame as a table of the terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, column in frame.items():
        table.add_column(str(name).replace("_", " "), justify="right" if column.dtype.kind in "fi" else "left")
    for row in frame.itertuples(index=False):
        table.add_row(*(number(value) if isinstance(value, int | float) else str(value) for value in row))
    console.print(table)
