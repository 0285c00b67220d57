"""What a case is, and the tensors or lines that it makes."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from conformance import checkpoints

DTYPE_NAMES: dict[np.dtype[Any], str] = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.uint8): "U8",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
ROW_DIGEST_BYTES = 8


@dataclass(frozen=True)
class Item:
    """One tensor of a case. `rows`: which rows of axis 0 are stored (None: all, (): none). `logical`: the dtype that
    the bytes stand for, where NumPy has none (F8_E4M3, F4_E2M1 two to a byte)."""

    value: np.ndarray
    rows: tuple[int, ...] | None = None
    logical: str = ""

    @property
    def dtype(self) -> str:
        return DTYPE_NAMES[self.value.dtype]

    def sha256(self) -> str:
        return hashlib.sha256(plain_bytes(self.value)).hexdigest()

    def row_digests(self) -> np.ndarray:
        """[rows, 8] u8: the beginning of each row's sha256, floats as float64 whatever dtype holds them."""
        wide = self.value if self.value.dtype.kind in "iu" else self.value.astype(np.float64)
        digests = [hashlib.sha256(plain_bytes(row)).digest()[:ROW_DIGEST_BYTES] for row in wide]
        return np.frombuffer(b"".join(digests), np.uint8).reshape(len(self.value), ROW_DIGEST_BYTES)


def plain_bytes(array: np.ndarray) -> bytes:
    """Little-endian, row-major."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


@dataclass(frozen=True)
class Made:
    """What a case made: tensors in the order in which they were computed, or lines of text."""

    tensors: dict[str, Item] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


class Workspace:
    """Synthetic checkpoints, each written once, in a directory (`inside` another) that goes with the `with` block."""

    def __init__(self, inside: Path | None = None) -> None:
        self._root = tempfile.TemporaryDirectory(prefix="glm53-golden-", dir=inside)
        self._made: dict[tuple[str, str, int], Path] = {}

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._root.cleanup()

    def checkpoint(self, geometry: str, export: str, seed: int) -> Path:
        key = (geometry, export, seed)
        if key not in self._made:
            self._made[key] = checkpoints.make(
                Path(self._root.name) / f"{geometry}-{export}-{seed}", export, geometry, seed
            )
        return self._made[key]


@dataclass(frozen=True)
class Case:
    """`suffix`: of the file that holds it, empty for a recipe. `settings` are what the manifest says about it.

    `computed`: whether NumPy computes any of it. What is only Python's integers and text is the same under any SIMD
    level and BLAS kernel.
    """

    name: str
    build: Callable[[Workspace], Made]
    suffix: str = ""
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    computed: bool = True

    @property
    def file(self) -> str:
        return self.name + self.suffix if self.suffix else ""
