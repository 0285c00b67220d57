"""fast.linear: dense and packed products against float64, and exactly where the sums are exact."""

from __future__ import annotations

import pytest
import torch

from conformance.unit.fast import bounds
from fast import linear as module
from fast.linear import linear
from fast.nvfp4 import Packed, decode, encode


def whole(seed: int, rows: int, cols: int, top: int, dtype: torch.dtype) -> torch.Tensor:
    """Integers of magnitude at most `top`: their products and sums are exact in fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-top, top + 1, (rows, cols), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("out", [None, torch.float32], ids=["storage", "fp32"])
def test_dense_product_is_exact_then_rounded_once(dtype, out):
    x, w = whole(1, 5, 48, 15, dtype), whole(2, 37, 48, 15, torch.bfloat16)
    y = linear(x, w, out)
    assert y.dtype == (out or dtype)
    assert torch.equal(y, (x.double() @ w.double().T).to(out or dtype))


@pytest.mark.parametrize("block_bytes", [4, 4 * 48 * 5, 1 << 26])
def test_blocks_of_rows_change_nothing(monkeypatch, block_bytes):
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    x, w = whole(3, 4, 48, 15, torch.bfloat16), whole(4, 37, 48, 15, torch.bfloat16)
    expected = x.double() @ w.double().T
    assert torch.equal(linear(x, w, torch.float32), expected.float())
    packed = encode(w.float())
    exact = x.double() @ decode(Packed(packed.codes, packed.scale, torch.ones(()))).double().T
    assert torch.equal(linear(x, packed, torch.float32), exact.float() * packed.scale_2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_packed_product_within_the_bound_of_its_sum(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 64, generator=generator).to(dtype)
    packed = encode(torch.randn(24, 64, generator=generator))
    w = decode(packed).double()
    expected = x.double() @ w.T
    bound = bounds.gamma(64 + 2) * (x.double().abs() @ w.abs().T)
    bounds.check(linear(x, packed), expected, bounds.stored(expected, bound, dtype))


def test_scale_2_reaches_the_accumulator_not_the_rounded_weight():
    """1/3 in bf16 is off by 2^-9 relative; on the fp32 accumulator it is not."""
    packed = Packed(
        torch.full((1, 8), 0x22, dtype=torch.uint8),
        torch.full((1, 1), 0x38, dtype=torch.uint8),
        torch.tensor(1 / 3),
    )
    y = linear(torch.ones(1, 16, dtype=torch.bfloat16), packed, torch.float32)
    assert float(y) == float(torch.tensor(16.0) * packed.scale_2)


def test_widths_that_do_not_meet_are_refused():
    with pytest.raises(AssertionError):
        linear(torch.ones(1, 16), torch.ones(4, 17))
    with pytest.raises(AssertionError):
        linear(torch.ones(1, 32), encode(torch.ones(4, 16)))
