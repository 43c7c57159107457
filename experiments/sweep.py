"""The sweep loop: plans every run, submits the unfinished ones, writes each run folder, survives the death of a worker.

The driver hands in `run_one`; this module does not know which one it is. A worker that dies takes the runs
beside it along, so what had begun is repeated alone, at most `RETRIES` times, and then marked failed; the others just
start again.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from experiments import raycluster, runfolder
from experiments.plan import RunPlan, plan_run
from experiments.runs import Runs, load_runs
from experiments.sweepfile import Run, Sweep, label
from perfmodel.errors import InputError, RunError
from perfmodel.metrics import breakdown, summarise
from perfmodel.records import RunResult

RETRIES = 2
SIMULATION, HARDWARE = "simulation", "hardware"  # what carries runs out


@dataclass(frozen=True)
class Recording:
    """What a run writes besides its tables, and whether an extrapolated time is an error."""

    events: bool = False
    timeline: bool = False
    strict: bool = False


class RunOne(Protocol):
    """A driver: carries one plan out, and may write its own files into `folder`. Worker processes import it by name."""

    def __call__(self, plan: RunPlan, folder: Path, recording: Recording) -> RunResult: ...


@dataclass(frozen=True)
class Workers:
    """How many runs at once, and where: processes of this machine, or a Ray cluster ("local" or an address)."""

    count: int = 1
    ray: str | None = None


@dataclass(frozen=True)
class Job:
    """One run and its place. `done`: it is complete already; `driver`: SIMULATION or HARDWARE; `inputs`: files that it reads."""

    run: Run
    folder: Path
    pool_line: str = ""
    done: bool = False
    driver: str = SIMULATION
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loop:
    """How a sweep is carried out. `report` is told of each run that ends, with its manifest."""

    run_one: RunOne
    recording: Recording = Recording()
    workers: Workers = Workers()
    report: Callable[[Run, dict[str, Any]], None] = lambda run, manifest: None

    def carry_out(self, jobs: Sequence[Job]) -> None:
        """Every job ends in a folder: done, or failed."""
        for job in jobs:
            runfolder.clear(job.folder)
        waiting = list(jobs)
        while waiting:
            self._submit(waiting, self.workers.count)
            missing = [job for job in waiting if not is_written(job)]
            suspects = [job for job in missing if runfolder.aside_of(job.folder).exists()]
            for job in suspects:
                self._repeat_alone(job)
            if missing == waiting and not suspects:
                raise RunError("workers die before they begin a run (killed, or out of memory)")
            waiting = [job for job in missing if job not in suspects]

    def _repeat_alone(self, job: Job) -> None:
        for _ in range(RETRIES):
            self._submit([job], 2)  # with one worker joblib would run it in this very process
            if is_written(job):
                return
        write_failed(job, {}, f"the worker died {1 + RETRIES} times (killed, or out of memory)")
        self._report(job)

    def _submit(self, jobs: Sequence[Job], count: int) -> None:
        """Run jobs and report each that ends; returns early where a worker dies."""
        from joblib import delayed

        open_jobs = {job.run.index: job for job in jobs}
        calls = [delayed(carry_out)(job, self.run_one, self.recording) for job in jobs]
        try:
            for index in parallel(calls, Workers(count, self.workers.ray)):
                self._report(open_jobs.pop(index))
        except Exception as error:
            if not is_worker_death(error):
                raise
        for job in open_jobs.values():  # ended, but a backend that returns all results at once has lost that
            if is_written(job):
                self._report(job)

    def _report(self, job: Job) -> None:
        manifest = runfolder.read_manifest(job.folder)
        assert manifest is not None, f"{job.folder} has just been written"
        self.report(job.run, manifest)


def is_written(job: Job) -> bool:
    return runfolder.read_manifest(job.folder) is not None


def parallel(calls: list[Any], workers: Workers) -> Iterator[Any]:
    """Results of joblib's delayed calls, as they come where the backend can."""
    from joblib import Parallel, parallel_config

    if workers.ray is None:
        backend = "sequential" if workers.count == 1 else "loky"
        yield from Parallel(n_jobs=workers.count, backend=backend, return_as="generator_unordered", batch_size=1)(calls)
        return
    raycluster.register_ray(workers.ray)
    with parallel_config(backend="ray", n_jobs=workers.count):
        yield from Parallel(return_as="list", batch_size=1)(calls)


def is_worker_death(error: BaseException) -> bool:
    """joblib's TerminatedWorkerError or Ray's ActorDiedError, without importing either."""
    return any(kind.__name__ in ("TerminatedWorkerError", "ActorDiedError") for kind in type(error).__mro__)


