"""From a resolved configuration to what a driver carries out: cluster, policies, costs, workload, and their sources."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

import traces
from experiments import catalogue, packs
from experiments.config import Chaos, Config, Costs, GeneratorWorkload, TraceWorkload
from experiments.policies import find_policy
from perfmodel.cluster import ChaosParams, ClusterSpec, Workload
from perfmodel.errors import InputError
from perfmodel.layout import single_layout
from perfmodel.loan import check_timers
from perfmodel.metrics import Capacity, Slo
from perfmodel.specs import InstanceSpec
from perfmodel.view import PlacementPolicy, SchedulerParams


@dataclass(frozen=True)
class RunPlan:
    """One run, ready to be carried out. `facts` go into its manifest."""

    config: Config
    spec: ClusterSpec
    workload: Workload
    facts: dict[str, Any]

    @property
    def slo(self) -> Slo:
        return Slo(**self.config.slo.model_dump())

    @property
    def capacity(self) -> Capacity:
        instance, count = self.spec.instance, self.spec.num_instances
        model = instance.model
        return Capacity(
            num_instances=count,
            num_blocks=count * self.spec.num_blocks,
            block_tokens=instance.block_tokens,
            peak_flops_per_s=count * instance.num_gpus * instance.gpu.flops_per_s(model.dtype_bytes),
            flops_per_token=model.matmul_flops_per_token,
            flops_per_pair=model.attention_flops_per_pair,
            flops_per_output_token=model.lm_head_flops_per_row,
        )

    def pool_line(self) -> str:
        """What fits, before anything runs."""
        instance, pool = self.spec.instance, self.facts["pool"]
        shape = f"{self.spec.num_instances} × TP{instance.tensor_parallel}"
        stages = f" PP{instance.pipeline_parallel}" if instance.pipeline_parallel > 1 else ""
        sizes = f"pool {pool['pool_tokens']:,} tokens, longest request {pool['longest_request_tokens']:,}"
        over = f", {pool['num_over_long']:,} of {pool['num_requests']:,} requests are longer"
        return f"{shape}{stages}: {sizes}{over if pool['num_over_long'] else ''}"


def plan_run(config: Config) -> RunPlan:
    """Raises InputError for names, sizes and files that do not exist or do not fit."""
    spec = plan_cluster(config)
    workload, source = plan_workload(config)
    return RunPlan(config, spec, workload, facts_of(config, spec, workload, source))


def plan_cluster(config: Config) -> ClusterSpec:
    instance, num_instances = plan_instance(config)
    scheduler = SchedulerParams(**config.scheduler.model_dump())
    belief, truth = (packs.cost_model(instance, costs.pack, costs.scale) for costs in (config.belief, config.truth))
    return ClusterSpec(
        instance=instance,
        num_instances=num_instances,
        nodes=tuple(i * instance.num_gpus // instance.gpus_per_node for i in range(num_instances)),
        num_blocks=instance.num_blocks,
        token_budget=config.instance.token_budget,
        dispatch=find_policy("dispatch", config.dispatch),
        batching=find_policy("batching", config.batching),
        belief=belief,
        truth=truth,
        placement=plan_placement(config, instance, scheduler),
        scheduler=scheduler,
        chaos=plan_chaos(config.chaos, num_instances),
        max_batch=config.instance.max_batch,
        headroom_frac=config.instance.headroom_frac,
        macro=config.macro,
        seed=config.seed,
        sample_s=config.record.sample_s,
    )


def plan_placement(
    config: Config, instance: InstanceSpec, scheduler: SchedulerParams
) -> Callable[[], PlacementPolicy] | None:
    """None: a system that shares nothing. Raises InputError where the leases cannot be kept."""
    name = config.placement or "none"
    if name == "none":
        return None
    check_timers(scheduler, 2 * instance.inter_link.latency_s)
    return find_policy("placement", name)


def plan_chaos(chaos: Chaos | None, num_instances: int) -> ChaosParams | None:
    if chaos is None:
        return None
    for at_s, instance, back_s in chaos.kill:
        if instance != int(instance) or not instance < num_instances or back_s <= at_s:
            raise InputError(
                f"chaos.kill: [{at_s:g}, {instance:g}, {back_s:g}] (allowed: [t_s, an instance from 0 to "
                f"{num_instances - 1}, a later time of return])"
            )
    kill = tuple((at_s, int(instance), back_s) for at_s, instance, back_s in chaos.kill)
    return ChaosParams(**{**chaos.model_dump(), "kill": kill})


def facts_of(config: Config, spec: ClusterSpec, workload: Workload, source: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says of a run before it has run."""
    return {
        "inputs": inputs_of(config, source),
        "workload": source,
        "provenance": {name: provenance(getattr(config, name), spec.instance) for name in ("belief", "truth")},
        "pool": pool_facts(spec, workload),
    }


