"""Public reports that concern workloads and show only in a run: what is offered is what is served and measured."""

import numpy as np
import pytest

import infsim
import traces
from traces import GenerateOptions

BASE = {
    "system": "vllm-multi",
    "model": "llama2-7b",
    "gpu": "a100-80gb",
    "cluster": {"nodes": 1, "gpus_per_node": 2, "intra_link": "nvlink3", "inter_link": "ethernet-100g"},
}


def run(tmp_path, name, workload, **more):
    return infsim.run({"base": {**BASE, "workload": workload, **more}}, out=tmp_path / name)


@pytest.mark.parametrize(
    "options",
    [
        {"rate_rps": 20.0},
        {"rate_rps": 20.0, "arrivals": "gamma", "cv": 3.0},
        {"arrivals": "closed", "users": 8, "think_s": 0.5},
    ],
    ids=["poisson", "gamma", "closed"],
)
def test_inference_sim_1615_a_replayed_export_runs_the_same(tmp_path, options):
    """A run of 200 requests, exported and replayed, completed 130."""
    generator = {"generator": "empirical-azure-conv", "num_requests": 200, **options}
    trace = traces.generate("empirical-azure-conv", GenerateOptions(num_requests=200, **options))
    traces.write_own(trace, tmp_path / "own.csv")
    first = run(tmp_path, "first", generator)
    again = run(tmp_path, "again", {"trace": "own", "path": str(tmp_path / "own.csv")})
    assert first.summary.num_finished.tolist() == [200]
    assert first.requests.equals(again.requests)
    assert first.instances.equals(again.instances)


def test_vllm_21104_evalscope_1367_the_driver_sends_at_the_recorded_times(tmp_path):
    """Overloaded or not, a request is offered when the trace says, not when the one before it was done."""
    runs = run(tmp_path, "runs", {"generator": "empirical-azure-conv", "num_requests": 300, "rate_rps": 200.0})
    trace = traces.generate("empirical-azure-conv", GenerateOptions(num_requests=300, rate_rps=200.0))
    assert np.array_equal(runs.requests.sort_values("req_id").arrival_s, trace.arrival_s)
    assert runs.summary.makespan_s[0] > 5 * trace.duration_s, "the test overloads"


def test_vllm_54101_waiting_counts_as_latency(tmp_path):
    """Time queued before a slot was free was left out: with one row a batch, the last of 20 waits for the other 19."""
    workload = {"generator": "fixed", "num_requests": 40, "arrivals": "saturated",
                "params": {"input_tokens": 100, "output_tokens": 50}}  # fmt: skip
    runs = run(tmp_path, "runs", workload, instance={"max_batch": 1})
    requests = runs.requests
    latency_s = requests.finish_s - requests.arrival_s
    assert latency_s.max() == pytest.approx(runs.summary.makespan_s[0])
    assert requests.queue_s.max() == pytest.approx(latency_s.max() * 19 / 20, rel=0.02)
    assert (requests.first_token_s - requests.arrival_s).max() > requests.queue_s.max()


def test_aibrix_2505_inference_perf_497_output_lengths_are_honoured(tmp_path):
    """Every finished request has emitted exactly the tokens that the trace asks for."""
    runs = run(tmp_path, "runs", {"generator": "paper-2", "num_requests": 50, "rate_rps": 1.0, "output": "chat"})
    trace = traces.generate("paper-2", GenerateOptions(num_requests=50, rate_rps=1.0, output="chat"))
    requests = runs.requests.sort_values("req_id")
    assert (requests.status == "finished").all()
    assert np.array_equal(requests.output_tokens, trace.output_tokens)
    assert runs.summary.served_token_frac[0] == 1.0
    assert runs.summary.num_finished[0] == 50


def test_vllm_28512_the_seed_of_a_run_seeds_its_workload(tmp_path):
    """Replicate r uses seed + r; systems see the same requests."""
    workload = {"generator": "paper-1", "num_requests": 30, "rate_rps": 2.0}
    config = {"base": {**BASE, "workload": workload, "seed": 5, "replicates": 2},
              "axes": {"system": ["vllm-multi", "vllm-single"]}}  # fmt: skip
    requests = infsim.run(config, out=tmp_path / "runs").requests
    offered = {
        key: group.sort_values("req_id").input_tokens.tolist()
        for key, group in requests.groupby(["system", "replicate"])
    }
    for replicate in (0, 1):
        trace = traces.generate("paper-1", GenerateOptions(num_requests=30, rate_rps=2.0, seed=5 + replicate))
        for system in ("vllm-multi", "vllm-single"):
            assert offered[system, replicate] == trace.input_tokens.tolist()
