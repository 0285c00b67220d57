"""`golden/manifest.json`, and reading and writing the files it lists."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from conformance.goldens.case import DTYPES, ROW_DIGEST_BYTES, Case, Made, plain_bytes
from conformance.trace import FORMAT as TRACE_FORMAT
from reference.errors import InputError
from reference.shard import Shard, read_header

FORMAT = "glm53-golden/1"
SPEC = f"glm5_next as of transformers 5.24; {TRACE_FORMAT}"
NAME = "manifest.json"
FILE_LIMIT, TOTAL_LIMIT = 1_000_000, 8_000_000
DIGESTS = "row digests"


class ManifestError(InputError):
    """The manifest is missing, unreadable, edited or of another format."""


class SizeError(InputError):
    """Golden files grew past what a repository should carry."""


@dataclass(frozen=True)
class Entry:
    """One tensor in the manifest: `stored` is "all", a list of rows, "same as NAME" or "no"."""

    dtype: str
    logical: str
    shape: tuple[int, ...]
    sha256: str
    stored: str | tuple[int, ...]


@dataclass
class Record:
    """One case in the manifest; `lines` counts those of a text."""

    settings: dict[str, Any]
    seed: int
    file: str = ""
    file_sha256: str = ""
    bytes: int = 0
    sha256: str = ""
    lines: int = 0
    tensors: dict[str, Entry] = field(default_factory=dict)


@dataclass
class Manifest:
    reason: str
    history: list[str]
    versions: dict[str, str]
    cases: dict[str, Record]

    def digest(self) -> str:
        """One hash over what every case holds: equal on every machine that agrees."""
        lines = (f"{name} {record.sha256}\n" for name, record in sorted(self.cases.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def versions() -> dict[str, str]:
    return {
        "glm53-conformance": importlib.metadata.version("glm53-conformance"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "machine": platform.machine(),
    }


def record(case: Case, made: Made) -> Record:
    """The manifest's entry for what a case made; file hashes are filled in by `write`."""
    entries: dict[str, Entry] = {}
    seen: dict[tuple[str, tuple[int, ...]], str] = {}
    for name, item in made.tensors.items():
        sha256, shape = item.sha256(), item.value.shape
        twin = seen.setdefault((sha256, shape), name)
        stored: str | tuple[int, ...] = "all" if item.rows is None else item.rows or "no"
        if twin != name and case.suffix:
            stored = f"same as {twin}"
        entries[name] = Entry(item.dtype, item.logical or item.dtype, shape, sha256, stored)
    total = hashlib.sha256("".join(f"{line}\n" for line in made.lines).encode())
    for name, entry in entries.items():
        total.update(f"{name} {entry.dtype} {list(entry.shape)} {entry.sha256}\n".encode())
    return Record(case.settings, case.seed, case.file, sha256=total.hexdigest(), lines=len(made.lines), tensors=entries)


def contents(case: Case, made: Made, kept: Record) -> bytes:
    """The bytes of a case's file. Row hashes of all partly stored tensors follow one another in one tensor."""
    if case.suffix == ".txt":
        return "".join(f"{line}\n" for line in made.lines).encode()
    arrays: dict[str, np.ndarray] = {}
    digests = []
    for name, entry in kept.tensors.items():
        item = made.tensors[name]
        if entry.stored == "all":
            arrays[name] = item.value
        elif isinstance(entry.stored, tuple):
            arrays[name] = item.value[list(entry.stored)]
            digests.append(item.row_digests())
    if digests:
        arrays[DIGESTS] = np.concatenate(digests)
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "case": case.name}}
    data, offset = [], 0
    names = {dtype: name for name, dtype in DTYPES.items()}
    for name, array in arrays.items():
        data.append(plain_bytes(array))
        end = offset + len(data[-1])
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data)


class Stored:
    """The tensors of one golden file and the hashes of their rows."""

    def __init__(self, path: Path, entries: dict[str, Entry]) -> None:
        header = read_header(path)
        self._shard, self._entries = Shard(header), header.entries
        self._rows: dict[str, tuple[int, int]] = {}
        start = 0
        for name, entry in entries.items():
            if isinstance(entry.stored, tuple):
                self._rows[name] = (start, start + entry.shape[0])
                start = self._rows[name][1]

    def array(self, name: str) -> np.ndarray | None:
        if name not in self._entries:
            return None
        entry = self._entries[name]
        return np.frombuffer(self._shard.data(name), DTYPES[entry.dtype]).reshape(entry.shape)

    def digests(self, name: str) -> np.ndarray | None:
        """[rows, 8] of a partly stored tensor."""
        every = self.array(DIGESTS)
        if name not in self._rows or every is None:
            return None
        begin, end = self._rows[name]
        return every.reshape(-1, ROW_DIGEST_BYTES)[begin:end]


def text_of(manifest: Manifest) -> str:
    """The manifest as stored: one line per tensor, and last a hash of all that stands before it."""
    head = {
        "format": FORMAT,
        "spec": SPEC,
        "command": 'glm53 golden regen --reason "..."',
        "reason": manifest.reason,
        "history": manifest.history,
        "versions": manifest.versions,
        "digest": manifest.digest(),
    }
    lines = ["{", *(f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()), ' "cases": {']
    for number, (name, kept) in enumerate(manifest.cases.items()):
        lines.append(f"  {json.dumps(name)}: {{")
        about = {
            "settings": kept.settings,
            "seed": kept.seed,
            "command": f'glm53 golden regen --only {name} --reason "..."',
            "file": kept.file,
            "file_sha256": kept.file_sha256,
            "bytes": kept.bytes,
            "sha256": kept.sha256,
            "lines": kept.lines,
        }
        lines.extend(f"   {json.dumps(key)}: {json.dumps(value)}," for key, value in about.items())
        lines.append('   "tensors": {')
        for tensor, entry in kept.tensors.items():
            stored = list(entry.stored) if isinstance(entry.stored, tuple) else entry.stored
            row = [entry.dtype, entry.logical, list(entry.shape), entry.sha256, stored]
            lines.append(f"    {json.dumps(tensor)}: {json.dumps(row)},")
        lines[-1] = lines[-1].removesuffix(",")
        lines += ["   }", "  }" + ("," if number + 1 < len(manifest.cases) else "")]
    lines.append(" },")
    body = "\n".join(lines)
    return f'{body}\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def read(directory: Path) -> Manifest:
    """Raises `ManifestError`, for an edited manifest too."""
    path = directory / NAME
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text)
    except FileNotFoundError:
        raise ManifestError(f"{path}: missing; `glm53 golden regen` writes it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"{path}: cannot be read: {error}") from None
    body = text.rpartition('\n "sha256": ')[0]
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ManifestError(f"{path}: not a {FORMAT} manifest")
    if raw.get("sha256") != hashlib.sha256(body.encode()).hexdigest():
        raise ManifestError(f"{path}: edited: its text does not have the sha256 at its end")
    cases = {}
    for name, about in raw["cases"].items():
        tensors = {
            tensor: Entry(dtype, logical, tuple(shape), sha256, stored if isinstance(stored, str) else tuple(stored))
            for tensor, (dtype, logical, shape, sha256, stored) in about["tensors"].items()
        }
        cases[name] = Record(
            about["settings"],
            about["seed"],
            about["file"],
            about["file_sha256"],
            about["bytes"],
            about["sha256"],
            about["lines"],
            tensors,
        )
    return Manifest(raw["reason"], raw["history"], raw["versions"], cases)
