"""Rotary position embedding, rotate-half (Su et al. 2021, eq. 34, in the order of dimensions of Hugging Face's LLaMA).

K is stored rotated at its global position (design: a moved block keeps its values), so positions are always global.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rope:
    """`scaling` is a name of `SCALINGS`; the fields behind `factor` belong to llama3, `factors` to GGUF files."""

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192
    factors: tuple[float, ...] = ()  # one divisor per frequency


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions, `[head_dim / 2]` fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return SCALINGS[rope.scaling](1.0 / rope.theta**exponents, rope)


def _default(frequency: torch.Tensor, rope: Rope) -> torch.Tensor:
    return frequency


def _linear(frequency: torch.Tensor, rope: Rope) -> torch.Tensor:
    return frequency / rope.factor


def _llama3(frequency: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1, `apply_scaling`)."""
    wave_tokens = 2 * math.pi / frequency
    blend = (rope.original_context_tokens / wave_tokens - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequency / rope.factor + blend * frequency


def _factors(frequency: torch.Tensor, rope: Rope) -> torch.Tensor:
    return frequency / torch.tensor(rope.factors, dtype=torch.float32)


SCALINGS: dict[str, Callable[[torch.Tensor, Rope], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "factors": _factors,
}


def angles(frequency: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the tokens, `[tokens, 1, head_dim / 2]` each. Computed in fp32 whatever the model's dtype is."""
    angle = (positions.float().unsqueeze(1) * frequency).unsqueeze(1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x `[tokens, heads, head_dim]`, any strides; returns a dense copy, rotated."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out
