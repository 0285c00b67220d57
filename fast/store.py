"""Bytes of a checkpoint on a device: mapped from disk, scanned, laid into slabs, counted.

`pack` decides where everything lies before anything is allocated, so slabs are exactly as large as what they hold and
small tensors cost no allocation of their own. `Store.read` is the only way bytes leave a file: in pieces of at most
`PIECE` bytes, through a mapping whose pages are given back piece by piece, each piece scanned for values no weight can
have while it is in cache. On CUDA a piece passes through one pinned buffer.

A tensor of the store is `held` (nobody has bound it), `bound` (an operand is a view of these very bytes) or
`superseded` (an operand was made from it and lives elsewhere). `prune` frees what is superseded and what is merely
held, except what the caller keeps.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fast import errors as E
from fast.ledger import Ledger
from fast.nvfp4 import E4M3_NAN
from fast.sharding import Slice
from fast.shards import WIDTHS, Directory, TensorInfo

PIECE = 4 << 20
SLAB_BYTES = 256 << 20
ALIGN = 256
INNER_ALIGN = 16
DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "F8_E4M3": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor to be laid out: `key` finds it again."""

    key: tuple[str, str]
    nbytes: int
    align: int = INNER_ALIGN


@dataclass(frozen=True, slots=True)
class Slot:
    slab: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Packing:
    slots: dict[tuple[str, str], Slot]
    slabs: tuple[int, ...]
    section_slabs: tuple[int, ...]
    """Slabs in use once section i is loaded: they are allocated in order, as sections reach them."""


def pack(sections: Sequence[Sequence[Sequence[Part]]], limit: int = SLAB_BYTES) -> Packing:
    """Sections of blocks of parts -> places. A block begins on 256 bytes and lies in one slab, its parts on 16 (or
    their own alignment) right after each other; a slab closes when the next block would pass `limit`, at its use."""
    slots: dict[tuple[str, str], Slot] = {}
    slabs: list[int] = []
    reached: list[int] = []
    used = 0
    for section in sections:
        for block in section:
            offsets, size = [], 0
            for part in block:
                size = _up(size, part.align)
                offsets.append(size)
                size += part.nbytes
            start = _up(used, ALIGN)
            if not slabs or start + size > limit:
                slabs.append(0)
                start = 0
            for part, offset in zip(block, offsets, strict=True):
                slots[part.key] = Slot(len(slabs) - 1, start + offset, part.nbytes)
            used = slabs[-1] = start + size
        reached.append(len(slabs))
    return Packing(slots, tuple(slabs), tuple(reached))


