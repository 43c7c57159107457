"""What the commands do and print: results on stdout, progress on stderr."""

from pathlib import Path

import pandas as pd
from joblib import cpu_count
from rich import box
from rich.console import Console
from rich.table import Table

from experiments import runfolder
from experiments.capacity import find_capacity, points_without_rate
from experiments.compare import Comparison, compare, metric_table, picture, request_table, shape_table
from experiments.plots import capacity_picture
from experiments.plotstyle import save
from experiments.progress import Progress
from experiments.run_command import Request, conclude, console_of
from experiments.summary import number
from experiments.sweep import Workers
from infsim.runner import run_one


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
