"""One safetensors file: every way its header can lie has its own error, and nothing else is ever raised."""

import json
import random

import pytest

from conformance.checkpoints.edit import join
from conformance.checkpoints.mutate import mutated_file
from reference import errors as e
from reference import shard

A = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]}
DATA = bytes(range(24))


def write(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return path


def test_a_good_file(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "b": B,
        "a": A,
        "none": {**B, "shape": [3, 0], "data_offsets": [16, 16]},
    }
    found = shard.read_header(write(tmp_path, join(json.dumps(header).encode() + b"   ", DATA)))
    assert list(found.entries) == ["a", "none", "b"]
    assert (found.entries["a"].dtype, found.entries["a"].shape) == ("F32", (2, 2))
    assert found.metadata == {"format": "pt"}
    assert found.data_bytes == 24
    opened = shard.Shard(found)
    assert (bytes(opened.data("a")), bytes(opened.data("b")), bytes(opened.data("none"))) == (DATA[:16], DATA[16:], b"")
    assert opened.data("a").readonly


def test_empty_file_of_no_tensors(tmp_path):
    assert shard.read_header(write(tmp_path, join({}, b""))).entries == {}


def entry(**changes):
    return {"a": A | changes}


def text(value):
    return json.dumps(value).encode()


HUGE = [2**32, 2**32]
REFUSED = {
    "no length": (b"\x02\0\0", e.HeaderLengthError, "3 bytes, too short"),
    "nothing": (b"", e.HeaderLengthError, "0 bytes, too short"),
    "length 0": (join(b"{}", b"", 0), e.HeaderLengthError, "header length 0"),
    "length 1": (join(b"{}", b"", 1), e.HeaderLengthError, "header length 1"),
    "length past the end": (join(b"{}", b"", 3), e.HeaderLengthError, "past the end of a file of 10 bytes"),
    "length bomb": (join(b"{}", b"", 2**63 - 1), e.HeaderLengthError, "header length 9223372036854775807"),
    "length all ones": (join(b"{}", b"", 2**64 - 1), e.HeaderLengthError, "header length 18446744073709551615"),
    "length above the cap": (join(b"{}", b"", shard.HEADER_CAP + 1), e.HeaderLengthError, "not in [2, 100000000]"),
    "not UTF-8": (join(b'{"\xff": 1}', b""), e.HeaderEncodingError, "not UTF-8 at byte 2"),
    "UTF-16": (join("{}".encode("utf-16"), b""), e.HeaderSyntaxError, "starts with"),
    "byte order mark": (join(b"\xef\xbb\xbf{}", b""), e.HeaderSyntaxError, "starts with"),
    "leading space": (join(b" {}", b""), e.HeaderSyntaxError, "starts with"),
    "not an object": (join(b"[]", b""), e.HeaderSyntaxError, "starts with b'['"),
    "cut off": (join(b'{"a": {', b""), e.HeaderSyntaxError, "not JSON"),
    "two objects": (join(b"{}{}", b""), e.HeaderSyntaxError, "not JSON"),
    "NaN": (join(b'{"a": NaN}', b""), e.HeaderSyntaxError, "NaN is not JSON"),
    "deep nesting": (join(b'{"a": ' + b"[" * 200_000, b""), e.HeaderSyntaxError, "not JSON"),
    "number of many digits": (join(b'{"a": ' + b"1" * 9_000 + b"}", b""), e.HeaderSyntaxError, "not JSON"),
    "tensor twice": (
        join(text(entry())[:-1] + b", " + text(entry())[1:], DATA[:16]),
        e.HeaderDuplicateKeyError,
        "'a' appears twice",
    ),
    "field twice": (
        join(b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [0], "data_offsets": [0, 0]}}', b""),
        e.HeaderDuplicateKeyError,
        "'dtype' appears twice",
    ),
    "metadata of numbers": (join({"__metadata__": {"n": 1}}, b""), e.HeaderFieldError, "__metadata__"),
    "metadata list": (join({"__metadata__": []}, b""), e.HeaderFieldError, "__metadata__"),
    "entry is a list": (join({"a": []}, b""), e.HeaderFieldError, "fields 'list'"),
    "field missing": (join({"a": {"dtype": "F32", "shape": []}}, b""), e.HeaderFieldError, "'dtype', 'shape'"),
    "field unknown": (join(entry(strides=[1]), DATA[:16]), e.HeaderFieldError, "strides"),
    "shape is a number": (join(entry(shape=4), DATA[:16]), e.HeaderFieldError, "shape 4"),
    "three offsets": (join(entry(data_offsets=[0, 8, 16]), DATA[:16]), e.HeaderFieldError, "[0, 8, 16]"),
    "empty name": (join({"": A}, DATA[:16]), e.TensorNameError, "''"),
    "control character": (join({"a\n": A}, DATA[:16]), e.TensorNameError, "a\\n"),
    "lone surrogate": (join(b'{"\\ud800": ' + text(A) + b"}", DATA[:16]), e.TensorNameError, "ud800"),
    "endless name": (join({"x" * 5000: A}, DATA[:16]), e.TensorNameError, "(5002 characters)"),
    "dtype unknown": (join(entry(dtype="F4"), DATA[:16]), e.UnknownDtypeError, "'F4'"),
    "dtype a list": (join(entry(dtype=["F32"]), DATA[:16]), e.UnknownDtypeError, "['F32']"),
    "dtype lower case": (join(entry(dtype="f32"), DATA[:16]), e.UnknownDtypeError, "'f32'"),
    "rank": (join(entry(shape=[1] * 200), DATA[:16]), e.ShapeRangeError, "rank 200"),
    "negative": (join(entry(shape=[-1, -4]), DATA[:16]), e.ShapeRangeError, "[-1, -4]"),
    "real": (join(entry(shape=[4.0]), DATA[:16]), e.ShapeRangeError, "[4.0]"),
    "1e30": (join(entry(shape=[1e30]), DATA[:16]), e.ShapeRangeError, "1e+30"),
    "true": (join(entry(shape=[True, 4]), DATA[:16]), e.ShapeRangeError, "[True, 4]"),
    "2^63": (join(entry(shape=[2**63]), DATA[:16]), e.ShapeRangeError, "[9223372036854775808]"),
    "product wraps to 0": (join(entry(shape=HUGE), DATA[:16]), e.ShapeRangeError, "more bytes than 2^63"),
    "bytes wrap": (join(entry(shape=[2**62]), DATA[:16]), e.ShapeRangeError, "more bytes than 2^63"),
    "offsets backwards": (join(entry(data_offsets=[16, 0]), DATA[:16]), e.OffsetError, "[16, 0]"),
    "offset negative": (join(entry(data_offsets=[-16, 0]), DATA[:16]), e.OffsetError, "[-16, 0]"),
    "offset real": (join(entry(data_offsets=[0, 16.0]), DATA[:16]), e.OffsetError, "[0, 16.0]"),
    "offset wraps": (join(entry(data_offsets=[0, 2**64 + 16]), DATA[:16]), e.FileLengthError, "of a file of"),
    "past the end": (join(entry(), DATA[:15]), e.FileLengthError, "ends at byte"),
    "trailing byte": (join(entry(), DATA[:17]), e.FileLengthError, "end at"),
    "shape too small": (join(entry(shape=[3]), DATA[:16]), e.ByteLengthError, "16 bytes for F32 [3], expected 12"),
    "shape too large": (join(entry(shape=[5]), DATA[:16]), e.ByteLengthError, "expected 20"),
    "F8 matrix of 128 bytes": (
        join(entry(dtype="F8_E4M3", shape=[128, 128], data_offsets=[0, 128]), bytes(128)),
        e.ByteLengthError,
        "128 bytes for F8_E4M3 [128, 128], expected 16384",
    ),
    "empty with bytes": (join(entry(shape=[0, 2**40]), DATA[:16]), e.ByteLengthError, "expected 0"),
    "equal ranges": (join({"k": A, "v": A}, DATA[:16]), e.OverlapError, "inside 'k', which ends at 16"),
    "partial overlap": (
        join({"a": A, "b": B | {"data_offsets": [8, 16]}}, DATA[:16]),
        e.OverlapError,
        "'b' begins at data byte 8, inside 'a'",
    ),
    "hole": (
        join({"a": A, "b": B | {"data_offsets": [18, 26]}}, DATA + b"xx"),
        e.GapError,
        "16 to 18 before tensor 'b'",
    ),
    "hole in front": (join({"b": B}, DATA), e.GapError, "0 to 16 before tensor 'b'"),
}


