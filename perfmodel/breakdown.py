"""One iteration taken apart: its parts, how each is known, and the time below which no hardware could go."""

from dataclasses import dataclass

from perfmodel import operators
from perfmodel.basis import Basis, worst
from perfmodel.cost import Batch, CostModel
from perfmodel.specs import InstanceSpec


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of one part of an iteration, and how they are known."""

    s: float
    basis: Basis


def parts(cost: CostModel, batch: Batch) -> dict[str, Part]:
    """The parts of one iteration; they sum to its time. host includes waiting for launches that kernels do not hide."""
    kernels_s, collectives_s = cost.kernel_terms(batch.tokens)
    terms_s, launch_s, host_s = cost.iteration_terms(batch.tokens, batch.decode_rows, batch.rows)
    prefill_s = sum(cost.prefill_attention_s(*chunk) for chunk in batch.chunks)
    decode_s = cost.decode_attention_s(batch.decode_rows, batch.decode_context_tokens, batch.longest_context_tokens)
    stall_s = max(0.0, launch_s - terms_s - prefill_s - decode_s)
    basis = cost.iteration_basis(batch.tokens, batch.decode_rows, batch.decode_context_tokens)
    chunk_basis = worst(Basis.MEASURED, *(cost.prefill_basis(*chunk) for chunk in batch.chunks))
    return {
        "non_attention": Part(kernels_s + cost.head_s(batch.rows), basis.kernels),
        "prefill_attention": Part(prefill_s, chunk_basis if batch.chunks else Basis.ANALYTIC),
        "decode_attention": Part(decode_s, basis.attention if batch.decode_rows else Basis.ANALYTIC),
        "collectives": Part(collectives_s, cost.collectives_basis(batch.tokens)),
        "host": Part(host_s + stall_s, cost.host_basis(batch.rows)),
    }


def roofline_s(instance: InstanceSpec, batch: Batch) -> float:
    """Lower bound: FLOPs at the peak or bytes at the peak bandwidth, all ranks busy; no host, no link."""
    flops, num_bytes = iteration_flops(instance, batch), iteration_bytes(instance, batch)
    per_gpu = instance.num_gpus
    peak = instance.gpu.flops_per_s(instance.model.dtype_bytes)
    return max(flops / peak, num_bytes / instance.gpu.memory_bytes_per_s) / per_gpu


def iteration_flops(instance: InstanceSpec, batch: Batch) -> int:
    """FLOPs of the matrix products and the attention of one iteration."""
    model = instance.model
    pairs = batch.decode_context_tokens + sum(t * prefix + t * (t + 1) // 2 for t, prefix in batch.chunks)
    layers = model.matmul_flops_per_token * batch.tokens + model.attention_flops_per_pair * pairs
    return layers + model.lm_head_flops_per_row * batch.rows


def iteration_bytes(instance: InstanceSpec, batch: Batch) -> int:
    """Bytes that must come from memory: the layers' weights and the LM head once, the KV of every row once."""
    model = instance.model
    kv_bytes = operators.heads_per_rank(instance).kv_bytes_per_token * instance.tensor_parallel * model.num_layers
    kv_tokens = batch.decode_context_tokens + sum(t + prefix for t, prefix in batch.chunks)
    layers = model.num_layers * model.layer_matmul_params if batch.tokens else 0
    head = model.vocab_size * model.hidden_size if batch.rows else 0
    return (layers + head) * model.dtype_bytes + kv_bytes * kv_tokens
