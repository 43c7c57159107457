"""The state of a partial attention, and its two forms on the wire (paper.md §2, kernels' contract in design.md §5)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

STATE_BYTES = 4  # every number of the state is fp32


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over a part of the tokens, not normalised. All fp32; m is in the natural base.

    acc `[…, heads, head_dim]` = Σ exp(s − m) V, m `[…, heads]` = max s or a number near it, e `[…, heads]` = Σ exp(s − m) over
    the scores s (1/sqrt(head_dim) included). The neutral element is (0, −inf, 0). The paper calls acc MA.
    """

    acc: torch.Tensor
    m: torch.Tensor
    e: torch.Tensor

    @classmethod
    def empty(cls, shape: Sequence[int], device: torch.device | str) -> "Partial":
        """Unwritten memory for acc of this shape."""
        new = torch.empty(tuple(shape), dtype=torch.float32, device=device)
        return cls(new, new.new_empty(new.shape[:-1]), new.new_empty(new.shape[:-1]))

    @classmethod
    def neutral(cls, shape: Sequence[int], device: torch.device | str) -> "Partial":
        """The state of no tokens at all."""
        return cls.empty(shape, device).fill_neutral()

    @classmethod
    def stack(cls, parts: Sequence["Partial"]) -> "Partial":
        if not parts:
            raise ValueError("no parts to stack: their shape is unknown")
        return cls(*(torch.stack([getattr(part, name) for part in parts]) for name in ("acc", "m", "e")))

    @classmethod
    def packed(cls, buffer: torch.Tensor, rows: int, heads: int, head_dim: int) -> "Partial":
        """Views of a message `[…, rows × heads × (head_dim + 2)]` fp32: acc, then m, then e, each dense.

        A buffer with a leading dimension holds one message per part: each is received into its slot and merged there.
        """
        num_states = rows * heads
        acc, m, e = buffer.split((num_states * head_dim, num_states, num_states), dim=-1)
        lead = buffer.shape[:-1]
        return cls(acc.view(*lead, rows, heads, head_dim), m.view(*lead, rows, heads), e.view(*lead, rows, heads))

    def __getitem__(self, index: int | slice) -> "Partial":
        """The part (or parts) at an index of the leading dimension, without a copy."""
        return Partial(self.acc[index], self.m[index], self.e[index])

    def copy_(self, other: "Partial") -> "Partial":
        """Take over the state of another one of this shape."""
        for name in ("acc", "m", "e"):
            getattr(self, name).copy_(getattr(other, name))
        return self

    def fill_neutral(self) -> "Partial":
        self.acc.zero_()
        self.m.fill_(-torch.inf)
        self.e.zero_()
        return self

    def output(self) -> torch.Tensor:
        """The normalised attention acc / e, fp32; zeros where no token was seen (e = 0)."""
        e = self.e.unsqueeze(-1)
        return torch.where(e > 0, self.acc / e, 0.0)


def packed_numel(rows: int, heads: int, head_dim: int) -> int:
    """Length of the fp32 message that `Partial.packed` views."""
    return rows * heads * (head_dim + 2)


def partial_bytes(rows: int, heads: int, head_dim: int) -> int:
    """Bytes of one partial on the wire, per layer."""
    return STATE_BYTES * packed_numel(rows, heads, head_dim)
