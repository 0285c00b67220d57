"""exp, log and what follows from them, built from operations that IEEE 754 defines to the last bit.

Float64 in and out, elementwise. NumPy's own exp and log differ between SIMD levels by design; these use only
+ - * / sqrt, comparisons, rint and integer operations, in the order written, so every machine gives the same bits.
A NaN result is always the one quiet NaN 0x7FF8000000000000, whatever the NaN that came in (x86 and Arm make
different ones). exp and log stay within 1 ulp of float64 and what is built on them within 2 or 3, hence within 0.51 ulp
once rounded to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from math import factorial

import numpy as np

_LN2_HI = float.fromhex("0x1.62e42feep-1")  # ln 2 to 32 bits, so that k * _LN2_HI is exact for |k| < 2^21
_LN2_LO = float.fromhex("0x1.a39ef35793c76p-33")  # ln 2 - _LN2_HI
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")  # 1 / ln 2
_EXP_TAIL = tuple(1.0 / factorial(n) for n in range(13, 1, -1))  # exp(r) = 1 + r + r^2 (1/2! + r/3! + ...)
_LOG_TAIL = tuple(2.0 / n for n in range(25, 1, -2))  # log((1+s)/(1-s)) = 2s + s (2/3 z + 2/5 z^2 + ...), z = s^2
_EXP_MAX = float.fromhex("0x1.62e42fefa39efp+9")  # the largest x with a finite exp(x)
_EXP_MIN = -745.2  # exp(x) rounds to zero below about -745.13
_EXP_MILD = 700.0  # up to this size of x, exp(x) is far from both ends of the range
_BLOCK = 1 << 13  # elements worked on at a time: what one block needs stays in a core's own cache


def in_blocks(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """An elementwise function of one array, applied to `_BLOCK` elements at a time; elements cannot tell."""

    @wraps(function)
    def blocked(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, np.float64)
        if x.size <= _BLOCK:
            return np.asarray(function(x))
        flat = x.reshape(-1)
        out = np.empty_like(flat)
        for start in range(0, len(flat), _BLOCK):
            out[start : start + _BLOCK] = function(flat[start : start + _BLOCK])
        return out.reshape(x.shape)

    return blocked


def _one_nan(x: np.ndarray) -> np.ndarray:
    nan = np.isnan(x)
    return np.where(nan, np.nan, x) if nan.any() else x


@in_blocks
def exp(x: np.ndarray) -> np.ndarray:
    """e^x. Overflow gives inf, underflow passes through the subnormals to 0; exp(-inf) = 0, exp(+-0) = 1."""
    mild = bool((np.abs(x) < _EXP_MILD).all())
    inside = x if mild else np.where(x > _EXP_MIN, np.where(x < _EXP_MAX, x, _EXP_MAX), _EXP_MIN)
    k = np.asarray(inside * _LOG2_E)
    np.rint(k, out=k)
    high = inside - k * _LN2_HI
    low = np.asarray(k * _LN2_LO)
    r = high - low
    tail = np.full_like(r, _EXP_TAIL[0])
    for c in _EXP_TAIL[1:]:
        tail *= r
        tail += c
    tail *= r * r
    low -= tail
    y = high - low
    y += 1.0
    n = k.astype(np.int64)
    if mild:
        return y * _power(n)
    half = n >> 1
    with np.errstate(under="ignore"):
        y = y * _power(half) * _power(n - half)
    y = np.where(x > _EXP_MAX, np.inf, y)
    return np.where(np.isnan(x), np.nan, np.where(x < _EXP_MIN, 0.0, y))


def _power(k: np.ndarray) -> np.ndarray:
    return ((k + 1023) << 52).view(np.float64)


def log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm. log(+-0) = -inf, log(inf) = inf, log of a negative number is NaN."""
    x = np.asarray(x, np.float64)
    small = (x > 0) & (x < 2.0**-1022)
    bits = np.asarray(np.where(small, np.where(small, x, 0.0) * 2.0**54, x)).view(np.int64)
    # Moving the exponent boundary to sqrt(1/2) keeps the reduced argument in [sqrt(1/2), sqrt(2)).
    offset = bits - 0x3FE6A09E667F3BCD
    k = offset >> 52
    f = (bits - (k << 52)).view(np.float64) - 1.0
    power = k.astype(np.float64) - np.where(small, 54.0, 0.0)
    s = f / (2.0 + f)
    z = s * s
    tail = np.full_like(z, _LOG_TAIL[0])
    for c in _LOG_TAIL[1:]:
        tail = tail * z + c
    half_square = 0.5 * f * f
    y = power * _LN2_HI - ((half_square - (s * (half_square + z * tail) + power * _LN2_LO)) - f)
    y = np.where(x == np.inf, np.inf, np.where(x == 0, -np.inf, y))
    return np.where((x < 0) | np.isnan(x), np.nan, y)


@in_blocks
def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x), through e^-|x| so that neither side overflows or cancels."""
    e = exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


@in_blocks
def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x), the product rounded once; silu(-inf) = -0."""
    if np.isfinite(x).all():
        return x * sigmoid(x)
    return np.where(x == -np.inf, -0.0, _one_nan(np.where(x == -np.inf, 0.0, x) * sigmoid(x)))


def rsqrt(x: np.ndarray) -> np.ndarray:
    """1 / sqrt(x), both operations correctly rounded. rsqrt(+-0) = +-inf, rsqrt(inf) = 0, negative gives NaN."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _one_nan(1.0 / np.sqrt(np.asarray(x, np.float64)))


def total(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """Sum along an axis in one fixed order: neighbours are added pairwise, level by level, zeros filling up.

    Appending zeros changes no bit of the result. A zero sum is +0.0; an empty axis gives zeros.
    """
    x = np.asarray(x, np.float64)
    axis = range(x.ndim)[axis]
    if axis:
        x = x.transpose(axis, *range(axis), *range(axis + 1, x.ndim))
    count = len(x)
    if count == 0:
        return np.zeros(x.shape[1:])
    with np.errstate(invalid="ignore", over="ignore"):
        while count > 2:
            if count % 2:
                even = x[0::2].copy()
                even[:-1] += x[1::2]
                x = even
            else:
                x = x[0::2] + x[1::2]
            count = len(x)
        return _one_nan((x[0] + x[1] if count == 2 else x[0]) + 0.0)


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """exp(x - max) / total(exp(x - max)) along an axis. A slice of nothing but -inf gives zeros, never NaN."""
    x = np.asarray(x, np.float64)
    top = x.max(axis=axis, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        e = exp(np.where(x == -np.inf, -np.inf, x - np.where(top == -np.inf, 0.0, top)))
    mass = np.expand_dims(total(e, axis), axis)
    return _one_nan(e / np.where(mass == 0, 1.0, mass))
