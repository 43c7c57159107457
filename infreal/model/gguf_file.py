"""A GGUF file: metadata, tensors of any type that the `gguf` package dequantises, and the tokenizer inside.

Layout as llama.cpp writes it; for architecture `llama` the rows of Q and K are permuted there, and put back here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from infreal.model.config import ModelConfig, check_model_type, checked
from infreal.model.errors import ModelError, one_line
from infreal.model.rope import Rope
from infreal.model.shard import Part
from infreal.model.tokenizer import GgufVocabulary, Tokenizer, load_tokenizer, tokenizer_from_gguf

ROPE_FACTORS = "rope_freqs.weight"


class _Reader(gguf.GGUFReader):
    """The package's reader slices silently past the end of a truncated file; this one says so."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"ends before byte {end}")
        if isinstance(self.data, np.memmap):
            self.data = self.data.view(np.ndarray)  # a memmap's own bookkeeping costs more than the slices read
        return super()._get(int(offset), dtype, count, override_order)


class GgufFile:
    """A checkpoint (see `infreal.model.loading`), with Hugging Face's tensor names on the outside."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        try:
            reader = _Reader(path)
        except Exception as error:  # the reader raises whatever its parsing stumbles over
            raise ModelError(f"{path}: not a readable GGUF file ({one_line(error)})") from error
        self.fields, self.tensors = reader.fields, {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = check_model_type(self._field("general.architecture"), f"{path}: general.architecture")
        self.config = self._config()
        self.gguf_names = self._names()

    def _field(self, key: str, default: Any = None) -> Any:
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def _size(self, key: str, default: Any = None) -> Any:
        value = self._field(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{self.name}: {self.architecture}.{key} is missing")
        return value

    def _config(self) -> ModelConfig:
        self._check_plain()
        hidden, heads = self._size("embedding_length"), self._size("attention.head_count")
        context = self._size("context_length")
        config = ModelConfig(
            model_type=self.architecture,
            num_layers=self._size("block_count"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=self._size("attention.head_count_kv", heads),
            head_dim=self._size("attention.key_length", hidden // heads),
            intermediate_size=self._size("feed_forward_length"),
            vocab_size=len(self._field("tokenizer.ggml.tokens", ())) or self._size("vocab_size"),
            max_context_tokens=context,
            rms_norm_eps=self._size("attention.layer_norm_rms_epsilon"),
            rope=self._rope(),
            tied_embeddings="output.weight" not in self.tensors,
            qkv_bias="blk.0.attn_q.bias" in self.tensors,
            out_bias="blk.0.attn_output.bias" in self.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self.tensors,
            dtype=torch.float16,
            eos_token_ids=self._stop_ids(),
        )
        return checked(config, self.name)

    def _check_plain(self) -> None:
        """Refuse what the decoder would compute wrongly."""
        if self._size("expert_count", 0):
            raise ModelError(f"{self.name}: {self.architecture}.expert_count: mixture of experts not supported")
        if self._size("attention.sliding_window", 1 << 62) < self._size("context_length"):
            raise ModelError(f"{self.name}: {self.architecture}.attention.sliding_window: not supported")

    def _rope(self) -> Rope:
        """Llama 3's scaling is a tensor of divisors in a GGUF file."""
        kind = self._size("rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise ModelError(f"{self.name}: rope.scaling.type: {kind!r} (allowed: none, linear)")
        theta = float(self._size("rope.freq_base", 10000.0))
        if ROPE_FACTORS in self.tensors:
            return Rope(theta, "factors", factors=tuple(map(float, self.tensors[ROPE_FACTORS].data)))
        factor = float(self._size("rope.scaling.factor", 1.0))
        return Rope(theta, "linear", factor) if kind == "linear" else Rope(theta)

    def _stop_ids(self) -> tuple[int, ...]:
        ids = (self._field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def _names(self) -> dict[str, str]:
        """Hugging Face's name of each tensor → the name in the file; one that has none keeps its own and is refused."""
        arch = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[self.architecture]
        table = gguf.get_tensor_name_map(arch, self.config.num_layers)
        layers = range(self.config.num_layers)
        stems = ["model.embed_tokens", "model.norm", "lm_head"]
        stems += [f"model.layers.{i}.{stem}" for i in layers for stem in LAYER_STEMS]
        known = {table.get_name(stem): stem for stem in stems}
        names = {}
        for name in self.tensors:
            stem, _, kind = name.rpartition(".")
            if name != ROPE_FACTORS:
                names[f"{known[stem]}.{kind}" if stem in known else name] = name
        return names

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {hf: tuple(self.tensors[name].shape.tolist()[::-1]) for hf, name in self.gguf_names.items()}

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        """Dequantised to fp32, all of it: quantised blocks do not end where a rank's part does."""
        tensor = self.tensors[self.gguf_names[name]]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except Exception as error:
            kind = tensor.tensor_type.name
            raise ModelError(
                f"{self.name}: tensor {tensor.name} of type {kind} cannot be read ({one_line(error)})"
            ) from error
        values = torch.from_numpy(np.require(values, np.float32, "W"))  # a copy where it is still the mapped file
        if self.architecture != "llama" or (".self_attn.q_proj." not in name and ".self_attn.k_proj." not in name):
            return values[part]
        heads = self.config.num_heads if ".q_proj." in name else self.config.num_kv_heads
        return unpermuted(values, heads)[part]

    def tokenizer(self) -> Tokenizer:
        """The file's own vocabulary, or a tokenizer.json beside it where the file's kind is not served."""
        beside = self.path.with_name("tokenizer.json")
        if beside.exists():
            return load_tokenizer(beside, self.config.eos_token_ids)
        get = lambda key, default=None: self._field(f"tokenizer.ggml.{key}", default)  # noqa: E731
        vocabulary = GgufVocabulary(
            kind=get("model", ""),
            pre=get("pre", "default"),
            tokens=get("tokens", []),
            token_types=get("token_type", []),
            merges=get("merges", []),
            bos_id=get("bos_token_id"),
            adds_bos=get("add_bos_token"),
            stop_ids=self.config.eos_token_ids,
        )
        return tokenizer_from_gguf(vocabulary, self.name)


LAYER_STEMS = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
)


def unpermuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of Q or K from llama.cpp's order (dimension i beside i + head_dim/2) to rotate-half's (first half, second half)."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
