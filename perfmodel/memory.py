"""Where a GPU's memory goes: weights, activations, runtime, and the KV blocks that are left.

Weights follow the real tensor shapes: embedding and LM head are split over tensor-parallel ranks by vocabulary, norms
are copied, the first stage holds the embedding and the last the LM head (a tied one has its own copy where stages
differ).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfmodel.specs import InstanceSpec

LOGITS_ROWS = 256  # rows whose logits exist at once: vLLM's default max_num_seqs
NCCL_BYTES = {1: 0, 2: 358_612_992, 4: 411_041_792}  # AIConfigurator system.yaml, "nccl_mem"; above 4 ranks as for 4


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Bytes of the fullest GPU of an instance, and the capacity they leave in the whole instance."""

    gpu_bytes: int
    usable_bytes: int  # gpu_memory_utilization of it
    weight_bytes: int
    activation_bytes: int
    reserve_bytes: int
    kv_bytes: int
    block_bytes: int  # of one KV block, on this GPU
    num_blocks: int  # of the instance
    kv_tokens: int  # of the instance
    kv_head_copies: int
    where: str

    def as_dict(self) -> dict[str, int | str]:
        return asdict(self)

    def misfit(self) -> str:
        """One line: why no KV block fits."""
        return (
            f"{self.where} does not fit: {self.usable_bytes / 1e9:.2f} GB usable, "
            f"{self.weight_bytes / 1e9:.2f} GB weights, {self.activation_bytes / 1e9:.2f} GB activations, "
            f"{self.reserve_bytes / 1e9:.2f} GB reserve per GPU "
            "(raise tensor_parallel or pipeline_parallel, or choose a larger GPU)"
        )


def weight_bytes(instance: InstanceSpec, stage: int) -> int:
    """Weights on one GPU of a pipeline stage."""
    model, tp, last = instance.model, instance.tensor_parallel, instance.pipeline_parallel - 1
    width = model.hidden_size
    qkv = width * (model.num_heads // tp + 2 * instance.kv_heads_per_gpu) * model.head_dim
    sharded = qkv + (model.num_heads * model.head_dim * width + 3 * width * model.intermediate_size) // tp
    table = math.ceil(model.vocab_size / tp) * width
    layers = model.num_layers // instance.pipeline_parallel * (sharded + model.layer_vector_params)
    embedding = table if stage == 0 else 0
    head = table + width if stage == last else 0
    if model.tied_embeddings and last == 0:
        head = width
    return (layers + embedding + head) * model.dtype_bytes


def activation_bytes(instance: InstanceSpec) -> int:
    """Peak of one GPU: residual, hidden and normed states beside the widest pair of tensors, or the logits."""
    model, tp = instance.model, instance.tensor_parallel
    attention = (2 * model.num_heads // tp + 2 * instance.kv_heads_per_gpu) * model.head_dim
    mlp = 3 * model.intermediate_size // tp
    layer = instance.token_budget * (3 * model.hidden_size + max(attention, mlp)) * model.dtype_bytes
    logits = LOGITS_ROWS * model.vocab_size * (model.dtype_bytes + 4)
    return max(layer, logits + instance.token_budget * model.hidden_size * model.dtype_bytes)


def reserve_bytes(instance: InstanceSpec) -> int:
    """Runtime reserve of one GPU: as configured, else context, libraries and NCCL's buffers."""
    if instance.reserve_bytes is not None:
        return instance.reserve_bytes
    if not instance.gpu.runtime_bytes:
        return 0
    ranks = max(size for size in NCCL_BYTES if size <= max(1, instance.num_gpus))
    return instance.gpu.runtime_bytes + NCCL_BYTES[ranks]


def kv_block_bytes_per_gpu(instance: InstanceSpec) -> int:
    model = instance.model
    per_layer = 2 * instance.kv_heads_per_gpu * model.head_dim * model.kv_dtype_bytes * instance.block_tokens
    return per_layer * (model.num_layers // instance.pipeline_parallel)


def memory_account(instance: InstanceSpec) -> MemoryAccount:
    """The account of the fullest GPU. Capacity may be negative or zero here; `InstanceSpec.num_blocks` refuses that."""
    weights = max(weight_bytes(instance, stage) for stage in range(instance.pipeline_parallel))
    usable = int(instance.gpu.memory_bytes * instance.gpu_memory_utilization)
    activations, reserve = activation_bytes(instance), reserve_bytes(instance)
    kv_bytes, block_bytes = usable - weights - activations - reserve, kv_block_bytes_per_gpu(instance)
    num_blocks = max(0, kv_bytes) // block_bytes
    if instance.blocks_per_gpu is not None:
        num_blocks = instance.blocks_per_gpu * instance.num_gpus
    layout = f"tensor_parallel {instance.tensor_parallel}, pipeline_parallel {instance.pipeline_parallel}"
    return MemoryAccount(
        gpu_bytes=instance.gpu.memory_bytes,
        usable_bytes=usable,
        weight_bytes=weights,
        activation_bytes=activations,
        reserve_bytes=reserve,
        kv_bytes=kv_bytes,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        kv_tokens=num_blocks * instance.block_tokens,
        kv_head_copies=max(1, instance.tensor_parallel // instance.model.num_kv_heads),
        where=f"{instance.model.name} on {instance.gpu.name} ({layout})",
    )
