"""What one rank of an instance holds of a model (tensor parallelism, Shoeybi et al. 2019): parts of its tensors, and their sizes.

Whole query heads with the KV heads they read, which several ranks hold where there are fewer KV heads than ranks; a span of the
MLP's columns; a span of the vocabulary. Matrices in front of a sum over ranks (O, down) are cut along their input, all others along
their output; norms are whole everywhere. A bias behind such a sum is rank 0's, so that it is added once.
"""

from dataclasses import dataclass, replace

from infreal.model.config import ModelConfig
from infreal.model.errors import ModelError

Part = tuple[slice, ...]  # of a tensor, by dimension; (): all of it
Span = tuple[int, int]


def allowed_sizes(config: ModelConfig) -> list[int]:
    """Numbers of ranks: query heads and MLP columns divide; KV heads divide, or are copied a whole number of times.

    The rule by which `perfmodel.layout` prices instances; the vocabulary need not divide.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    return [
        size
        for size in range(1, heads + 1)
        if heads % size == config.intermediate_size % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    ]


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`. Raises ModelError for a size that does not divide the model, listing what is allowed."""

    model: ModelConfig
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        model, allowed = self.model, allowed_sizes(self.model)
        if self.size not in allowed:
            sizes = f"{model.num_heads} heads, {model.num_kv_heads} KV heads, {model.intermediate_size} MLP columns"
            raise ModelError(f"tensor_parallel: {self.size} ranks do not divide {sizes} (allowed: {allowed})")

    @property
    def config(self) -> ModelConfig:
        """The sizes of this rank's part."""
        return replace(
            self.model,
            num_heads=_length(self.heads),
            num_kv_heads=_length(self.kv_heads),
            intermediate_size=_length(self.columns),
            vocab_size=_length(self.vocabulary),
            out_bias=self.model.out_bias and self.rank == 0,
        )

    @property
    def heads(self) -> Span:
        return self._span(self.model.num_heads)

    @property
    def kv_heads(self) -> Span:
        kv_heads = self.model.num_kv_heads
        if self.size <= kv_heads:
            return self._span(kv_heads)
        head = self.rank * kv_heads // self.size
        return head, head + 1

    @property
    def columns(self) -> Span:
        return self._span(self.model.intermediate_size)

    @property
    def vocabulary(self) -> Span:
        """Token ids whose rows of embedding and head are here; spans differ by one where the vocabulary does not divide."""
        return self._span(self.model.vocab_size)

    def part(self, name: str) -> Part:
        """What of a tensor (Hugging Face's name) is here."""
        if self.size == 1:
            return ()
        width = self.model.head_dim
        parts = {
            "q_proj": (_slice(self.heads, width),),
            "k_proj": (_slice(self.kv_heads, width),),
            "v_proj": (_slice(self.kv_heads, width),),
            "o_proj": (slice(None), _slice(self.heads, width)),
            "gate_proj": (_slice(self.columns),),
            "up_proj": (_slice(self.columns),),
            "down_proj": (slice(None), _slice(self.columns)),
            "embed_tokens": (_slice(self.vocabulary),),
            "lm_head": (_slice(self.vocabulary),),
        }
        *_, module, kind = name.split(".")
        return () if (module, kind) == ("o_proj", "bias") else parts.get(module, ())

    def _span(self, count: int) -> Span:
        return count * self.rank // self.size, count * (self.rank + 1) // self.size


def _length(span: Span) -> int:
    return span[1] - span[0]


def _slice(span: Span, width: int = 1) -> slice:
    return slice(span[0] * width, span[1] * width)
