"""x · Wᵀ in the layout of each device equals the plain product."""

import pytest
import torch
import torch.nn.functional as F

from infreal.model.linear import linear, pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 77])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_packed_or_not_the_product_is_the_same(dtype, rows, with_bias):
    draw = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(n, 96, generator=draw).to(dtype) for n in (160, rows))
    bias = torch.randn(160, generator=draw).to(dtype) if with_bias else None
    expected = F.linear(x.double(), weight.double(), bias if bias is None else bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for form in (pack(weight), weight):
        found = linear(x, form, bias)
        assert found.dtype == dtype
        assert torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance * 10)


def test_a_packed_weight_keeps_its_size():
    weight = torch.randn(160, 96)
    assert pack(weight).shape == weight.shape
