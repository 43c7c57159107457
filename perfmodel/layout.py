"""Which tensor and pipeline parallel sizes a model allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfmodel.errors import InputError

if TYPE_CHECKING:
    from perfmodel.specs import ModelSpec


def can_shard(model: ModelSpec, tensor_parallel: int) -> bool:
    """Query heads and MLP columns divide; KV heads divide, or are copied a whole number of times."""
    tp, kv_heads = tensor_parallel, model.num_kv_heads
    kv_divides = kv_heads % tp == 0 or tp % kv_heads == 0
    return tp >= 1 and model.num_heads % tp == 0 and model.intermediate_size % tp == 0 and kv_divides


def allowed_tensor_parallel(model: ModelSpec) -> list[int]:
    return [tp for tp in range(1, model.num_heads + 1) if can_shard(model, tp)]


def allowed_pipeline_parallel(model: ModelSpec) -> list[int]:
    return [pp for pp in range(1, model.num_layers + 1) if model.num_layers % pp == 0]


def check_layout(model: ModelSpec, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raises InputError, listing what is allowed."""
    for key, size, allowed in (
        ("tensor_parallel", tensor_parallel, allowed_tensor_parallel(model)),
        ("pipeline_parallel", pipeline_parallel, allowed_pipeline_parallel(model)),
    ):
        if size not in allowed:
            heads = f"{model.num_heads} heads, {model.num_kv_heads} KV heads, {model.num_layers} layers"
            raise InputError(f"instance.{key}: {size} does not divide {model.name} ({heads}; allowed: {allowed})")


def single_layout(model: ModelSpec, num_gpus: int) -> tuple[int, int]:
    """(tensor_parallel, pipeline_parallel) of one instance of all GPUs: the largest allowed first, times the second.

    Raises InputError where no split of `num_gpus` divides the model.
    """
    stages = allowed_pipeline_parallel(model)
    for tp in reversed(allowed_tensor_parallel(model)):
        if num_gpus % tp == 0 and num_gpus // tp in stages:
            return tp, num_gpus // tp
    raise InputError(
        f"layout single: {num_gpus} GPUs cannot hold one {model.name} "
        f"(tensor_parallel {allowed_tensor_parallel(model)} × pipeline_parallel {stages})"
    )
