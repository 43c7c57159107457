"""A Hugging Face `config.json` → ModelSpec, for dense LLaMA-like models; anything else is refused, naming its field."""

from collections.abc import Mapping
from typing import Any

from perfmodel.errors import InputError
from perfmodel.specs import ModelSpec

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "fp16": 2, "bf16": 2, "fp32": 4}
MOE_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
MLA_FIELDS = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def width_of_dtype(name: str, where: str) -> int:
    """Bytes of one number. Raises InputError for a width that is not served."""
    if name not in DTYPE_BYTES:
        raise InputError(f"{where}: {name!r} (allowed: {', '.join(DTYPE_BYTES)})")
    return DTYPE_BYTES[name]


def model_from_config(name: str, config: Mapping[str, Any], where: str) -> ModelSpec:
    """Raises InputError with one line naming the field that is missing, wrong or not supported."""
    check_supported(config, where)
    for key in REQUIRED:
        if key not in config:
            raise InputError(f"{where}: {key} is missing")
    hidden, heads = _size(config, "hidden_size", where), _size(config, "num_attention_heads", where)
    model_type = config["model_type"]
    width = width_of_dtype(config.get("torch_dtype") or config.get("dtype") or "float16", f"{where}: torch_dtype")
    model = ModelSpec(
        name=name,
        model_type=model_type,
        num_layers=_size(config, "num_hidden_layers", where),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_size(config, "num_key_value_heads", where, default=heads),
        head_dim=_size(config, "head_dim", where, default=128 if model_type == "qwen3" else hidden // heads),
        intermediate_size=_size(config, "intermediate_size", where),
        vocab_size=_size(config, "vocab_size", where),
        tied_embeddings=_flag(config, "tie_word_embeddings", where),
        attention_bias=model_type == "qwen2" or _flag(config, "attention_bias", where),
        qk_norm=model_type == "qwen3",
        dtype_bytes=width,
        kv_dtype_bytes=width,
    )
    if model.num_heads % model.num_kv_heads:
        raise InputError(
            f"{where}: num_key_value_heads: {model.num_kv_heads} (allowed: a divisor of num_attention_heads, {heads})"
        )
    return model


def check_supported(config: Mapping[str, Any], where: str) -> None:
    """Raises InputError for MoE, MLA, an active sliding window, quantised weights, or another kind of model."""
    for fields, what in ((MOE_FIELDS, "mixture of experts"), (MLA_FIELDS, "multi-head latent attention")):
        for key in fields:
            if config.get(key):
                raise InputError(f"{where}: {key}: {config[key]} ({what} is not supported)")
    for key in ("quantization_config", "quantization"):
        if config.get(key):
            raise InputError(f"{where}: {key} (quantised weights are not supported)")
    if config.get("model_type") not in MODEL_TYPES:
        raise InputError(f"{where}: model_type: {config.get('model_type')!r} (allowed: {', '.join(MODEL_TYPES)})")
    if config.get("mlp_bias"):
        raise InputError(f"{where}: mlp_bias: true (biases in the MLP are not supported)")
    window = active_window(config)
    if window:
        raise InputError(f"{where}: {window} (an active sliding window is not supported)")


def active_window(config: Mapping[str, Any]) -> str | None:
    """The field that switches a sliding window on, or None. One as long as the model's context changes nothing."""
    if "sliding_attention" in (config.get("layer_types") or ()):
        return "layer_types: sliding_attention"
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", config["model_type"] == "mistral"):
        return None
    if window >= config.get("max_position_embeddings", float("inf")):
        return None
    return f"sliding_window: {window}"


def _size(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{where}: {key}: {value!r} (allowed: a whole number, 1 or more)")
    return value


def _flag(config: Mapping[str, Any], key: str, where: str) -> bool:
    value = config.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InputError(f"{where}: {key}: {value!r} (allowed: true or false)")
    return value
