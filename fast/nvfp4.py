"""NVFP4 on torch tensors: encode by ModelOpt's dynamic path, decode, and the two scans that refuse lying scales.

A packed linear [rows, cols] is codes u8 [rows, cols/2] (column 2j in the low nibble of byte j), block scales as E4M3
bytes u8 [rows, cols/16], row-major, and one fp32 multiplier. Its value is (code x float(block scale)) x scale_2, left
to right in fp32. code x block scale has at most six significant bits, so it is exact in bf16 too.

Encoding, every step in fp32 and rounded to nearest even:

    scale_2 = amax / 2688                              1.0 when that is zero
    block   = amax16 / (6 * scale_2)                   0 becomes 1.0; clamped to [2^-9, 448]; cast to E4M3
    code    = x / (float(block) * scale_2)             nearest of 0 .5 1 1.5 2 3 4 6, ties to the even code
    sign    = x < 0          above 6 stores 6;         so -0.0 and +0.0 both store 0x0, a small negative value 0x8
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fast.errors import NonFiniteWeightError, ScaleNaNError, ScaleNegativeError, TensorScaleError, WrongShapeError

BLOCK = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_NAN = 0x7F
ENCODE_ELEMENTS = 1 << 16
"""Values encoded at a time."""

ENCODE_BYTES = 14
"""Bytes of temporaries per value while encoding: magnitudes and two partial codes in fp32, signs, scales."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One packed linear: codes u8 [rows, cols/2], scale u8 [rows, cols/16] (E4M3 bytes), scale_2 f32 []."""

    codes: Tensor
    scale: Tensor
    scale_2: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Logical [rows, cols]."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.scale_2.nbytes


