"""The operators of one transformer layer and of the model's two ends, on one rank of an instance. Shapes, no times."""

from dataclasses import dataclass

from perfmodel.laws.attention import Heads
from perfmodel.specs import InstanceSpec


@dataclass(frozen=True, slots=True)
class Gemm:
    """Weights [n, k]; applied to m tokens it is 2·m·n·k FLOPs."""

    name: str
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Stream:
    """An element-wise kernel: its law, how often a layer runs it, bytes read and written for each token."""

    law: str
    count: int
    bytes_per_token: int


def layer_gemms(instance: InstanceSpec) -> tuple[Gemm, ...]:
    """QKV, O, gate and up (one product), down."""
    model, tp = instance.model, instance.tensor_parallel
    heads, kv_heads = model.num_heads // tp, instance.kv_heads_per_gpu
    hidden, columns = model.hidden_size, model.intermediate_size // tp
    return (
        Gemm("qkv", (heads + 2 * kv_heads) * model.head_dim, hidden),
        Gemm("out", hidden, heads * model.head_dim),
        Gemm("gate_up", 2 * columns, hidden),
        Gemm("down", hidden, columns),
    )


def layer_streams(instance: InstanceSpec) -> tuple[Stream, ...]:
    """Two norms, two residual sums, RoPE on Q and K, the KV write, the activation (SiLU times up)."""
    model, tp, width = instance.model, instance.tensor_parallel, instance.model.dtype_bytes
    heads, kv_heads = model.num_heads // tp, instance.kv_heads_per_gpu
    return (
        Stream("norm", 2, 2 * model.hidden_size * width),
        Stream("add", 2, 3 * model.hidden_size * width),
        Stream("rope", 1, 2 * (heads + kv_heads) * model.head_dim * width),
        Stream("kv_write", 1, 2 * kv_heads * model.head_dim * (width + model.kv_dtype_bytes)),
        Stream("activation", 1, 3 * (model.intermediate_size // tp) * width),
    )


def lm_head(instance: InstanceSpec) -> Gemm:
    return Gemm("lm_head", -(-instance.model.vocab_size // instance.tensor_parallel), instance.model.hidden_size)


def embedding_bytes_per_token(instance: InstanceSpec) -> int:
    """A row read from the table, a row written."""
    return 2 * instance.model.hidden_size * instance.model.dtype_bytes


def sampling_bytes_per_row(instance: InstanceSpec) -> int:
    """Logits written, read and normalised in fp32 (softmax, then the choice)."""
    return 4 * 4 * instance.model.vocab_size


def heads_per_rank(instance: InstanceSpec) -> Heads:
    """Shape of attention on one rank."""
    model = instance.model
    heads = model.num_heads // instance.tensor_parallel
    return Heads(heads, instance.kv_heads_per_gpu, model.head_dim, model.kv_dtype_bytes)
