"""Error bounds of floating-point arithmetic, for tests that compare the engine with float64 (Higham, chapter 3)."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-53}
"""Unit roundoff: half the distance from 1 to the next number."""


def gamma(n: int, dtype: torch.dtype = torch.float32) -> float:
    """Bound on the relative error of n successive roundings: n u / (1 - n u)."""
    return n * UNIT[dtype] / (1 - n * UNIT[dtype])


def product(x: Tensor, w: Tensor) -> Tensor:
    """x [.., K], w [N, K] -> bound [.., N] on the fp32 error of x w^T, whatever the order of the sum."""
    return gamma(x.shape[-1]) * (x.double().abs() @ w.double().abs().T)


def stored(value: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound after one more rounding of `value` (known to within `error`) to `dtype`."""
    return error + UNIT[dtype] * (value.double().abs() + error)


def check(actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Every element within its bound; the message names the worst one."""
    error = (actual.double() - expected.double()).abs()
    bound = bound.expand_as(error)
    over = torch.where(error <= bound, 0.0, error / bound.clamp_min(torch.finfo(torch.float64).tiny))
    assert actual.shape == expected.shape
    if not bool((error <= bound).all()):
        at = tuple(int(i) for i in torch.unravel_index(over.nan_to_num(torch.inf).argmax(), over.shape))
        raise AssertionError(
            f"at {at}: expected {float(expected[at])!r}, actual {float(actual[at])!r}, "
            f"error {float(error[at]):.3e}, bound {float(bound[at]):.3e}"
        )
