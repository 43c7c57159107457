"""Speed of whole processes: start-up included, one line a figure, `case metric value`."""

import json
import resource
import subprocess
import sys
import time

import pytest

BASE = {
    "model": "llama2-70b",
    "instance": {"tensor_parallel": 2},
    "cluster": {"nodes": 8, "gpus_per_node": 8},
    "workload": {
        "generator": "fixed",
        "params": {"input_tokens": 512, "output_tokens": 128},
        "num_requests": 10_000,
        "rate_rps": 32.0,
    },
}
SCRIPT = """
import json, resource, sys
from experiments.config import Config
from experiments.plan import plan_run
from infsim.simulate import simulate
plan = plan_run(Config.model_validate(json.loads(sys.argv[1])).resolved())
result = simulate(plan.spec, plan.workload)
print(len(result.requests["req_id"]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.bench
@pytest.mark.parametrize("system", ["vllm-multi", "infinite-llm"])
def test_ten_thousand_requests_on_thirty_two_instances(system):
    """512 + 128 tokens, Poisson at 1 req/s an instance, LLaMA2-70B on TP2."""
    before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    config = json.dumps({**BASE, "system": system})
    done = subprocess.run([sys.executable, "-c", SCRIPT, config], capture_output=True, text=True, check=True)
    wall_s = time.perf_counter() - start_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    requests, peak_mib = (float(word) for word in done.stdout.split())
    cpu_s = after.ru_utime - before.ru_utime
    for metric, value in {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "requests_per_s": requests / wall_s,
        "peak_mib": peak_mib,
    }.items():
        print(f"{system}-32x10000 {metric} {value:.4g}")
    assert requests == 10_000
    assert peak_mib < 300
