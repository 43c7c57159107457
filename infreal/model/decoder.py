"""The forward pass of a LLaMA-family decoder: one iteration's tokens in, logits of the rows that asked for them out.

Owns the arithmetic between the attentions. It must not know requests, blocks or peers: those are behind `attend`.
"""

import torch
import torch.nn.functional as F

from infreal.model.attention import Attend, LocalAttention
from infreal.model.batch import Batch
from infreal.model.config import ModelConfig
from infreal.model.linear import linear
from infreal.model.rope import angles, frequencies, rotate
from infreal.model.weights import LayerWeights, Weights

MLP_TOKENS = 1024  # at a time: what lies between the products stays in a CPU's cache, and in memory that is used again


class Decoder:
    """A model on one device. Holds no state between iterations; several threads may use it at once."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config, self.weights = config, weights
        self.frequencies = frequencies(config.rope, config.head_dim).to(self.device)

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def new_pool(self, num_blocks: int, block_tokens: int) -> torch.Tensor:
        """KV pool `[blocks, layers, 2, block_tokens, kv_heads, head_dim]`, unwritten, in the weights' dtype."""
        config = self.config
        shape = (num_blocks, config.num_layers, 2, block_tokens, config.num_kv_heads, config.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def local_attention(self, batch: Batch, kv_pool: torch.Tensor, backend: str) -> LocalAttention:
        return LocalAttention(batch, kv_pool, scale=self.config.scale, backend=backend)

    @torch.inference_mode()
    def forward(self, batch: Batch, attend: Attend) -> torch.Tensor:
        """Logits `[rows that want them, vocab_size]` fp32, in the order of `batch.logits_index`."""
        weights, eps = self.weights, self.config.rms_norm_eps
        x = F.embedding(batch.token_ids, weights.embedding)
        rotation = angles(self.frequencies, batch.positions, self.dtype)
        for index, layer in enumerate(weights.layers):
            q, k, v = self._project(layer, _norm(x, layer.input_norm, eps), rotation)
            attention = attend(index, q, k, v).to(x.dtype).flatten(1)
            x += linear(attention, layer.out, layer.out_bias)
            for part in x.split(MLP_TOKENS):
                part.add_(linear(_gated(linear(_norm(part, layer.post_norm, eps), layer.gate_up)), layer.down))
        return self.logits(x[batch.logits_index])

    @torch.inference_mode()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The head: `[rows, hidden_size]` out of the last layer → `[rows, vocab_size]` fp32."""
        weights = self.weights
        return linear(_norm(x, weights.final_norm, self.config.rms_norm_eps), weights.head).float()

    def _project(
        self, layer: LayerWeights, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`; q and k normed (qwen3) and rotated."""
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = linear(x, layer.qkv, layer.qkv_bias)
        qk, v = qkv.unflatten(1, (-1, config.head_dim)).split((heads + kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None:
            q, k = qk.split((heads, kv_heads), dim=1)
            norms = ((q, layer.q_norm), (k, layer.k_norm))
            qk = torch.cat([_norm(part, weight, config.rms_norm_eps) for part, weight in norms], dim=1)
        q, k = rotate(qk, *rotation).split((heads, kv_heads), dim=1)
        return q, k, v


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU: silu(gate) × up, `[tokens, intermediate_size]`."""
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate).mul_(up)
