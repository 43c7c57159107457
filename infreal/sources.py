"""Which model a configuration runs, and where its weights come from. Sizes are read first, weights where they are needed."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from experiments.catalogue import load_model_config
from experiments.config import Config
from infreal.model import Decoder, config_from_hf, load_decoder, open_checkpoint, random_decoder
from infreal.model.config import DTYPES, ModelConfig
from infreal.model.weights import check_memory
from infreal.requests import RandomPrompts, Requests
from infreal.transport.group import ALONE, Group
from perfmodel.cluster import ClusterSpec, Workload
from perfmodel.errors import InputError

WEIGHTS_SEED = 0  # of a model without weights: the runs of a sweep share them
DTYPE_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """weights: a name for `open_checkpoint`; None: random."""

    config: ModelConfig
    dtype: torch.dtype
    weights: str | None

    @property
    def where(self) -> str:
        return self.weights or "random"


def find_model(model: str, weights: str | None, dtype: str | None) -> ModelSource:
    """model, dtype: as in a configuration; weights: its `real.weights`. Raises ModelError, InputError."""
    fields, _, where = load_model_config(model)
    config = config_from_hf(fields, where)
    folder = Path(where).parent
    if weights is None and Path(where).is_file() and any(folder.glob("*.safetensors")):
        weights = str(folder)
    target = DTYPES[DTYPE_NAMES.get(dtype, dtype)] if dtype else config.dtype
    if weights is None:
        return ModelSource(config, target, None)
    found_config = open_checkpoint(weights).config
    for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        found, wanted = getattr(found_config, name), getattr(config, name)
        if found != wanted:
            raise InputError(f"real.weights: {weights} has {name} {found}, model {model} has {wanted}")
    return ModelSource(found_config, target, weights)


@lru_cache(maxsize=1)
def load_model(model: str, weights: str | None, dtype: str | None, device: str, group: Group = ALONE) -> Decoder:
    """The decoder, or a rank's part of it, shared by the runs of a sweep. Raises ModelError, InputError."""
    source = find_model(model, weights, dtype)
    if source.weights is None:
        return random_decoder(source.config, WEIGHTS_SEED, source.dtype, device, group)
    return load_decoder(open_checkpoint(source.weights), source.dtype, device, group)


def make_requests(config: Config, workload: Workload, source: ModelSource) -> Requests:
    """What a run asks of the model. Raises InputError."""
    prompts = RandomPrompts(workload, source.config.vocab_size, config.seed)
    return Requests(workload, prompts, stop_ids(config, source.config))


def stop_ids(config: Config, model: ModelConfig) -> tuple[int, ...]:
    """Tokens that end an output early: none where lengths are those of the workload."""
    if not config.real.stop_at_eos:
        return ()
    if not model.eos_token_ids:
        raise InputError(f"real.stop_at_eos: model {config.model} names no end token (allowed: false)")
    return model.eos_token_ids


def check_pools(spec: ClusterSpec, source: ModelSource, device: str) -> None:
    """Raises ModelError where the pools of all instances are more than the machine has."""
    copies = max(1, spec.instance.tensor_parallel // source.config.num_kv_heads)
    block_bytes = copies * source.config.block_bytes(spec.instance.block_tokens, source.dtype)
    num_bytes = spec.num_instances * spec.num_blocks * block_bytes
    what = f"{spec.num_instances} KV pools of {spec.num_blocks:,} blocks (instance.blocks_per_gpu sets a number)"
    check_memory(what, num_bytes, device)
