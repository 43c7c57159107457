"""Tiny models of every served family, made by `transformers` with random weights, and runs of our decoder over them."""

from pathlib import Path

import pytest
import torch

from infreal.model import Decoder, Row, load_decoder, make_batch, open_checkpoint

BLOCK_TOKENS = 4
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# name: (model_type, what differs from SIZES)
FAMILIES = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "rms_norm_eps": 1e-3}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {"num_key_value_heads": 6, "use_sliding_window": False}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"head_dim": 8, "attention_bias": True}),
}


def reference_model(family: str, seed: int = 0):
    """A transformers model whose every weight, norms and biases included, is random."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model_type, changes = FAMILIES[family]
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | changes))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return model


def load(path: Path) -> Decoder:
    return load_decoder(open_checkpoint(path), torch.float32)


def reference_logits(model, token_ids: list[int]) -> torch.Tensor:
    """`[tokens, vocab_size]`."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


def random_ids(count: int, seed: int, vocab_size: int = 300) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def nan_pool(decoder: Decoder, num_blocks: int) -> torch.Tensor:
    """Whatever is read without having been written shows."""
    return decoder.new_pool(num_blocks, BLOCK_TOKENS).fill_(torch.nan)


def step(decoder: Decoder, rows: list[Row], pool: torch.Tensor, backend: str = "torch") -> torch.Tensor:
    batch = make_batch(rows, pool.shape[3], decoder.device)
    return decoder.forward(batch, decoder.local_attention(batch, pool, backend))


def run_chunks(decoder: Decoder, token_ids: list[int], chunks: list[int], blocks: list[int]) -> torch.Tensor:
    """One request in chunks of these sizes (1: decode); logits after each chunk."""
    pool, logits, start = nan_pool(decoder, max(blocks) + 1), [], 0
    for size in chunks:
        logits.append(step(decoder, [Row(token_ids[start : start + size], start, blocks)], pool)[0])
        start += size
    return torch.stack(logits)
