"""What Ray costs an instance and what it gives two: the same requests in one process, and on actors pinned to a core each.

SmolLM2-135M's shape with random weights, one thread an instance, nothing shared. An iteration's overhead is the time of the run
that was not spent computing, by iteration.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from experiments import raycluster
from experiments.explain import validate
from experiments.plan import plan_cluster
from infreal.clocks import WallClock
from infreal.driver import InProcess
from infreal.requests import RandomPrompts, Requests
from infreal.sources import load_model
from perfmodel.cluster import ClusterSpec, Workload
from perfmodel.records import RunResult

MODEL, DTYPE = "smollm2-135m", "float32"
INPUT_TOKENS, ROWS = 32, 4  # of a request; requests an instance, all at once
SEED = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """One run. overhead_s: of an iteration; None where instances take turns, and wait for each other."""

    where: str
    num_instances: int
    iteration_s: float
    overhead_s: float | None
    tokens_per_s: float


def measure_actors(output_tokens: int) -> Iterator[Finding]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for num_instances in (1, 2):
            yield in_one_process(num_instances, output_tokens)
    finally:
        torch.set_num_threads(before)
    with raycluster.connected(raycluster.LOCAL):
        for num_instances in (1, 2):
            yield on_actors(num_instances, output_tokens)


def in_one_process(num_instances: int, output_tokens: int) -> Finding:
    requests = make_requests(num_instances, output_tokens)
    run = InProcess(make_cluster(num_instances), requests, load_model(MODEL, None, DTYPE, "cpu"), WallClock())
    result = run.run()
    iterations = sum(executor.num_iterations for executor in run.executors)
    return finding("one process", num_instances, result, iterations, takes_turns=num_instances > 1)


def on_actors(num_instances: int, output_tokens: int) -> Finding:
    from infreal.actors.run import RayOptions, make_head

    make_decoder = partial(load_model, MODEL, None, DTYPE, "cpu")
    requests = make_requests(num_instances, output_tokens)
    options = RayOptions(pinned=True, deadline_s=60.0)
    head = make_head(partial(make_cluster, num_instances), make_decoder, requests, options=options)
    result = head.run()
    return finding("Ray actors", num_instances, result, head.num_iterations(), takes_turns=False)


def finding(where: str, num_instances: int, result: RunResult, iterations: int, takes_turns: bool) -> Finding:
    busy_s = result.basis_s["measured"]
    begun_s, tokens = min(result.requests["arrival_s"]), sum(result.requests["output_tokens"])
    run_s = result.makespan_s - begun_s
    overhead_s = None if takes_turns else (num_instances * run_s - busy_s) / iterations
    return Finding(where, num_instances, busy_s / iterations, overhead_s, tokens / run_s)


def make_cluster(num_instances: int) -> ClusterSpec:
    config = {
        "system": "vllm-multi",
        "model": MODEL,
        "dtype": DTYPE,
        "gpu": "cpu",
        "cluster": {"nodes": 1, "gpus_per_node": num_instances, "intra_link": "loopback", "inter_link": "loopback"},
        "instance": {"blocks_per_gpu": 200},
        "workload": {"generator": "fixed", "params": {"input_tokens": 1, "output_tokens": 1}},
    }
    return plan_cluster(validate(config, "bench"))


def make_requests(num_instances: int, output_tokens: int) -> Requests:
    count = ROWS * num_instances
    workload = Workload(np.zeros(count), np.full(count, INPUT_TOKENS), np.full(count, output_tokens))
    return Requests(workload, RandomPrompts(workload, 49152, SEED))


def report(findings: list[Finding]) -> str:
    lines = [f"{'':12} {'instances':>9} {'ms an iteration':>16} {'overhead in ms':>15} {'tokens/s':>9}"]
    for f in findings:
        overhead = "" if f.overhead_s is None else f"{1e3 * f.overhead_s:.3f}"
        lines.append(
            f"{f.where:12} {f.num_instances:9} {1e3 * f.iteration_s:16.2f} {overhead:>15} {f.tokens_per_s:9.1f}"
        )
    return "\n".join(lines)
