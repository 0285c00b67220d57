"""The reference's arithmetic: portable operations and the three ways of rounding between them.

Everything the ops compute with goes through here; design.md (decision 1) says why, model.md section 4 says which
points round. Elementary functions and fixed-order sums are in `elementary`, the exact product in `exact`.
"""

from __future__ import annotations

import numpy as np

from reference.elementary import exp, log, rsqrt, sigmoid, silu, softmax, total
from reference.exact import Sliced, product
from reference.rounding import random_bf16, random_f32, round_bf16, round_f32

__all__ = [
    "Arithmetic", "Sliced", "exp", "get_arithmetic", "log", "matmul", "round_bf16", "round_f32", "rsqrt", "sigmoid",
    "silu", "softmax", "total",
]  # fmt: skip


def matmul(a: np.ndarray, b: np.ndarray | Sliced) -> np.ndarray:
    """a [..,M,K] @ b [..,K,N], each element the exact dot product rounded once to float64 (see `exact.product`)."""
    return product(a, b)


class Arithmetic:
    """Exact: float64 everywhere, no rounding point does anything. The truth that errors are measured against."""

    name = "exact"

    def store(self, x: np.ndarray, point: str) -> np.ndarray:
        """A bf16 storage point. `point` names the place; float64 in and out, any shape."""
        return np.asarray(x, np.float64)

    def single(self, x: np.ndarray, point: str) -> np.ndarray:
        """An fp32 point."""
        return np.asarray(x, np.float64)

    def maybe(self, x: np.ndarray, point: str) -> np.ndarray:
        """A point where only some correct bf16 engines round."""
        return np.asarray(x, np.float64)

    def linear(self, x: np.ndarray, w: Sliced, point: str, out: str = "bf16") -> np.ndarray:
        """x [..,T,K] times w = W^T [K,N], accumulated exactly, then one rounding to `out`: bf16, fp32 or none."""
        return self.dot(x, w, point, out)

    def dot(self, a: np.ndarray, b: np.ndarray | Sliced, point: str, out: str = "bf16") -> np.ndarray:
        """a [..,M,K] @ b [..,K,N] of two activations, accumulated exactly, then one rounding to `out`."""
        _check_out(out)
        return product(a, b)


class Bf16(Arithmetic):
    """The storage contract of a bf16 engine: nearest-even rounding at every bf16 and fp32 point."""

    name = "bf16"

    def store(self, x: np.ndarray, point: str) -> np.ndarray:
        return round_bf16(x)

    def single(self, x: np.ndarray, point: str) -> np.ndarray:
        return round_f32(x)

    def dot(self, a: np.ndarray, b: np.ndarray | Sliced, point: str, out: str = "bf16") -> np.ndarray:
        _check_out(out)
        if out == "none":
            return product(a, b)
        # Odd first: two nearest roundings in a row could fall on the wrong side of a tie.
        y = product(a, b, odd=True)
        return round_bf16(y) if out == "bf16" else round_f32(y)


class Stochastic(Arithmetic):
    """Every rounding goes up or down at random, and products carry the noise of an fp32 accumulator.

    Draws are hashes of (seed, point, how many times this object met that point, flat index): two runs of the same
    calls agree, and copies of an input along a leading axis are independent samples.
    """

    name = "stochastic"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._met: dict[str, int] = {}

    def _draw(self, shape: tuple[int, ...], point: str) -> np.ndarray:
        met = self._met.get(point, 0)
        self._met[point] = met + 1
        key = np.uint64(_key(self.seed, point, met))
        size = 1
        for n in shape:
            size *= n
        z = np.arange(1, size + 1, dtype=np.uint64)
        z *= np.uint64(0x9E3779B97F4A7C15)
        z += key
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z ^= z >> np.uint64(shift)
            z *= np.uint64(factor)
        z ^= z >> np.uint64(31)
        return ((z >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(shape)

    def store(self, x: np.ndarray, point: str) -> np.ndarray:
        return random_bf16(x, self._draw(np.shape(x), point))

    def single(self, x: np.ndarray, point: str) -> np.ndarray:
        return random_f32(x, self._draw(np.shape(x), point))

    def maybe(self, x: np.ndarray, point: str) -> np.ndarray:
        return self.store(x, point)

    def dot(self, a: np.ndarray, b: np.ndarray | Sliced, point: str, out: str = "bf16") -> np.ndarray:
        """As the class says; the noise is uniform in +-2^-24 |a row| |b column|, added before the rounding."""
        _check_out(out)
        a = np.asarray(a, np.float64)
        right = b if isinstance(b, Sliced) else Sliced(b)
        y = product(a, right)
        rows = np.sqrt(total(a * a))[..., :, None]
        u = self._draw(y.shape, point + "/sum")
        noise = (2.0 * u - 1.0) * 2.0**-24 * (rows * right.norms[..., None, :])
        y = y + np.where(np.isfinite(y), noise, 0.0)
        if out == "none":
            return y
        return self.store(y, point) if out == "bf16" else self.single(y, point)


def _check_out(out: str) -> None:
    if out not in ("bf16", "fp32", "none"):
        raise ValueError(f"rounding of a product must be bf16, fp32 or none, not {out!r}")


_WORD = (1 << 64) - 1


def _key(seed: int, point: str, met: int) -> int:
    """64 bits from the parts of a draw's name: FNV-1a over the point, then a splitmix64 finaliser per part."""
    h = 0xCBF29CE484222325
    for byte in point.encode():
        h = ((h ^ byte) * 0x100000001B3) & _WORD
    for part in (seed & _WORD, met):
        h = (h + part + 0x9E3779B97F4A7C15) & _WORD
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _WORD
        h ^= h >> 31
    return h


def get_arithmetic(name: str, seed: int = 0) -> Arithmetic:
    """The arithmetic called `name`: exact, bf16 or stochastic (which uses the seed)."""
    if name == "exact":
        return Arithmetic()
    if name == "bf16":
        return Bf16()
    if name == "stochastic":
        return Stochastic(seed)
    raise ValueError(f"unknown arithmetic {name!r}: expected exact, bf16 or stochastic")
