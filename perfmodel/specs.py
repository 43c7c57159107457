"""What is served, and on what: model, GPU, link, engine, instance. Plain numbers; knows no file and no time.

Units are in the names. An instance is `tensor_parallel × pipeline_parallel` GPUs that hold one copy of the model.
"""

from dataclasses import dataclass
from functools import cached_property

from perfmodel.errors import InputError
from perfmodel.layout import check_layout
from perfmodel.memory import kv_block_bytes_per_gpu, memory_account, weight_bytes

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense LLaMA-like decoder: MHA, GQA or MQA attention, gated MLP, RMSNorm. Sizes are those of `config.json`."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False
    attention_bias: bool = False  # biases on Q, K and V (and on O, except in qwen2)
    qk_norm: bool = False
    dtype_bytes: int = 2
    kv_dtype_bytes: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers, no copies."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_dtype_bytes

    @property
    def layer_matmul_params(self) -> int:
        """Weights of one layer's matrix products: QKV, O, gate, up, down."""
        qkv = self.hidden_size * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        out = self.num_heads * self.head_dim * self.hidden_size
        return qkv + out + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_vector_params(self) -> int:
        """Norms and biases of one layer."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        bias = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.attention_bias else 0
        return norms + bias + (self.hidden_size if self.attention_bias and self.model_type != "qwen2" else 0)

    @property
    def num_params(self) -> int:
        """All parameters, as the checkpoint has them."""
        layers = self.num_layers * (self.layer_matmul_params + self.layer_vector_params)
        tables = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        return layers + tables + self.hidden_size

    @property
    def weight_bytes(self) -> int:
        return self.num_params * self.dtype_bytes

    @property
    def matmul_flops_per_token(self) -> int:
        """FLOPs of the layers' matrix products for one token (no LM head: see `lm_head_flops_per_row`)."""
        return 2 * self.num_layers * self.layer_matmul_params

    @property
    def lm_head_flops_per_row(self) -> int:
        return 2 * self.hidden_size * self.vocab_size

    @property
    def attention_flops_per_pair(self) -> int:
        """FLOPs of one (query token, KV token) pair over all layers: QK and PV."""
        return 4 * self.num_heads * self.head_dim * self.num_layers


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One accelerator at its data sheet.

    `pack` names the profile pack measured on it ("": none, analytic); `link` the usual link inside a node.
    """

    name: str
    memory_bytes: int
    peak_flops_per_s: float  # dense, 16-bit
    memory_bytes_per_s: float
    peak_flops32_per_s: float = 0.0  # dense, 32-bit inputs; 0: half of the 16-bit peak
    num_sms: int = 1
    cache_bytes: int = 0  # L2
    runtime_bytes: int = (
        551 * MIB
    )  # context and libraries; AIConfigurator system.yaml, "other_mem" before its safety margin
    pack: str = ""
    link: str = "nvlink3"

    def flops_per_s(self, dtype_bytes: int) -> float:
        """Peak for matrix products of that width."""
        if dtype_bytes <= 2:
            return self.peak_flops_per_s
        return self.peak_flops32_per_s or self.peak_flops_per_s / 2


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A link between GPUs, one direction. `bytes_per_s`: what large transfers sustain; `peak_bytes_per_s`: data sheet.

    `per_node`: the GPUs of a node share one such link (one network card a node); otherwise each GPU has its own.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    peak_bytes_per_s: float = 0.0  # 0: the same as bytes_per_s
    per_node: bool = False

    def transfer_s(self, num_bytes: float) -> float:
        """One transfer alone on the link."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def group_bytes_per_s(self, num_gpus: int) -> float:
        """Rate out of a node when `num_gpus` of its GPUs send at once."""
        return self.bytes_per_s * (1 if self.per_node else num_gpus)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Host side of an engine: iteration = max(kernels, launches) + iteration_s + row_s · rows.

    `fitted_rows`: largest batch the numbers were fitted on (0: not fitted, chosen). `splits_all_heads`: few rows are split along
    their KV even where query heads do not share KV heads (MHA), so that they use the whole GPU. `background_frac`: share of an
    instance's time that its core gives to the rest of the serving system. `message_s`: one way between two managers (0: a link's
    latency alone).
    """

    name: str
    launch_s_per_layer: float
    iteration_s: float
    row_s: float
    exchange_s_per_layer_per_peer: float
    fitted_rows: int = 0
    splits_all_heads: bool = False
    background_frac: float = 0.0
    message_s: float = 0.0


@dataclass(frozen=True)
class InstanceSpec:
    """GPUs that serve one copy of the model, and how their memory is shared out."""

    model: ModelSpec
    gpu: GpuSpec
    engine: EngineSpec
    intra_link: LinkSpec
    inter_link: LinkSpec
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    block_tokens: int = 16
    gpu_memory_utilization: float = 0.9
    reserve_bytes: int | None = None  # per GPU, for the runtime; None: gpu.runtime_bytes and NCCL's buffers
    blocks_per_gpu: int | None = None  # overrides the computed capacity
    gpus_per_node: int = 8
    token_budget: int = 2048  # new tokens of one iteration: sets the activation peak

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def kv_heads_per_gpu(self) -> int:
        """KV heads are copied where tensor_parallel exceeds them."""
        return max(1, self.model.num_kv_heads // self.tensor_parallel)

    @property
    def block_bytes(self) -> int:
        """KV bytes of one block over the whole instance: all layers, copies of KV heads counted."""
        return kv_block_bytes_per_gpu(self) * self.num_gpus

    @property
    def weight_bytes_per_gpu(self) -> int:
        """Weights on the fullest GPU."""
        return max(weight_bytes(self, stage) for stage in range(self.pipeline_parallel))

    @cached_property
    def num_blocks(self) -> int:
        """KV blocks of the instance. Raises InputError where weights, activations and reserve leave no room."""
        if self.blocks_per_gpu is not None:
            return self.blocks_per_gpu * self.num_gpus
        account = memory_account(self)
        if account.num_blocks < 1:
            raise InputError(account.misfit())
        return account.num_blocks

    def memory_account(self) -> dict[str, int | str]:
        """Bytes of the fullest GPU, and the KV capacity they leave (`MemoryAccount` as a dict)."""
        return memory_account(self).as_dict()

    def check(self) -> None:
        """Raises InputError for sizes that do not divide the model or cannot be served."""
        check_layout(self.model, self.tensor_parallel, self.pipeline_parallel)
        positive = ("block_tokens", "gpus_per_node", "token_budget")
        for name in positive:
            if getattr(self, name) < 1:
                raise InputError(f"instance.{name}: {getattr(self, name)} (allowed: 1 or more)")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InputError(
                f"instance.gpu_memory_utilization: {self.gpu_memory_utilization} (allowed: above 0, up to 1)"
            )
        if self.blocks_per_gpu is not None and self.blocks_per_gpu < 1:
            raise InputError(f"instance.blocks_per_gpu: {self.blocks_per_gpu} (allowed: 1 or more, or null)")
        if self.reserve_bytes is not None and self.reserve_bytes < 0:
            raise InputError(f"instance.reserve_bytes: {self.reserve_bytes} (allowed: 0 or more, or null)")
