"""NVFP4 as ModelOpt stores it: four-bit codes, an E4M3 scale per 16 columns, one float32 scale per tensor.

Source: exports.md 3.1 and 3.2 (dynamic path), model.md section 4. All arithmetic is float32, one rounding an operation.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

from reference.errors import (
    BlockScaleError,
    NonFiniteWeightError,
    TensorDtypeError,
    TensorScaleError,
    TensorShapeError,
)

BLOCK = 16  # columns that share a block scale
_CHUNK = 1 << 22  # elements worked on at a time
_SMALLEST = np.float32(2.0**-9)  # least positive E4M3 value; a block that is not zero never stores less

# The value of each four-bit code: sign in bit 3, magnitude in bits 0 to 2.
E2M1 = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0],
    np.float32,
)

# The value of each block scale byte 0x00 to 0x7E, eight to an exponent field; the first row is subnormal (n * 2^-9).
E4M3 = np.array(
    [
        [0.0, 0.001953125, 0.00390625, 0.005859375, 0.0078125, 0.009765625, 0.01171875, 0.013671875],
        [0.015625, 0.017578125, 0.01953125, 0.021484375, 0.0234375, 0.025390625, 0.02734375, 0.029296875],
        [0.03125, 0.03515625, 0.0390625, 0.04296875, 0.046875, 0.05078125, 0.0546875, 0.05859375],
        [0.0625, 0.0703125, 0.078125, 0.0859375, 0.09375, 0.1015625, 0.109375, 0.1171875],
        [0.125, 0.140625, 0.15625, 0.171875, 0.1875, 0.203125, 0.21875, 0.234375],
        [0.25, 0.28125, 0.3125, 0.34375, 0.375, 0.40625, 0.4375, 0.46875],
        [0.5, 0.5625, 0.625, 0.6875, 0.75, 0.8125, 0.875, 0.9375],
        [1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875],
        [2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75],
        [4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5],
        [8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0],
        [16.0, 18.0, 20.0, 22.0, 24.0, 26.0, 28.0, 30.0],
        [32.0, 36.0, 40.0, 44.0, 48.0, 52.0, 56.0, 60.0],
        [64.0, 72.0, 80.0, 88.0, 96.0, 104.0, 112.0, 120.0],
        [128.0, 144.0, 160.0, 176.0, 192.0, 208.0, 224.0, 240.0],
        [256.0, 288.0, 320.0, 352.0, 384.0, 416.0, 448.0, np.nan],
    ],
    np.float32,
).ravel()


class Nvfp4(NamedTuple):
    """packed u8 [rows, cols/2] (column 2j in the low nibble of byte j), scale u8 [rows, cols/16], scale_2 f32."""

    packed: np.ndarray
    scale: np.ndarray
    scale_2: np.float32


def encode(w: np.ndarray, *, amax: float | None = None, name: str = "weight") -> Nvfp4:
    """Quantise w [rows, cols], float32 or bf16 (exact in float32), by ModelOpt's dynamic path.

    scale_2 = amax / 2688; block scale = E4M3(clamp(amax16 / (6 scale_2), 2^-9, 448)), a quotient of zero counting as
    1; code = E2M1(w / (block scale * scale_2)). Both grids round to nearest, ties to the even code, and saturate; the
    sign bit is set only where the quotient is below zero, so -0.0 gives code 0.
    `amax` stands in for the tensor's own largest magnitude where fused siblings share one (exports.md 3.3).
    Where amax / 2688 is zero in float32, as for a tensor of zeros, scale_2 is 1.

    encode(decode(e)) gives e back when every block that is not zero holds a code of +-6, but for code 8, which comes
    back as 0 (same value, no sign left to see). Blocks scaled by 0x03 or more always hold one; a block that had to
    store 0x01 or 0x02 may not, and can come back with a smaller scale and larger codes.

    Raises TensorDtypeError, TensorShapeError (cols not a multiple of 16) and NonFiniteWeightError, which names the
    tensor and the position of the first NaN or infinity; TensorScaleError where `usable_scale` refuses scale_2.
    """
    w = np.asarray(w)
    if w.dtype not in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        raise TensorDtypeError(f"{name}: cannot encode {w.dtype}, expected float32 or bfloat16")
    if w.ndim != 2 or w.shape[1] % BLOCK:
        raise TensorShapeError(f"{name}: cannot encode shape {list(w.shape)}, expected [rows, a multiple of {BLOCK}]")
    rows, cols = w.shape
    step = max(1, _CHUNK // max(1, cols))
    own = np.float32(0.0)
    for start in range(0, rows, step):
        part = np.abs(w[start : start + step].astype(np.float32))
        bad = ~np.isfinite(part)
        if bad.any():
            i, j = (int(n) for n in np.argwhere(bad)[0])
            raise NonFiniteWeightError(
                f"{name}: {float(w[start + i, j])} at row {start + i}, column {j}: only finite values can be encoded"
            )
        own = max(own, part.max(initial=np.float32(0.0)))
    scale_2 = np.float32(own if amax is None else amax) / np.float32(2688.0)
    if scale_2 == 0:
        scale_2 = np.float32(1.0)
    if not usable_scale(scale_2):
        raise TensorScaleError(f"{name}: {unusable_scale(scale_2)}")
    packed = np.empty((rows, cols // 2), np.uint8)
    scale = np.empty((rows, cols // BLOCK), np.uint8)
    for start in range(0, rows, step):
        part = w[start : start + step].astype(np.float32).reshape(-1, cols // BLOCK, BLOCK)
        scale[start : start + step], codes = _encode_blocks(part, scale_2)
        codes = codes.reshape(len(part), cols)
        packed[start : start + step] = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return Nvfp4(packed, scale, scale_2)


def usable_scale(scale_2: np.floating) -> bool:
    """Whether scale_2 can multiply: finite, without a sign, and 6 x 448 x scale_2 rounds to a finite BF16 number.

    That product is the largest value the format can hold, whatever codes and block scales a tensor, or one rank's part
    of it, has. Zero and the subnormal numbers are usable; what zero may stand above is `decode`'s matter.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        largest = (np.float32(2688.0) * np.float32(scale_2)).astype(ml_dtypes.bfloat16)
    return bool(np.isfinite(largest)) and not np.signbit(scale_2)


