"""A checkpoint directory: config, shards, index and the layout of an export, all checked against each other.

`scan` reads headers only and collects every problem; `open_checkpoint` is a scan that must find none. Which export a
directory holds follows from the dtypes of its tensors, never from names of files, repositories or keys of the config.
What the spec lets vary (`layout.tensors`) is accepted as it is stored; `departures` lists it.
"""

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from reference import errors as e
from reference import layout, nvfp4, values
from reference.config import ModelConfig, check_hf_quant_config, load
from reference.fields import decode_json
from reference.shard import Entry, Shard, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PROBLEM_CAP = 10_000
INDEX_CAP = 100_000_000
CHECKED_AT_ONCE = 1 << 24


@dataclass
class Files:
    """The tensors of a directory by name, and everything wrong with the files that hold them."""

    directory: Path
    entries: dict[str, Entry] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    total_size: int | None = None
    problems: list[e.InputError] = field(default_factory=list)
    # Tensors that the index places in a shard that could not be read: one problem of the shard, not one of each.
    unread: set[str] = field(default_factory=set)

    def data(self, name: str) -> memoryview:
        return self.shards[name].data(name)


@dataclass
class Scan:
    """What a directory holds. `problems` is empty exactly when `open_checkpoint` accepts it.

    `specs` are the tensors as they are stored here or ought to be; all of them where `complete`.
    """

    files: Files
    config: ModelConfig | None
    export: str | None
    gate_rank: int | None
    specs: dict[str, layout.TensorSpec]
    problems: list[e.InputError]
    complete: bool = False


def read_files(directory: str | Path) -> Files:
    """Read and cross-check index and shard headers. Nothing is raised; see `Files.problems`."""
    files = Files(Path(directory))
    try:
        names, weight_map = _index(files)
    except e.InputError as error:
        files.problems.append(error)
        return files
    broken: set[str] = set()
    for file_name in names:
        path = files.directory / file_name
        try:
            _check_path(files.directory, file_name)
            header = read_header(path)
        except e.InputError as error:
            files.problems.append(error)
            broken.add(file_name)
            continue
        shard = Shard(header)
        for name, entry in header.entries.items():
            if name in files.entries:
                files.problems.append(
                    e.TwoShardsError(f"{path}: tensor {e.show(name)} is also in {files.shards[name].header.path.name}")
                )
                continue
            files.entries[name] = entry
            files.shards[name] = shard
            if weight_map is not None and name not in weight_map:
                files.problems.append(e.UnindexedTensorError(f"{path}: tensor {e.show(name)} is not in {INDEX}"))
    for name, file_name in (weight_map or {}).items():
        found = files.shards.get(name)
        if found is None and file_name in broken:
            files.unread.add(name)
        elif found is None or found.header.path.name != file_name:
            where = f", it is in {found.header.path.name}" if found else ""
            files.problems.append(
                e.AbsentTensorError(f"{files.directory / file_name}: does not hold tensor {e.show(name)}{where}")
            )
    return files


def _index(files: Files) -> tuple[list[str], dict[str, str] | None]:
    """Shard names in order, and tensor -> shard where there is an index."""
    directory = files.directory
    if not directory.is_dir():
        raise e.IndexFileError(f"{directory}: not a directory")
    path = directory / INDEX
    present = sorted(p.name for p in directory.glob("*.safetensors"))
    if not path.is_file():
        if present == [SINGLE]:
            return present, None
        raise e.IndexFileError(f"{path}: missing, and {SINGLE} is not the only shard here ({len(present)} found)")
    try:
        if path.stat().st_size > INDEX_CAP:
            raise e.IndexFileError(f"{path}: {path.stat().st_size} bytes, at most {INDEX_CAP}")
        raw = decode_json(path.read_bytes())
    except OSError as error:
        raise e.IndexFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except e.HeaderDuplicateKeyError as error:
        raise e.IndexDuplicateKeyError(f"{path}: {error}") from None
    except e.ShardError as error:
        raise e.IndexFileError(f"{path}: {error}") from None
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise e.IndexFileError(f"{path}: weight_map is not a non-empty object")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str):
            raise e.IndexFileError(f"{path}: weight_map[{e.show(name)}] is {e.show(file_name)}, expected a file name")
    strange = next((key for key in raw if key not in ("weight_map", "metadata")), None)
    if strange is not None:
        raise e.IndexFileError(f"{path}: section {e.show(strange)}, expected weight_map and metadata")
    metadata = raw.get("metadata", {})
    if not isinstance(metadata, dict):
        raise e.IndexFileError(f"{path}: metadata is {e.show(metadata)}, expected an object")
    total = metadata.get("total_size")
    if "total_size" in metadata and (type(total) is not int or not 0 <= total < 2**63):
        raise e.IndexFileError(f"{path}: metadata.total_size is {e.show(total)}, expected a whole number below 2^63")
    files.total_size = total
    names = sorted(set(weight_map.values()))
    files.problems.extend(
        e.StrayShardError(f"{directory / name}: not named by {INDEX}") for name in present if name not in names
    )
    return names, weight_map


