"""The weights of a decoder: which tensors a model has, checked before anything is read; then a rank's parts, loaded and fused.

Sources (a Hugging Face directory, a GGUF file, a seed) all speak Hugging Face's tensor names.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from infreal.model.config import ModelConfig
from infreal.model.errors import ModelError
from infreal.model.linear import pack
from infreal.model.shard import Part, Shard

Shape = tuple[int, ...]


class TensorSource(Protocol):
    """Where weights come from. `name` stands in front of every refusal."""

    name: str

    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor that is there."""

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        """Part of a tensor, on the CPU, in the file's dtype."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are `[out, in]`, packed for `linear`. qkv: Q, K and V one above the other; gate_up: gate above up. None: the model
    has none.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """One rank's. embedding and head `[vocab_size, hidden_size]`, the same memory where the two are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


def layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The tensors of one layer, named behind `model.layers.N.`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    rows = {"q": config.num_heads * config.head_dim, "k": config.num_kv_heads * config.head_dim}
    rows["v"] = rows["k"]
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    shapes |= {f"self_attn.{side}_proj.weight": (n, hidden) for side, n in rows.items()}
    shapes["self_attn.o_proj.weight"] = (hidden, rows["q"])
    shapes |= {f"mlp.{side}_proj.weight": (inner, hidden) for side in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (hidden, inner)
    if config.qkv_bias:
        shapes |= {f"self_attn.{side}_proj.bias": (n,) for side, n in rows.items()}
    if config.out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"self_attn.{side}_norm.weight": (config.head_dim,) for side in ("q", "k")}
    return shapes


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the model."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    layer = layer_shapes(config)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def load_weights(
    config: ModelConfig,
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device | str,
    rank: int = 0,
    size: int = 1,
) -> Weights:
    """What rank `rank` of `size` holds of a model of these sizes; nothing else is read.

    Raises ModelError for a tensor that is missing, unexpected or of the wrong shape, for too little memory, and for a size that
    does not divide the model.
    """
    shard = Shard(config, rank, size)
    check_shapes(source.name, tensor_shapes(config), source.shapes())
    own = shard.config
    num_bytes = sum(math.prod(shape) for shape in tensor_shapes(own).values()) * dtype.itemsize
    check_memory(f"{source.name}: weights in {str(dtype).removeprefix('torch.')}", num_bytes, device)

    def read(name: str) -> torch.Tensor:
        return source.read(name, shard.part(name))

    def load(*names: str) -> torch.Tensor:
        joined = torch.cat([read(name).to(device=device, dtype=dtype) for name in names])
        return pack(joined) if joined.ndim == 2 else joined

    embedding = read("model.embed_tokens.weight").to(device=device, dtype=dtype, copy=True)
    layers = tuple(_load_layer(own, f"model.layers.{index}.", load) for index in range(config.num_layers))
    head = embedding if config.tied_embeddings else load("lm_head.weight")
    return Weights(embedding, layers, load("model.norm.weight"), head)


def _load_layer(config: ModelConfig, prefix: str, load: Callable[..., torch.Tensor]) -> LayerWeights:
    def attention(kind: str, *sides: str) -> torch.Tensor:
        return load(*(f"{prefix}self_attn.{side}_{kind}" for side in sides))

    return LayerWeights(
        input_norm=load(f"{prefix}input_layernorm.weight"),
        qkv=attention("proj.weight", "q", "k", "v"),
        qkv_bias=attention("proj.bias", "q", "k", "v") if config.qkv_bias else None,
        q_norm=attention("norm.weight", "q") if config.qk_norm else None,
        k_norm=attention("norm.weight", "k") if config.qk_norm else None,
        out=attention("proj.weight", "o"),
        out_bias=attention("proj.bias", "o") if config.out_bias else None,
        post_norm=load(f"{prefix}post_attention_layernorm.weight"),
        gate_up=load(f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"),
        down=load(f"{prefix}mlp.down_proj.weight"),
    )


def check_shapes(where: str, expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    """A tensor too many would be left out of the computation in silence, so it is refused too."""
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(f"{where}: tensor {missing[0]} is missing{_others(missing)}")
    unexpected = [name for name in found if name not in expected and not _is_redundant(name)]
    if unexpected:
        raise ModelError(f"{where}: tensor {unexpected[0]} has no place in this architecture{_others(unexpected)}")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ModelError(f"{where}: tensor {name} has shape {list(found[name])}; config says {list(shape)}")


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _is_redundant(name: str) -> bool:
    """Frequencies follow from the configuration; a tied head is the embedding."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def check_memory(what: str, num_bytes: int, device: torch.device | str) -> None:
    """Refuse before the machine starts to swap or a process is killed."""
    available = available_bytes(torch.device(device))
    if num_bytes > available:
        raise ModelError(f"{what} take {num_bytes / 1e9:.3g} GB; {available / 1e9:.3g} GB are available on {device}")


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken: of the GPU, or of this machine within the limit of its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_host_bytes(), default=1 << 62)


def _host_bytes() -> Iterator[int]:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        yield int(lines["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.exists() and limit.read_text().strip() != "max":
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        yield int(limit.read_text()) - int((group / "memory.current").read_text()) + int(cached)


@dataclass(frozen=True)
class RandomWeights:
    """A source without a file: the same seed gives the same weights, tensor by tensor.

    Matrices have standard deviation 1/sqrt(in), so that activations stay near 1 in every layer; norms lie around 1.
    """

    config: ModelConfig
    seed: int
    name: str = "random weights"

    def shapes(self) -> Mapping[str, Shape]:
        return tensor_shapes(self.config)

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        """Part of what the whole model has, so that the number of ranks changes nothing."""
        shapes = self.shapes()
        index = list(shapes).index(name)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        values = torch.randn(shapes[name], generator=generator)
        if len(shapes[name]) == 2:
            return values[part].mul_(shapes[name][1] ** -0.5)
        return values[part].mul_(0.1).add_(0.0 if name.endswith(".bias") else 1.0)
