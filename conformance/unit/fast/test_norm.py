"""fast.ops.norm against float64 formulas."""

from __future__ import annotations

import pytest
import torch

from conformance.unit.fast import bounds
from fast.ops import norm

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def rows(seed: int, D: int, dtype: torch.dtype, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = size * torch.randn(7, D, generator=generator) + 0.5 * size
    w, b = 1 + 0.3 * torch.randn(D, generator=generator), torch.randn(D, generator=generator)
    return x.to(dtype), w.bfloat16(), b.bfloat16()


@DTYPES
@pytest.mark.parametrize("size", [1.0, 1e-3])
@pytest.mark.parametrize("eps", [1e-5, 1e-2])
@pytest.mark.parametrize("D", [16, 112, 128])
def test_rms(dtype, size, eps, D):
    x, w, _ = rows(D, D, dtype, size)
    wide = x.double()
    expected = w.double() * wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    bound = bounds.gamma(D + 6) * expected.abs()
    bounds.check(norm.rms(x, w, eps), expected, bounds.stored(expected, bound, dtype))


@DTYPES
@pytest.mark.parametrize("D", [20, 32, 128])
def test_layer_subtracts_the_mean_and_adds_the_bias(dtype, D):
    x, w, b = rows(D, D, dtype)
    wide = x.double()
    mean = wide.mean(-1, keepdim=True)
    deviation = torch.sqrt((wide - mean).square().mean(-1, keepdim=True) + 1e-6)
    expected = w.double() * (wide - mean) / deviation + b.double()
    moved = bounds.gamma(D + 1) * wide.abs().mean(-1, keepdim=True) / deviation
    bound = w.double().abs() * 2 * moved * (1 + (wide - mean).abs() / deviation)
    bound = bound + bounds.gamma(D + 8) * (expected.abs() + 2 * b.double().abs())
    bounds.check(norm.layer(x, w, b, 1e-6), expected, bounds.stored(expected, bound, dtype))


def test_rms_of_zeros_is_zero():
    assert torch.equal(norm.rms(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


def test_out_dtype_is_the_only_rounding():
    x, w, _ = rows(5, 64, torch.bfloat16)
    assert torch.equal(norm.rms(x, w, 1e-5, torch.float32).bfloat16(), norm.rms(x, w, 1e-5))
