"""Faults of loaders and of readers of files that lie: the oracle's reader and the engine's loader."""

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance import lying_files
from conformance.checkpoints import edit, geometry
from conformance.checkpoints.export import write_export
from conformance.checkpoints.shared import copy_of, shared
from conformance.checkpoints.source import Synthetic
from fast import errors as fast_errors
from fast import nvfp4 as fast_nvfp4
from fast import reader as reading
from fast import shards
from fast.loader import _Loader, load
from reference import errors as e
from reference import nvfp4, shard
from reference.checkpoint import Checkpoint, departures, open_checkpoint, scan

T = "model.language_model."
EXPERT_2 = f"{T}layers.3.mlp.experts.2."
EXPERT_5 = f"{T}layers.3.mlp.experts.5.up_proj."
SECOND = "model-00002-of-00003.safetensors"


@dataclasses.dataclass(frozen=True)
class Side:
    """One reader: `read` all of a directory, `header` of one file -> {name: shape}, and its names for what is wrong."""

    name: str
    read: Callable[[Path], Any]
    header: Callable[[Path], dict[str, tuple[int, ...]]]
    errors: dict[str, type[Exception]]


def _read(directory: Path) -> Checkpoint:
    opened = open_checkpoint(directory)
    opened.weight(f"{EXPERT_5}weight")
    return opened


def _fast_header(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, _, shape, _, _ in shards.read_header(shards.open_shard(path.parent, path.name))}


SIDES = [
    Side(
        "reference",
        _read,
        lambda path: {name: entry.shape for name, entry in shard.read_header(path).entries.items()},
        {
            "shard": e.MissingShardError,
            "file length": e.FileLengthError,
            "header length": e.HeaderLengthError,
            "bytes": e.ByteLengthError,
            "shape": e.TensorShapeError,
            "overlap": e.OverlapError,
            "gap": e.GapError,
            "overflow": e.ShapeRangeError,
            "dimension": e.ShapeRangeError,
            "twice": e.HeaderDuplicateKeyError,
            "scale_2": e.TensorScaleError,
            "foreign": e.ForeignFormatError,
        },
    ),
    Side(
        "fast",
        load,
        _fast_header,
        {
            "shard": fast_errors.IndexMissingShardError,
            "file length": fast_errors.OffsetRangeError,
            "header length": fast_errors.HeaderLengthError,
            "bytes": fast_errors.ByteLengthError,
            "shape": fast_errors.WrongShapeError,
            "overlap": fast_errors.OffsetOverlapError,
            "gap": fast_errors.OffsetGapError,
            "overflow": fast_errors.ShapeOverflowError,
            "dimension": fast_errors.BadDimensionError,
            "twice": fast_errors.HeaderDuplicateKeyError,
            "scale_2": fast_errors.TensorScaleError,
            "foreign": fast_errors.ForeignFormatError,
        },
    ),
]
both = pytest.mark.parametrize("side", SIDES, ids=[side.name for side in SIDES])


