"""safetensors files and their index, read without trusting a byte of them.

Everything about a directory is checked before a tensor's data is touched: the index is a flat map to plain files inside
the directory, every header parses under a grammar stricter than JSON (no repeated key, no unknown field, whole numbers
only), every byte range is shape times width, and the ranges of a shard tile its data section exactly. A reader holds at
most one header beside the entries it has accepted, and `admit` lets the caller refuse a name before it is stored.

The grammar of a header, `n` standing for a whole number without sign, point or exponent:

    { "NAME": {"dtype": "..", "shape": [n, ..], "data_offsets": [n, n]}, .., "__metadata__": {"..": "..", ..} }
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fast import errors as E

HEADER_CAP = 100_000_000
MAX_RANK = 8
LIMIT = 2**63
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
WIDTHS = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip

Admit = Callable[[str], None]
"""Called with every tensor name before it is kept; raises to refuse it."""

_SPACE = re.compile(rb"[ \t\n\r]*")
_STRING = re.compile(rb'"([^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*)"')
_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]*")
_INTEGER = re.compile(rb"0|[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its header declares it; `begin`, `end` are absolute positions in the shard."""

    dtype: str
    shape: tuple[int, ...]
    shard: int = 0
    begin: int = 0
    end: int = 0

    @property
    def nbytes(self) -> int:
        count = WIDTHS[self.dtype]
        for n in self.shape:
            count *= n
        return count


@dataclass(frozen=True, slots=True)
class Shard:
    """One open file: its descriptor, its size when the header was checked, and where its data begins."""

    path: Path
    fd: int
    size: int
    data: int


@dataclass(frozen=True, slots=True)
class Directory:
    """A checkpoint directory whose index and headers have been checked."""

    root: Path
    shards: tuple[Shard, ...]
    tensors: dict[str, TensorInfo]
    total_size: int | None
    _open: list[int] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_open", [shard.fd for shard in self.shards])

    @property
    def closed(self) -> bool:
        return len(self._open) < len(self.shards)

    def close(self) -> None:
        """Again does nothing: a descriptor's number may by then be another file's."""
        while self._open:
            os.close(self._open.pop())


class _Scanner:
    """Pulls tokens out of JSON bytes; `fail` names the byte."""

    def __init__(self, data: bytes, where: str, syntax: type[E.InputError]) -> None:
        self.data, self.where, self.syntax, self.at = data, where, syntax, 0

    def fail(self, kind: type[E.InputError], found: str) -> E.InputError:
        return kind(f"{self.where}: {found} (at byte {self.at})")

    def peek(self) -> bytes:
        match = _SPACE.match(self.data, self.at)
        self.at = match.end() if match else self.at
        return self.data[self.at : self.at + 1]

    def take(self, char: bytes) -> None:
        found = self.peek()
        if found != char:
            raise self.fail(self.syntax, f"found {found.decode('latin-1')!r}, expected {char.decode()!r}")
        self.at += 1

    def string(self, longest: int = 4096) -> str:
        self.peek()
        match = _STRING.match(self.data, self.at)
        if not match:
            raise self.fail(self.syntax, "expected a string")
        if match.end() - match.start() > longest:
            raise self.fail(self.syntax, f"a string of {match.end() - match.start()} bytes, expected at most {longest}")
        try:
            text: str = (
                json.loads(match.group().decode("utf-8")) if b"\\" in match.group(1) else match[1].decode("utf-8")
            )
            text.encode("utf-8")
        except UnicodeError:
            raise self.fail(E.HeaderEncodingError, "a string is not UTF-8") from None
        self.at = match.end()
        return text

    def integer(self, kind: type[E.InputError]) -> int:
        """A whole number in 0 .. 2^63 - 1; anything else that starts like a value raises `kind`."""
        self.peek()
        match = _NUMBER.match(self.data, self.at)
        text = match.group() if match else self.data[self.at : self.at + 12]
        if not match or not _INTEGER.fullmatch(text) or int(text) >= LIMIT:
            shown = text[:40].decode("latin-1")
            raise self.fail(kind, f"found {shown!r}, expected a whole number in 0 .. 2^63 - 1")
        self.at = match.end()
        return int(text)

    def integers(self, kind: type[E.InputError], most: int, too_many: type[E.InputError]) -> list[int]:
        out: list[int] = []
        for _ in self.items(b"[", b"]"):
            if len(out) == most:
                raise self.fail(too_many, f"more than {most} numbers in a list")
            out.append(self.integer(kind))
        return out

    def items(self, opening: bytes, closing: bytes) -> Iterator[None]:
        """Stops before each item of a list or object; the caller consumes the item."""
        self.take(opening)
        if self.peek() == closing:
            self.at += 1
            return
        while True:
            yield
            if self.peek() == b",":
                self.at += 1
                continue
            self.take(closing)
            return

    def keys(self) -> Iterator[str]:
        for _ in self.items(b"{", b"}"):
            key = self.string()
            self.take(b":")
            yield key

    def skip(self, depth: int = 16) -> None:
        """Passes over any JSON value of bounded depth."""
        first = self.peek()
        if depth == 0:
            raise self.fail(self.syntax, "nested too deeply")
        if first == b'"':
            self.string()
        elif first == b"{":
            for _ in self.keys():
                self.skip(depth - 1)
        elif first == b"[":
            for _ in self.items(b"[", b"]"):
                self.skip(depth - 1)
        else:
            match = re.compile(rb"true|false|null|-?[0-9][0-9.eE+-]*").match(self.data, self.at)
            if not match:
                raise self.fail(self.syntax, "expected a value")
            self.at = match.end()

    def finish(self) -> None:
        if self.peek():
            raise self.fail(self.syntax, "text after the end")


