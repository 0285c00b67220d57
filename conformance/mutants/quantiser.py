"""Faults of encoding NVFP4: bytes other than ModelOpt's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.record import Patch, family, output, replace

N = "fast.nvfp4"
CODES, SCALE, SCALE_2 = "encode.codes.*", "encode.scale.*", "encode.scale_2.*"
"""Of the first blocks, `ties`; what these do not find is named with its own."""
_m = family("quantiser")


def encoder(
    *,
    divide: float = 6.0,
    floor: float = 2.0**-9,
    ceiling: float = 448.0,
    zero: float = 1.0,
    ties: str = "even",
    sign: str = "below zero",
    cast: str = "even",
    order: int = 1,
    through: float = 0.0,
) -> Patch:
    """ModelOpt's path with one number or rule changed. `cast` "plain" gives NaN past 464, as E4M3 casts that do not
    saturate."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    middles = (grid[1:] + grid[:-1]) / 2

    def rows(x: Tensor, scale_2: Tensor, codes: Tensor, scale: Tensor) -> None:
        blocks = x.float().unflatten(-1, (-1, 16))
        ratio = blocks.abs().amax(-1) / (divide * scale_2)
        ratio = torch.where(ratio == 0, torch.full_like(ratio, zero), ratio).clamp(floor, ceiling)
        if cast == "up":
            ratio = (ratio * 1.0625).clamp(max=448.0)
        stored = ratio.to(torch.float8_e4m3fn)
        bytes_ = stored.view(torch.uint8)
        if cast == "plain":
            bytes_ = torch.where(ratio > 464, torch.full_like(bytes_, 0x7F), bytes_)
        scale.copy_(bytes_)
        divisor = (ratio if through else stored.float()) * scale_2
        quotient = (blocks / divisor[..., None]).nan_to_num(nan=0.0)
        size = quotient.abs()
        code = torch.bucketize(size, middles, right=ties != "down")
        if ties == "even":
            exact = torch.isin(size, middles)
            code = torch.where(exact & (code % 2 == 1), code - 1, code)
        if ties == "truncate":
            code = torch.bucketize(size, grid, right=True) - 1
        negative = (
            torch.signbit(blocks) if sign == "bit" else (quotient < 0) & (code > 0 if sign == "never zero" else True)
        )
        if sign == "none":
            negative = torch.zeros_like(negative)
        nibble = (code.clamp(0, 7) + 8 * negative.int()).to(torch.uint8)
        pairs = nibble.flatten(-2).unflatten(-1, (-1, 2))
        low, high = (pairs[..., 0], pairs[..., 1])[::order]
        codes.copy_(low | (high << 4))

    return replace(f"{N}:encode_rows", rows)


def _no_zero_rule(amax: Tensor) -> Tensor:
    return (amax.float() / 2688.0).abs()


def _nothing(*args: Any) -> None:
    return None


MUTANTS = (
    _m("quantiser-no-clamp", "FB12", "encode.scale.foreign", encoder(ceiling=1e9, cast="plain"), probe="codec"),
    _m("quantiser-ties-away", "FB05", CODES, encoder(ties="away"), probe="codec", fast=True),
    _m("quantiser-ties-down", "FB05", CODES, encoder(ties="down"), probe="codec"),
    _m("quantiser-truncates", "FB05", CODES, encoder(ties="truncate"), probe="codec"),
    _m("quantiser-zero-block-scale-zero", "FB03", SCALE, encoder(zero=0.0), probe="codec"),
    _m("quantiser-no-floor", "exports.md 3.2", SCALE, encoder(floor=0.0), probe="codec"),
    _m("quantiser-sign-of-negative-zero", "FB10", CODES, encoder(sign="bit"), probe="codec"),
    _m("quantiser-no-negative-zero", "FB10", CODES, encoder(sign="never zero"), probe="codec"),
    _m("quantiser-sign-lost", "exports.md 3.2", CODES, encoder(sign="none"), probe="codec"),
    _m("quantiser-scale-for-448-and-8", "exports.md 3.2", SCALE, encoder(divide=8.0), probe="codec"),
    _m("quantiser-scale-rounded-up", "exports.md 3.2", "encode.scale.normal", encoder(cast="up"), probe="codec"),
    _m(
        "quantiser-codes-by-unrounded-scale",
        "exports.md 3.2",
        "encode.codes.range",
        encoder(through=1.0),
        probe="codec",
    ),
    _m("quantiser-nibbles-swapped", "exports.md 3.1", CODES, encoder(order=-1), probe="codec"),
    _m(
        "quantiser-scale_2-inverted",
        "FB08",
        "encode.scale_2.zero-block",
        output(f"{N}:tensor_scale", lambda s: 1 / s),
        probe="codec",
    ),
    _m(
        "quantiser-scale_2-of-448",
        "exports.md 3.2",
        SCALE_2,
        output(f"{N}:tensor_scale", lambda s: s * 6),
        probe="codec",
    ),
    _m(
        "quantiser-scale_2-bf16",
        "exports.md 3.2",
        "encode.scale_2.zero-block",
        output(f"{N}:tensor_scale", lambda s: s.bfloat16().float()),
        probe="codec",
    ),
    _m(
        "quantiser-scale_2-of-zeros",
        "FB03",
        "encode.scale_2.zeros",
        replace(f"{N}:tensor_scale", _no_zero_rule),
        probe="codec",
    ),
    _m("quantiser-non-finite-taken", "FB55", "refuse.infinite", replace(f"{N}:check_finite", _nothing), probe="codec"),
)
