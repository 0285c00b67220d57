"""Bytes of a checkpoint on a device: read from disk, scanned, laid into slabs, counted.

`pack` decides where everything lies before anything is allocated, so slabs are exactly as large as what they hold and
small tensors cost no allocation of their own. Reading is `fast.reader`'s.

A tensor of the store is `held` (nobody has bound it), `bound` (an operand is a view of these very bytes) or
`superseded` (an operand was made from it and lives elsewhere). `prune` frees what is superseded and what is merely
held, except what the caller keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fast import errors as E
from fast.ledger import Ledger
from fast.reader import Reader, window
from fast.sharding import Slice
from fast.shards import Directory

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
        self.device = checked_device(device)
        self.ledger = ledger if ledger is not None else Ledger()
        self.reader = Reader(directory, self.device, evict=_unified(self.device) if evict is None else evict)
        self.resident: dict[str, Resident] = {}
        self.slabs: list[Tensor] = []
        self._sizes: tuple[int, ...] = ()
        self._slack: list[int] = []
        self._taken: list[int] = []
        size = window(directory.tensors)
        self._window: int | None = self.ledger.charge("read window", "read window", "staging", size, "host")

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
        self.reader.read(name, tensor)
        self.reader.flush()
        return tensor

    def adopt(self, name: str, role: str, slot: Slot, cut: Slice, *, scanned: bool = True) -> Tensor:
        """Bring (a slice of) a tensor into its slot and bind it: the operand is these bytes."""
        info = self.directory.tensors[name]
        tensor = self.place(slot, DTYPES[info.dtype], cut.shape(info.shape))
        ticket = self.take(name, role, slot)
        self.reader.read(name, tensor, cut, scanned=scanned)
        self.resident[name] = Resident(tensor, ticket, "bound")
        return tensor

    def take(self, name: str, role: str, slot: Slot) -> int:
        """Enter the bytes of a slot under the name of what is put there."""
        self._taken.append(self.ledger.split(self._slack[slot.slab], name, role, "weights", slot.nbytes))
        return self._taken[-1]

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

    def discard(self) -> None:
        """Give up all that is resident, and its entries in the ledger: what a load that failed leaves behind."""
        self.ledger.release(*{*self._slack, *self._taken, *(item.ticket for item in self.resident.values())})
        self.resident.clear()
        self.slabs, self._sizes, self._slack, self._taken = [], (), [], []

    def close(self) -> None:
        """Give up files, mappings and the read window; what is resident stays."""
        self.reader.close()
        if self._window is not None:
            self.ledger.release(self._window)
        self._window = None


def storage_dtype(dtype: str) -> torch.dtype:
    return DTYPES[dtype]


def checked_device(device: str | torch.device) -> torch.device:
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
