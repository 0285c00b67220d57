"""Inputs, float64 truths and error models for the tests of the CUDA kernels.

Bounds of single products are worst-case bounds on the sum (`gamma` below) plus the roundings at stores. Longer chains
are evaluated in float64 with every rounding point of the kernel replaced by a random relative error as large as that
rounding can be; the allowed error of an element is Z times the root mean square of what such draws do to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.unit.fast.bounds import UNIT

CUDA = torch.device("cuda")
BF16, F32 = UNIT[torch.bfloat16], UNIT[torch.float32]
TINY = 2.0**-134
"""Half the distance of bf16 subnormals."""

DRAWS = 24
Z = 6.0
"""A normal variable leaves 6 standard deviations once in 5e8 draws."""

KINDS = ("normal", "heavy", "cancelling")
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device=CUDA).manual_seed(seed)


def values(kind: str, *shape: int, seed: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """normal; heavy: normal over a squared uniform (outliers of 1e4); cancelling: large terms of both signs, zeros and
    subnormals."""
    g = generator(seed)
    x = torch.randn(shape, generator=g, device=CUDA)
    if kind == "heavy":
        x = x / torch.rand(shape, generator=g, device=CUDA).clamp_min(0.01).square()
    elif kind == "cancelling":
        sign = 1.0 - 2.0 * (torch.arange(shape[-1], device=CUDA) % 2)
        pick = torch.rand(shape, generator=g, device=CUDA)
        x = torch.where(pick < 0.1, 0.0, torch.where(pick < 0.2, x * 2.0**-130, 300.0 * sign + x))
    return (x * scale).to(dtype)


def gamma(K: int) -> float:
    """Relative bound on a sum of K products, added 16 at a time by a tensor core that truncates (2^-22 an addition) in
    eight or more slices, and at most 64 more additions."""
    return (K / 16 / 8 + 64) * 2.0**-22


def product(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """x [.., K], w [N, K] -> (x w^T, bound on its error) in float64."""
    x, w = x.double(), w.double()
    return x @ w.T, gamma(x.shape[-1]) * (x.abs() @ w.abs().T)


def stored(value: Tensor, error: Tensor) -> Tensor:
    """Bound after one more rounding of `value`, known to within `error`, to bf16."""
    return error + BF16 * (value.abs() + error) + TINY


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def swiglu(gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor], limit: float) -> tuple[Tensor, Tensor]:
    """(value, error) of both -> (value, error) of the product; silu grows by at most 1.1 of its argument's change."""
    a, b = silu(gate[0].clamp(max=limit)), up[0].clamp(-limit, limit)
    da, db = 1.1 * gate[1] + 8 * F32 * a.abs(), up[1]
    return a * b, da * b.abs() + a.abs() * db + da * db + 2 * F32 * (a * b).abs()


@dataclass(frozen=True)
class Packed:
    codes: Tensor
    scale: Tensor
    scale_2: Tensor

    def unscaled(self) -> Tensor:
        """code * block scale, float64."""
        table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64, device=self.codes.device)
        codes = torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(-2).long()
        scale = self.scale.view(torch.float8_e4m3fn).double().repeat_interleave(16, -1)
        return table[codes] * scale


def packed(N: int, K: int, seed: int, *, bits: tuple[int, int] = (0, 0x7F), scale_2: float = 2.0**-9) -> Packed:
    """Random codes, and scale bytes over the whole range of E4M3 (or `bits`), subnormal and zero scales included."""
    g = generator(seed)
    codes = torch.randint(0, 256, (N, K // 2), generator=g, device=CUDA, dtype=torch.uint8)
    scale = torch.randint(*bits, (N, K // 16), generator=g, device=CUDA, dtype=torch.uint8)
    return Packed(codes, scale, torch.rand((), generator=g, device=CUDA) * scale_2 + scale_2)


class Noise:
    """Rounding points of a chain: identity, or a random relative error of at most a rounding's size."""

    def __init__(self, seed: int | None) -> None:
        self.generator = None if seed is None else generator(seed)

    def bf16(self, x: Tensor) -> Tensor:
        return x + self.spread(BF16 * x.abs() + TINY)

    def f32(self, x: Tensor, steps: int = 1) -> Tensor:
        """`steps`: how many fp32 operations lie behind x."""
        return x + self.spread(steps * F32 * x.abs())

    def spread(self, size: Tensor) -> Tensor:
        """Uniform in +-size."""
        if self.generator is None:
            return torch.zeros_like(size)
        return size * (2.0 * torch.rand(size.shape, generator=self.generator, device=CUDA, dtype=torch.float64) - 1.0)

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        value, bound = product(x, w)
        return value + self.spread(bound)


def chain(function: Callable[[Noise], tuple[Tensor, ...]], seed: int) -> list[tuple[Tensor, Tensor]]:
    """-> (exact value, allowed error) of every output of `function`."""
    exact = function(Noise(None))
    square = [torch.zeros_like(x) for x in exact]
    for draw in range(DRAWS):
        for total, value, noisy in zip(square, exact, function(Noise(1000 * seed + draw)), strict=True):
            total += (noisy - value).square()
    return [(value, Z * (total / DRAWS).sqrt()) for value, total in zip(exact, square, strict=True)]
