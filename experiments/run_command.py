"""What `infsim run` and `infreal run` share, whichever driver carries a run out: place, table, pictures, closing lines.

Results go to stdout, progress to stderr.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from joblib import cpu_count
from rich.console import Console

from experiments import raycluster, runfolder
from experiments.plots import draw_sweep
from experiments.progress import Progress
from experiments.runs import Runs
from experiments.summary import closing_lines, table_of
from experiments.sweep import SIMULATION, Job, Loop, OtherSweepError, Recording, RunOne, Workers, plan_jobs, run_jobs
from experiments.sweepfile import Sweep, load_sweep, parse_settings
from perfmodel.errors import InputError

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


def run_command(
    request: Request, run_one: RunOne, recording: Recording, workers: Workers, driver: str = SIMULATION
) -> int:
    """`infsim run` and `infreal run`. workers.count 0: as many as there are cores."""
    sweep = request.sweep()
    out, jobs = place(sweep, shared_out(request.out, workers.ray), driver)
    runfolder.make_folder(out)
    console = console_of()
    announce(console, sweep, jobs, out)
    at_once = workers.count or min(cpu_count(), max(1, sum(not job.done for job in jobs)))
    with Progress(len(jobs), sum(job.done for job in jobs)) as progress:
        runs = run_jobs(jobs, out, Loop(run_one, recording, Workers(at_once, workers.ray), progress.report))
    return conclude(console, runs)


def shared_out(out: Path | None, ray: str | None) -> Path | None:
    """On a Ray cluster the folder must be named, and means the same on every node. Raises InputError."""
    if ray is None:
        return out
    if out is None and ray != raycluster.LOCAL:
        raise InputError(f"--ray {ray}: give --out, a folder that all nodes of the cluster see")
    return out and out.resolve()


def list_runs(request: Request) -> int:
    """`--dry-run`: input is checked, nothing runs and nothing is written."""
    sweep = request.sweep()
    console = console_of()
    for job in plan_jobs(sweep, request.out or Path("out") / sweep.name):
        console.print(f"{job.run.name}: {job.pool_line}")
    return 0


def place(sweep: Sweep, out: Path | None, driver: str) -> tuple[Path, list[Job]]:
    """The output folder and its jobs. Without `--out`: out/NAME, or the next number where that holds another sweep."""
    if out is not None:
        return out, plan_jobs(sweep, out, driver)
    for attempt in count(1):
        folder = Path("out") / (sweep.name if attempt == 1 else f"{sweep.name}-{attempt}")
        with suppress(OtherSweepError):
            return folder, plan_jobs(sweep, folder, driver)
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
