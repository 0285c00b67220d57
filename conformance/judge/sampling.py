"""The reference's `stochastic` arithmetic, drawn fast: the same points, neighbours and probabilities.

The oracle's own version is bit-reproducible on every machine and pays for it. A sample only has to have the right
distribution, so here the draws come from NumPy's generator, products from BLAS in float64, and a random rounding is an
integer addition: the bits that go are added to random bits, and what carries goes up.
"""

from __future__ import annotations

import numpy as np

from reference.arithmetic import Arithmetic, Sliced, total

_BLOCK = 1 << 13
"""Elements rounded at a time: what one block needs stays in a core's own cache. Even, so that draws are those of one
call."""


class Sampler(Arithmetic):
    """Copies of an input along a leading axis become independent samples. Equal seeds and calls give equal samples."""

    name = "stochastic"

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.SFC64(seed))

    def store(self, x: np.ndarray, point: str) -> np.ndarray:
        """To one of the two bf16 neighbours of x, which is first rounded to float32 (2^-16 of the step at most)."""
        out = np.array(x, np.float64, order="C")
        flat = out.reshape(-1)
        with np.errstate(over="ignore"):
            for start in range(0, len(flat), _BLOCK):
                bits = flat[start : start + _BLOCK].astype(np.float32).view(np.uint32)
                bits += self._random.integers(0, 1 << 16, size=len(bits), dtype=np.uint16)
                bits &= np.uint32(0xFFFF0000)
                flat[start : start + _BLOCK] = bits.view(np.float32)
        return out

    def single(self, x: np.ndarray, point: str) -> np.ndarray:
        """To one of the two float32 neighbours of x; a subnormal result keeps more bits than float32 has."""
        out = np.array(x, np.float64, order="C")
        flat = out.reshape(-1).view(np.uint64)
        for start in range(0, len(flat), _BLOCK):
            bits = flat[start : start + _BLOCK]
            draw = self._random.integers(0, 1 << 32, size=len(bits), dtype=np.uint32)
            draw >>= 3
            bits += draw
            bits &= np.uint64((-1 << 29) & (1 << 64) - 1)
        return out

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
        y = (a.reshape(-1, a.shape[-1]) @ right).reshape(*a.shape[:-1], right.shape[-1]) if flat else a @ right
        rows = np.sqrt(np.einsum("...i,...i->...", a, a))[..., None]
        noise = self._random.random(y.shape, dtype=np.float32)
        noise -= np.float32(0.5)
        reach = rows * (norms[..., None, :] * 2.0**-23)
        reach *= noise
        y += reach
        if out == "none":
            return y
        return self.store(y, point) if out == "bf16" else self.single(y, point)
