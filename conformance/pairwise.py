"""Two traces of the same tokens held against each other, tap by tap, with no bound and no verdict of its own.

This is the free-running comparison: an error travels, so the first tap that differs matters and the rest follow. It is
what `glm53 diff A B` prints beside the rebased verdicts, and how the reference is held against other implementations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from conformance.errors import TraceMismatchError
from conformance.trace import Trace

PROMISED = 2e-5
"""What the project promises of its reference: in exact arithmetic it stays within this relative L2 distance of a
float32 implementation of the same model, at every tap, free-running over a whole input."""


@dataclass(frozen=True)
class Pair:
    """One tap of both traces. `relative_l2` = |a - b| / |a| in the 2-norm; `worst` where |a - b| is largest.

    For choices (`router.indices`, `indexer.selected`) `relative_l2` is 0 or infinite, and `rows` counts the tokens
    whose *sets* differ. `fault` says why a tap cannot be compared (other shape, other infinities), else it is empty.
    """

    tap: str
    relative_l2: float
    max_error: float
    worst: tuple[int, ...]
    rows: int
    fault: str = ""


def compare(first: Trace, second: Trace) -> list[Pair]:
    """Every tap both traces hold, in the order of `first`. Raises TraceMismatchError for other tokens."""
    if not np.array_equal(first.tokens, second.tokens):
        raise TraceMismatchError("the two traces were made with other tokens")
    return [_pair(name, first, second) for name in first.taps if name in second.taps]


def aligned(trace: Trace, name: str) -> np.ndarray:
    """The tap with what has no order put in order: sets ascending, routing weights by expert. Floats become float64.

    What has not the axes for that stays as it is.
    """
    array = trace.taps[name]
    if name.endswith((".selected", "router.indices")):
        return np.sort(array, axis=-1) if array.ndim else array
    indices = trace.taps.get(f"{name.removesuffix('weights')}indices")
    if name.endswith("router.weights") and indices is not None and indices.shape == array.shape and array.ndim:
        array = np.take_along_axis(array, np.argsort(indices, axis=-1, kind="stable"), axis=-1)
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


def _pair(name: str, first: Trace, second: Trace) -> Pair:
    a, b = aligned(first, name), aligned(second, name)
    if a.shape != b.shape:
        return Pair(name, math.inf, math.inf, (), 0, f"{list(a.shape)} against {list(b.shape)}")
    if a.size == 0:
        return Pair(name, 0.0, 0.0, (), 0)
    differing = (a != b).reshape(a.shape[0], -1).any(-1) if a.ndim else a != b
    rows = int(np.count_nonzero(differing))
    if a.dtype.kind in "iub":
        apart = math.inf if rows else 0.0
        return Pair(name, apart, apart, (int(np.argmax(differing)),) if rows else (), rows)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite]):
        return Pair(name, math.inf, math.inf, (), rows, "infinities or NaN in other places")
    error = np.where(finite, np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)), 0.0)
    norm = float(np.linalg.norm(a[finite]))
    distance = float(np.linalg.norm(error))
    relative = distance / norm if norm else (0.0 if distance == 0 else math.inf)
    worst = tuple(int(axis) for axis in np.unravel_index(int(np.argmax(error)), error.shape))
    return Pair(name, relative, float(error.max()), worst, rows)