def open_directory(directory: str | os.PathLike[str], admit: Admit | None = None) -> Directory:
    """Check the index and every header of `directory`. Raises one of the errors of `fast.errors`, and only those; on an
    error nothing stays open."""
    root = Path(directory)
    if not root.is_dir():
        raise E.MissingFileError(f"{root}: not a directory")
    admit = None if admit is None else _at(root, admit)
    names, total = _index(root, admit)
    shards: list[Shard] = []
    tensors: dict[str, TensorInfo] = {}
    try:
        for file in sorted(set(names.values())) if names is not None else [SINGLE_NAME]:
            _add_shard(root, file, names, shards, tensors, admit)
        for name, file in (names or {}).items():
            if name not in tensors:
                raise E.IndexMissingTensorError(f"{root / INDEX_NAME}: {name} is not in {file}, which the index names")
    except BaseException:
        for shard in shards:
            os.close(shard.fd)
        raise
    return Directory(root, tuple(shards), tensors, total)


def _at(root: Path, admit: Admit) -> Admit:
    """Refusals of a name also say where it was found."""

    def named(name: str) -> None:
        try:
            admit(name)
        except E.InputError as error:
            raise type(error)(f"{root}: {error}") from None

    return named


def _add_shard(
    root: Path,
    file: str,
    names: dict[str, str] | None,
    shards: list[Shard],
    tensors: dict[str, TensorInfo],
    admit: Admit | None,
) -> None:
    def check(name: str) -> None:
        if name in tensors:
            other = shards[tensors[name].shard].path.name
            raise E.TensorClaimedTwiceError(f"{root / file}: {name} is also in {other}")
        if names is None:
            if admit is not None:
                admit(name)
        elif name not in names:
            raise E.UnindexedTensorError(f"{root / file}: {name} is in no index")
        elif names[name] != file:
            raise E.TensorClaimedTwiceError(f"{root / file}: {name} belongs to {names[name]} by the index")

    shard = open_shard(root, file)
    shards.append(shard)
    for name, dtype, shape, begin, end in read_header(shard, check):
        tensors[name] = TensorInfo(dtype, shape, len(shards) - 1, shard.data + begin, shard.data + end)