@pytest.mark.parametrize(("content", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(tmp_path, content, error, words):
    path = write(tmp_path, content)
    with pytest.raises(error) as caught:
        shard.read_header(path)
    assert type(caught.value) is error
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [[0], [0, 2**40], [2**40, 0], [3, 0, 5]])
def test_empty_tensors_are_legal(tmp_path, shape):
    found = shard.read_header(write(tmp_path, join(entry(shape=shape, data_offsets=[0, 0]), b"")))
    assert found.entries["a"].shape == tuple(shape)


@pytest.mark.parametrize("cut", [1, 2, 8, 4096])
def test_truncated_data(tmp_path, cut):
    data = bytes(8192)
    path = write(tmp_path, join({"a": {"dtype": "U8", "shape": [8192], "data_offsets": [0, 8192]}}, data[:-cut]))
    with pytest.raises(e.FileLengthError):
        shard.read_header(path)


def test_not_a_regular_file(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(e.ShardFileError):
            shard.read_header(path)


def test_file_that_disappears_after_the_check(tmp_path):
    path = write(tmp_path, join({"a": A, "b": B}, DATA))
    opened = shard.Shard(shard.read_header(path))
    path.unlink()
    with pytest.raises(e.ShardFileError, match="cannot be read"):
        opened.data("a")


def test_file_that_shrinks_after_the_check(tmp_path):
    path = write(tmp_path, join({"a": A, "b": B}, DATA))
    opened = shard.Shard(shard.read_header(path))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(e.FileLengthError, match="when checked"):
        opened.data("a")


@pytest.mark.parametrize("seed", range(4))
def test_mutation_fuzz(tmp_path, seed):
    """Every mutated file is read to tensors that tile its data, or refused by one of our errors."""
    rng = random.Random(seed)
    accepted = refused = 0
    for _ in range(500):
        path = write(tmp_path, mutated_file(rng))
        try:
            found = shard.read_header(path)
        except e.ShardError:
            refused += 1
        else:
            accepted += 1
            content = path.read_bytes()
            assert (
                b"".join(content[one.begin : one.end] for one in found.entries.values())
                == content[8 + int.from_bytes(content[:8], "little") :]
            )
    # Faults must not drown out the good files, nor the reverse, or the fuzz proves nothing.
    assert accepted > 50
    assert refused > 50
