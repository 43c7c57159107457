"""Golden summaries: ten small runs must give the same numbers as when they were written down, to 1e-9.

A change that is to change results (a policy, a price) writes them anew and says why in its commit message:

    UPDATE_GOLDEN=1 python -m pytest tests/infsim/test_golden.py -n 0
"""

import json
import os
from pathlib import Path

import pytest

from experiments.config import Config
from experiments.plan import plan_run
from infsim.driver import Simulation
from perfmodel.metrics import breakdown, summarise

GOLDEN = Path(__file__).with_name("golden.json")
FOUR = {"nodes": 1, "gpus_per_node": 4}
SHORT = {"generator": "fixed", "params": {"input_tokens": 512, "output_tokens": 128}, "num_requests": 200}
HEAVY = {
    "generator": "loguniform-mix",
    "params": {"mean_tokens": 600, "sd_tokens": 500, "max_tokens": 2000, "tail_frac": 0.1, "tail_max_tokens": 24_000},
    "num_requests": 120,
    "rate_rps": 3.0,
}
LONG = {**HEAVY, "params": {**HEAVY["params"], "tail_max_tokens": 40_000}, "num_requests": 60, "rate_rps": 1.5}
SMALL = {"blocks_per_gpu": 1600}  # 25,600 tokens
FAULTS = {"delay_s": 0.02, "reorder": 0.1, "duplicate": 0.1, "loss": 0.05, "kill": [[12.0, 1, 20.0]]}

CASES = {
    "short requests": {"system": "vllm-multi", "cluster": FOUR, "workload": {**SHORT, "rate_rps": 12.0}},
    "one large instance": {"system": "vllm-single", "cluster": FOUR, "workload": HEAVY},
    "preemption": {
        "system": "vllm-multi",
        "cluster": FOUR,
        "instance": {"blocks_per_gpu": 260},
        "batching": "prefill-first",
        "engine": "eager-2023",
        "workload": {**SHORT, "params": {"input_tokens": 200, "output_tokens": 300}, "arrivals": "saturated"},
    },
    "closed loop on a pipeline": {
        "system": "vllm-multi",
        "cluster": FOUR,
        "instance": {"pipeline_parallel": 2, "max_batch": 6},
        "dispatch": "round-robin",
        "workload": {**SHORT, "arrivals": "closed", "users": 20, "think_s": 0.5},
    },
    "idle pool": {"system": "infinite-llm", "cluster": FOUR, "workload": {**SHORT, "rate_rps": 12.0}},
    "pool": {"system": "infinite-llm", "cluster": FOUR, "instance": SMALL, "workload": HEAVY},
    "reactive pool": {
        "system": "infinite-llm",
        "placement": "reactive",
        "cluster": FOUR,
        "instance": {"blocks_per_gpu": 600},
        "workload": {
            **HEAVY,
            "params": {**HEAVY["params"], "tail_max_tokens": 8_000},
            "arrivals": "saturated",
            "rate_rps": None,
        },
    },
    "prompts beyond an instance": {"system": "infinite-llm", "cluster": FOUR, "instance": SMALL, "workload": LONG},
    "pool over a slow link": {
        "system": "infinite-llm",
        "cluster": {"nodes": 2, "gpus_per_node": 2, "inter_link": "ethernet-1g"},
        "instance": SMALL,
        "engine": "eager-2023",
        "workload": LONG,
    },
    "pool under faults": {
        "system": "infinite-llm",
        "cluster": FOUR,
        "instance": SMALL,
        "chaos": FAULTS,
        "workload": HEAVY,
    },
}


def summary_of(config):
    """What a run folder says of the run, and a weighted sum of every column of its tables."""
    plan = plan_run(Config.model_validate(config).resolved())
    result = Simulation(plan.spec, plan.workload).run()
    metrics = summarise(result, plan.slo, plan.capacity) | breakdown(result.requests)
    del metrics["window_kind"]  # a text
    columns = {
        f"{table}.{name}": weighted_sum(column)
        for table in ("requests", "instances", "moves")
        for name, column in getattr(result, table).items()
    }
    return {**metrics, **{f"basis_s.{name}": s for name, s in result.basis_s.items()}, **columns}


def weighted_sum(column):
    """The order of the rows counts. Texts count by their length, what is undefined by nothing."""
    values = (len(value) if isinstance(value, str) else value or 0 for value in column)
    return float(sum(value * (1 + i % 7) for i, value in enumerate(values)))


@pytest.mark.parametrize("name", CASES)
def test_summary_is_what_it_was(name):
    found = summary_of(CASES[name])
    if "UPDATE_GOLDEN" in os.environ:
        golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        GOLDEN.write_text(json.dumps({**golden, name: found}, indent=1, sort_keys=True) + "\n")
    assert found == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-9, abs=1e-9, nan_ok=True)
