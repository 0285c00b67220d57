"""One named input of one operation, the same for every implementation of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Inputs = dict[str, Any]
"""float64 arrays whose values are float32 values, integer arrays, and plain numbers."""


@dataclass(frozen=True)
class Case:
    """`make()` builds the inputs; `op` says which operation of the file takes them."""

    op: str
    name: str
    make: Callable[[], Inputs]

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


def draw(seed: int, *shape: int, scale: float = 1.0, shift: float = 0.0) -> np.ndarray:
    """Normal values that float32 holds exactly, as float64."""
    values = np.random.default_rng(seed).normal(shift, scale, shape)
    return values.astype(np.float32).astype(np.float64)
