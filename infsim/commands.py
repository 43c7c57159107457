"""What the commands do and print: results on stdout, progress on stderr."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from joblib import cpu_count
from rich import box
from rich.console import Console
from rich.table import Table

from experiments import runfolder
from experiments.capacity import find_capacity, points_without_rate
from experiments.compare import Comparison, compare, metric_table, request_table, shape_table
from experiments.decisions import Divergence, decisions_of, equal_shares, first_divergence
from experiments.plots import capacity_picture
from experiments.plots_compare import picture
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


def compare_command(dir_a: Path, dirs_b: Sequence[Path], out: Path) -> int:
    """`infsim compare`."""
    comparison = compare(dir_a, *dirs_b)
    runfolder.make_folder(out)
    comparison.metrics.to_csv(out / "compare.csv", index=False)
    save(picture(comparison), out / "compare")
    console = console_of()
    console.print(f"A: {comparison.name_a}\nB: {comparison.name_b}")
    for title, frame in tables_of(comparison).items():
        console.print(f"\n{title}, (B − A)/A in %", style="bold")
        print_frame(console, frame)
    for run, logs in comparison.logs.items():
        tell_decisions(console, f"Decisions, {run}", *logs)
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


def tell_decisions(console: Console, title: str, log_a: Path, log_b: Path) -> None:
    """Of two event logs: how many decisions are the same, and the first that is not."""
    a, b = decisions_of(log_a), decisions_of(log_b)
    rows = [(kind, 100 * share, num_a, num_b) for kind, (share, num_a, num_b) in equal_shares(a, b).items()]
    console.print(f"\n{title}", style="bold")
    print_frame(console, pd.DataFrame(rows, columns=["kind", "equal, %", "A", "B"]))
    console.print("\n".join(first_difference(first_divergence(a, b))), soft_wrap=True)


def first_difference(place: Divergence | None) -> list[str]:
    if place is None:
        return ["the same decisions in the same order"]
    lines = [f"first difference: decision {place.number + 1} of {place.machine}"]
    for side, decision in (("A", place.a), ("B", place.b)):
        told = f"{decision.t_s:.3f} s: {decision.kind} {decision.what} ({decision.because})" if decision else "none"
        lines.append(f"  {side} {told}")
    return lines


def in_percent(frame: pd.DataFrame) -> pd.DataFrame:
    """Columns `*_error_frac` in percent, under their first words."""
    suffix = "_error_frac"
    columns = {str(column): frame[column] for column in frame}
    return pd.DataFrame(
        {k.removesuffix(suffix): column * 100 if k.endswith(suffix) else column for k, column in columns.items()}
    )


def replay_command(events: Path, out: Path, simulate: bool) -> int:
    """`infsim replay`."""
    from infsim.replay import replay_run, simulate_run

    console = console_of()
    if not simulate:
        return conclude(console, replay_run(events, out))
    runs, log = simulate_run(events, out)
    tell_decisions(console, "Decisions: A as recorded, B simulated under the recorded times", events, log)
    return conclude(console, runs)


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