def carry_out(job: Job, run_one: RunOne, recording: Recording) -> int:
    """One run, from its configuration to its folder; returns its index.

    Input errors are raised. Whatever else goes wrong belongs to this run, is written into its folder, and the sweep
    goes on.
    """
    aside = runfolder.open_aside(job.folder)
    plan = plan_run(job.run.config)
    plan.facts["driver"] = job.driver
    started_s = time.perf_counter()
    try:
        result = run_one(plan, aside, recording)
        check_strict(result, recording)
        write_done(job, plan, result, time.perf_counter() - started_s)
    except InputError:
        raise
    except RunError as error:
        write_failed(job, plan.facts, str(error))
    except Exception as error:
        facts = {**plan.facts, "traceback": traceback.format_exc()}
        write_failed(job, facts, f"{type(error).__name__}: {error}")
    return job.run.index


def check_strict(result: RunResult, recording: Recording) -> None:
    extrapolated_s = result.basis_s.get("extrapolated", 0.0)
    if recording.strict and extrapolated_s > 0:
        share = extrapolated_s / sum(result.basis_s.values())
        raise RunError(f"--strict: {100 * share:.1f} % of the simulated time is extrapolated")


def write_done(job: Job, plan: RunPlan, result: RunResult, wall_s: float) -> None:
    aside = runfolder.aside_of(job.folder)
    runfolder.write_tables(aside, result)
    manifest = runfolder.manifest_of(job.run, plan.facts) | {
        "basis_s": result.basis_s,
        "breakdown": breakdown(result.requests),
        "metrics": summarise(result, plan.slo, plan.capacity) | {"wall_s": wall_s},
    }
    runfolder.write_manifest(aside, manifest)
    runfolder.close_aside(job.folder)


def write_failed(job: Job, facts: dict[str, Any], error: str) -> None:
    aside = runfolder.open_aside(job.folder)
    manifest = runfolder.manifest_of(job.run, facts) | {"status": "failed", "error": error}
    runfolder.write_manifest(aside, manifest)
    runfolder.close_aside(job.folder)


def run_sweep(sweep: Sweep, out: Path, loop: Loop) -> Runs:
    """Carry out what `out` does not hold yet, and write its summary. Raises InputError before anything runs."""
    return run_jobs(plan_jobs(sweep, out), out, loop)


def run_jobs(jobs: Sequence[Job], out: Path, loop: Loop) -> Runs:
    """The same for a sweep that is planned already."""
    runfolder.make_folder(out)
    open_jobs = [job for job in jobs if not job.done]
    if loop.workers.ray and open_jobs:
        raycluster.register_ray(loop.workers.ray)
        inputs = dict.fromkeys(path for job in open_jobs for path in job.inputs)
        raycluster.check_shared(out, [Path(path) for path in inputs])
    loop.carry_out(open_jobs)
    runs = load_runs(out)
    runfolder.write_summary(out, runs.manifests)
    return runs


def plan_jobs(sweep: Sweep, out: Path, driver: str = SIMULATION) -> list[Job]:
    """All runs, planned once here so that wrong input ends the command before anything runs. Raises InputError."""
    jobs = []
    for run in sweep.runs:
        try:
            plan = plan_run(run.config)
        except InputError as error:
            raise InputError(f"{sweep.source}: {at_axes(run)}{error}") from error
        plan.facts["driver"] = driver
        folder = out / "runs" / run.name
        done, inputs = is_done(run, folder, plan), tuple(plan.facts["inputs"])
        jobs.append(Job(run, folder, plan.pool_line(), done, driver, inputs))
    strangers = {folder.name for folder in runfolder.run_folders(out)} - {job.folder.name for job in jobs}
    if strangers:
        raise OtherSweepError(f"{out}: holds another sweep's run {min(strangers)}; give another --out or remove it")
    return jobs


def at_axes(run: Run) -> str:
    """Which point of a sweep, for an error."""
    values = ", ".join(f"{axis} {label(value)}" for axis, value in run.axes.items())
    return f"at {values}: " if values else ""


class OtherSweepError(InputError):
    """The output folder belongs to another sweep."""


def is_done(run: Run, folder: Path, plan: RunPlan) -> bool:
    """Complete already? Raises OtherSweepError where the folder holds a run of another configuration."""
    manifest = runfolder.read_manifest(folder)
    if manifest is None or manifest["status"] == "failed":
        return False
    why = runfolder.difference(manifest, run, plan.facts)
    if why:
        raise OtherSweepError(f"{folder}: holds another run ({why}); give another --out or remove it")
    return True
