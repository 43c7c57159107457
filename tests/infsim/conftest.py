"""Small clusters and workloads for tests of the simulator."""

import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.catalogue import load_engine, load_gpu, load_link, load_model
from experiments.packs import cost_model
from perfmodel.cluster import ClusterSpec, Workload
from perfmodel.policies import BATCHING, DISPATCH
from perfmodel.specs import InstanceSpec

sys.path.insert(0, str(Path(__file__).parent))  # `shadow`, `chaoscase`, …, shared by the tests of this folder


def _cluster(num_instances=2, num_blocks=100, model="llama2-7b", tensor_parallel=1, **options):
    instance = InstanceSpec(
        load_model(model),
        load_gpu("a100-80gb"),
        load_engine(options.pop("engine", "graphs")),
        load_link("nvlink3"),
        load_link("ethernet-100g"),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=options.pop("pipeline_parallel", 1),
    )
    cost = options.pop("cost", None) or cost_model(instance, "analytic", options.pop("scale", None))
    defaults = {
        "instance": instance,
        "num_instances": num_instances,
        "nodes": (0,) * num_instances,
        "num_blocks": num_blocks,
        "token_budget": 2048,
        "dispatch": DISPATCH[options.pop("dispatch", "least-loaded")],
        "batching": BATCHING[options.pop("batching", "chunked")],
        "belief": cost,
        "truth": cost,
    }
    return ClusterSpec(**{**defaults, **options})


def _workload(requests, rate_rps=None, seed=0, **options):
    """`requests`: (input_tokens, output_tokens) in order of arrival; all at once, or Poisson at `rate_rps`."""
    gaps = np.random.default_rng(seed).exponential(1 / rate_rps, len(requests)) if rate_rps else np.zeros(len(requests))
    arrival_s = np.cumsum(gaps)
    lengths = np.array(requests, dtype=np.int64)
    return Workload(arrival_s - arrival_s[:1], lengths[:, 0], lengths[:, 1], **options)


@pytest.fixture(scope="session")
def cluster():
    return _cluster


@pytest.fixture(scope="session")
def workload():
    return _workload
