"""Write a source model as one of the two exports (or as its own `bf16` layout), exactly as `exports.md` describes.

Everything streams: at most one weight is in memory. The directory appears under its name only when it is complete.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conformance.checkpoints.configs import config_json, generation_config_json, hf_quant_config_json
from conformance.checkpoints.source import Source, round_bf16
from reference import nvfp4
from reference.errors import OutputError
from reference.layout import TensorSpec, tensors

ROW_BLOCK = 1 << 22
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
) -> None:
    """Write `source` (whose config.json without quantization is `raw`) to `directory`, which must not hold anything.

    `progress(name, bytes)` is called for each piece written, with the name at a tensor's first piece. `companions` are
    copied beside the weights. Raises `OutputError`, and whatever the source raises.
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
            for name, data in _stored_tensors(source, export, stored):
                first = True
                for part in data:
                    writer.append(name, part)
                    progress(name if first else "", len(part))
                    first = False
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
        raise


def _stored_tensors(
    source: Source, export: str, stored: dict[str, TensorSpec]
) -> Iterator[tuple[str, Iterator[bytes]]]:
    """(name, pieces of bytes) of every stored tensor, one source weight after the other."""
    shared: dict[str, float] = {}
    for spec in tensors(source.config, "bf16", source.gate_rank):
        if stored[spec.name].dtype != "U8":
            yield spec.name, _plain(source, spec, stored[spec.name].dtype)
            continue
        amax = None
        if export == "nvidia" and spec.name.endswith(("gate_proj.weight", "up_proj.weight")):
            # ModelOpt quantises gate and up of one expert as one fused tensor: one amax, one weight_scale_2.
            stem = spec.name.removesuffix("gate_proj.weight").removesuffix("up_proj.weight")
            if stem not in shared:
                both = [_named(spec, f"{stem}{half}_proj.weight") for half in ("gate", "up")]
                shared = {stem: max(_amax(source, half) for half in both)}
            amax = shared[stem]
        encoded = nvfp4.encode(source.rows(spec, 0, spec.shape[0]), amax=amax, name=spec.name)
        yield spec.name, iter((encoded.packed.tobytes(),))
        yield f"{spec.name}_scale", iter((encoded.scale.tobytes(),))
        yield f"{spec.name}_scale_2", iter((np.array(encoded.scale_2, "<f4").tobytes(),))
        if (name := f"{spec.name.removesuffix('weight')}input_scale") in stored:
            assert spec.layer is not None
            scale = source.input_scale(spec.layer, "down" if "down_proj" in name else "gate_up")
            yield name, iter((np.array(scale, "<f4").tobytes(),))


def _named(spec: TensorSpec, name: str) -> TensorSpec:
    return TensorSpec(name, spec.role, spec.family, spec.layer, spec.expert, spec.dtype, spec.shape)


def _blocks(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    width = max(1, int(np.prod(spec.shape[1:], dtype=np.int64)))
    step = max(1, ROW_BLOCK // width)
    for start in range(0, spec.shape[0], step):
        yield start, min(start + step, spec.shape[0])


def _amax(source: Source, spec: TensorSpec) -> float:
    return max(float(np.abs(source.rows(spec, start, stop)).max()) for start, stop in _blocks(spec))


def _plain(source: Source, spec: TensorSpec, dtype: str) -> Iterator[bytes]:
    for start, stop in _blocks(spec):
        values = source.rows(spec, start, stop)
        if dtype == "F32":
            yield values.astype("<f4").tobytes()
        else:
            yield (round_bf16(values).view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()


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


class Writer:
    """Shard files with their headers, filled tensor by tensor in any order of tensors."""

    def __init__(self, directory: Path, shards: list[list[TensorSpec]]) -> None:
        self._files: list[int] = []
        self._at: dict[str, tuple[int, int]] = {}
        self._end: dict[str, int] = {}
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
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            self._files.append(file)
            _write(file, len(text).to_bytes(8, "little") + text, 0)
            os.ftruncate(file, 8 + len(text) + offset)
            for spec in ordered:
                begin, end = header[spec.name]["data_offsets"]
                self._at[spec.name] = (file, 8 + len(text) + begin)
                self._end[spec.name] = 8 + len(text) + end

    def append(self, name: str, data: bytes) -> None:
        """The next bytes of a tensor."""
        file, position = self._at[name]
        assert position + len(data) <= self._end[name], name
        _write(file, data, position)
        self._at[name] = (file, position + len(data))

    def finish(self) -> None:
        """Every tensor must be complete."""
        unfinished = [name for name, (_, position) in self._at.items() if position != self._end[name]]
        assert not unfinished, unfinished[:3]

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


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
