"""A LLaMA-family model over a paged KV pool: loading, tokenizer, and one iteration's forward pass.

Needs only torch, numpy and the kernels; safetensors, gguf and tokenizers are imported by the loaders that read files.
Owns no blocks, requests or schedule, and raises `ModelError` (one line) for whatever is wrong with a model's files.
"""

from infreal.model.attention import Attend, LocalAttention
from infreal.model.batch import Batch, Row, make_batch
from infreal.model.config import ModelConfig, config_from_hf
from infreal.model.decoder import Decoder
from infreal.model.errors import ModelError
from infreal.model.loading import Checkpoint, load_decoder, open_checkpoint, random_decoder

__all__ = [
    "Attend",
    "Batch",
    "Checkpoint",
    "Decoder",
    "LocalAttention",
    "ModelConfig",
    "ModelError",
    "Row",
    "config_from_hf",
    "load_decoder",
    "make_batch",
    "open_checkpoint",
    "random_decoder",
]
