"""A Hugging Face directory: config.json, safetensors in one file or sharded behind an index, tokenizer.json.

Pickled weights are never read.
"""

import json
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from infreal.model.config import config_from_hf, token_ids
from infreal.model.errors import ModelError, one_line
from infreal.model.shard import Part
from infreal.model.tokenizer import Tokenizer, load_tokenizer

FLOATS = ("F64", "F32", "F16", "BF16")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class HfDirectory:
    """A checkpoint (see `infreal.model.loading`). Files stay open, mapped, for as long as the object lives."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        fields = read_json(path / "config.json")
        self.config = config_from_hf(fields, where=str(path / "config.json"))
        self.file_of: dict[str, Any] = {}
        for file in weight_files(path):
            opened = open_safetensors(file)
            self.file_of |= dict.fromkeys(opened.keys(), opened)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._shape(name) for name in self.file_of}

    def _shape(self, name: str) -> tuple[int, ...]:
        header = self.file_of[name].get_slice(name)
        if header.get_dtype() not in FLOATS:
            allowed = ", ".join(FLOATS)
            raise ModelError(f"{self.name}: tensor {name} has dtype {header.get_dtype()} (allowed: {allowed})")
        return tuple(header.get_shape())

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        with readable(self.path):
            return self.file_of[name].get_slice(name)[part]

    def tokenizer(self) -> Tokenizer:
        """Stops at the end-of-text tokens of generation_config.json, or else of config.json."""
        generation = self.path / "generation_config.json"
        stop_ids = token_ids(read_json(generation).get("eos_token_id")) if generation.exists() else ()
        return load_tokenizer(self.path / "tokenizer.json", stop_ids or self.config.eos_token_ids)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory. Raises ModelError where there are none, or a shard is missing."""
    if (path / SINGLE).exists():
        return [path / SINGLE]
    if (path / INDEX).exists():
        shards = sorted(set(read_json(path / INDEX).get("weight_map", {}).values()))
        missing = [shard for shard in shards if not (path / shard).exists()]
        if missing or not shards:
            raise ModelError(f"{path / INDEX}: shard {missing[0] if missing else '(none listed)'} is not there")
        return [path / shard for shard in shards]
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(path.glob(pattern))]
    found = f"; {pickles[0]} is a pickle, and pickles are never read: convert it" if pickles else ""
    raise ModelError(f"{path}: neither {SINGLE} nor {INDEX} is there{found}")


def open_safetensors(file: Path) -> Any:
    with readable(file):
        return safe_open(file, framework="pt")


@contextmanager
def readable(file: Path):
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: not a readable safetensors file ({one_line(error)})") from error


def read_json(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{file}: not JSON ({one_line(error)})") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{file}: holds {type(fields).__name__} (allowed: an object)")
    return fields
