"""Where the ops get their weights: by checkpoint name, decoded when first used, big ones never kept.

A weight is either the right operand of x W^T (`linear`) or a float64 array (`array`). Operands of up to `KEPT` elements
stay sliced until `KEPT_IN_ALL` elements do; the others are decoded and cut at each use, so that a real-size model needs
little more memory than one weight at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from reference.arithmetic import Sliced

KEPT = 1 << 20
KEPT_IN_ALL = 1 << 25
BLOCK = 1 << 24


class Source(Protocol):
    """What `Weights` reads from; `reference.checkpoint.Checkpoint` is one."""

    def weight(self, name: str) -> np.ndarray:
        """The values of a weight, decoded where it is packed."""

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """`weight(name)[start:stop]` without decoding the rest."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the values."""


class Weights:
    """All weights whose names start with `prefix`; `at("mlp.")` narrows it. The cache is shared by all scopes."""

    def __init__(self, source: Source, prefix: str = "", cache: _Cache | None = None) -> None:
        self._source = source
        self._prefix = prefix
        self._cache = _Cache() if cache is None else cache

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Weights:
        """Weights held in memory, for ops used without a checkpoint. float64 values are kept as they are."""
        return cls(_Held(arrays))

    def at(self, scope: str) -> Weights:
        """The same weights under a longer prefix."""
        return Weights(self._source, self._prefix + scope, self._cache)

    def linear(self, name: str) -> Sliced:
        """W [N, K] as the right operand of x W^T."""
        name = self._prefix + name
        operand = self._cache.linear.get(name)
        if operand is None:
            operand = Sliced.of_weight(self._source.weight(name))
            if self._cache.admits(operand.k * operand.n):
                self._cache.linear[name] = operand
        return operand

    def array(self, name: str) -> np.ndarray:
        """The values in float64, in the stored shape."""
        name = self._prefix + name
        values = self._cache.array.get(name)
        if values is None:
            values = self._source.weight(name).astype(np.float64)
            if self._cache.admits(values.size):
                self._cache.array[name] = values
        return values

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored values' shape."""
        return self._source.shape(self._prefix + name)

    def lookup(self, name: str, index: np.ndarray) -> np.ndarray:
        """Rows `index` [..] of a weight [V, D] -> [.., D] float64; only those rows are decoded."""
        name = self._prefix + name
        used, inverse = np.unique(index, return_inverse=True)
        width = self._source.shape(name)[-1]
        rows = [self._source.rows(name, int(row), int(row) + 1) for row in used]
        table = np.concatenate(rows) if rows else np.zeros((0, width))
        return table[inverse.reshape(-1)].reshape(*np.shape(index), width).astype(np.float64)

    def linear_blocks(self, name: str) -> Iterator[Sliced]:
        """As `linear`, in consecutive row ranges of W of at most `BLOCK` elements; a small W comes in one piece."""
        N, K = self._source.shape(self._prefix + name)
        if N * K <= KEPT:
            yield self.linear(name)
            return
        step = max(1, BLOCK // K)
        for first in range(0, N, step):
            yield Sliced.of_weight(self._source.rows(self._prefix + name, first, min(N, first + step)))


class _Cache:
    """Operands kept for the next use, and how many more elements may be."""

    def __init__(self) -> None:
        self.linear: dict[str, Sliced] = {}
        self.array: dict[str, np.ndarray] = {}
        self.room = KEPT_IN_ALL

    def admits(self, elements: int) -> bool:
        if elements > min(KEPT, self.room):
            return False
        self.room -= elements
        return True


class _Held:
    """A `Source` over arrays in memory."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def weight(self, name: str) -> np.ndarray:
        return np.asarray(self._arrays[name])

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.weight(name)[start:stop]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weight(name).shape
