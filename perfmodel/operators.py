"""The operators of one transformer layer and of the model's two ends, on one rank of an instance. Shapes, no times."""

from dataclasses import dataclass

from perfmodel.specs import InstanceSpec


@dataclass(frozen=True, slots=True)
class Gemm:
    """Weights [n, k]; applied to m tokens it is 2·m·n·k FLOPs."""

    name: str
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Stream:
    """An element-wise kernel: bytes read and written for each token."""

    name: str
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
    """Two norms with the residual added (read both, write both), RoPE with the KV write, the activation."""
    model, tp, width = instance.model, instance.tensor_parallel, instance.model.dtype_bytes
    heads, kv_heads = model.num_heads // tp, instance.kv_heads_per_gpu
    norm = 4 * model.hidden_size * width
    rope = 2 * (heads + kv_heads) * model.head_dim * width
    kv_write = 2 * kv_heads * model.head_dim * (width + model.kv_dtype_bytes)
    activation = 3 * model.intermediate_size // tp * width
    return (
        Stream("input_norm", norm),
        Stream("post_norm", norm),
        Stream("rope", rope),
        Stream("kv_write", kv_write),
        Stream("activation", activation),
    )


def lm_head(instance: InstanceSpec) -> Gemm:
    return Gemm("lm_head", -(-instance.model.vocab_size // instance.tensor_parallel), instance.model.hidden_size)


def embedding_bytes_per_token(instance: InstanceSpec) -> int:
    """A row read from the table, a row written."""
    return 2 * instance.model.hidden_size * instance.model.dtype_bytes


def sampling_bytes_per_row(instance: InstanceSpec) -> int:
    """Logits written, read and normalised in fp32 (softmax, then the choice)."""
    return 4 * 4 * instance.model.vocab_size


def kv_bytes_per_token_per_layer(instance: InstanceSpec) -> int:
    """K and V of one token, one layer, one rank."""
    return 2 * instance.kv_heads_per_gpu * instance.model.head_dim * instance.model.kv_dtype_bytes
