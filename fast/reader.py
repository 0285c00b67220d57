"""Bytes out of safetensors files: read, in pieces, by a few threads, each piece scanned while it is in cache.

A piece is at most `PIECE` bytes of a tensor (a row, where a column cut meets a wider one). On a CPU whole rows are read
to where they stay; columns, and everything for CUDA (pinned there), pass through a window of one piece per thread.
`read` may return before the bytes are there; `flush` waits, and raises the first refusal in the order of the calls,
whichever thread found it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fast import errors as E
from fast.nvfp4 import E4M3_NAN
from fast.sharding import Slice
from fast.shards import WIDTHS, Directory, Shard, TensorInfo

PIECE = 2 << 20
INLINE = 1 << 16
"""Tensors up to this size are not worth a thread's attention."""

SCAN = 1 << 18
"""Bytes read and then scanned at a time: they stay in cache in between."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def threads() -> int:
    return min(4, os.cpu_count() or 1)


def window(tensors: Mapping[str, TensorInfo]) -> int:
    """Host bytes that reading these tensors holds at a time: one piece for each thread and one for the caller, who
    reads small tensors himself."""
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
        size = window(directory.tensors) // (threads() + 1)
        for _ in range(threads() + 1):
            self._windows.put(torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda"))

    def read(self, name: str, out: Tensor, cut: Slice | None = None, *, scanned: bool = True) -> None:
        """Fill `out` (contiguous, disk dtype, the slice's shape, on the device or the host) from disk. Raises, now or
        in `flush`, FileChangedError and, where `scanned`, NonFiniteWeightError, ScaleNaNError, ScaleNegativeError.

        A cut by rows reads those rows' bytes and no others; a cut by columns passes over whole rows. Raises ValueError
        once the directory is closed.
        """
        if self.directory.closed:
            raise ValueError(f"{name}: {self.directory.root} has been closed")
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
        position: int,
        scanned: bool,
    ) -> None:
        """Bytes start .. stop of a shard, or columns of their rows, into `target`, at `position` of the tensor's."""
        info = self.directory.tensors[name]
        shard = self.directory.shards[info.shard]
        if os.fstat(shard.fd).st_size != shard.size:
            raise E.FileChangedError(f"{shard.path}: no longer the {shard.size} bytes that were checked")
        held = None if rows is None and target.device.type == "cpu" else self._windows.get()
        try:
            for done, part in _placed(shard, start, stop, rows, target, held):
                dtype, bad = info.dtype if scanned else "U8", None
                for at in range(0, part.size, SCAN):
                    portion = part[at : at + SCAN]
                    if rows is None:
                        _fill(shard, start + done + at, portion)
                    bad = scan(portion, dtype)
                    if bad is not None:
                        raise _refusal(name, info, cut, position + done + at + bad, int(portion[bad]))
                if held is not None:
                    target[done : done + part.size].copy_(torch.from_numpy(part))
        finally:
            if held is not None:
                self._windows.put(held)
        if self.evict:
            os.posix_fadvise(shard.fd, start, stop - start, os.POSIX_FADV_DONTNEED)


def _placed(
    shard: Shard, start: int, stop: int, rows: tuple[int, slice] | None, target: Tensor, held: Tensor | None
) -> Iterator[tuple[int, Bytes]]:
    """(position in the target, host bytes) of bytes start .. stop of a shard: places to be filled, in the target or the
    window; or the columns of its rows, already there."""
    if rows is None:
        if held is None:
            yield 0, target.numpy()
            return
        for done in range(0, stop - start, held.numel()):
            yield done, held.numpy()[: min(held.numel(), stop - start - done)]
        return
    assert held is not None
    (width, columns), window = rows, held.numpy()
    wide = columns.stop - columns.start
    step = window.size // (width + wide)
    for done, row in enumerate(range(start, stop, max(1, step) * width)):
        if step:
            whole = window[: min(step * width, stop - row)]
            _fill(shard, row, whole)
            table = whole.reshape(-1, width)[:, columns]
            part = window[step * width : step * width + table.size]
            np.copyto(part.reshape(table.shape), table)
            yield done * step * wide, part
            continue
        for at in range(0, wide, window.size):
            part = window[: min(window.size, wide - at)]
            _fill(shard, row + columns.start + at, part)
            yield done * wide + at, part


def _fill(shard: Shard, position: int, out: Bytes) -> None:
    """Bytes of a file from `position` on. Raises FileChangedError where there are fewer, or none to be read."""
    view = out.data
    while view:
        try:
            n = os.preadv(shard.fd, [view], position)
        except OSError as error:
            raise E.FileChangedError(f"{shard.path}: cannot be read at byte {position}: {error.strerror}") from None
        if not n:
            raise E.FileChangedError(f"{shard.path}: ends at byte {position}, no longer the {shard.size} checked")
        view, position = view[n:], position + n


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
