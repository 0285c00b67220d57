"""Faults of loaders and of readers of files that lie."""

import dataclasses
import struct

import numpy as np
import pytest

from conformance.checkpoints import edit, geometry
from conformance.checkpoints.export import write_export
from conformance.checkpoints.shared import copy_of, shared
from conformance.checkpoints.source import Synthetic
from reference import errors as e
from reference import nvfp4
from reference.checkpoint import open_checkpoint
from reference.shard import read_header

T = "model.language_model."
EXPERT_2 = f"{T}layers.3.mlp.experts.2."
SECOND = "model-00002-of-00003.safetensors"


def header_file(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return path


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


def test_fb33_index_names_a_shard_that_is_not_there(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    (directory / SECOND).unlink()
    with pytest.raises(e.MissingShardError, match=SECOND):
        open_checkpoint(directory)


@pytest.mark.parametrize("cut", [1, 4096])
def test_fb34_shard_shorter_than_its_header_says(tmp_path, cut):
    directory = copy_of(tmp_path, "libertai")
    content = (directory / SECOND).read_bytes()
    (directory / SECOND).write_bytes(content[:-cut])
    with pytest.raises(e.FileLengthError, match=SECOND):
        open_checkpoint(directory)


def test_fb38_missing_input_scale_names_the_expert(tmp_path):
    directory = copy_of(tmp_path, "nvidia")
    tensors = edit.read_tensors(directory)
    gone = {name for name in tensors if name.startswith(EXPERT_2) and name.endswith("input_scale")}
    assert len(gone) == 3
    edit.write_tensors(directory, {name: stored for name, stored in tensors.items() if name not in gone})
    with pytest.raises(e.MissingScaleError, match=r"input_scale is missing \(layer 3, expert 2\)"):
        open_checkpoint(directory)


def test_fb38_input_scale_is_never_multiplied_in(tmp_path):
    directory = copy_of(tmp_path, "nvidia")
    before = open_checkpoint(directory).weight(f"{EXPERT_2}up_proj.weight")
    name = f"{EXPERT_2}up_proj.input_scale"
    tensors = edit.read_tensors(directory)
    edit.write_tensors(directory, tensors | {name: dataclasses.replace(tensors[name], data=struct.pack("<f", 64.0))})
    np.testing.assert_array_equal(open_checkpoint(directory).weight(f"{EXPERT_2}up_proj.weight"), before)


@pytest.mark.parametrize("length", [0, 1, 2**63 - 1, 2**64 - 1, 16 - 7], ids=hex)
def test_fb44_header_length(tmp_path, length):
    path = header_file(tmp_path, struct.pack("<Q", length) + b"{}      ")
    assert path.stat().st_size == 16
    with pytest.raises(e.HeaderLengthError, match=f"header length {length}"):
        read_header(path)


def test_fb47_bytes_against_shape(tmp_path):
    content = edit.join({"w": tensor("F8_E4M3", [128, 128], 0, 128)}, bytes(128))
    with pytest.raises(e.ByteLengthError, match="128 bytes for F8_E4M3"):
        read_header(header_file(tmp_path, content))


def test_fb47_scales_against_codes(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    name = f"{EXPERT_2}up_proj.weight_scale"
    tensors = edit.read_tensors(directory)
    rows, columns = tensors[name].shape
    half = dataclasses.replace(
        tensors[name], shape=(rows, columns // 2), data=tensors[name].data[: rows * columns // 2]
    )
    edit.write_tensors(directory, tensors | {name: half})
    with pytest.raises(
        e.TensorShapeError, match=rf"{name}: shape \[{rows}, {columns // 2}\], expected \[{rows}, {columns}\]"
    ):
        open_checkpoint(directory)
    with pytest.raises(e.TensorShapeError):
        nvfp4.decode(np.zeros((4, 8), np.uint8), np.zeros((4, 2), np.uint8), 1.0)


RANGES = {
    "same bytes": ({"k": (0, 64), "v": (0, 64)}, 64, e.OverlapError),
    "overlap": ({"a": (0, 100), "b": (50, 150)}, 150, e.OverlapError),
    "hole": ({"a": (0, 64), "b": (72, 80)}, 80, e.GapError),
}


@pytest.mark.parametrize(("ranges", "size", "error"), RANGES.values(), ids=RANGES)
def test_fb48_ranges_tile_the_data(tmp_path, ranges, size, error):
    header = {name: tensor("U8", [end - begin], begin, end) for name, (begin, end) in ranges.items()}
    with pytest.raises(error, match=f"'{list(ranges)[-1]}'"):
        read_header(header_file(tmp_path, edit.join(header, bytes(size))))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("U8", [2**32, 2**32]), ("F32", [2**62]), ("U8", [-1, -8]), ("U8", [1e30])],
    ids=str,
)
def test_fb50_shape_overflow(tmp_path, dtype, shape):
    with pytest.raises(e.ShapeRangeError, match="'w'"):
        read_header(header_file(tmp_path, edit.join({"w": tensor(dtype, shape, 0, 0)}, b"")))


def test_fb50_zero_size_is_legal(tmp_path):
    path = header_file(tmp_path, edit.join({"w": tensor("U8", [0, 2**40], 0, 0)}, b""))
    assert read_header(path).entries["w"].shape == (0, 2**40)
    with pytest.raises(e.ByteLengthError):
        read_header(header_file(tmp_path, edit.join({"w": tensor("U8", [0, 2**40], 0, 8)}, bytes(8))))


def test_fb51_one_name_twice(tmp_path):
    header = (
        b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}'
    )
    with pytest.raises(e.HeaderDuplicateKeyError, match="'w' appears twice"):
        read_header(header_file(tmp_path, edit.join(header, bytes(8))))


def test_fb55_block_scale_of_expert_5(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    weight = f"{T}layers.3.mlp.experts.5.up_proj.weight"
    tensors = edit.read_tensors(directory)
    edit.write_tensors(directory, tensors | {f"{weight}_scale": tensors[f"{weight}_scale"].with_byte(9, 0x7F)})
    opened = open_checkpoint(directory)
    for read in (opened.weight, opened.check_values):
        with pytest.raises(e.BlockScaleError, match=rf"{weight}_scale at \[1, 1\]"):
            read(f"{weight}_scale")
    with pytest.raises(e.BlockScaleError, match=rf"{weight}_scale at \[1, 1\]"):
        opened.weight(weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_fb55_tensor_scale_of_expert_5(tmp_path, value):
    directory = copy_of(tmp_path, "libertai")
    weight = f"{T}layers.3.mlp.experts.5.up_proj.weight"
    tensors = edit.read_tensors(directory)
    broken = dataclasses.replace(tensors[f"{weight}_scale_2"], data=struct.pack("<f", value))
    edit.write_tensors(directory, tensors | {f"{weight}_scale_2": broken})
    with pytest.raises(e.TensorScaleError, match=weight):
        open_checkpoint(directory).weight(weight)


def test_fb55_zero_tensor_scale_of_an_unused_expert(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    weight = f"{T}layers.3.mlp.experts.5.up_proj.weight"
    tensors = edit.read_tensors(directory)
    zeros = {
        weight: dataclasses.replace(tensors[weight], data=bytes(len(tensors[weight].data))),
        f"{weight}_scale_2": dataclasses.replace(tensors[f"{weight}_scale_2"], data=bytes(4)),
    }
    edit.write_tensors(directory, tensors | zeros)
    assert not open_checkpoint(directory).weight(weight).any()


@pytest.mark.parametrize("foreign", ["weight_packed", "weight_global_scale", "input_global_scale"])
def test_fb08_names_whose_scale_divides_are_refused(tmp_path, foreign):
    """compressed-tensors stores the reciprocal of weight_scale_2 under another name."""
    directory = copy_of(tmp_path, "libertai")
    stem = f"{EXPERT_2}up_proj."
    tensors = edit.read_tensors(directory)
    taken = "weight" if foreign == "weight_packed" else "weight_scale_2"
    renamed = {f"{stem}{foreign}": tensors.pop(f"{stem}{taken}")}
    edit.write_tensors(directory, tensors | renamed)
    with pytest.raises(e.ForeignFormatError, match=f"{stem}{foreign}"):
        open_checkpoint(directory)