def unscaled(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """codes u8 [.., rows, cols/2], scale u8 [.., rows, cols/16] -> code x block scale [.., rows, cols]; exact in bf16
    and fp32. Every scale byte is taken as it is: refusing NaN and negative ones is `check_scale`'s work at load."""
    *lead, half = codes.shape
    if scale.shape != (*lead, half // 8) or half % 8:
        raise WrongShapeError(f"codes {list(codes.shape)} and scales {list(scale.shape)} are not of one weight")
    values = F.embedding(codes.int(), _pairs(codes.device, dtype)).view(*lead, half // 8, BLOCK)
    return (values * scale.view(torch.float8_e4m3fn).to(dtype)[..., None]).view(*lead, 2 * half)


def decode(packed: Packed, name: str = "weight") -> Tensor:
    """The fp32 values [rows, cols]. Raises as `check_scale` and `check_scale_2` do."""
    check_scale(packed.scale, name)
    check_scale_2(packed.scale_2, packed.codes, name)
    return unscaled(packed.codes, packed.scale, torch.float32) * packed.scale_2


def encode(w: Tensor, name: str = "weight") -> Packed:
    """w [rows, cols], any float dtype -> Packed. Raises WrongShapeError, NonFiniteWeightError (with the position) and
    TensorScaleError where the largest magnitude has no finite BF16 neighbour."""
    if w.dim() != 2 or w.shape[1] % BLOCK or not w.numel():
        raise WrongShapeError(f"{name}: shape {list(w.shape)}, expected two dimensions, the last a multiple of {BLOCK}")
    rows, cols = w.shape
    check_finite(w, name)
    scale_2 = tensor_scale(amax(w))
    check_scale_2(scale_2, w.new_zeros(0, dtype=torch.uint8), name)
    codes = torch.empty(rows, cols // 2, dtype=torch.uint8, device=w.device)
    scale = torch.empty(rows, cols // BLOCK, dtype=torch.uint8, device=w.device)
    encode_all(w, scale_2, codes, scale)
    return Packed(codes, scale, scale_2)


def encode_all(w: Tensor, scale_2: Tensor, codes: Tensor, scale: Tensor) -> None:
    """w [rows, cols] finite, possibly a slice; fills codes and scale, `ENCODE_ELEMENTS` values at a time."""
    rows, cols = w.shape
    step = encode_rows_at_a_time(cols)
    for row in range(0, rows, step):
        encode_rows(w[row : row + step], scale_2, codes[row : row + step], scale[row : row + step])


def amax(w: Tensor) -> Tensor:
    """Largest magnitude of w, without a copy of it."""
    low, high = torch.aminmax(w)
    return torch.maximum(-low, high)


def tensor_scale(amax: Tensor) -> Tensor:
    """amax [] of the *whole* tensor -> weight_scale_2 f32 []."""
    scale_2 = amax.float() / amax.new_full((), 2688.0, dtype=torch.float32)
    return torch.where(scale_2 == 0, torch.ones_like(scale_2), scale_2)


def encode_rows_at_a_time(cols: int) -> int:
    return max(1, ENCODE_ELEMENTS // cols)


def encode_workspace(rows: int, cols: int) -> int:
    """Bytes of temporaries that `encode_rows` may hold while a [rows, cols] tensor is encoded in its steps."""
    return ENCODE_BYTES * cols * min(rows, encode_rows_at_a_time(cols))


def encode_rows(x: Tensor, scale_2: Tensor, codes: Tensor, scale: Tensor) -> None:
    """x [r, cols] finite, scale_2 f32 [] of the whole tensor; fills codes u8 [r, cols/2] and scale u8 [r, cols/16]."""
    rows, cols = x.shape
    blocks = x.float().reshape(rows, cols // BLOCK, BLOCK)
    magnitude = blocks.abs()
    ratio = magnitude.amax(-1) / (6.0 * scale_2)
    ratio = torch.where(ratio == 0, torch.ones_like(ratio), ratio).clamp_(2.0**-9, 448.0)
    stored = ratio.to(torch.float8_e4m3fn)
    scale.copy_(stored.view(torch.uint8))
    divisor = stored.float() * scale_2
    magnitude /= divisor[..., None]
    if not bool(divisor.all()):
        magnitude.nan_to_num_(nan=0.0)
    # The sign is that of the quotient: one too small for fp32 stores 0x0, whatever the sign of x.
    negative = ((blocks < 0) & (magnitude > 0)).to(torch.uint8)
    del blocks
    # The grid has step 1/2 up to 2, step 1 up to 4 and step 2 up to 6: rounding half to even within each step, then
    # counting the steps passed, is rounding to the nearest code with ties to the even one.
    code = (magnitude * 2.0).round_().clamp_(max=4.0)
    code += magnitude.round().clamp_(2.0, 4.0)
    code += magnitude.mul_(0.5).round_().clamp_(2.0, 3.0)
    nibble = code.sub_(4.0).to(torch.uint8)
    nibble += negative << 3
    pairs = nibble.view(rows, cols // 2, 2)
    torch.add(pairs[..., 0], pairs[..., 1], alpha=16, out=codes)


def check_finite(w: Tensor, name: str) -> None:
    """Raises NonFiniteWeightError that names the first NaN or infinity."""
    bad = ~torch.isfinite(w)
    if bool(bad.any()):
        index = torch.nonzero(bad)[0].tolist()
        raise NonFiniteWeightError(f"{name}: {w[tuple(index)].item()} at {index}, expected a finite value")


def check_scale(scale: Tensor, name: str) -> None:
    """Raises ScaleNaNError or ScaleNegativeError that names the first E4M3 byte outside 0x00 .. 0x7E."""
    if not scale.numel() or int(scale.max()) < E4M3_NAN:
        return
    index = torch.nonzero(scale >= E4M3_NAN)[0].tolist()
    byte = int(scale[tuple(index)])
    kind = ScaleNaNError if byte & E4M3_NAN == E4M3_NAN else ScaleNegativeError
    raise kind(f"{name}: block scale byte {byte:#04x} at {index}, expected 0x00 .. 0x7e")


def is_multiplier(scale_2: Tensor) -> Tensor:
    """Elementwise, f32: above zero, and the largest value it can make, 6 x 448 x scale_2, rounds to a finite BF16
    number. The codes at hand do not matter, so every rank answers alike for its part."""
    return (scale_2 > 0) & torch.isfinite((scale_2 * 2688.0).to(torch.bfloat16))


def check_scale_2(scale_2: Tensor, codes: Tensor, name: str) -> None:
    """Raises TensorScaleError unless scale_2 `is_multiplier`, or is +0 above codes that are all zero."""
    if bool(is_multiplier(scale_2)):
        return
    value = float(scale_2)
    if value != 0.0 or math.copysign(1.0, value) < 0:
        rule = "no sign and 6 x 448 x weight_scale_2 finite in BF16"
        raise TensorScaleError(f"{name}: weight_scale_2 is {value:g}, expected {rule}")
    if bool((codes & 0x77).any()):
        raise TensorScaleError(f"{name}: weight_scale_2 is 0, but the codes are not all zero")


_PAIRS: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[256, 2]: the values of the low and the high nibble of every byte."""
    key = (device, dtype)
    if key not in _PAIRS:
        signed = (*MAGNITUDES, *(-m for m in MAGNITUDES))
        table = [[signed[byte & 15], signed[byte >> 4]] for byte in range(256)]
        _PAIRS[key] = torch.tensor(table, dtype=dtype, device=device)
    return _PAIRS[key]
