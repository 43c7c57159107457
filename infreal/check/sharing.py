"""Several instances on one device that lend each other memory: the tokens of a single one, and every block back at the end."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.eventlog import EventLog
from infreal.check import Verdict
from infreal.clocks import WallClock
from infreal.driver import InProcess, Options
from infreal.generate import generate_ids
from infreal.model import Decoder
from infreal.requests import RandomPrompts, Requests
from perfmodel.cluster import ClusterSpec, Workload
from perfmodel.cost import CostModel
from perfmodel.curves import analytic_curves
from perfmodel.policies import BATCHING, DISPATCH, PLACEMENT
from perfmodel.specs import EngineSpec, GpuSpec, InstanceSpec, LinkSpec, ModelSpec
from perfmodel.view import SchedulerParams

NUM_INSTANCES = 4
GPUS = {"H200": "h200-141gb", "H100": "h100-80gb", "A100": "a100-80gb"}  # part of a device's name: catalogue name


@dataclass(frozen=True, slots=True)
class Sizes:
    """KV blocks of an instance, and (input, output) tokens of the requests, in order."""

    num_blocks: int
    lengths: tuple[tuple[int, int], ...]


SIZES = {
    "cpu": Sizes(8, ((40, 10), (200, 10), (60, 10))),
    "cuda": Sizes(64, ((300, 200), (2500, 100), (500, 200), (200, 300), (1800, 100), (700, 100))),
}


def check_sharing(decoder: Decoder, backend: str, gpu_name: str, out: Path) -> Iterator[Verdict]:
    """Serve prompts longer than an instance. Writes events.jsonl, config.yaml and trace.csv into `out`."""
    sizes = SIZES[decoder.device.type]
    inputs, outputs = np.array(sizes.lengths, dtype=np.int64).T
    workload = Workload(np.arange(len(inputs)) * 0.1, inputs, outputs)
    prompts = RandomPrompts(workload, decoder.config.vocab_size, 0)
    config = write_inputs(workload, sizes, gpu_name, out)
    with (out / "events.jsonl").open("w", encoding="utf-8") as file:
        run = InProcess(
            make_spec(sizes),
            Requests(workload, prompts),
            decoder,
            WallClock(),
            EventLog(file, config, {"driver": "hardware", "hardware": {"device": gpu_name}}),
            Options(backend),
        )
        result = run.run()
    alone = [
        list(generate_ids(decoder, prompts(i), max_tokens=int(n), backend=backend))
        for i, n in enumerate(outputs.tolist())
    ]
    same = sum(run.outputs[i] == tokens for i, tokens in enumerate(alone))
    yield Verdict(
        "tokens of a pool against those of one instance", same == len(alone), f"{same} of {len(alone)} requests equal"
    )
    lent = sum(n for n, o in zip(result.moves["num_blocks"], result.moves["outcome"], strict=True) if o == "committed")
    yield Verdict("prompts longer than an instance", lent > 0, f"{lent} KV blocks lent")
    free = [manager.pool.free for manager in run.machines.rmanagers]
    yield Verdict("free KV blocks at the end", set(free) == {sizes.num_blocks}, f"{free} of {sizes.num_blocks} each")


def make_spec(sizes: Sizes) -> ClusterSpec:
    """The cluster of `config.yaml`, as the managers need it: reactive placement asks no model what anything costs."""
    model = ModelSpec("smollm2-135m", "llama", 30, 576, 9, 3, 64, 1536, 49152, True, dtype_bytes=4, kv_dtype_bytes=4)
    gpu, link = GpuSpec("cpu", 1 << 32, 50e9, 10e9), LinkSpec("loopback", 1e9, 50e-6)
    engine = EngineSpec("graphs", 20e-6, 1e-3, 5e-6, 20e-6)
    instance = InstanceSpec(
        model, gpu, engine, link, link, blocks_per_gpu=sizes.num_blocks, gpus_per_node=NUM_INSTANCES
    )
    cost = CostModel(instance, analytic_curves(gpu, model.dtype_bytes))
    return ClusterSpec(
        instance=instance,
        num_instances=NUM_INSTANCES,
        nodes=(0,) * NUM_INSTANCES,
        num_blocks=instance.num_blocks,
        token_budget=instance.token_budget,
        dispatch=DISPATCH["least-loaded"],
        batching=BATCHING["chunked"],
        belief=cost,
        truth=cost,
        placement=PLACEMENT["reactive"],
        scheduler=SchedulerParams(),
    )


def write_inputs(workload: Workload, sizes: Sizes, gpu_name: str, out: Path) -> dict[str, Any]:
    """The same run as a configuration (JSON is YAML) and a trace. Returns the configuration as an event log's header has it."""
    rows = zip(workload.arrival_s, workload.input_tokens, workload.output_tokens, strict=True)
    lines = [f"{arrival_s:g},{inputs},{outputs},r{i}" for i, (arrival_s, inputs, outputs) in enumerate(rows)]
    (out / "trace.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens,id", *lines, ""]))
    gpu = next((name for part, name in GPUS.items() if part in gpu_name), "cpu")
    links = {"intra_link": "loopback", "inter_link": "loopback"}
    config = {
        "system": "infinite-llm",
        "placement": "reactive",
        "model": "smollm2-135m",
        "dtype": "float32",
        "gpu": gpu,
        "cluster": {"nodes": 1, "gpus_per_node": NUM_INSTANCES, **links},
        "instance": {"blocks_per_gpu": sizes.num_blocks},
        "workload": {"trace": "own", "path": "trace.csv"},
    }
    (out / "config.yaml").write_text(json.dumps({"base": config}, indent=2) + "\n")
    return config
