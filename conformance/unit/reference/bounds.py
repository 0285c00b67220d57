"""Rounding-error bounds of float64 (Higham, chapter 3) and the check against them."""

from __future__ import annotations

from typing import Any

import numpy as np

from reference.arithmetic import Arithmetic, Sliced

U = 2.0**-53
"""Unit roundoff of float64."""


def gamma(n: int) -> float:
    """Bound on the relative error of n successive roundings: n u / (1 - n u)."""
    return n * U / (1 - n * U)


def check(actual: Any, expected: Any, bound: Any) -> None:
    """Every element within its bound; the message names the worst one."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    error = np.abs(actual - expected)
    bound = np.broadcast_to(bound, error.shape)
    if not (error <= bound).all():
        over = np.where(error <= bound, 0.0, error / np.maximum(bound, np.finfo(np.float64).tiny))
        at = tuple(int(i) for i in np.unravel_index(np.nan_to_num(over, nan=np.inf).argmax(), error.shape))
        raise AssertionError(
            f"at {at}: expected {float(expected[at]).hex()}, actual {float(actual[at]).hex()}, "
            f"error {float(error[at]):.3e}, bound {float(bound[at]):.3e}"
        )


class Recorder(Arithmetic):
    """An arithmetic that rounds nothing and remembers what was done at every point, in order."""

    name = "recorder"

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def store(self, x: np.ndarray, point: str) -> np.ndarray:
        self.seen.append(("store", point))
        return super().store(x, point)

    def single(self, x: np.ndarray, point: str) -> np.ndarray:
        self.seen.append(("single", point))
        return super().single(x, point)

    def maybe(self, x: np.ndarray, point: str) -> np.ndarray:
        self.seen.append(("maybe", point))
        return super().maybe(x, point)

    def dot(self, a: np.ndarray, b: np.ndarray | Sliced, point: str, out: str = "bf16") -> np.ndarray:
        self.seen.append(({"bf16": "store", "fp32": "single", "none": "none"}[out], point))
        return super().dot(a, b, point, out)

    def points(self, kind: str) -> set[str]:
        """Names of the points of one kind."""
        return {point for done, point in self.seen if done == kind}
