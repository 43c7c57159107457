"""A Triton launch as data: the same description runs a kernel and compiles it ahead of time (`aot.py`)."""

from dataclasses import dataclass, field
from typing import Any

import torch
import triton

WARPS, STAGES = 4, 3


@dataclass(frozen=True)
class Launch:
    """kernel[grid](*args, **constants): args in the kernel's order, constants are its `tl.constexpr` parameters."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = WARPS
    num_stages: int = STAGES

    def run(self) -> None:
        if 0 in self.grid:
            return
        with torch.cuda.device_of(self.args[0]):
            self.kernel[self.grid](*self.args, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """Fused multiply-add is named because Triton's default changes with 3.10."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    @property
    def name(self) -> str:
        return self.kernel.__name__


def needs_upcast(kernel: Any, dtype: torch.dtype) -> bool:
    """Triton's interpreter multiplies, sums and dots bf16 wrongly: there, values are cast to fp32 right after a load."""
    return dtype == torch.bfloat16 and not isinstance(kernel, triton.runtime.JITFunction)
