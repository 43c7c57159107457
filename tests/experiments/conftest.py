"""A driver that simulates nothing: the sweep loop takes any `run_one`."""

import sys

import cloudpickle
import pytest

from experiments.plan import RunPlan
from perfmodel.records import INSTANCE_COLUMNS, MOVE_COLUMNS, REQUEST_COLUMNS, Counters, RunResult

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a conftest


def fake_result(plan: RunPlan) -> RunResult:
    """Every request takes 2 s: 0.5 in the queue, 0.5 prefill, 1 decode. Instances in turn."""
    workload, count = plan.workload, len(plan.workload)
    rows = {name: [0] * count for name in REQUEST_COLUMNS}
    arrival_s = workload.arrival_s.tolist()
    rows |= {
        "req_id": list(range(count)),
        "arrival_s": arrival_s,
        "input_tokens": workload.input_tokens.tolist(),
        "output_tokens": workload.output_tokens.tolist(),
        "status": ["finished"] * count,
        "reason": [None] * count,
        "instance": [i % plan.spec.num_instances for i in range(count)],
        "first_token_s": [t_s + 1.0 for t_s in arrival_s],
        "finish_s": [t_s + 2.0 for t_s in arrival_s],
        "queue_s": [0.5] * count,
        "prefill_s": [0.5] * count,
        "decode_s": [1.0] * count,
    }
    samples = {name: [0, 0] for name in INSTANCE_COLUMNS} | {"free_blocks": [plan.spec.num_blocks] * 2}
    end_s = arrival_s[-1] + 2.0
    counters = {"t_s": end_s, "output_tokens": int(workload.output_tokens.sum()), "batch_s": 2.0 * count}
    return RunResult(
        requests=rows,
        instances=samples,
        moves={name: [] for name in MOVE_COLUMNS},
        marks={"start": Counters(), "end": Counters(**counters)},
        window_kind=workload.window_kind,
        num_refused=0,
        basis_s={"analytic": 3.0, "extrapolated": 1.0},
        makespan_s=end_s,
    )


def fake_run_one(plan, folder, recording):
    if recording.events:
        (folder / "events.jsonl").write_text("{}\n")
    return fake_result(plan)


@pytest.fixture(scope="session")
def run_one():
    return fake_run_one
