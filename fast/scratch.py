"""Where the intermediate results of a layer lie: one block of memory per kind of layer, used again by every layer.

    with arena.frame():                what is made inside lies in the arena, and is gone at the end
        y = scratch.keep(value, dtype)     rounded to `dtype`
        z = scratch.empty((T, N), dtype, device)
        with scratch.frame():          what is made in here makes room again for what comes after it
            ...

Outside of any frame, and inside `outside()`, the same calls allocate: an op is the same function either way, and its
bits do not depend on where its results lie. A frame belongs to the thread that opened it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fast.errors import DoesNotFitError

ALIGN = 256

TILE_BYTES = 1 << 26
"""Bound on the temporaries of one op that works row by row (`tiles`)."""

_local = threading.local()


class Arena:
    """`size` bytes on a device, handed out from the front; `high` is the most that was ever in use."""

    def __init__(self, kind: str, size: int, device: str | torch.device) -> None:
        self.kind, self.used, self.high = kind, 0, 0
        self.block = torch.empty(size, dtype=torch.uint8, device=device)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Raises DoesNotFitError when more is asked for than was planned."""
        n = dtype.itemsize * math.prod(shape)
        start, self.used = self.used, self.used + aligned(n)
        if self.used > self.block.numel():
            raise DoesNotFitError(
                f"workspace {self.kind}: {self.used:,} bytes for {list(shape)} {dtype}, planned {self.block.numel():,}"
            )
        self.high = max(self.high, self.used)
        return self.block[start : start + n].view(dtype).view(*shape)

    @contextlib.contextmanager
    def frame(self) -> Iterator[None]:
        outer, mark = current(), self.used
        _local.arena = self
        try:
            yield
        finally:
            _local.arena, self.used = outer, mark


def current() -> Arena | None:
    return getattr(_local, "arena", None)


@contextlib.contextmanager
def frame() -> Iterator[None]:
    """A frame inside the one that is open; nothing where none is."""
    arena = current()
    if arena is None:
        yield
        return
    with arena.frame():
        yield


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """For what lives longer than the frame, or whose size no plan knows."""
    arena = current()
    _local.arena = None
    try:
        yield
    finally:
        _local.arena = arena


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    arena = current()
    if arena is None or arena.block.device != device:
        return torch.empty(*shape, dtype=dtype, device=device)
    return arena.take(shape, dtype)


def keep(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`value` rounded to `dtype` (default: as it is), in the open frame."""
    dtype = value.dtype if dtype is None else dtype
    return value.to(dtype) if current() is None else empty(value.shape, dtype, value.device).copy_(value)


def tiles(rows: int, bytes_per_row: int) -> list[slice]:
    """Row ranges whose temporaries, at `bytes_per_row`, stay within TILE_BYTES."""
    step = max(1, TILE_BYTES // max(1, bytes_per_row))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def by_rows(
    work: Callable[..., Tensor],
    *parts: Tensor,
    dtype: torch.dtype,
    shape: Sequence[int] | None = None,
    temporaries: int = 3,
) -> Tensor:
    """`work` on tiles of the first axis of `parts`, as fp32, rounded to `dtype` into one tensor.

    `shape`: that of the result, by default the first part's. `temporaries`: how many tensors as large as the first
    part `work` holds at a time.
    """
    first = parts[0]
    out = empty(first.shape if shape is None else shape, dtype, first.device)
    for rows in tiles(len(first), 4 * (temporaries + len(parts)) * first[:1].numel()):
        out[rows] = work(*(part[rows].float() for part in parts))
    return out


def copies(tap: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """A tap whose tensors are its own: those of a layer lie in memory that the next layer uses."""
    return lambda name, value: tap(name, value.clone() if isinstance(value, Tensor) else value)


def aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