def unusable_scale(scale_2: np.floating) -> str:
    """What is wrong with a scale_2 that `usable_scale` refuses."""
    return f"weight_scale_2 is {float(scale_2):g}, expected no sign and 6 x 448 x weight_scale_2 finite in BF16"


def _encode_blocks(w: np.ndarray, scale_2: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Blocks w [.., 16] -> scale bytes [..], codes [.., 16]."""
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        ratio = np.abs(w).max(axis=-1) / (np.float32(6.0) * scale_2)
        ratio = np.where(ratio == 0, np.float32(1.0), ratio)
        scale = _nearest(np.where(ratio < _SMALLEST, _SMALLEST, ratio), E4M3[:-1])
        quotient = w / (E4M3[scale] * scale_2)[..., None]
    codes = _nearest(np.abs(quotient), E2M1[:8])
    # 0 / 0 can only come from a scale product under the float32 range; the value is zero.
    codes[np.isnan(quotient)] = 0
    return scale, codes | ((quotient < 0).astype(np.uint8) << 3)


def _nearest(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Index of the grid value nearest to x >= 0, ties to the even index, the last index for everything above."""
    middle = (grid[:-1] + grid[1:]) / np.float32(2.0)
    index = np.searchsorted(middle, x, side="left")
    tie = x == np.append(middle, np.float32(np.inf))[index]
    tie &= index < len(middle)
    return (index + (tie & (index % 2 == 1))).astype(np.uint8)


def decode(
    packed: np.ndarray, scale: np.ndarray, scale_2: np.ndarray | np.floating | float, *, name: str = "weight"
) -> np.ndarray:
    """packed u8 [rows, cols/2], scale u8 [rows, cols/16], scale_2 of one element -> float32 [rows, cols].

    value = (E2M1(code) * E4M3(scale)) * scale_2: the first product is exact, the second rounds once. Code 8 is -0.0.
    Every positive scale byte is taken, 0x00 and the subnormals included, as other encoders write them.

    Raises TensorDtypeError, TensorShapeError, BlockScaleError for a byte that is NaN or has its sign bit set, with its
    position, and TensorScaleError for a scale_2 that `usable_scale` refuses, or that is zero where a code is not.
    """
    packed, scale = np.asarray(packed), np.asarray(scale)
    for what, array in (("codes", packed), ("block scales", scale)):
        if array.dtype != np.uint8:
            raise TensorDtypeError(f"{name}: {what} are {array.dtype}, expected uint8")
    if packed.ndim != 2 or packed.shape[1] % (BLOCK // 2):
        raise TensorShapeError(f"{name}: codes of shape {list(packed.shape)}, expected [rows, a multiple of 8]")
    rows, blocks = packed.shape[0], packed.shape[1] // (BLOCK // 2)
    if scale.shape != (rows, blocks):
        raise TensorShapeError(f"{name}: block scales of shape {list(scale.shape)}, expected {[rows, blocks]}")
    if np.size(scale_2) != 1:
        raise TensorShapeError(f"{name}: scale_2 of shape {list(np.shape(scale_2))}, expected one element")
    factor = np.float32(np.reshape(scale_2, ()))
    bad = scale >= 0x7F
    if bad.any():
        i, j = (int(n) for n in np.argwhere(bad)[0])
        kind = "NaN" if scale[i, j] & 0x7F == 0x7F else "negative"
        raise BlockScaleError(f"{name}: block scale 0x{scale[i, j]:02X} at row {i}, block {j} is {kind}")
    if not usable_scale(factor):
        raise TensorScaleError(f"{name}: {unusable_scale(factor)}")
    if factor == 0 and (packed & 0x77).any():
        raise TensorScaleError(f"{name}: weight_scale_2 is 0, but the codes are not all zero")
    out = np.empty((rows, blocks, BLOCK), np.float32)
    step = max(1, _CHUNK // max(1, blocks * BLOCK))
    for start in range(0, rows, step):
        part = packed[start : start + step].reshape(-1, blocks, BLOCK // 2)
        here = out[start : start + step]
        here[..., 0::2] = E2M1[part & 0xF]
        here[..., 1::2] = E2M1[part >> 4]
        with np.errstate(over="ignore", under="ignore"):
            here *= E4M3[scale[start : start + step]][..., None]
            here *= factor
    return out.reshape(rows, blocks * BLOCK)
