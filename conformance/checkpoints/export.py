"""Write a source model as one of the two exports (or as its own `bf16` layout), exactly as `exports.md` describes.

Everything streams: a process holds one weight, or the two that are encoded as one. The directory appears under its name
only when it is complete.
"""

import contextlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conformance.checkpoints.configs import config_json, generation_config_json, hf_quant_config_json
from conformance.checkpoints.source import Source, round_bf16
from conformance.processes import processes
from reference import nvfp4
from reference.errors import OutputError
from reference.layout import TensorSpec, tensors

ROW_BLOCK = 1 << 22
ENCODED = 1 << 17
# The released model then has as many shards as its public copies.
SHARD_BYTES = {"nvidia": 204_419_110_596 // 33 + 1, "libertai": 194_644_803_576 // 120 + 1, "bf16": 5 << 30}
LEAST_SHARDS = 3
Progress = Callable[[str, int], None]


def write_export(
    source: Source,
    raw: dict[str, Any],
    directory: Path,
    export: str,
    progress: Progress,
    *,
    companions: Sequence[Path] = (),
    workers: int = 1,
) -> None:
    """Write `source` (whose config.json without quantization is `raw`) to `directory`, which must not hold anything.

    `progress(name, bytes)` is called for each piece written, with the name at a tensor's first piece. `companions` are
    copied beside the weights. More than one of `workers` are processes (`conformance.processes`), which a source that
    can be pickled may have; the files do not depend on them. Raises `OutputError`, and whatever the source raises.
    """
    directory = Path(directory).absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise OutputError(f"{directory}: exists and is not an empty directory")
    stored = {spec.name: spec for spec in tensors(source.config, export, source.gate_rank)}
    shards = plan_shards(list(stored.values()), export)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"{partial}: cannot be made: {error.strerror or error}") from None
    try:
        with contextlib.closing(Writer(partial, shards)) as writer:
            for name, size in _written(Work(source, export, stored, writer.files), workers):
                progress(name if writer.count(name, size) else "", size)
            writer.finish()
        _write_index(partial, shards)
        (partial / "config.json").write_text(config_json(raw, export), encoding="utf-8")
        (partial / "generation_config.json").write_text(generation_config_json(raw), encoding="utf-8")
        if export == "nvidia":
            (partial / "hf_quant_config.json").write_text(hf_quant_config_json(raw), encoding="utf-8")
        for path in companions:
            shutil.copyfile(path, partial / path.name)
        partial.rename(directory)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise OutputError(f"{directory}: cannot be written: {error.strerror or error}") from None
        if isinstance(error, BrokenProcessPool):
            raise OutputError(f"{directory}: cannot be written: a process that makes it was ended") from None
        raise


