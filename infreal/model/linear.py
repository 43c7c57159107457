"""x · Wᵀ, as each device does it best.

On a CPU through oneDNN: eight rows take a third of the time that the library behind `torch.mm` needs, since the matrix is laid out
for its kernels once, when it is loaded. Elsewhere through `torch.nn.functional.linear`.
"""

import torch
import torch.nn.functional as F

ONEDNN_DTYPES = (torch.float32, torch.bfloat16)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """`[out, in]` in the layout that `linear` likes; what else reads the weight must keep a copy of its own."""
    if not _suits_onednn(weight):
        return weight.contiguous()
    with torch.inference_mode():
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x `[tokens, in]`, weight `[out, in]`, packed or not → `[tokens, out]`."""
    if weight.is_mkldnn or _suits_onednn(weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _suits_onednn(weight: torch.Tensor) -> bool:
    return weight.is_cpu and weight.dtype in ONEDNN_DTYPES and torch.backends.mkldnn.is_available()
