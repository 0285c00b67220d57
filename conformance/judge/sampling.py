"""The reference's `stochastic` arithmetic, drawn fast: the same points, neighbours and probabilities.

The oracle's own version is bit-reproducible on every machine and pays for it. A sample only has to have the right
distribution, so here the draws come from NumPy's generator, products from BLAS in float64, and a random rounding is an
integer addition: the bits that go are added to random bits, and what carries goes up.
"""

from __future__ import annotations

import numpy as np

from reference.arithmetic import Arithmetic, Sliced, total


class Sampler(Arithmetic):
    """Copies of an input along a leading axis become independent samples. Equal seeds and calls give equal samples."""

    name = "stochastic"

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.SFC64(seed))

    def store(self, x: np.ndarray, point: str) -> np.ndarray:
        """To one of the two bf16 neighbours of x, which is first rounded to float32 (2^-16 of the step at most)."""
        with np.errstate(over="ignore"):
            bits = np.asarray(x, np.float64).astype(np.float32).view(np.uint32)
        draw = self._random.integers(0, 1 << 16, size=bits.shape, dtype=np.uint16)
        return ((bits + draw) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)

    def single(self, x: np.ndarray, point: str) -> np.ndarray:
        """To one of the two float32 neighbours of x; a subnormal result keeps more bits than float32 has."""
        bits = np.ascontiguousarray(x, np.float64).view(np.uint64)
        draw = self._random.integers(0, 1 << 29, size=bits.shape, dtype=np.uint32)
        return ((bits + draw) & np.uint64((-1 << 29) & (1 << 64) - 1)).view(np.float64).reshape(np.shape(x))

    def maybe(self, x: np.ndarray, point: str) -> np.ndarray:
        return self.store(x, point)

    def dot(self, a: np.ndarray, b: np.ndarray | Sliced, point: str, out: str = "bf16") -> np.ndarray:
        """Noise as in the oracle: uniform in +-2^-24 |a row| |b column|, before the rounding to `out`."""
        a = np.asarray(a, np.float64)
        if isinstance(b, Sliced):
            right, norms = np.asarray(b.values, np.float64), b.norms
        else:
            right = np.asarray(b, np.float64)
            norms = np.sqrt(total(right * right, axis=-2))
        flat = right.ndim == 2 and a.ndim > 2
        y = (a.reshape(-1, a.shape[-1]) @ right).reshape(*a.shape[:-1], -1) if flat else a @ right
        rows = np.sqrt(np.einsum("...i,...i->...", a, a))[..., None]
        noise = self._random.random(y.shape, dtype=np.float32)
        noise -= np.float32(0.5)
        y += noise * (rows * norms[..., None, :] * 2.0**-23)
        if out == "none":
            return y
        return self.store(y, point) if out == "bf16" else self.single(y, point)