def _check_path(directory: Path, file_name: str) -> None:
    path = directory / file_name
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors", file_name):
        raise e.ShardPathError(f"{directory / INDEX}: {e.show(file_name)} is not a plain .safetensors file name")
    leads_to = os.path.realpath(path)
    if os.path.dirname(leads_to) != os.path.realpath(directory):
        raise e.ShardPathError(f"{path}: leads out of the directory to {leads_to}")
    if not path.exists():
        raise e.MissingShardError(f"{path}: named by {INDEX}, not on disk")


def detect_export(entries: dict[str, Entry], mtp_layer: int | None) -> str:
    """ "nvidia" or "libertai", by majority of the five dtype rules that differ between them.

    Within a rule the commoner dtype speaks, so that single tensors do not change the verdict. Where as many rules
    speak for either, their tensors are counted; a tie of these is LibertAI. Raises `ExportError` if nothing is packed.
    """
    votes: dict[str, list[str]] = {}
    packed = False
    for name, entry in entries.items():
        packed |= entry.dtype == "U8"
        rule, dtypes = _export_rule(name, mtp_layer)
        if entry.dtype in dtypes:
            votes.setdefault(rule, []).append(dtypes[entry.dtype])
    if not packed:
        raise e.ExportError("no packed (U8) tensor: not an NVFP4 export")
    spoken = ["nvidia" if 2 * found.count("nvidia") > len(found) else "libertai" for found in votes.values()]
    if 2 * spoken.count("nvidia") == len(spoken):
        spoken = [export for found in votes.values() for export in found]
    return "nvidia" if 2 * spoken.count("nvidia") > len(spoken) else "libertai"


def _export_rule(name: str, mtp_layer: int | None) -> tuple[str, dict[str, str]]:
    """The rule a tensor speaks for, and which export its dtype means; ("", {}) for one that is alike in both."""
    role, layer, _ = layout.classify(name)
    leaf = role.removeprefix(f"{layout.TEXT}layers.N.")
    if leaf.endswith("_conv1d.weight"):
        return "conv1d", {"F32": "nvidia", "BF16": "libertai"}
    if leaf.startswith("hc_") and leaf.endswith(("_base", "_scale")):
        return "mHC base and scale", {"BF16": "nvidia", "F32": "libertai"}
    if leaf in ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"):
        return "dense MLP", {"U8": "nvidia", "BF16": "libertai"}
    if leaf.startswith("mlp.experts.E."):
        if leaf.endswith(".input_scale"):
            return "input_scale", {"F32": "nvidia"}
        if layer == mtp_layer and leaf.endswith(".weight"):
            return "MTP experts", {"BF16": "nvidia", "U8": "libertai"}
    return "", {}


def scan(directory: str | Path) -> Scan:
    """Headers, index, config and layout of a directory, with every problem found. Raises nothing."""
    files = read_files(directory)
    result = Scan(files, None, None, None, {}, list(files.problems))
    quantization = files.directory / "hf_quant_config.json"
    try:
        result.config = load(directory)
        if quantization.exists():
            check_hf_quant_config(quantization, result.config)
    except e.InputError as error:
        result.problems.append(error)
    foreign = [name for name in files.entries if name.rsplit(".", 1)[-1] in layout.FOREIGN_SUFFIXES]
    result.problems.extend(
        e.ForeignFormatError(
            f"{files.shards[name].header.path}: tensor {e.show(name)} belongs to "
            "compressed-tensors, whose global scale divides; expected ModelOpt's weight, weight_scale, weight_scale_2"
        )
        for name in foreign
    )
    if result.config is None or not files.entries:
        return result
    try:
        result.export = detect_export(files.entries, result.config.text.mtp_layer)
        result.gate_rank = find_gate_rank(files.entries, result.config)
        check_layout(result, set(foreign))
    except e.InputError as error:
        result.problems.append(type(error)(f"{files.directory}: {error}"))
    return result


