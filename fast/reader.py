"""Bytes out of safetensors files: mapped, in pieces, by a few threads, each piece scanned while it is in cache.

A piece is at most `PIECE` bytes of a tensor (a row, where a column cut meets a wider one). A thread maps just its
piece and unmaps it when done, so mapped memory never exceeds one piece per thread, whatever the kernel maps around a
fault. On CUDA every thread owns one pinned buffer of that size. `read` may return before the bytes are there; `flush`
waits, and raises the first refusal in the order of the calls, whichever thread found it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fast import errors as E
from fast.nvfp4 import E4M3_NAN
from fast.sharding import Slice
from fast.shards import WIDTHS, Directory, TensorInfo

PIECE = 2 << 20
INLINE = 1 << 16
"""Tensors up to this size are not worth a thread's attention."""

SCAN = 1 << 18
"""Bytes copied and then scanned at a time: they stay in cache in between."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def threads() -> int:
    return min(4, os.cpu_count() or 1)


def window(tensors: Mapping[str, TensorInfo]) -> int:
    """Host bytes that reading these tensors holds at a time: mapped pages on a CPU, pinned buffers for CUDA; one piece
    for each thread and one for the caller, who reads small tensors himself."""
    return (threads() + 1) * min(PIECE, max((info.nbytes for info in tensors.values()), default=0))


class Reader:
    """Reads tensors of one checked directory for one device. `evict` also drops read pages from the page cache."""

    def __init__(self, directory: Directory, device: torch.device, *, evict: bool) -> None:
        self.directory, self.device, self.evict = directory, device, evict
        self.bytes_read = 0
        """Bytes passed over so far; a cut by columns counts whole rows."""
        self.seconds = 0.0
        """Time the caller spent in `read` and `flush`."""
        self._pool = ThreadPoolExecutor(threads(), "read")
        self._pending: deque[Future[None]] = deque()
        self._windows: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        if device.type == "cuda":
            size = window(directory.tensors) // (threads() + 1)
            for _ in range(threads() + 1):
                self._windows.put(torch.empty(size, dtype=torch.uint8, pin_memory=True))

    def read(self, name: str, out: Tensor, cut: Slice | None = None, *, scanned: bool = True) -> None:
        """Fill `out` (contiguous, disk dtype, the slice's shape, on the device or the host) from disk. Raises, now or
        in `flush`, FileChangedError and, where `scanned`, NonFiniteWeightError, ScaleNaNError, ScaleNegativeError.

        A cut by rows reads those rows' bytes and no others; a cut by columns passes over whole rows.
        """
        began = time.perf_counter()
        info = self.directory.tensors[name]
        flat = out.reshape(-1).view(torch.uint8)
        height = info.shape[0] if info.shape else 1
        width = info.nbytes // height if height else 0
        first, last = (cut.start, cut.stop) if cut is not None and cut.axis == 0 else (0, height)
        begin, end = info.begin + first * width, info.begin + last * width
        columns = slice(0, width)
        step, yielded = PIECE, PIECE
        if cut is not None and cut.axis == 1:
            per = width // info.shape[1]
            columns = slice(cut.start * per, cut.stop * per)
            step = max(1, PIECE // width) * width
            yielded = step // width * (columns.stop - columns.start)
        for i, start in enumerate(range(begin, end, step)):
            stop = min(start + step, end)
            target = flat[i * yielded : (i + 1) * yielded]
            rows = (width, columns) if cut is not None and cut.axis == 1 else None
            self.bytes_read += stop - start
            job = (name, cut, start, stop, rows, target, i * yielded, scanned)
            if end - begin <= INLINE:
                self._piece(*job)
                continue
            self._pending.append(self._pool.submit(self._piece, *job))
            if len(self._pending) > 4 * threads():
                self._first()
        self.seconds += time.perf_counter() - began

    def flush(self) -> None:
        """Wait until everything asked for is there."""
        began = time.perf_counter()
        while self._pending:
            self._first()
        self.seconds += time.perf_counter() - began

    def _first(self) -> None:
        try:
            self._pending.popleft().result()
        except BaseException:
            for future in self._pending:
                future.cancel()
            for future in self._pending:
                with contextlib.suppress(BaseException):
                    future.result()
            self._pending.clear()
            raise

    def close(self) -> None:
        """Give up files and threads."""
        self._pool.shutdown(cancel_futures=True)
        self.directory.close()
        self._windows = queue.SimpleQueue()

    def _piece(
        self,
        name: str,
        cut: Slice | None,
        start: int,
        stop: int,
        rows: tuple[int, slice] | None,
        target: Tensor,
        at: int,
        scanned: bool,
    ) -> None:
        info = self.directory.tensors[name]
        mapped, source = self._map(info.shard, start, stop)
        held = None if target.device.type == "cpu" else self._windows.get()
        try:
            for done, part in _parts(source, rows, PIECE if held is None else held.numel()):
                n = part.size
                host = target[done : done + n] if held is None else held[:n]
                local = host.numpy()
                bad = _copy(local, part, info.dtype if scanned else "U8")
                if bad is not None:
                    raise _refusal(name, info, cut, at + done + bad, int(local[bad]))
                if held is not None:
                    target[done : done + n].copy_(host)
        finally:
            if held is not None:
                self._windows.put(held)
        del source, part
        mapped.close()
        if self.evict:
            os.posix_fadvise(self.directory.shards[info.shard].fd, start, stop - start, os.POSIX_FADV_DONTNEED)

    def _map(self, index: int, start: int, stop: int) -> tuple[mmap.mmap, Bytes]:
        """A mapping of bytes start .. stop of a shard, and a view of exactly these."""
        shard = self.directory.shards[index]
        low = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        if os.fstat(shard.fd).st_size != shard.size:
            raise E.FileChangedError(f"{shard.path}: no longer the {shard.size} bytes that were checked")
        mapped = mmap.mmap(shard.fd, stop - low, access=mmap.ACCESS_READ, offset=low)
        return mapped, np.frombuffer(mapped, np.uint8, stop - start, start - low)


def _parts(source: Bytes, rows: tuple[int, slice] | None, most: int) -> list[tuple[int, Bytes]]:
    """(position in the target, bytes) of a piece: all of it, or the columns of its rows."""
    if rows is None:
        return [(0, source)]
    width, columns = rows
    table = source.reshape(-1, width)[:, columns]
    if table.size <= most:
        return [(0, table)]
    return [(i, table[0, i : i + most]) for i in range(0, table.shape[1], most)]


def _copy(target: Bytes, source: Bytes, dtype: str) -> int | None:
    """Copy and scan, a cache-sized portion at a time; returns as `scan`."""
    if source.ndim > 1:
        np.copyto(target.reshape(source.shape), source)
        return scan(target, dtype)
    for at in range(0, target.size, SCAN):
        portion = target[at : at + SCAN]
        np.copyto(portion, source[at : at + SCAN])
        bad = scan(portion, dtype)
        if bad is not None:
            return at + bad
    return None


def scan(data: Bytes, dtype: str) -> int | None:
    """Byte position of the first value in u8 `data` that `dtype` may not hold in a checkpoint, or None.

    BF16 and F32: NaN and infinities, the bit patterns from the all-ones exponent up, for either sign. As signed
    integers the positive ones are the largest, as unsigned ones the negative ones are: two maxima and no temporary.
    F8_E4M3: 0x7F and everything with a sign bit.
    """
    if dtype == "F8_E4M3":
        return int(np.argmax(data >= E4M3_NAN)) if data.max(initial=0) >= E4M3_NAN else None
    if dtype not in ("BF16", "F32"):
        return None
    width, top = (2, 0x7F80) if dtype == "BF16" else (4, 0x7F800000)
    signed: Any = data.view(f"i{width}")
    unsigned: Any = data.view(f"u{width}")
    sign = 1 << (8 * width - 1)
    if signed.max(initial=0) < top and unsigned.max(initial=0) < sign + top:
        return None
    return int(np.argmax((unsigned & (sign - 1)) >= top)) * width


def _refusal(name: str, info: TensorInfo, cut: Slice | None, at: int, byte: int) -> E.ValueRefusedError:
    """The error for the value at byte `at` of the local slice, with its position in the whole tensor."""
    local = info.shape if cut is None else cut.shape(info.shape)
    index = [int(i) for i in np.unravel_index(at // WIDTHS[info.dtype], local)] if local else []
    if cut is not None and cut.axis is not None:
        index[cut.axis] += cut.start
    if info.dtype != "F8_E4M3":
        return E.NonFiniteWeightError(f"{name}: not finite at {index}")
    kind = E.ScaleNaNError if byte & E4M3_NAN == E4M3_NAN else E.ScaleNegativeError
    return kind(f"{name}: block scale byte {byte:#04x} at {index}, expected 0x00 .. 0x7e")
