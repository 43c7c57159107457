"""`infsim replay`: a run folder rebuilt from an event log alone."""

import time
from pathlib import Path

import numpy as np

from experiments import runfolder
from experiments.eventlog import Replay, read_log
from experiments.explain import validate
from experiments.plan import RunPlan, facts_of, file_sha256, plan_cluster
from experiments.runs import Runs, load_runs
from experiments.sweep import Job, write_done
from experiments.sweepfile import Run
from perfmodel.cluster import Workload
from perfmodel.errors import InputError
from perfmodel.records import RunResult


def replay_run(events: Path, out: Path) -> Runs:
    """Feed a log to fresh machines and write what they did. Raises InputError for what is no event log."""
    started_s = time.perf_counter()
    header, lines = read_log(events)
    config = validate(header["config"], f"{events}, line 1")
    spec = plan_cluster(config)
    try:
        result = Replay(spec).run(lines)
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        raise InputError(f"{events}: a damaged event log ({type(error).__name__}: {error})") from error
    workload = workload_of(result)
    facts = facts_of(config, spec, workload, {"replay": events.name}) | header["facts"]
    facts["inputs"][str(events)] = file_sha256(events)
    write_run(RunPlan(config, spec, workload, facts), result, out, time.perf_counter() - started_s)
    runs = load_runs(out)
    runfolder.write_summary(out, runs.manifests)
    return runs


def write_run(plan: RunPlan, result: RunResult, out: Path, wall_s: float) -> None:
    run = Run(0, {}, 0, plan.config)
    folder = out / "runs" / run.name
    runfolder.make_folder(out)
    runfolder.open_aside(folder)
    write_done(Job(run, folder), plan, result, wall_s)


def workload_of(result: RunResult) -> Workload:
    """The requests of the log, in order of `req_id`."""
    arrival_s = np.array(result.requests["arrival_s"], dtype=np.float64)
    inputs = np.array(result.requests["input_tokens"], dtype=np.int64)
    outputs = np.array(result.requests["output_tokens"], dtype=np.int64)
    return Workload(arrival_s, inputs, outputs, window_kind=result.window_kind)
