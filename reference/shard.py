"""A strict reader for one safetensors file, standard library only.

The file is: 8 bytes little-endian header length n; n bytes of JSON, one object of name -> {dtype, shape, data_offsets}
with an optional `__metadata__` of strings; then data, which the tensors must tile exactly. Every statement the header
makes is checked against the others and against the file's size before a byte of data is touched, and the header is
read only after its length was found possible, so nothing here allocates more than the header cap.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference import errors as e
from reference.fields import decode_json, open_regular

HEADER_CAP = 100_000_000
MAX_RANK = 8
MAX_ELEMENTS = 2**63 - 1
NAME_CAP = 1024
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; `begin` and `end` count from the start of the file, not of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A checked header: entries in file order."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]
    size: int

    @property
    def data_bytes(self) -> int:
        return sum(entry.end - entry.begin for entry in self.entries.values())


def read_header(path: str | Path) -> Header:
    """Read and check a file's header. Raises a `ShardError` that names the file and what is wrong."""
    path = Path(path)
    try:
        with open_regular(path) as file:
            return _read(path, file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise e.ShardFileError(f"{path}: cannot be read: {error.strerror or error}") from None


def _read(path: Path, file: Any, size: int) -> Header:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise e.HeaderLengthError(f"{path}: {size} bytes, too short for a header length")
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= HEADER_CAP:
        raise e.HeaderLengthError(f"{path}: header length {length} is not in [2, {HEADER_CAP}]")
    if 8 + length > size:
        raise e.HeaderLengthError(f"{path}: header length {length} reaches past the end of a file of {size} bytes")
    data = file.read(length)
    if len(data) != length:
        raise e.HeaderLengthError(f"{path}: {len(data)} of {length} header bytes could be read")
    if data[:1] != b"{":
        raise e.HeaderSyntaxError(f"{path}: the header starts with {data[:1]!r}, expected '{{'")
    try:
        raw = decode_json(data)
    except e.ShardError as error:
        raise type(error)(f"{path}: header: {error}") from None
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise e.HeaderFieldError(f"{path}: __metadata__ is not an object of strings")
    start = 8 + length
    entries = [_entry(path, name, value, start, size) for name, value in raw.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _tile(path, entries, start, size)
    return Header(path, {entry.name: entry for entry in entries}, metadata, size)


def _entry(path: Path, name: str, value: Any, start: int, size: int) -> Entry:
    where = f"{path}: tensor {e.show(name)}"
    if not name or len(name) > NAME_CAP or not name.isprintable():
        raise e.TensorNameError(f"{where}: a name must be 1 to {NAME_CAP} printable characters")
    if not isinstance(value, dict) or set(value) != FIELDS:
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise e.HeaderFieldError(f"{where}: fields {e.show(found)}, expected {sorted(FIELDS)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise e.UnknownDtypeError(f"{where}: unknown dtype {e.show(dtype)}")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise e.HeaderFieldError(f"{where}: shape {e.show(shape)} and data_offsets {e.show(offsets)} must be lists")
    if len(shape) > MAX_RANK:
        raise e.ShapeRangeError(f"{where}: rank {len(shape)}, at most {MAX_RANK}")
    if not all(type(extent) is int and 0 <= extent <= MAX_ELEMENTS for extent in shape):
        raise e.ShapeRangeError(f"{where}: shape {e.show(shape)} is not made of integers in [0, 2^63)")
    elements = 0 if 0 in shape else 1
    for extent in shape:
        elements *= extent
        if elements * ITEM_BYTES[dtype] > MAX_ELEMENTS:
            raise e.ShapeRangeError(f"{where}: shape {e.show(shape)} holds more bytes than 2^63")
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise e.OffsetError(f"{where}: data_offsets {e.show(offsets)} are not integers 0 <= begin <= end")
    if start + end > size:
        raise e.FileLengthError(f"{where}: ends at byte {start + end} of a file of {size} bytes")
    expected = elements * ITEM_BYTES[dtype]
    if end - begin != expected:
        raise e.ByteLengthError(f"{where}: {end - begin} bytes for {dtype} {shape}, expected {expected}")
    return Entry(name, dtype, tuple(shape), start + begin, start + end)


def _tile(path: Path, entries: list[Entry], start: int, size: int) -> None:
    reached, last = start, "the header"
    for entry in entries:
        if entry.begin < reached:
            raise e.OverlapError(
                f"{path}: tensor {e.show(entry.name)} begins at data byte {entry.begin - start}, "
                f"inside {e.show(last)}, which ends at {reached - start}"
            )
        if entry.begin > reached:
            raise e.GapError(
                f"{path}: data bytes {reached - start} to {entry.begin - start} before tensor {e.show(entry.name)} "
                "belong to no tensor"
            )
        reached, last = entry.end, entry.name
    if reached != size:
        raise e.FileLengthError(f"{path}: {size} bytes, but the header and its tensors end at {reached}")


class Shard:
    """A checked file whose data is memory-mapped on first use, read-only."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self._map: mmap.mmap | None = None

    def data(self, name: str) -> memoryview:
        """The bytes of one tensor, read-only. Raises `FileLengthError` or `ShardFileError` if the file changed."""
        entry = self.header.entries[name]
        if entry.begin == entry.end:
            return memoryview(b"")
        if self._map is None:
            self._map = self._open()
        return memoryview(self._map)[entry.begin : entry.end]

    def _open(self) -> mmap.mmap:
        path = self.header.path
        try:
            with open_regular(path) as file:
                if (size := os.fstat(file.fileno()).st_size) != self.header.size:
                    raise e.FileLengthError(f"{path}: {size} bytes now, {self.header.size} when checked")
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise e.ShardFileError(f"{path}: cannot be read: {error.strerror or error}") from None
