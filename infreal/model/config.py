"""Sizes of a LLaMA-family decoder, out of a Hugging Face `config.json`; what is not served is refused by its field.

The names of the sizes are those of `perfmodel.specs.ModelSpec`, which prices the same model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch

from infreal.model.errors import ModelError
from infreal.model.rope import Rope

# model_type: (biases on Q, K and V; bias on O; norms of Q and K). None: as `attention_bias` says.
MODEL_TYPES: dict[str, tuple[bool | None, bool | None, bool]] = {
    "llama": (None, None, False),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": (None, None, True),
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
REFUSED = {
    "num_local_experts": "mixture of experts",
    "num_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
    "quantization_config": "quantised weights",
    "mlp_bias": "biases in the MLP",
}
SCALING_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`eos_token_ids`: generation ends at any of them; `dtype`: what the checkpoint was written in."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context_tokens: int
    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    dtype: torch.dtype = torch.float32
    eos_token_ids: tuple[int, ...] = ()

    @property
    def scale(self) -> float:
        """What scores are multiplied with."""
        return self.head_dim**-0.5

    def block_bytes(self, block_tokens: int, dtype: torch.dtype) -> int:
        """One KV block over all layers."""
        return 2 * self.num_layers * block_tokens * self.num_kv_heads * self.head_dim * dtype.itemsize


def config_from_hf(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Raises ModelError with one line that names the field. `where` stands in front of it."""
    fields = Fields(config, where)
    model_type = fields.model_type()
    qkv_bias, out_bias, qk_norm = MODEL_TYPES[model_type]
    has_bias = fields.flag("attention_bias")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    parsed = ModelConfig(
        model_type=model_type,
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=fields.size("head_dim", 128 if model_type == "qwen3" else hidden // heads),
        intermediate_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        max_context_tokens=fields.size("max_position_embeddings", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=fields.rope(),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=has_bias if qkv_bias is None else qkv_bias,
        out_bias=has_bias if out_bias is None else out_bias,
        qk_norm=qk_norm,
        dtype=fields.dtype(),
        eos_token_ids=token_ids(config.get("eos_token_id")),
    )
    return checked(parsed, where)


def checked(config: ModelConfig, where: str) -> ModelConfig:
    """Sizes that do not fit each other, whichever file they come from."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{where}: {config.num_heads} query heads are no multiple of {config.num_kv_heads} KV heads")
    if config.head_dim % 2:
        raise ModelError(f"{where}: head_dim: {config.head_dim} (allowed: an even number)")
    return config


def token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` is a number, a list of them, or absent."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def check_model_type(name: Any, where: str) -> str:
    if name in MODEL_TYPES:
        return name
    near = get_close_matches(str(name), MODEL_TYPES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ModelError(f"{where}: {name!r} is not a served architecture{hint} (allowed: {', '.join(MODEL_TYPES)})")


@dataclass(frozen=True)
class Fields:
    """Typed access to a configuration; every refusal names the field."""

    config: Mapping[str, Any]
    where: str

    def wrong(self, key: str, value: Any, allowed: str) -> ModelError:
        return ModelError(f"{self.where}: {key}: {value!r} (allowed: {allowed})")

    def model_type(self) -> str:
        model_type = check_model_type(self.config.get("model_type"), f"{self.where}: model_type")
        for key, what in REFUSED.items():
            if self.config.get(key):
                raise ModelError(f"{self.where}: {key}: {what} not supported")
        if self.config.get("hidden_act", "silu") != "silu":
            raise self.wrong("hidden_act", self.config["hidden_act"], "silu")
        self._check_window(model_type)
        return model_type

    def _check_window(self, model_type: str) -> None:
        """A window as long as the context changes nothing."""
        window = self.config.get("sliding_window")
        is_on = self.config.get("use_sliding_window", model_type == "mistral")
        is_short = window and window < self.config.get("max_position_embeddings", float("inf"))
        if (is_on and is_short) or "sliding_attention" in (self.config.get("layer_types") or ()):
            raise ModelError(f"{self.where}: sliding_window: {window} (an active sliding window is not supported)")

    def size(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.where}: {key} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, value, "a whole number, 1 or more")
        return value

    def number(self, key: str, default: float | None = None, inside: Mapping[str, Any] | None = None) -> float:
        value = (self.config if inside is None else inside).get(key, default)
        if value is None:
            raise ModelError(f"{self.where}: {key} is missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value not in (None, True, False):
            raise self.wrong(key, value, "true or false")
        return bool(value)

    def dtype(self) -> torch.dtype:
        name = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        if name not in DTYPES:
            raise self.wrong("dtype", name, ", ".join(DTYPES))
        return DTYPES[name]

    def rope(self) -> Rope:
        """`rope_parameters` holds both; older files have `rope_theta` and `rope_scaling` side by side."""
        both = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        theta = both.get("rope_theta") or self.number("rope_theta", 10000.0)
        kind = both.get("rope_type") or both.get("type") or "default"
        if kind not in SCALING_FIELDS:
            raise self.wrong("rope_scaling", kind, ", ".join(SCALING_FIELDS))
        partial = both.get("partial_rotary_factor", self.config.get("partial_rotary_factor", 1.0))
        if partial != 1.0:
            raise self.wrong("partial_rotary_factor", partial, "1.0")
        values = {name: self.number(name, inside=both) for name in SCALING_FIELDS[kind]}
        if "original_max_position_embeddings" in values:
            values["original_context_tokens"] = int(values.pop("original_max_position_embeddings"))
        return Rope(theta=float(theta), scaling=kind, **values)