def _up(n: int, align: int) -> int:
    return -(-n // align) * align


@dataclass(slots=True)
class Resident:
    """A tensor of the store in memory."""

    tensor: Tensor
    ticket: int
    state: str = "held"


class Store:
    """The tensors of one opened directory on one device. `evict` also drops read pages from the page cache, which
    counts as used memory where host and device share it; None means: exactly on such devices."""

    def __init__(
        self,
        directory: Directory,
        device: str | torch.device = "cpu",
        ledger: Ledger | None = None,
        *,
        evict: bool | None = None,
    ) -> None:
        self.directory = directory
        self.device = _device(device)
        self.ledger = ledger if ledger is not None else Ledger()
        self.evict = _unified(self.device) if evict is None else evict
        self.resident: dict[str, Resident] = {}
        self.bytes_read = 0
        self.seconds = 0.0
        self.slabs: list[Tensor] = []
        self._sizes: tuple[int, ...] = ()
        self._slack: list[int] = []
        self._maps: dict[int, mmap.mmap] = {}
        window = read_window(directory.tensors)
        pinned = self.device.type == "cuda"
        self._window = torch.empty(window, dtype=torch.uint8, pin_memory=True) if pinned else None
        self._window_ticket: int | None = self.ledger.charge("read window", "read window", "staging", window, "host")

    # --- memory ------------------------------------------------------------------------------------------------

    def reserve(self, packing: Packing) -> None:
        """Say which slabs will be needed; `reach` allocates them."""
        self._sizes = packing.slabs

    def reach(self, count: int) -> None:
        """Allocate slabs until `count` exist. Their bytes are "alignment" until a tensor takes its part of them."""
        while len(self.slabs) < count:
            size = self._sizes[len(self.slabs)]
            name = f"slab {len(self.slabs)}"
            self.slabs.append(torch.empty(size, dtype=torch.uint8, device=self.device))
            self._slack.append(self.ledger.charge(name, "alignment", "weights", size))

    def place(self, slot: Slot, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor that lies in a slot: a view of the slab's storage."""
        flat = self.slabs[slot.slab][slot.offset : slot.offset + slot.nbytes]
        return flat.view(dtype).view(shape)

    def address(self, name: str) -> int:
        """Where the store's bytes of a tensor lie on the device."""
        return self.resident[name].tensor.data_ptr()

    # --- tensors as on disk ------------------------------------------------------------------------------------

    def upload(self, name: str, role: str) -> Tensor:
        """Bring a whole tensor to the device in its disk dtype, into an allocation of its own; it is held."""
        info = self.directory.tensors[name]
        tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype], device=self.device)
        self.resident[name] = Resident(tensor, self.ledger.charge(name, role, "store", tensor.nbytes))
        self.read(name, tensor)
        return tensor

    def adopt(self, name: str, role: str, slot: Slot, cut: Slice, *, scanned: bool = True) -> Tensor:
        """Bring (a slice of) a tensor into its slot and bind it: the operand is these bytes."""
        info = self.directory.tensors[name]
        tensor = self.place(slot, DTYPES[info.dtype], cut.shape(info.shape))
        ticket = self.take(name, role, slot)
        self.read(name, tensor, cut, scanned=scanned)
        self.resident[name] = Resident(tensor, ticket, "bound")
        return tensor

    def take(self, name: str, role: str, slot: Slot) -> int:
        """Enter the bytes of a slot under the name of what is put there."""
        return self.ledger.split(self._slack[slot.slab], name, role, "weights", slot.nbytes)

    def bind(self, name: str) -> Tensor:
        """Hand held bytes to the model as they are: no copy, only the owner changes."""
        item = self.resident[name]
        item.state = "bound"
        self.ledger.move(item.ticket, "weights")
        return item.tensor

    def supersede(self, name: str) -> None:
        self.resident[name].state = "superseded"

    def prune(self, keep: Callable[[str], bool]) -> int:
        """Free every superseded tensor and every held one that `keep` does not name; returns the bytes freed."""
        freed = 0
        for name, item in list(self.resident.items()):
            if item.state == "superseded" or (item.state == "held" and not keep(name)):
                freed += item.tensor.nbytes
                self.ledger.release(item.ticket)
                del self.resident[name]
        return freed

    def close(self) -> None:
        """Give up files, mappings and the read window; what is resident stays."""
        for mapped in self._maps.values():
            with contextlib.suppress(BufferError):
                mapped.close()
        self._maps.clear()
        self.directory.close()
        if self._window_ticket is not None:
            self.ledger.release(self._window_ticket)
        self._window = self._window_ticket = None

    # --- reading -----------------------------------------------------------------------------------------------

    def read(self, name: str, out: Tensor, cut: Slice | None = None, *, scanned: bool = True) -> None:
        """Fill `out` (contiguous, disk dtype, the slice's shape, on the device or the host) from disk. Raises
        FileChangedError and, where `scanned`, NonFiniteWeightError, ScaleNaNError, ScaleNegativeError."""
        start = time.perf_counter()
        info = self.directory.tensors[name]
        flat = out.reshape(-1).view(torch.uint8)
        local = flat.numpy() if flat.device.type == "cpu" else None
        at = 0
        for piece in self.pieces(name, cut):
            n = piece.size
            if local is not None:
                target = local[at : at + n]
            else:
                assert self._window is not None
                target = self._window.numpy()[:n]
            np.copyto(target.reshape(piece.shape), piece)
            bad = scan(target, info.dtype) if scanned else None
            if bad is not None:
                raise _refusal(name, info, cut, at + bad, target[bad])
            if local is None:
                assert self._window is not None
                flat[at : at + n].copy_(self._window[:n])
            at += n
        assert at == flat.numel(), (name, at, flat.numel())
        self.seconds += time.perf_counter() - start

    def pieces(self, name: str, cut: Slice | None = None) -> Iterator[np.ndarray]:
        """The bytes of (a slice of) a tensor, u8 [rows, bytes], as views of the mapping that die with the next one.

        A cut by rows reads those rows' bytes and no others. A cut by columns passes over whole rows, in order, and
        yields its columns; `bytes_read` counts what was passed over.
        """
        info = self.directory.tensors[name]
        height = info.shape[0] if info.shape else 1
        width = info.nbytes // height if height else 0
        first, last = (cut.start, cut.stop) if cut is not None and cut.axis == 0 else (0, height)
        begin, end = info.begin + first * width, info.begin + last * width
        columns = None
        if cut is not None and cut.axis == 1:
            per = width // info.shape[1]
            columns = slice(cut.start * per, cut.stop * per)
        step = PIECE if columns is None else max(1, PIECE // width) * width
        for start in range(begin, end, step):
            stop = min(start + step, end)
            data = self._mapped(info, start, stop)
            self.bytes_read += stop - start
            if columns is None:
                yield data[None]
            else:
                data = data.reshape(-1, width)[:, columns]
                for column in range(0, data.shape[1], PIECE):
                    yield data[:, column : column + PIECE]
            del data
            self._forget(info, start, stop)

    def _mapped(self, info: TensorInfo, start: int, stop: int) -> np.ndarray:
        shard = self.directory.shards[info.shard]
        if os.fstat(shard.fd).st_size != shard.size:
            raise E.FileChangedError(f"{shard.path}: no longer the {shard.size} bytes that were checked")
        if info.shard not in self._maps:
            self._maps[info.shard] = mmap.mmap(shard.fd, 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._maps[info.shard], np.uint8, stop - start, start)

    def _forget(self, info: TensorInfo, start: int, stop: int) -> None:
        """Give the pages of a finished piece back; they are clean, so a neighbour on one of them faults it in again."""
        low = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._maps[info.shard].madvise(mmap.MADV_DONTNEED, low, stop - low)
        if self.evict:
            os.posix_fadvise(self.directory.shards[info.shard].fd, low, stop - low, os.POSIX_FADV_DONTNEED)


def read_window(tensors: Mapping[str, TensorInfo]) -> int:
    """Host bytes that reading needs at a time: mapped pages on a CPU, a pinned buffer for CUDA."""
    return min(PIECE, max((info.nbytes for info in tensors.values()), default=0))


def storage_dtype(dtype: str) -> torch.dtype:
    return DTYPES[dtype]


def scan(data: np.ndarray[Any, np.dtype[np.uint8]], dtype: str) -> int | None:
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
    return kind(f"{name}: block scale byte {int(byte):#04x} at {index}, expected 0x00 .. 0x7e")


def _device(device: str | torch.device) -> torch.device:
    """The device with its index. Raises HardwareError when it is not there."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise E.HardwareError(f"device {device!r}: {error}") from None
    if found.type == "cuda":
        count = torch.cuda.device_count()
        index = found.index if found.index is not None else torch.cuda.current_device() if count else 0
        if index >= count:
            raise E.HardwareError(f"device {device}: this machine has {count} CUDA devices")
        return torch.device("cuda", index)
    if found.type != "cpu":
        raise E.HardwareError(f"device {device}: expected cpu or cuda")
    return found


def _unified(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch.cuda.get_device_properties(device).is_integrated)
