"""`infsim replay`: a run folder rebuilt from an event log alone, or simulated under its times."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments import runfolder
from experiments.config import Config
from experiments.eventlog import read_log
from experiments.explain import validate
from experiments.plan import RunPlan, facts_of, file_sha256, plan_cluster
from experiments.runs import Runs, load_runs
from experiments.sweep import SIMULATION, Job, Recording, write_done
from experiments.sweepfile import Run
from experiments.watching import watching
from infsim.driver import Simulation
from infsim.given import GivenTimes, read_times
from perfmodel.cluster import ClusterSpec, Workload
from perfmodel.errors import InputError
from perfmodel.records import RunResult


def replay_run(events: Path, out: Path) -> Runs:
    """Feed a log to fresh machines and write what they did. Raises InputError for what is no event log."""
    started_s = time.perf_counter()
    config, facts, spec, (_, result) = read_run(events)
    plan = plan_of(events, config, spec, workload_of(result), {"replay": events.name}, facts)
    job = open_job(plan, out)
    write_done(job, plan, result, time.perf_counter() - started_s)
    return closed(out)


def simulate_run(events: Path, out: Path) -> tuple[Runs, Path]:
    """Simulate the requests of a log, its iterations and copies taking as long as they did there. Returns its runs and its own log.

    Raises InputError for what is no event log.
    """
    started_s = time.perf_counter()
    config, _, spec, (times, result) = read_run(events)
    plan = plan_of(events, config, spec, workload_of(result), {"times": events.name}, {"driver": SIMULATION})
    job = open_job(plan, out)
    with watching(plan, runfolder.aside_of(job.folder), Recording(events=True)) as observer:
        simulated = Simulation(spec, plan.workload, observer, given=times).run()
    write_done(job, plan, simulated, time.perf_counter() - started_s)
    return closed(out), job.folder / "events.jsonl"


def read_run(events: Path) -> tuple[Config, dict[str, Any], ClusterSpec, tuple[GivenTimes, RunResult]]:
    """The configuration of a log, what carried it out, its cluster, and its times and tables."""
    header, lines = read_log(events)
    config = validate(header["config"], f"{events}, line 1")
    spec = plan_cluster(config)
    try:
        return config, header["facts"], spec, read_times(spec, lines)
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        raise InputError(f"{events}: a damaged event log ({type(error).__name__}: {error})") from error


def plan_of(
    events: Path, config: Config, spec: ClusterSpec, workload: Workload, source: dict[str, Any], facts: dict[str, Any]
) -> RunPlan:
    plan = RunPlan(config, spec, workload, facts_of(config, spec, workload, source) | facts)
    plan.facts["inputs"][str(events)] = file_sha256(events)
    return plan


def open_job(plan: RunPlan, out: Path) -> Job:
    run = Run(0, {}, 0, plan.config)
    folder = out / "runs" / run.name
    runfolder.make_folder(out)
    runfolder.open_aside(folder)
    return Job(run, folder)


def closed(out: Path) -> Runs:
    runs = load_runs(out)
    runfolder.write_summary(out, runs.manifests)
    return runs


def workload_of(result: RunResult) -> Workload:
    """The requests of the log, in order of `req_id`."""
    arrival_s = np.array(result.requests["arrival_s"], dtype=np.float64)
    inputs = np.array(result.requests["input_tokens"], dtype=np.int64)
    outputs = np.array(result.requests["output_tokens"], dtype=np.int64)
    return Workload(arrival_s, inputs, outputs, window_kind=result.window_kind)