def plan_instance(config: Config) -> tuple[InstanceSpec, int]:
    """The instance and how many of it the cluster holds."""
    model = catalogue.load_model(config.model, config.dtype, config.kv_dtype)
    cluster, sizes = config.cluster, config.instance
    tensor_parallel, pipeline_parallel = sizes.tensor_parallel, sizes.pipeline_parallel
    if config.layout == "single":
        tensor_parallel, pipeline_parallel = single_layout(model, cluster.num_gpus)
    if cluster.num_gpus % (tensor_parallel * pipeline_parallel):
        raise InputError(
            f"instance: tensor_parallel {tensor_parallel} × pipeline_parallel {pipeline_parallel} does not divide "
            f"the cluster's {cluster.num_gpus} GPUs ({cluster.nodes} nodes × {cluster.gpus_per_node})"
        )
    instance = InstanceSpec(
        model=model,
        gpu=catalogue.load_gpu(config.gpu),
        engine=catalogue.load_engine(config.engine),
        intra_link=catalogue.load_link(cluster.intra_link),
        inter_link=catalogue.load_link(cluster.inter_link),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        block_tokens=sizes.block_tokens,
        gpu_memory_utilization=sizes.gpu_memory_utilization,
        reserve_bytes=None if sizes.reserve_bytes is None else int(sizes.reserve_bytes),
        blocks_per_gpu=sizes.blocks_per_gpu,
        gpus_per_node=cluster.gpus_per_node,
        token_budget=sizes.token_budget,
    )
    instance.check()
    return instance, cluster.num_gpus // instance.num_gpus


def plan_workload(config: Config) -> tuple[Workload, dict[str, Any]]:
    """The requests, and the manifest of where they come from."""
    trace = read_workload(config.workload, config.seed)
    closed = trace.closed
    workload = Workload(
        trace.arrival_s,
        trace.input_tokens,
        trace.output_tokens,
        users=closed.users if closed else None,
        think_s=closed.think_s if closed else None,
        window_kind="finishes" if closed or trace.is_saturated else "arrivals",
    )
    return workload, trace.manifest()


def read_workload(workload: TraceWorkload | GeneratorWorkload, seed: int) -> traces.Trace:
    """The systems of a sweep share one trace: read once, unless its file has changed."""
    changed_ns = Path(workload.path).stat().st_mtime_ns if is_file(workload) else 0
    return _read(type(workload), workload.model_dump_json(), seed, changed_ns)


def is_file(workload: TraceWorkload | GeneratorWorkload) -> TypeGuard[TraceWorkload]:
    return isinstance(workload, TraceWorkload) and Path(workload.path).is_file()


@lru_cache(maxsize=64)
def _read(kind: type[TraceWorkload | GeneratorWorkload], text: str, seed: int, changed_ns: int) -> traces.Trace:
    """The key is text because a model holds lists."""
    workload = kind.model_validate_json(text)
    if isinstance(workload, GeneratorWorkload):
        return traces.generate(workload.generator, workload.options(seed))
    return traces.load(workload.trace, workload.path, workload.options(seed))


def pool_facts(spec: ClusterSpec, workload: Workload) -> dict[str, Any]:
    """Tokens of KV the cluster and one request can have; a request needs room for its last token too."""
    instance_tokens = spec.num_blocks * spec.instance.block_tokens
    longest = spec.largest_blocks * spec.instance.block_tokens
    context = workload.input_tokens + workload.output_tokens
    return {
        "num_instances": spec.num_instances,
        "num_gpus": spec.num_instances * spec.instance.num_gpus,
        "tensor_parallel": spec.instance.tensor_parallel,
        "pipeline_parallel": spec.instance.pipeline_parallel,
        "num_blocks": spec.num_blocks,
        "block_tokens": spec.instance.block_tokens,
        "pool_tokens": spec.num_instances * instance_tokens,
        "longest_request_tokens": longest,
        "num_requests": len(workload),
        "num_over_long": int((context > longest).sum()),
    }


def provenance(costs: Costs, instance: InstanceSpec) -> dict[str, Any]:
    """Where the curves come from, as the manifest says it."""
    return packs.provenance(instance, costs.pack) | {"scale": dict(costs.scale)}


def inputs_of(config: Config, source: dict[str, Any]) -> dict[str, str]:
    """sha256 of every file the run depends on."""
    names = [config.model, f"{config.model}/config.json"]
    names += [pack.partition("@")[0] for pack in (config.belief.pack, config.truth.pack) if pack]
    names += [name.rpartition(":")[0] for name in (config.dispatch, config.batching, config.placement or "")]
    files = {name: Path(name) for name in names if name}
    found = {name: file_sha256(path) for name, path in files.items() if path.is_file()}
    if isinstance(config.workload, TraceWorkload) and "sha256" in source:
        found[config.workload.path] = source["sha256"]
    return found


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