def _index(root: Path, admit: Admit | None) -> tuple[dict[str, str] | None, int | None]:
    """(tensor -> file, metadata.total_size), or (None, None) for a directory of one `model.safetensors`."""
    path = root / INDEX_NAME
    present = sorted(p.name for p in root.iterdir() if p.name.endswith(".safetensors"))
    if not os.path.lexists(path):
        if present == [SINGLE_NAME]:
            return None, None
        raise E.MissingFileError(f"{path}: absent, and the directory is not one {SINGLE_NAME} either")
    fd, size = _open(path)
    with os.fdopen(fd, "rb") as handle:
        if size > HEADER_CAP:
            raise E.IndexTooLargeError(f"{path}: {size} bytes, expected at most {HEADER_CAP}")
        scan = _Scanner(handle.read(HEADER_CAP), str(path), E.IndexSyntaxError)
    names: dict[str, str] | None = None
    total: int | None = None
    seen: set[str] = set()
    for section in scan.keys():  # noqa: SIM118
        if section in seen:
            raise E.IndexDuplicateKeyError(f"{path}: {section!r} given twice")
        seen.add(section)
        if section == "weight_map":
            names = _weight_map(scan, path, admit)
        elif section == "metadata":
            total = _total_size(scan)
        else:
            raise E.IndexSyntaxError(f"{path}: unknown section {section[:80]!r}, expected metadata and weight_map")
    scan.finish()
    if not names:
        raise E.IndexSyntaxError(f"{path}: no weight_map, or an empty one")
    files = set(names.values())
    for file in sorted(files):
        if file not in present:
            raise E.IndexMissingShardError(f"{path}: names {file}, which is not in the directory")
    for file in present:
        if file not in files:
            raise E.UnindexedShardError(f"{root / file}: no tensor of the index lies in it")
    return names, total


def _weight_map(scan: _Scanner, path: Path, admit: Admit | None) -> dict[str, str]:
    names: dict[str, str] = {}
    files: dict[str, str] = {}
    for name in scan.keys():  # noqa: SIM118
        if name in names:
            raise E.IndexDuplicateKeyError(f"{path}: {name} mapped twice")
        if admit is not None:
            admit(name)
        file = scan.string()
        if file not in files:
            plain = file not in (".", "..") and not re.search(r"[/\\\x00-\x1f]", file)
            if not plain or not file.endswith(".safetensors"):
                raise E.PathEscapeError(f"{path}: {name} -> {file[:120]!r}, expected a plain .safetensors file name")
            files[file] = file
        names[name] = files[file]
    return names


def _total_size(scan: _Scanner) -> int | None:
    total = None
    for key in scan.keys():  # noqa: SIM118
        if key == "total_size":
            total = scan.integer(E.IndexSyntaxError)
        else:
            scan.skip()
    return total


