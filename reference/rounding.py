"""Rounding float64 values to the bf16 and float32 grids: nearest even, or up or down at random.

Source of the points where it happens: model.md section 4. Results stay float64.
"""

from __future__ import annotations

import numpy as np

from reference.elementary import in_blocks

_BF16 = (45, -133)  # float64 mantissa bits that go, exponent of the smallest subnormal
_F32 = (29, -149)
_LIMIT = 2.0**128


def _settle(y: np.ndarray) -> np.ndarray:
    """Past the largest finite value is infinity; NaN is one NaN."""
    if bool((np.abs(y) < _LIMIT).all()):
        return y
    y = np.where(np.abs(y) >= _LIMIT, np.where(y > 0, np.inf, -np.inf), y)
    return np.where(np.isnan(y), np.nan, y)


@in_blocks
def round_bf16(x: np.ndarray) -> np.ndarray:
    """x to the nearest bfloat16, ties to even, subnormals kept, overflow to infinity, sign of zero kept."""
    drop, bottom = _BF16
    bits = x.view(np.int64)
    # Adding just under half a unit, plus the last kept bit, carries exactly when nearest-even rounds up.
    kept = np.asarray(bits >> drop)
    kept &= 1
    kept += bits
    kept += (1 << (drop - 1)) - 1
    kept &= -1 << drop
    y = kept.view(np.float64)
    size = np.abs(x)
    small = size < 2.0 ** (bottom + 52 - drop)
    if small.any():
        anchor = np.where(np.signbit(x), -1.0, 1.0) * 2.0 ** (bottom + 52)
        # The smallest normal is where the grid stops refining: one addition rounds to its even neighbour there.
        y = np.where(small, np.copysign((x + anchor) - anchor, x), y)
    return y if (size < _LIMIT / 2).all() else _settle(np.where(np.isfinite(x), y, x))


@in_blocks
def round_f32(x: np.ndarray) -> np.ndarray:
    """x to the nearest float32, ties to even, subnormals kept, overflow to infinity, sign of zero kept."""
    with np.errstate(over="ignore", invalid="ignore"):
        y = x.astype(np.float32)
    wide = y.astype(np.float64)
    return wide if np.isfinite(y).all() else _settle(wide)


def _at_random(x: np.ndarray, grid: tuple[int, int], u: np.ndarray) -> np.ndarray:
    """Down where u >= the fraction of the gap that x has covered, up elsewhere; grid values stay as they are."""
    drop, bottom = grid
    x = np.asarray(x, np.float64)
    finite = np.isfinite(x)
    inside = np.where(finite, x, 0.0)
    e = ((inside.view(np.int64) >> 52) & 0x7FF) - 1023 - (52 - drop)
    e = np.where(e < bottom, bottom, e)
    scaled = inside * ((1023 - e) << 52).view(np.float64)
    down = np.floor(scaled)
    y = (down + (u < scaled - down)) * ((1023 + e) << 52).view(np.float64)
    return _settle(np.where(finite, np.copysign(y, x), x))


def random_bf16(x: np.ndarray, u: np.ndarray) -> np.ndarray:
    """x to one of its two bf16 neighbours, the nearer one more likely; u uniform in [0, 1)."""
    return _at_random(x, _BF16, u)


def random_f32(x: np.ndarray, u: np.ndarray) -> np.ndarray:
    """x to one of its two float32 neighbours, the nearer one more likely; u uniform in [0, 1)."""
    return _at_random(x, _F32, u)
