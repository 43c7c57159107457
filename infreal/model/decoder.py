"""The forward pass of a LLaMA-family decoder: one iteration's tokens in, logits of the rows that asked for them out.

Owns the arithmetic between the attentions, and the sums over the ranks that share the model. It must not know requests, blocks or
peers: those are behind `attend`.
"""

import torch
import torch.nn.functional as F

from infreal.model.attention import Attend, LocalAttention
from infreal.model.batch import Batch
from infreal.model.config import ModelConfig
from infreal.model.linear import linear
from infreal.model.rope import angles, frequencies, rotate
from infreal.model.shard import Shard
from infreal.model.weights import LayerWeights, Weights
from infreal.transport.group import ALONE, Group

MLP_TOKENS = 1024  # at a time: what lies between the products stays in a CPU's cache, and in memory that is used again


class Decoder:
    """A model on one device, or a rank's shard of it; `config` has the sizes of what is here. Holds no state between iterations.

    Alone, it may be used by several threads at once. Ranks of a group call the same methods in the same order, each with the same
    batch, and raise GroupLost where one of them does not.
    """

    def __init__(self, model: ModelConfig, weights: Weights, group: Group = ALONE) -> None:
        self.shard = Shard(model, group.rank, group.size)
        self.config, self.weights, self.group = self.shard.config, weights, group
        self.frequencies = frequencies(model.rope, model.head_dim).to(self.device)

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
        """Logits `[rows that want them, vocab_size]` fp32 of the tokens of this rank, in the order of `batch.logits_index`."""
        weights, eps, all_reduce = self.weights, self.config.rms_norm_eps, self.group.all_reduce
        x = self._embed(batch.token_ids)
        rotation = angles(self.frequencies, batch.positions, self.dtype)
        for index, layer in enumerate(weights.layers):
            q, k, v = self._project(layer, _norm(x, layer.input_norm, eps), rotation)
            attention = attend(index, q, k, v).to(x.dtype).flatten(1)
            x += all_reduce(linear(attention, layer.out, layer.out_bias))
            x += all_reduce(self._mlp(layer, x))
        return self.logits(x[batch.logits_index])

    @torch.inference_mode()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The head: `[rows, hidden_size]` out of the last layer → `[rows, vocab_size]` fp32."""
        weights = self.weights
        return linear(_norm(x, weights.final_norm, self.config.rms_norm_eps), weights.head).float()

    @torch.inference_mode()
    def next_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest token of each row, the first of equals: `[rows]` int64, the same on all ranks.

        Ranks exchange their best (a token id is exact in fp32 up to 2^24), never their logits.
        """
        best, index = logits.max(-1)
        if self.group.size == 1:
            return index
        first, _ = self.shard.vocabulary
        bests, tokens = self.group.all_gather(torch.stack([best, (index + first).float()])).unbind(1)
        return tokens.gather(0, bests.argmax(0, keepdim=True))[0].long()

    @torch.inference_mode()
    def whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """`[rows, vocab_size of the model]`, on all ranks."""
        size, vocab_size = self.group.size, self.shard.model.vocab_size
        if size == 1:
            return logits
        width = -(-vocab_size // size)
        gathered = self.group.all_gather(F.pad(logits, (0, width - logits.shape[1])))
        spans = [Shard(self.shard.model, rank, size).vocabulary for rank in range(size)]
        return torch.cat([part[:, : end - first] for part, (first, end) in zip(gathered, spans, strict=True)], dim=1)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[tokens, hidden_size]`. The row of a token is on one rank; the others add zeros to it."""
        embedding = self.weights.embedding
        if self.group.size == 1:
            return F.embedding(token_ids, embedding)
        first, end = self.shard.vocabulary
        is_here = (token_ids >= first) & (token_ids < end)
        rows = F.embedding((token_ids - first).where(is_here, 0), embedding)
        return self.group.all_reduce(rows.masked_fill_(~is_here.unsqueeze(1), 0))

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum."""
        out = []
        for part in x.split(MLP_TOKENS):
            normed = _norm(part, layer.post_norm, self.config.rms_norm_eps)
            out.append(linear(_gated(linear(normed, layer.gate_up)), layer.down))
        return out[0] if len(out) == 1 else torch.cat(out)

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