def _open(path: Path) -> tuple[int, int]:
    """(descriptor, size) of a regular file; a pipe or device is refused, never waited for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise E.MissingFileError(f"{path}: {error.strerror}") from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise E.NotRegularFileError(f"{path}: not a regular file")
    return fd, status.st_size


def open_shard(root: Path, file: str) -> Shard:
    """Open `root`/`file` and check its length field; a link that leaves `root` is refused."""
    path = root / file
    leads_to = os.path.realpath(path)
    if os.path.dirname(leads_to) != os.path.realpath(root):
        raise E.PathEscapeError(f"{path}: leads to {leads_to}, outside the directory")
    fd, size = _open(path)
    try:
        if size < 8:
            raise E.HeaderTruncatedError(f"{path}: {size} bytes, expected at least 8")
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if not 2 <= length <= HEADER_CAP:
            raise E.HeaderLengthError(f"{path}: header length {length}, expected 2 .. {HEADER_CAP}")
        if 8 + length > size:
            raise E.HeaderLengthError(f"{path}: header length {length} in a file of {size} bytes")
    except BaseException:
        os.close(fd)
        raise
    return Shard(path, fd, size, 8 + length)


def read_header(shard: Shard, admit: Admit | None = None) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    """[(name, dtype, shape, begin, end)], positions relative to the data section, sorted by position."""
    where = str(shard.path)
    data = os.pread(shard.fd, shard.data - 8, 8)
    if len(data) != shard.data - 8:
        raise E.FileChangedError(f"{where}: became shorter while its header was read")
    if data[:1] != b"{":
        raise E.HeaderSyntaxError(f"{where}: header begins with {data[:1]!r}, expected an opening brace")
    scan = _Scanner(data, where, E.HeaderSyntaxError)
    room = shard.size - shard.data
    entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    metadata = False
    for name in scan.keys():  # noqa: SIM118
        if name == "__metadata__":
            if metadata:
                raise E.HeaderDuplicateKeyError(f"{where}: __metadata__ given twice")
            metadata = True
            _metadata(scan)
            continue
        if name in entries:
            raise E.HeaderDuplicateKeyError(f"{where}: tensor {name[:200]!r} given twice")
        if admit is not None:
            admit(name)
        entries[name] = _entry(scan, f"{where}: {name[:200]}", room)
    scan.finish()
    return _tiled([(name, *entry) for name, entry in entries.items()], where, room)


def _metadata(scan: _Scanner) -> None:
    seen: set[str] = set()
    if scan.peek() != b"{":
        raise scan.fail(E.HeaderMetadataError, "__metadata__ is not an object")
    for key in scan.keys():  # noqa: SIM118
        if key in seen:
            raise scan.fail(E.HeaderDuplicateKeyError, f"__metadata__ key {key[:80]!r} given twice")
        seen.add(key)
        if scan.peek() != b'"':
            raise scan.fail(E.HeaderMetadataError, f"__metadata__ value of {key[:80]!r} is not a string")
        scan.string(longest=1 << 20)


def _entry(scan: _Scanner, where: str, room: int) -> tuple[str, tuple[int, ...], int, int]:
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    offsets: list[int] | None = None
    if scan.peek() not in (b"{", b""):
        raise E.HeaderFieldError(f"{where}: not an object (at byte {scan.at})")
    for field in scan.keys():  # noqa: SIM118
        if {"dtype": dtype, "shape": shape, "data_offsets": offsets}.get(field) is not None:
            raise E.HeaderDuplicateKeyError(f"{where}: field {field} given twice")
        if field == "dtype":
            dtype = scan.string()
            if dtype not in WIDTHS:
                raise E.UnknownDtypeError(f"{where}: dtype {dtype[:40]!r}, expected one of {', '.join(WIDTHS)}")
        elif field == "shape":
            shape = tuple(scan.integers(E.BadDimensionError, MAX_RANK, E.RankError))
        elif field == "data_offsets":
            offsets = scan.integers(E.OffsetOrderError, 2, E.HeaderFieldError)
        else:
            raise E.HeaderFieldError(f"{where}: unknown field {field[:80]!r}")
    if dtype is None or shape is None or offsets is None or len(offsets) != 2:
        raise E.HeaderFieldError(f"{where}: expected dtype, shape and two data_offsets")
    begin, end = offsets
    if begin > end:
        raise E.OffsetOrderError(f"{where}: data_offsets [{begin}, {end}] end before they begin")
    if end > room:
        raise E.OffsetRangeError(f"{where}: data_offsets [{begin}, {end}], but the file holds {room} data bytes")
    count = WIDTHS[dtype]
    for n in shape:
        count *= n
        if count >= LIMIT:
            raise E.ShapeOverflowError(f"{where}: shape {list(shape)} of {dtype} does not fit 63 bits")
    if end - begin != count:
        raise E.ByteLengthError(f"{where}: {end - begin} bytes, but {dtype} {list(shape)} has {count}")
    return dtype, shape, begin, end


def _tiled(
    entries: list[tuple[str, str, tuple[int, ...], int, int]], where: str, room: int
) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    entries.sort(key=lambda e: e[3:])
    at = 0
    last = "the start of the data"
    for name, _, _, begin, end in entries:
        if begin < at:
            raise E.OffsetOverlapError(
                f"{where}: {name[:200]} begins at {begin}, inside {last[:200]}, which ends at {at}"
            )
        if begin > at:
            raise E.OffsetGapError(f"{where}: bytes {at} .. {begin} before {name[:200]} belong to no tensor")
        at, last = end, name
    if at != room:
        raise E.TrailingDataError(f"{where}: {room - at} bytes after the last tensor")
    return entries