def find_gate_rank(entries: dict[str, Entry], config: ModelConfig) -> int:
    """Rows of the first `f_a_proj`; the head width where no KDA layer has one (then the layout reports it missing)."""
    for layer in config.text.kda_layers:
        entry = entries.get(f"{layout.TEXT}layers.{layer}.self_attn.f_a_proj.weight")
        if entry is not None and len(entry.shape) == 2:
            return entry.shape[0]
    return config.text.linear_head_dim


def check_layout(found: Scan, ignore: Collection[str] = ()) -> None:
    """Compare what is stored with what the export stores and with what may be stored in its place: fills `specs` and
    `problems`. Stops after `PROBLEM_CAP` missing tensors."""
    files, config, export, gate_rank = found.files, found.config, found.export, found.gate_rank
    assert config is not None
    assert export is not None
    assert gate_rank is not None
    specs, problems = found.specs, found.problems
    missing = 0
    dtypes = {name: entry.dtype for name, entry in files.entries.items()}
    for spec in layout.tensors(config, export, gate_rank, dtypes):
        specs[spec.name] = spec
        entry = files.entries.get(spec.name)
        if entry is None and spec.name in files.unread:
            continue
        if entry is None:
            missing += 1
            problems.append(_missing(files, spec, export))
            if missing == PROBLEM_CAP:
                problems.append(e.MissingTensorError(f"{files.directory}: stopped after {missing} missing tensors"))
                return
            continue
        where = f"{files.shards[spec.name].header.path}: tensor {spec.name}"
        if entry.dtype != spec.dtype:
            problems.append(e.TensorDtypeError(f"{where}: {entry.dtype}, expected {spec.dtype} in the {export} export"))
        elif not right_shape(entry, spec):
            problems.append(
                e.TensorShapeError(f"{where}: shape {list(entry.shape)}, expected {list(spec.shape)} from the config")
            )
    found.complete = True
    for name in files.entries:
        if name not in specs and name not in ignore:
            problems.append(
                e.UnknownTensorError(
                    f"{files.shards[name].header.path}: tensor {e.show(name)} is not part of the {export} export"
                )
            )


def right_shape(entry: Entry, spec: layout.TensorSpec) -> bool:
    """A scale of one element may have shape [1]."""
    return entry.shape == spec.shape or (not spec.shape and entry.shape == (1,))


def departures(found: Scan) -> list[e.LayoutError]:
    """What is accepted and yet not as the export stores it: dtypes of the other export, shape [1], and `input_scale`
    where the export has none. `MissingScaleError` stands for one that it has and that is absent."""
    if not found.complete:
        return []
    assert found.config is not None
    assert found.export is not None
    assert found.gate_rank is not None
    entries = found.files.entries
    published = {spec.name: spec for spec in layout.tensors(found.config, found.export, found.gate_rank)}
    packs = {spec.packed for spec in published.values()}
    listed: list[e.LayoutError] = []
    for name, spec in found.specs.items():
        usual, entry = published.get(name), entries.get(name)
        if entry is None or entry.dtype != spec.dtype or not right_shape(entry, spec):
            continue
        where = f"{found.files.shards[name].header.path}: tensor {name}"
        if entry.shape != spec.shape:
            listed.append(e.TensorShapeError(f"{where}: shape [1], expected []"))
        if usual is not None and usual.dtype != spec.dtype:
            listed.append(e.TensorDtypeError(f"{where}: {spec.dtype}, expected {usual.dtype}"))
        elif usual is None and spec.packed in packs:
            listed.append(e.UnknownTensorError(f"{where}: not part of the export"))
    for name, spec in published.items():
        if name not in found.specs and name not in entries and found.specs[str(spec.packed)].packed is not None:
            listed.append(_missing(found.files, spec, found.export))
    return listed


def _missing(files: Files, spec: layout.TensorSpec, export: str) -> e.LayoutError:
    who = f" (layer {spec.layer}, expert {spec.expert})" if spec.expert is not None else ""
    if spec.name != spec.packed and spec.packed in files.entries:
        return e.MissingScaleError(
            f"{files.directory}: {spec.packed} is packed, but {spec.name.rsplit('.', 1)[-1]} is missing{who}"
        )
    return e.MissingTensorError(f"{files.directory}: tensor {spec.name} is missing from the {export} export{who}")


