"""Read a checkpoint directory into memory, change it, write it back: how tests make the files that must be refused.

Nothing here checks anything, so that every kind of damage can be written.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """One tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    shard: str

    def with_byte(self, position: int, value: int) -> "Stored":
        """The same tensor with one byte replaced; negative positions count from the end."""
        data = bytearray(self.data)
        data[position] = value
        return replace(self, data=bytes(data))


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a well-formed safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), content[start:]


def join(header: dict[str, Any] | bytes, data: bytes, length: int | None = None) -> bytes:
    """The bytes of a safetensors file; `length` replaces the true header length."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def read_tensors(directory: Path) -> dict[str, Stored]:
    """All tensors of a well-formed directory, in file order."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        header, data = split(path)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), data[begin:end], path.name)
    return tensors


def pack(tensors: dict[str, Stored]) -> tuple[dict[str, Any], bytes]:
    """Header and data of the given tensors, one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, tensor in tensors.items():
        end = len(data) + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [len(data), end]}
        data += tensor.data
    return header, bytes(data)


def write_tensors(directory: Path, tensors: dict[str, Stored]) -> None:
    """Replace all shards and the index; every tensor goes to the shard it names."""
    for path in directory.glob("*.safetensors"):
        path.unlink()
    for shard in sorted({tensor.shard for tensor in tensors.values()}):
        part = {name: tensor for name, tensor in tensors.items() if tensor.shard == shard}
        (directory / shard).write_bytes(join(*pack(part)))
    total = sum(len(tensor.data) for tensor in tensors.values())
    weight_map = {name: tensor.shard for name, tensor in sorted(tensors.items())}
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def change_tensors(directory: Path, **changes: Stored | None) -> None:
    """As `write_tensors` of what is there, with tensors replaced, added or (None) removed. Names keep their dots."""
    tensors = read_tensors(directory) | changes
    write_tensors(directory, {name: tensor for name, tensor in tensors.items() if tensor is not None})


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
