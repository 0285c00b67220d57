"""Faults of loaders and of readers of files that lie, in the fast engine's loader (the oracle's: `test_loader`)."""

import struct

import pytest
import torch

from conformance import lying_files
from conformance.checkpoints import edit
from conformance.checkpoints.shared import copy_of, shared
from fast import errors as e
from fast import reader as reading
from fast.loader import load
from fast.shards import open_shard, read_header

T = "model.language_model."
EXPERT_2 = f"{T}layers.3.mlp.experts.2."
EXPERT_5 = f"{T}layers.3.mlp.experts.5.up_proj."
SECOND = "model-00002-of-00003.safetensors"


def header_of(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    return read_header(open_shard(tmp_path, "model.safetensors"))


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_fb32_no_operand_is_a_view_of_what_is_read_next(monkeypatch):
    """Everything passes through buffers that are reused at once: here of 2 KiB, poisoned after each conversion."""
    directory = shared("nvidia")
    monkeypatch.setattr(reading, "PIECE", 2048)
    monkeypatch.setattr(reading, "INLINE", 0)
    from fast.loader import _Loader

    plain = _Loader._from_disk

    def poisoned(self, name, cut):
        self.buffer.fill_(0xFF)
        return plain(self, name, cut)

    monkeypatch.setattr(_Loader, "_from_disk", poisoned)
    weights = load(directory, mtp=True, vision=True)
    assert lying_files.differences(weights, lying_files.read_files(directory)) == []


def test_fb33_index_names_a_shard_that_is_not_there(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    (directory / SECOND).unlink()
    with pytest.raises(e.IndexMissingShardError, match=SECOND):
        load(directory)


@pytest.mark.parametrize("cut", [1, 4096])
def test_fb34_shard_shorter_than_its_header_says(tmp_path, cut):
    directory = copy_of(tmp_path, "libertai")
    content = (directory / SECOND).read_bytes()
    (directory / SECOND).write_bytes(content[:-cut])
    with pytest.raises(e.OffsetRangeError, match=SECOND):
        load(directory)


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
def test_fb44_header_length(tmp_path, length):
    with pytest.raises(e.HeaderLengthError, match=f"header length {length}"):
        header_of(tmp_path, struct.pack("<Q", length) + b"{}      ")


def test_fb47_bytes_against_shape(tmp_path):
    content = edit.join({"w": tensor("F8_E4M3", [128, 128], 0, 128)}, bytes(128))
    with pytest.raises(e.ByteLengthError, match=r"128 bytes, but F8_E4M3 \[128, 128\] has 16384"):
        header_of(tmp_path, content)


def test_fb47_scales_against_codes(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    name = f"{EXPERT_2}up_proj.weight_scale"
    stored = edit.read_tensors(directory)[name]
    rows, cols = stored.shape
    half = edit.replace(stored, shape=(rows, cols // 2), data=stored.data[: rows * cols // 2])
    edit.change_tensors(directory, **{name: half})
    with pytest.raises(e.WrongShapeError, match=rf"{name}: shape \[{rows}, {cols // 2}\], expected \[{rows}, {cols}\]"):
        load(directory)


RANGES = {
    "same bytes": ({"k": (0, 64), "v": (0, 64)}, 64, e.OffsetOverlapError),
    "overlap": ({"a": (0, 100), "b": (50, 150)}, 150, e.OffsetOverlapError),
    "hole": ({"a": (0, 64), "b": (72, 80)}, 80, e.OffsetGapError),
}


@pytest.mark.parametrize(("ranges", "size", "error"), RANGES.values(), ids=RANGES)
def test_fb48_ranges_tile_the_data(tmp_path, ranges, size, error):
    header = {name: tensor("U8", [end - begin], begin, end) for name, (begin, end) in ranges.items()}
    with pytest.raises(error, match=list(ranges)[-1]):
        header_of(tmp_path, edit.join(header, bytes(size)))


@pytest.mark.parametrize(
    ("dtype", "shape", "error"),
    [
        ("U8", [2**32, 2**32], e.ShapeOverflowError),
        ("F32", [2**62], e.ShapeOverflowError),
        ("U8", [-1, -8], e.BadDimensionError),
        ("U8", [1e30], e.BadDimensionError),
    ],
    ids=str,
)
def test_fb50_shape_overflow(tmp_path, dtype, shape, error):
    with pytest.raises(error):
        header_of(tmp_path, edit.join({"w": tensor(dtype, shape, 0, 0)}, b""))


def test_fb50_zero_size_is_legal(tmp_path):
    content = edit.join({"w": tensor("U8", [0, 2**40], 0, 0)}, b"")
    assert header_of(tmp_path, content) == [("w", "U8", (0, 2**40), 0, 0)]


def test_fb51_one_name_twice(tmp_path):
    header = (
        b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}'
    )
    with pytest.raises(e.HeaderDuplicateKeyError, match="'w' given twice"):
        header_of(tmp_path, edit.join(header, bytes(8)))


@pytest.mark.parametrize(
    ("byte", "error"), [(0x7F, e.ScaleNaNError), (0x80, e.ScaleNegativeError)], ids=["nan", "negative"]
)
def test_fb55_block_scale_of_expert_5(tmp_path, byte, error):
    directory = copy_of(tmp_path, "libertai")
    name = f"{EXPERT_5}weight_scale"
    edit.change_tensors(directory, **{name: edit.read_tensors(directory)[name].with_byte(9, byte)})
    with pytest.raises(error, match=rf"{name}: block scale byte {byte:#04x} at \[1, 1\]"):
        load(directory)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_fb55_tensor_scale_of_expert_5(tmp_path, value):
    directory = copy_of(tmp_path, "libertai")
    name = f"{EXPERT_5}weight_scale_2"
    edit.change_tensors(
        directory, **{name: edit.replace(edit.read_tensors(directory)[name], data=struct.pack("<f", value))}
    )
    with pytest.raises(e.TensorScaleError, match=name):
        load(directory)


def test_fb55_zero_tensor_scale_of_an_unused_expert(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    tensors = edit.read_tensors(directory)
    zeros = {
        f"{EXPERT_5}{leaf}": bytes(len(tensors[f"{EXPERT_5}{leaf}"].data)) for leaf in ("weight", "weight_scale_2")
    }
    edit.change_tensors(directory, **{n: edit.replace(tensors[n], data=data) for n, data in zeros.items()})
    assert float(load(directory).experts(3).up[5].scale_2) == 0.0


@pytest.mark.parametrize("foreign", ["weight_packed", "weight_global_scale", "input_global_scale"])
def test_fb08_names_whose_scale_divides_are_refused(tmp_path, foreign):
    directory = copy_of(tmp_path, "libertai")
    stem = f"{EXPERT_2}up_proj."
    tensors = edit.read_tensors(directory)
    taken = "weight" if foreign == "weight_packed" else "weight_scale_2"
    renamed = {f"{stem}{foreign}": tensors.pop(f"{stem}{taken}")}
    edit.write_tensors(directory, tensors | renamed)
    with pytest.raises(e.ForeignFormatError, match=f"{stem}{foreign}.*compressed-tensors"):
        load(directory)


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
    with pytest.raises(e.WrongDtypeError, match=f"{name}: dtype BF16, expected F32"):
        load(directory)
