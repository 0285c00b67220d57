"""Faults of decoding NVFP4, seen by the codec's own answers or by the first packed weight of a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.record import Patch, around, family, replace

N = "fast.nvfp4"
PACKED = "layers.*.mlp.out"
CODEC = {"probe": "codec"}
_m = family("codec")


def _values(table: tuple[float, ...]) -> Any:
    """The byte table made from sixteen other values."""

    def pairs(device: Any, dtype: torch.dtype) -> Tensor:
        rows = [[table[byte & 15], table[byte >> 4]] for byte in range(256)]
        return torch.tensor(rows, dtype=dtype, device=device)

    return replace(f"{N}:_pairs", pairs)


M = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGNED = (*M, *(-m for m in M))


def _swapped(device: Any, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[SIGNED[b >> 4], SIGNED[b & 15]] for b in range(256)], dtype=dtype, device=device)


def _scaled(change: Any) -> Any:
    """`unscaled` with block scales that `change(bytes)` reads as floats."""

    def unscaled(original: Any, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        ones = torch.full_like(scale, 0x38)
        values = original(codes, ones, torch.float32).unflatten(-1, (-1, 16)) * change(scale)[..., None]
        return values.flatten(-2).to(dtype)

    return unscaled


def _everywhere(wrapper: Any) -> Patch:
    return around(f"{N}:unscaled", wrapper) + around("fast.linear:unscaled", wrapper)


def _normal_only(scale: Tensor) -> Tensor:
    """(1 + m / 8) 2^(e - 7) for every exponent, zero included."""
    byte = scale.int()
    value = (1 + (byte & 7) / 8) * torch.exp2((byte >> 3).float() - 7)
    return torch.where(byte == 0, torch.zeros_like(value), value)


def _e5m2(scale: Tensor) -> Tensor:
    return scale.view(torch.float8_e5m2).float()


def _fnuz(scale: Tensor) -> Tensor:
    return scale.view(torch.float8_e4m3fnuz).float()


def _flushed(scale: Tensor) -> Tensor:
    return torch.where(scale < 8, 0.0, scale.view(torch.float8_e4m3fn).float())


def _neighbour(scale: Tensor) -> Tensor:
    return scale.view(torch.float8_e4m3fn).float().roll(1, -1)


def _first_of_row(scale: Tensor) -> Tensor:
    return scale.view(torch.float8_e4m3fn).float()[..., :1].expand(scale.shape)


def _no_scale_2(original: Any, x: Tensor, weight: Any, out: Any = None) -> Tensor:
    """The tensor's multiplier divided by instead, as the other format wants it; rescaled to stay finite."""
    y = original(x, weight, out)
    return y if isinstance(weight, Tensor) else (y.float() / weight.scale_2.square()).clamp(-1e4, 1e4).to(y.dtype)


def _nothing(*args: Any) -> None:
    return None


def _finite(scale_2: Tensor) -> Tensor:
    """A multiplier that makes infinities of finite codes is taken."""
    return (scale_2 > 0) & torch.isfinite(scale_2)


def _clean(original: Any, scale: Tensor, name: str) -> None:
    """Only NaN bytes are refused, not negative ones."""
    original(scale & 0x7F, name)


MUTANTS = (
    _m("codec-subnormal-scales-as-normal", "FB01", "decode", _everywhere(_scaled(_normal_only)), fast=True, **CODEC),
    _m("codec-subnormal-scales-flushed", "FB01", "decode", _everywhere(_scaled(_flushed)), **CODEC),
    _m("codec-scale-e5m2", "exports.md 3.1", "decode", _everywhere(_scaled(_e5m2)), **CODEC),
    _m("codec-scale-fnuz", "exports.md 3.1", "decode", _everywhere(_scaled(_fnuz)), **CODEC),
    _m("codec-scale-of-neighbour", "exports.md 3.1", PACKED, _everywhere(_scaled(_neighbour))),
    _m("codec-scale-of-row", "exports.md 3.1", PACKED, _everywhere(_scaled(_first_of_row))),
    _m("codec-nibbles-swapped", "exports.md 3.1", "decode", replace(f"{N}:_pairs", _swapped), **CODEC),
    _m("codec-nibbles-swapped-in-a-run", "exports.md 3.1", PACKED, replace(f"{N}:_pairs", _swapped)),
    _m("codec-sign-dropped", "exports.md 3.1", "decode", _values((*M, *M)), **CODEC),
    _m("codec-negative-zero-is-zero", "FB10", "decode", _values((*M, 0.0, *(-m for m in M[1:]))), **CODEC),
    _m("codec-negative-zero-is-a-value", "FB10", "decode", _values((*M, -0.5, *(-m for m in M[1:]))), **CODEC),
    _m("codec-five-for-six", "exports.md 3.1", "decode", _values((*M[:7], 5.0, *(-m for m in M[:7]), -5.0)), **CODEC),
    _m("codec-eight-for-six", "exports.md 3.1", PACKED, _values((*M[:7], 8.0, *(-m for m in M[:7]), -8.0))),
    _m(
        "codec-integer-codes",
        "exports.md 3.1",
        PACKED,
        _values((*map(float, range(8)), *(-float(i) for i in range(8)))),
    ),
    _m("codec-scale_2-divides", "FB08", PACKED, around("fast.ops.mlp:linear", _no_scale_2)),
    _m("codec-nan-scale-taken", "FB55", "refuse.nan", replace(f"{N}:check_scale", _nothing), **CODEC),
    _m("codec-negative-scale-taken", "FB55", "refuse.negative", around(f"{N}:check_scale", _clean), **CODEC),
    _m("codec-bad-scale_2-taken", "FB55", "refuse.scale_2", replace(f"{N}:check_scale_2", _nothing), **CODEC),
    _m("codec-huge-scale_2-taken", "FB55", "refuse.scale_2", replace(f"{N}:is_multiplier", _finite), **CODEC),
)