class Checkpoint:
    """An accepted checkpoint. Data is memory-mapped lazily; what `weight` returns is always an array of its own."""

    def __init__(self, found: Scan) -> None:
        assert found.config is not None
        assert found.export is not None
        assert found.gate_rank is not None
        self.directory = found.files.directory
        self.config = found.config
        self.export = found.export
        self.gate_rank = found.gate_rank
        self.specs = found.specs
        self._files = found.files

    def names(self) -> tuple[str, ...]:
        """All tensor names, in layout order."""
        return tuple(self.specs)

    def has(self, name: str) -> bool:
        return name in self.specs

    def dtype(self, name: str) -> str:
        return self._spec(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the values: for a packed weight the logical one, [out, in]."""
        spec = self._spec(name)
        return (spec.shape[0], 2 * spec.shape[1]) if spec.dtype == "U8" else spec.shape

    def raw(self, name: str) -> tuple[str, tuple[int, ...], memoryview]:
        """(dtype, shape, bytes) exactly as stored; the bytes are a read-only view of the file."""
        return self._spec(name).dtype, self._files.entries[name].shape, self._files.data(name)

    def weight(self, name: str) -> np.ndarray:
        """Values of a tensor as float32: exact for BF16, F32 and scales; packed weights as `nvfp4.decode` defines.

        Raises `NonFiniteWeightError`, `BlockScaleError` or `TensorScaleError`, naming file, tensor and position.
        """
        spec = self._spec(name)
        if spec.shape:
            return self.rows(name, 0, spec.shape[0])
        return values.decode(self.where(name), spec.dtype, (), self.raw(name)[2])

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """`weight(name)[start:stop]`, reading only those rows."""
        dtype, (length, *rest), data = self.raw(name)
        stop = min(stop, length)
        shape = (stop - start, *rest)
        part = _row_bytes(length, data, start, stop)
        if dtype != "U8":
            return values.decode(self.where(name), dtype, shape, part, start)
        scale_name = f"{name}_scale"
        scale_dtype, (_, blocks), scale_data = self.raw(scale_name)
        scale_part = _row_bytes(length, scale_data, start, stop)
        values.check(self.where(scale_name), scale_dtype, (stop - start, blocks), scale_part, start)
        return nvfp4.decode(
            np.frombuffer(part, np.uint8).reshape(shape),
            np.frombuffer(scale_part, np.uint8).reshape(stop - start, blocks),
            self.weight(f"{name}_scale_2"),
            name=self.where(name),
        )

    def check_values(self, name: str) -> None:
        """Read a whole tensor and refuse it as `weight` would, without decoding it."""
        spec, data = self._spec(name), self._files.data(name)
        dtype, shape = spec.dtype, spec.shape
        if dtype == "U8":
            if self.weight(f"{name}_scale_2") == 0 and np.any(np.frombuffer(data, np.uint8) & 0x77):
                raise e.TensorScaleError(f"{self.where(name)}_scale_2: 0, but the codes are not all zero")
            return
        if not shape:
            values.check(self.where(name), dtype, shape, data)
            return
        step = max(1, CHECKED_AT_ONCE // max(1, len(data) // max(1, shape[0])))
        for start in range(0, shape[0], step):
            stop = min(start + step, shape[0])
            part = _row_bytes(shape[0], data, start, stop)
            values.check(self.where(name), dtype, (stop - start, *shape[1:]), part, start)

    def where(self, name: str) -> str:
        """The file and tensor, as messages name them."""
        return f"{self._files.shards[name].header.path}: tensor {name}"

    def _spec(self, name: str) -> layout.TensorSpec:
        spec = self.specs.get(name)
        if spec is None:
            raise e.NoSuchTensorError(f"{self.directory}: no tensor {e.show(name)}")
        return spec


def _row_bytes(rows: int, data: memoryview, start: int, stop: int) -> memoryview:
    width = len(data) // rows if rows else 0
    return data[start * width : stop * width]


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Open a checkpoint of either export. Raises the first problem that `scan` finds."""
    found = scan(directory)
    if found.problems:
        raise found.problems[0]
    return Checkpoint(found)
