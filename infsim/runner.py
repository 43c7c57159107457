"""What the sweep loop calls for one run: the simulation, watched as far as was asked for."""

from pathlib import Path

from experiments.plan import RunPlan
from experiments.sweep import Recording
from experiments.watching import watching
from infsim.simulate import simulate
from perfmodel.records import RunResult


def run_one(plan: RunPlan, folder: Path, recording: Recording) -> RunResult:
    """Simulate a plan; events.jsonl and timeline.json go into `folder`."""
    with watching(plan, folder, recording) as observer:
        return simulate(plan.spec, plan.workload, observer)