def header_of(side, tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return side.header(path)


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


class OneBuffer:
    """A source that hands out every tensor in the same memory, as a streaming reader with a staging buffer does."""

    def __init__(self, source):
        self.source, self.config, self.gate_rank = source, source.config, source.gate_rank
        self.buffer = np.empty(1 << 20, np.float32)

    def rows(self, spec, start, stop):
        values = self.source.rows(spec, start, stop)
        self.buffer[:] = np.nan
        self.buffer[: values.size] = values.ravel()
        return self.buffer[: values.size].reshape(values.shape)

    def input_scale(self, layer, projection):
        return self.source.input_scale(layer, projection)


@pytest.mark.parametrize("export", ["nvidia", "libertai"])
def test_fb32_writer_keeps_no_view_of_a_streamed_tensor(tmp_path, export):
    chosen = geometry("odd")
    source = OneBuffer(Synthetic(chosen.config, chosen.gate_rank, 0, chosen.layer_keys))
    write_export(source, chosen.config, tmp_path / "out", export, lambda name, size: None)
    for path in shared(export, "odd").glob("*.safetensors"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_fb32_reader_keeps_no_view_of_a_tensor():
    """Values read first stay what they were while others are read and overwritten."""
    opened = open_checkpoint(shared("nvidia"))
    stem = f"{T}layers.3.self_attn."
    pairs = [f"{stem}q_a_proj.weight", f"{stem}kv_a_proj_with_mqa.weight", f"{EXPERT_2}gate_proj.weight"]
    held = {name: opened.weight(name) for name in pairs}
    copies = {name: values.copy() for name, values in held.items()}
    for name in opened.names():
        opened.weight(name)[...] = np.nan
    for name in pairs:
        np.testing.assert_array_equal(held[name], copies[name])
        np.testing.assert_array_equal(opened.weight(name), copies[name])


def test_fb32_no_operand_is_a_view_of_what_is_read_next(monkeypatch):
    """Everything passes through buffers that are reused at once: here of 2 KiB, poisoned after each conversion."""
    directory = shared("nvidia")
    monkeypatch.setattr(reading, "PIECE", 2048)
    monkeypatch.setattr(reading, "INLINE", 0)
    plain = _Loader._from_disk

    def poisoned(self, name, cut):
        self.buffer.fill_(0xFF)
        return plain(self, name, cut)

    monkeypatch.setattr(_Loader, "_from_disk", poisoned)
    weights = load(directory, mtp=True, vision=True)
    assert lying_files.differences(weights, lying_files.read_files(directory)) == []


@both
def test_fb33_index_names_a_shard_that_is_not_there(tmp_path, side):
    directory = copy_of(tmp_path, "libertai")
    (directory / SECOND).unlink()
    with pytest.raises(side.errors["shard"], match=SECOND):
        side.read(directory)


@pytest.mark.parametrize("cut", [1, 4096])
@both
def test_fb34_shard_shorter_than_its_header_says(tmp_path, side, cut):
    directory = copy_of(tmp_path, "libertai")
    content = (directory / SECOND).read_bytes()
    (directory / SECOND).write_bytes(content[:-cut])
    with pytest.raises(side.errors["file length"], match=SECOND):
        side.read(directory)


def test_fb38_missing_input_scale_names_the_expert(tmp_path):
    """It is told and named; the oracle, whose arithmetic is weight-only, opens the rest."""
    directory = copy_of(tmp_path, "nvidia")
    tensors = edit.read_tensors(directory)
    gone = {name for name in tensors if name.startswith(EXPERT_2) and name.endswith("input_scale")}
    assert len(gone) == 3
    edit.write_tensors(directory, {name: stored for name, stored in tensors.items() if name not in gone})
    assert open_checkpoint(directory).has(f"{EXPERT_2}up_proj.weight")
    told = departures(scan(directory))
    assert [type(error) for error in told] == [e.MissingScaleError] * 3
    assert all("input_scale is missing (layer 3, expert 2)" in str(error) for error in told)


def test_fb38_input_scale_is_never_multiplied_in(tmp_path):
    directory = copy_of(tmp_path, "nvidia")
    before = open_checkpoint(directory).weight(f"{EXPERT_2}up_proj.weight")
    name = f"{EXPERT_2}up_proj.input_scale"
    tensors = edit.read_tensors(directory)
    edit.write_tensors(directory, tensors | {name: dataclasses.replace(tensors[name], data=struct.pack("<f", 64.0))})
    np.testing.assert_array_equal(open_checkpoint(directory).weight(f"{EXPERT_2}up_proj.weight"), before)


@pytest.mark.parametrize("value", [None, 0.0, float("nan")], ids=str)
def test_fb38_input_scale_of_an_expert_is_not_needed(tmp_path, value):
    """Weight-only arithmetic: absent, zero or nonsense, it changes no operand."""
    directory = copy_of(tmp_path, "nvidia")
    tensors = edit.read_tensors(directory)
    names = [n for n in tensors if n.startswith(EXPERT_2) and n.endswith("input_scale")]
    assert len(names) == 3
    data = None if value is None else struct.pack("<f", value)
    edit.change_tensors(directory, **{n: None if data is None else edit.replace(tensors[n], data=data) for n in names})
    before, after = load(shared("nvidia")).experts(3), load(directory).experts(3)
    for side in ("gate", "up", "down"):
        for a, b in zip(getattr(before, side), getattr(after, side), strict=True):
            assert all(torch.equal(getattr(a, k), getattr(b, k)) for k in ("codes", "scale", "scale_2"))


@pytest.mark.parametrize("length", [0, 1, 2**63 - 1, 2**64 - 1, 16 - 7], ids=hex)
@both
def test_fb44_header_length(tmp_path, side, length):
    content = struct.pack("<Q", length) + b"{}      "
    assert len(content) == 16
    with pytest.raises(side.errors["header length"], match=f"header length {length}"):
        header_of(side, tmp_path, content)


@both
def test_fb47_bytes_against_shape(tmp_path, side):
    content = edit.join({"w": tensor("F8_E4M3", [128, 128], 0, 128)}, bytes(128))
    with pytest.raises(side.errors["bytes"], match="128 bytes"):
        header_of(side, tmp_path, content)


@both
def test_fb47_scales_against_codes(tmp_path, side):
    directory = copy_of(tmp_path, "libertai")
    name = f"{EXPERT_2}up_proj.weight_scale"
    stored = edit.read_tensors(directory)[name]
    rows, columns = stored.shape
    half = edit.replace(stored, shape=(rows, columns // 2), data=stored.data[: rows * columns // 2])
    edit.change_tensors(directory, **{name: half})
    words = rf"{name}: shape \[{rows}, {columns // 2}\], expected \[{rows}, {columns}\]"
    with pytest.raises(side.errors["shape"], match=words):
        side.read(directory)


def test_fb47_scales_against_codes_in_the_codec():
    with pytest.raises(e.TensorShapeError):
        nvfp4.decode(np.zeros((4, 8), np.uint8), np.zeros((4, 2), np.uint8), 1.0)


RANGES = {
    "same bytes": ({"k": (0, 64), "v": (0, 64)}, 64, "overlap"),
    "overlap": ({"a": (0, 100), "b": (50, 150)}, 150, "overlap"),
    "hole": ({"a": (0, 64), "b": (72, 80)}, 80, "gap"),
}


@pytest.mark.parametrize(("ranges", "size", "error"), RANGES.values(), ids=RANGES)
@both
def test_fb48_ranges_tile_the_data(tmp_path, side, ranges, size, error):
    header = {name: tensor("U8", [end - begin], begin, end) for name, (begin, end) in ranges.items()}
    with pytest.raises(side.errors[error], match=list(ranges)[-1]):
        header_of(side, tmp_path, edit.join(header, bytes(size)))


@pytest.mark.parametrize(
    ("dtype", "shape", "error"),
    [
        ("U8", [2**32, 2**32], "overflow"),
        ("F32", [2**62], "overflow"),
        ("U8", [-1, -8], "dimension"),
        ("U8", [1e30], "dimension"),
    ],
    ids=str,
)
@both
def test_fb50_shape_overflow(tmp_path, side, dtype, shape, error):
    with pytest.raises(side.errors[error], match="w"):
        header_of(side, tmp_path, edit.join({"w": tensor(dtype, shape, 0, 0)}, b""))


@both
def test_fb50_zero_size_is_legal(tmp_path, side):
    content = edit.join({"w": tensor("U8", [0, 2**40], 0, 0)}, b"")
    assert header_of(side, tmp_path, content) == {"w": (0, 2**40)}
    with pytest.raises(side.errors["bytes"]):
        header_of(side, tmp_path, edit.join({"w": tensor("U8", [0, 2**40], 0, 8)}, bytes(8)))


@both
def test_fb51_one_name_twice(tmp_path, side):
    header = (
        b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}'
    )
    with pytest.raises(side.errors["twice"], match="'w'"):
        header_of(side, tmp_path, edit.join(header, bytes(8)))


def test_fb55_block_scale_in_the_oracle(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    weight = f"{EXPERT_5}weight"
    tensors = edit.read_tensors(directory)
    edit.write_tensors(directory, tensors | {f"{weight}_scale": tensors[f"{weight}_scale"].with_byte(9, 0x7F)})
    opened = open_checkpoint(directory)
    for read in (opened.weight, opened.check_values):
        with pytest.raises(e.BlockScaleError, match=rf"{weight}_scale at \[1, 1\]"):
            read(f"{weight}_scale")
    with pytest.raises(e.BlockScaleError, match=rf"{weight}_scale at \[1, 1\]"):
        opened.weight(weight)


@pytest.mark.parametrize(
    ("byte", "error"),
    [(0x7F, fast_errors.ScaleNaNError), (0x80, fast_errors.ScaleNegativeError)],
    ids=["nan", "negative"],
)
def test_fb55_block_scale_in_the_engine(tmp_path, byte, error):
    directory = copy_of(tmp_path, "libertai")
    name = f"{EXPERT_5}weight_scale"
    edit.change_tensors(directory, **{name: edit.read_tensors(directory)[name].with_byte(9, byte)})
    with pytest.raises(error, match=rf"{name}: block scale byte {byte:#04x} at \[1, 1\]"):
        load(directory)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0, -0.0, 3e38])
@both
def test_fb55_tensor_scale_of_expert_5(tmp_path, side, value):
    directory = copy_of(tmp_path, "libertai")
    name = f"{EXPERT_5}weight_scale_2"
    broken = edit.replace(edit.read_tensors(directory)[name], data=struct.pack("<f", value))
    edit.change_tensors(directory, **{name: broken})
    with pytest.raises(side.errors["scale_2"], match=f"{EXPERT_5}weight"):
        side.read(directory)


@pytest.mark.parametrize("value", [1e-42, 1.26e35])
def test_fb55_extreme_tensor_scales_that_are_sound(tmp_path, value):
    """Subnormal, and just below the largest: taken on both sides, with the same finite values."""
    directory = copy_of(tmp_path, "libertai")
    name = f"{EXPERT_5}weight_scale_2"
    edit.change_tensors(
        directory, **{name: edit.replace(edit.read_tensors(directory)[name], data=struct.pack("<f", value))}
    )
    expected = open_checkpoint(directory).weight(f"{EXPERT_5}weight")
    assert np.isfinite(expected).all()
    assert expected.any()
    assert fast_nvfp4.decode(load(directory).experts(3).up[5]).numpy().tobytes() == expected.tobytes()


def test_fb55_zero_tensor_scale_of_an_unused_expert(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    tensors = edit.read_tensors(directory)
    names = [f"{EXPERT_5}{leaf}" for leaf in ("weight", "weight_scale_2")]
    edit.change_tensors(directory, **{n: edit.replace(tensors[n], data=bytes(len(tensors[n].data))) for n in names})
    assert not open_checkpoint(directory).weight(f"{EXPERT_5}weight").any()
    assert float(load(directory).experts(3).up[5].scale_2) == 0.0


@pytest.mark.parametrize("foreign", ["weight_packed", "weight_global_scale", "input_global_scale"])
@both
def test_fb08_names_whose_scale_divides_are_refused(tmp_path, side, foreign):
    """compressed-tensors stores the reciprocal of weight_scale_2 under another name."""
    directory = copy_of(tmp_path, "libertai")
    stem = f"{EXPERT_2}up_proj."
    tensors = edit.read_tensors(directory)
    taken = "weight" if foreign == "weight_packed" else "weight_scale_2"
    renamed = {f"{stem}{foreign}": tensors.pop(f"{stem}{taken}")}
    edit.write_tensors(directory, tensors | renamed)
    with pytest.raises(side.errors["foreign"], match=f"{stem}{foreign}"):
        side.read(directory)


@pytest.mark.parametrize("leaf", ["mlp.gate.e_score_correction_bias", "self_attn.A_log", "self_attn.dt_bias"])
def test_fb27_fp32_in_the_file_is_fp32_in_the_engine(tmp_path, leaf):
    """Bits unchanged where the file has them; a file that has lost them is refused."""
    directory = copy_of(tmp_path, "nvidia")
    name = f"{T}layers.4.{leaf}"
    stored = edit.read_tensors(directory)[name]
    bound = load(directory).tensor(name)
    assert bound.dtype == torch.float32
    assert bound.numpy().tobytes() == stored.data
    edit.change_tensors(directory, **{name: edit.replace(stored, dtype="BF16", data=bytes(len(stored.data) // 2))})
    with pytest.raises(fast_errors.WrongDtypeError, match=f"{name}: dtype BF16, expected F32"):
        load(directory)
