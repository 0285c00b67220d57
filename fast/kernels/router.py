"""The expert choice on the device (router.cuh): fused behind the logits in gemv.py, or alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fast.kernels import driver
from fast.kernels.compile import Variant
from fast.kernels.driver import Float, Int, Parameters, Pointer, address

VARIANT = Variant("router")


class RouterStruct(Parameters):
    _fields_ = (
        *((name, Pointer) for name in ("bias", "ids", "weights", "counter")),
        *((name, Int) for name in ("experts", "top_k", "groups", "top_groups", "norm")),
        ("scaling", Float),
    )


class _Choose(Parameters):
    _fields_ = (("router", RouterStruct), ("logits", Pointer), ("rows", Int))


def supported(experts: int, top_k: int, groups: int) -> bool:
    """Whether a warp holds the choice: a lane at most 16 experts, a place of the choice, and a group."""
    return experts <= 512 and top_k <= min(32, experts) and groups <= 32 and experts % groups == 0


@dataclass(frozen=True, slots=True)
class Router:
    """bias [E] fp32; ids [R, k] int32 and weights [R, k] fp32 receive the choice, ids ascending in a row."""

    bias: Tensor
    ids: Tensor
    weights: Tensor
    groups: int
    top_groups: int
    normalise: bool
    factor: float

    def struct(self, experts: int) -> RouterStruct:
        (R, k) = self.ids.shape
        assert self.weights.shape == (R, k), (tuple(self.weights.shape), R, k)
        assert (self.bias.shape, self.bias.dtype) == ((experts,), torch.float32), (tuple(self.bias.shape), experts)
        assert supported(experts, k, self.groups), (experts, k, self.groups)
        return RouterStruct(
            address(self.bias),
            address(self.ids),
            address(self.weights),
            None,
            experts,
            k,
            self.groups,
            self.top_groups,
            int(self.normalise),
            self.factor,
        )


def choose(logits: Tensor, router: Router, *, pdl: bool = False) -> None:
    """logits [R, E] fp32 contiguous -> router.ids and router.weights."""
    R, E = logits.shape
    assert router.ids.shape[0] == R, (tuple(router.ids.shape), R)
    assert logits.is_contiguous(), logits.stride()
    p = _Choose(router.struct(E), address(logits), R)
    kernel = driver.kernel(VARIANT, "router_choose", logits.device.index)
    kernel((-(-R // 4), 1, 1), 128, p, shared=16 * E, pdl=pdl)