class Piece(NamedTuple):
    """What is made at once: rows `start` .. `stop` of one weight, or all of gate and up that share an amax."""

    specs: tuple[TensorSpec, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Work:
    """How to make any piece of an export; `stored` are its tensors by name."""

    source: Source
    export: str
    stored: dict[str, TensorSpec]
    files: "Files"

    def pieces(self) -> Iterator[Piece]:
        """All of them, in layout order."""
        gate: TensorSpec | None = None
        for spec in tensors(self.source.config, "bf16", self.source.gate_rank):
            if self.stored[spec.name].dtype != "U8":
                yield from (Piece((spec,), *block) for block in _blocks(spec))
            elif self.export == "nvidia" and spec.name.endswith("gate_proj.weight"):
                gate = spec
            elif gate is not None and spec.name.endswith("up_proj.weight"):
                # ModelOpt quantises gate and up of one expert as one fused tensor: one amax, one weight_scale_2.
                assert spec.name == gate.name.replace("gate_proj", "up_proj"), (gate.name, spec.name)
                yield Piece((gate, spec), 0, spec.shape[0])
                gate = None
            else:
                yield Piece((spec,), 0, spec.shape[0])
        assert gate is None

    def write(self, piece: Piece) -> list[tuple[str, int]]:
        """Makes a piece and writes it -> (stored name, bytes), each with its part of the file."""
        done = []
        for name, at, data in self._make(piece):
            self.files.write(name, at, data)
            done.append((name, len(data)))
        return done

    def _make(self, piece: Piece) -> Iterator[tuple[str, int, bytes]]:
        """(stored name, first byte within the tensor, bytes)."""
        specs, start, stop = piece
        dtype = self.stored[specs[0].name].dtype
        # A source may hand out one buffer again and again.
        values = [self.source.rows(spec, start, stop).copy() for spec in specs[:-1]]
        values.append(self.source.rows(specs[-1], start, stop))
        if dtype != "U8":
            spec, data = specs[0], _plain(values[0], dtype)
            yield spec.name, start * (self.stored[spec.name].nbytes // spec.shape[0]), data
            return
        amax = max(_amax(part, spec.name) for part, spec in zip(values, specs, strict=True))
        for spec, part in zip(specs, values, strict=True):
            codes, scales, scale_2 = _encode(part, amax, spec.name)
            yield spec.name, 0, codes
            yield f"{spec.name}_scale", 0, scales
            yield f"{spec.name}_scale_2", 0, np.array(scale_2, "<f4").tobytes()
            if (name := f"{spec.name.removesuffix('weight')}input_scale") in self.stored:
                assert spec.layer is not None
                scale = self.source.input_scale(spec.layer, "down" if "down_proj" in name else "gate_up")
                yield name, 0, np.array(scale, "<f4").tobytes()


def _written(work: Work, workers: int) -> Iterator[tuple[str, int]]:
    """(stored name, bytes) of everything, as it is written."""
    if workers == 1:
        for piece in work.pieces():
            yield from work.write(piece)
        return
    with processes(workers, _begin, work) as pool:
        # Neither every piece of a large model at once nor a process without one.
        waiting: deque[Future[list[tuple[str, int]]]] = deque()
        for piece in work.pieces():
            waiting.append(pool.submit(_write_piece, piece))
            if len(waiting) > 4 * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


_work: list[Work] = []
"""In a process of `_written`: what it does."""


def _begin(work: Work) -> None:
    _work[:] = [work]


def _write_piece(piece: Piece) -> list[tuple[str, int]]:
    return _work[0].write(piece)


def _blocks(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    width = max(1, int(np.prod(spec.shape[1:], dtype=np.int64)))
    step = max(1, ROW_BLOCK // width)
    for start in range(0, spec.shape[0], step):
        yield start, min(start + step, spec.shape[0])


def _amax(values: np.ndarray, name: str) -> float:
    found = float(max(values.max(), -values.min()))
    if not math.isfinite(found):
        nvfp4.encode(values, name=name)  # raises, and says which value it is
    return found


def _encode(values: np.ndarray, amax: float, name: str) -> tuple[bytes, bytes, np.float32]:
    """`nvfp4.encode`, a few rows at a time: they need no fresh memory."""
    step = max(1, ENCODED // values.shape[1])
    starts = range(0, len(values), step)
    parts = [nvfp4.encode(values[start : start + step], amax=amax, name=name) for start in starts]
    packed, scale = (b"".join(part[i].tobytes() for part in parts) for i in (0, 1))
    return packed, scale, parts[0].scale_2


def _plain(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    return (round_bf16(values).view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()


def plan_shards(specs: list[TensorSpec], export: str) -> list[list[TensorSpec]]:
    """Tensors per shard: about equal bytes, in layout order, nvidia's MTP block first.

    A cut waits, for up to half a shard, until it falls right behind the codes of a packed weight, so that codes and
    scales lie in different shards.
    """
    if export == "nvidia":
        layer = max((spec.layer for spec in specs if spec.layer is not None), default=None)
        specs = sorted(specs, key=lambda spec: spec.layer != layer)
    total = sum(spec.nbytes for spec in specs)
    count = max(LEAST_SHARDS, -(-total // SHARD_BYTES[export]))
    shards: list[list[TensorSpec]] = [[]]
    done = waiting = 0
    for spec in specs:
        shards[-1].append(spec)
        done += spec.nbytes
        if len(shards) < count and done * count >= total * len(shards):
            waiting += spec.nbytes
            if spec.dtype == "U8" or waiting * count * 2 > total:
                shards.append([])
                waiting = 0
    return [shard for shard in shards if shard]


class Files:
    """Where in which shard file every tensor lies: name -> (path, first byte, bytes). Files are opened at first use."""

    def __init__(self, places: dict[str, tuple[Path, int, int]]) -> None:
        self.places = places
        self._open: dict[Path, int] = {}

    def write(self, name: str, at: int, data: bytes) -> None:
        """Bytes `at` .. of a tensor."""
        path, first, size = self.places[name]
        assert at + len(data) <= size, name
        if path not in self._open:
            self._open[path] = os.open(path, os.O_WRONLY)
        _write(self._open[path], data, first + at)

    def close(self) -> None:
        for file in self._open.values():
            os.close(file)
        self._open = {}


class Writer:
    """Shard files with their headers, to be filled through `files` by tensors in any order; counts what was written."""

    def __init__(self, directory: Path, shards: list[list[TensorSpec]]) -> None:
        places: dict[str, tuple[Path, int, int]] = {}
        for number, shard in enumerate(shards):
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            offset = 0
            # Wider items first, as the safetensors library orders them, keeps every tensor aligned.
            ordered = sorted(shard, key=lambda spec: (-_item(spec), spec.name))
            for spec in ordered:
                header[spec.name] = {
                    "dtype": spec.dtype,
                    "shape": list(spec.shape),
                    "data_offsets": [offset, offset + spec.nbytes],
                }
                offset += spec.nbytes
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            path = directory / shard_name(number, len(shards))
            with path.open("xb", buffering=0) as file:
                _write(file.fileno(), len(text).to_bytes(8, "little") + text, 0)
                os.ftruncate(file.fileno(), 8 + len(text) + offset)
            for spec in ordered:
                places[spec.name] = (path, 8 + len(text) + header[spec.name]["data_offsets"][0], spec.nbytes)
        self.files = Files(places)
        self._missing = {name: size for name, (_, _, size) in places.items()}

    def count(self, name: str, size: int) -> bool:
        """So many bytes of a tensor are written: whether they are its first."""
        first = self._missing[name] == self.files.places[name][2]
        self._missing[name] -= size
        return first

    def finish(self) -> None:
        """Every tensor must be complete."""
        unfinished = [name for name, missing in self._missing.items() if missing]
        assert not unfinished, unfinished[:3]

    def close(self) -> None:
        self.files.close()


def _item(spec: TensorSpec) -> int:
    return {"F32": 4, "BF16": 2}.get(spec.dtype, 1)


def _write(file: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, position)
        view, position = view[written:], position + written


def shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_index(directory: Path, shards: list[list[TensorSpec]]) -> None:
    weight_map = {spec.name: shard_name(n, len(shards)) for n, shard in enumerate(shards) for spec in shard}
    total = sum(spec.nbytes for shard in shards for spec in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
