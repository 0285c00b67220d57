"""Headers and indexes that lie: one class each, no byte of a tensor touched, no more memory than the header."""

import json
import os
import struct
import tracemalloc

import pytest

from conformance.checkpoints import edit
from conformance.checkpoints.shared import copy_of, shared
from fast import errors as e
from fast.shards import HEADER_CAP, MAX_RANK, WIDTHS, open_directory, open_shard, read_header

SECOND = "model-00002-of-00003.safetensors"


def file(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    return tmp_path


def read(directory, admit=None):
    shard = open_shard(directory, "model.safetensors")
    try:
        return read_header(shard, admit)
    finally:
        os.close(shard.fd)


def entry(dtype="U8", shape=(4,), begin=0, end=4, **extra):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **extra}


def header(text, data=4):
    return edit.join(text if isinstance(text, bytes) else json.dumps(text).encode(), bytes(data))


def with_shape(text):
    return header(b'{"w":{"dtype":"U8","shape":%s,"data_offsets":[0,4]}}' % text)


W = entry()
GOOD = {
    "plain": (header({"w": W}), {"w": ("U8", (4,), 0, 4)}),
    "metadata, any order": (header({"w": W, "__metadata__": {"format": "pt"}}), {"w": ("U8", (4,), 0, 4)}),
    "fields in any order": (
        header(b'{"w":{"data_offsets":[0,4],"dtype":"F32","shape":[]}}'),
        {"w": ("F32", (), 0, 4)},
    ),
    "padded with spaces": (header(json.dumps({"w": W}).encode() + b"   "), {"w": ("U8", (4,), 0, 4)}),
    "white space": (
        header(b'{ "w" :\n{"dtype"\t:"U8", "shape": [ 4 ],"data_offsets":[0 , 4]} }'),
        {"w": ("U8", (4,), 0, 4)},
    ),
    "empty": (header({}, 0), {}),
    "no elements": (header({"w": entry(shape=(0, 2**40), end=0)}, 0), {"w": ("U8", (0, 2**40), 0, 0)}),
    "escaped name": (
        header(b'{"\\u0077\\n":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'),
        {"w\n": ("U8", (4,), 0, 4)},
    ),
    "out of order": (
        header({"b": entry(begin=4, end=8), "a": W}, 8),
        {"a": ("U8", (4,), 0, 4), "b": ("U8", (4,), 4, 8)},
    ),
}


@pytest.mark.parametrize(("content", "wanted"), GOOD.values(), ids=GOOD)
def test_headers_that_are_sound(tmp_path, content, wanted):
    assert {name: rest for name, *rest in read(file(tmp_path, content))} == {n: list(v) for n, v in wanted.items()}


@pytest.mark.parametrize("dtype", WIDTHS)
def test_every_dtype_has_its_width(tmp_path, dtype):
    n = WIDTHS[dtype]
    assert read(file(tmp_path, header({"w": entry(dtype, (3,), 0, 3 * n)}, 3 * n)))
    with pytest.raises(e.ByteLengthError):
        read(file(tmp_path, header({"w": entry(dtype, (3,), 0, 3 * n + 1)}, 3 * n + 1)))


BAD = {
    "no length": (b"\x02\0\0", e.HeaderTruncatedError),
    "empty file": (b"", e.HeaderTruncatedError),
    **{
        f"length {n}": (struct.pack("<Q", n) + b"{}      ", e.HeaderLengthError)
        for n in (0, 1, 9, HEADER_CAP + 1, 2**63 - 1, 2**64 - 1)
    },
    "not an object": (header(b"[]      "), e.HeaderSyntaxError),
    "leading space": (header(b" {}"), e.HeaderSyntaxError),
    "unfinished": (header(b'{"w":'), e.HeaderSyntaxError),
    "unfinished string": (header(b'{"w'), e.HeaderSyntaxError),
    "control character": (header(b'{"w\x01":{}}'), e.HeaderSyntaxError),
    "bad escape": (header(b'{"\\x":{}}'), e.HeaderSyntaxError),
    "two objects": (header(b"{}{}", 0), e.HeaderSyntaxError),
    "comma at the end": (header(b'{"w":{"dtype":"U8","shape":[4,],"data_offsets":[0,4]}}'), e.BadDimensionError),
    "deep": (header(b'{"w":' + b"[" * 50_000), e.HeaderFieldError),
    "deep metadata": (header(b'{"__metadata__":{"a":' + b"[" * 50_000), e.HeaderMetadataError),
    "latin-1 name": (header(b'{"\xe9":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'), e.HeaderEncodingError),
    "overlong utf-8": (header(b'{"\xc0\x80":{}}'), e.HeaderEncodingError),
    "lone surrogate": (header(b'{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'), e.HeaderEncodingError),
    "name twice": (
        header(
            b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}',
            8,
        ),
        e.HeaderDuplicateKeyError,
    ),
    "name twice, once escaped": (
        header(
            b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"\\u0077":{"dtype":"U8","shape":[],"data_offsets":[4,5]}}',
            5,
        ),
        e.HeaderDuplicateKeyError,
    ),
    "field twice": (
        header(b'{"w":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}'),
        e.HeaderDuplicateKeyError,
    ),
    "metadata twice": (header(b'{"__metadata__":{},"__metadata__":{}}', 0), e.HeaderDuplicateKeyError),
    "metadata key twice": (header(b'{"__metadata__":{"a":"b","a":"c"}}', 0), e.HeaderDuplicateKeyError),
    "metadata number": (header(b'{"__metadata__":{"a":1}}', 0), e.HeaderMetadataError),
    "metadata list": (header(b'{"__metadata__":[]}', 0), e.HeaderMetadataError),
    "field missing": (header(b'{"w":{"dtype":"U8","shape":[4]}}'), e.HeaderFieldError),
    "field unknown": (header({"w": entry(strides=[1])}), e.HeaderFieldError),
    "entry null": (header(b'{"w":null}'), e.HeaderFieldError),
    "three offsets": (header({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 8]}}), e.HeaderFieldError),
    "one offset": (header({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0]}}), e.HeaderFieldError),
    "dtype unknown": (header({"w": entry("F8_E4M3FN")}), e.UnknownDtypeError),
    "dtype in lower case": (header({"w": entry("u8")}), e.UnknownDtypeError),
    **{
        f"dimension {text.decode()[:20]}": (with_shape(b"[" + text + b"]"), e.BadDimensionError)
        for text in (
            b"-1",
            b"4.0",
            b"1e30",
            b"4e0",
            b"true",
            b"null",
            b'"4"',
            b"[4]",
            b"9223372036854775808",
            b"9" * 5000,
            b"04",
        )
    },
    "shape null": (with_shape(b"null"), e.HeaderSyntaxError),
    "rank": (with_shape(b"[" + b",".join([b"1"] * (MAX_RANK + 1)) + b"]"), e.RankError),
    "enormous rank": (with_shape(b"[" + b",".join([b"1"] * 100_000) + b"]"), e.RankError),
    "product wraps to 0": (with_shape(b"[4294967296,4294967296]"), e.ShapeOverflowError),
    "product wraps to 4": (with_shape(b"[4611686018427387905,4]"), e.ShapeOverflowError),
    "bytes overflow": (header({"w": entry("F32", (2**62,))}), e.ShapeOverflowError),
    "overflow before the zero": (with_shape(b"[4611686018427387904,4611686018427387904,0]"), e.ShapeOverflowError),
    "offsets descend": (header({"w": entry(begin=4, end=0)}), e.OffsetOrderError),
    "offset negative": (header({"w": entry(begin=-4, end=0)}), e.OffsetOrderError),
    "offset 2^63": (header({"w": entry(end=2**63)}), e.OffsetOrderError),
    "offset past the end": (header({"w": entry(shape=(5,), end=5)}), e.OffsetRangeError),
    "offset far past the end": (header({"w": entry(shape=(2**62,), end=2**62)}), e.OffsetRangeError),
    "too many bytes for the shape": (header({"w": entry("F8_E4M3", (128, 128), 0, 128)}, 128), e.ByteLengthError),
    "too few bytes for the shape": (header({"w": entry(shape=(3,))}), e.ByteLengthError),
    "no elements, some bytes": (header({"w": entry(shape=(0, 2**40))}), e.ByteLengthError),
    "same bytes": (header({"k": W, "v": W}), e.OffsetOverlapError),
    "overlap": (
        header({"a": entry(shape=(100,), end=100), "b": entry(shape=(100,), begin=50, end=150)}, 150),
        e.OffsetOverlapError,
    ),
    "hole": (header({"a": entry(shape=(64,), end=64), "b": entry(shape=(8,), begin=72, end=80)}, 80), e.OffsetGapError),
    "hole in front": (header({"a": entry(begin=4, end=8)}, 8), e.OffsetGapError),
    "data after the last": (header({"w": W}, 5), e.TrailingDataError),
    "data of nobody": (header({}, 1), e.TrailingDataError),
}


@pytest.mark.parametrize(("content", "error"), BAD.values(), ids=BAD)
def test_headers_that_lie(tmp_path, content, error):
    with pytest.raises(e.HeaderError, match=r"model\.safetensors") as caught:
        read(file(tmp_path, content))
    assert type(caught.value) is error
    assert len(str(caught.value)) < 600 + len(str(tmp_path))


@pytest.mark.parametrize(
    "body",
    [
        b'{"w":{"dtype":"U8","shape":[' + b"[" * (8 << 20),
        b'{"' + b"w" * (8 << 20) + b'":{"dtype":"XX"}}',
        b'{"w":{"dtype":"U8","shape":[' + b"9" * (8 << 20) + b"]}}",
        b"{" + b" " * (8 << 20),
        b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(150_000)) + b"}",
    ],
    ids=["brackets", "name", "digits", "spaces", "entries"],
)
def test_memory_stays_near_the_header(tmp_path, body):
    """With names refused as they come, an 8 MB header costs a copy or two of itself and no more."""

    def admit(name):
        raise e.UnknownTensorError(name[:10])

    directory = file(tmp_path, edit.join(body, b""))
    tracemalloc.start()
    try:
        with pytest.raises(e.InputError):
            read(directory, admit)
        assert tracemalloc.get_traced_memory()[1] < 2.5 * len(body) + (1 << 20)
    finally:
        tracemalloc.stop()


# --- the index -------------------------------------------------------------------------------------------------------


def index_of(directory):
    return edit.read_json(directory / edit.INDEX)


def put(directory, text):
    (directory / edit.INDEX).write_bytes(text if isinstance(text, bytes) else json.dumps(text).encode())


def remap(new):
    def change(directory):
        index = index_of(directory)
        index["weight_map"]["lm_head.weight"] = new(directory) if callable(new) else new
        put(directory, index)

    return change


def outside(directory):
    """A sound shard beside the directory, and a link to it inside."""
    (directory.parent / "outside.safetensors").write_bytes((directory / SECOND).read_bytes())
    (directory / SECOND).unlink()
    (directory / SECOND).symlink_to(directory.parent / "outside.safetensors")


def special(make):
    def change(directory):
        (directory / SECOND).unlink()
        make(directory / SECOND)

    return change


def drop(directory):
    index = index_of(directory)
    del index["weight_map"]["lm_head.weight"]
    put(directory, index)


def twice_in_the_index(directory):
    put(
        directory,
        json.dumps(index_of(directory))
        .replace('"weight_map": {', '"weight_map": {"lm_head.weight": "x.safetensors", ')
        .encode(),
    )


def two_shards_claim(directory):
    header, data = edit.split(directory / SECOND)
    name = next(n for n in edit.split(directory / "model-00001-of-00003.safetensors")[0] if n != "__metadata__")
    header[name] = {"dtype": "U8", "shape": [4], "data_offsets": [len(data), len(data) + 4]}
    (directory / SECOND).write_bytes(edit.join(header, data + bytes(4)))


def index_pipe(directory):
    (directory / edit.INDEX).unlink()
    os.mkfifo(directory / edit.INDEX)


def extra_name(directory):
    index = index_of(directory)
    index["weight_map"]["weight"] = SECOND
    put(directory, index)


INDEX = {
    "missing shard": (lambda d: (d / SECOND).unlink(), e.IndexMissingShardError, SECOND),
    "missing tensor": (extra_name, e.IndexMissingTensorError, "weight is not in"),
    "tensor in no index": (drop, e.UnindexedTensorError, "lm_head.weight is in no index"),
    "shard in no index": (
        lambda d: (d / "x.safetensors").write_bytes(header({}, 0)),
        e.UnindexedShardError,
        "x.safetensors",
    ),
    "two shards claim one tensor": (two_shards_claim, e.TensorClaimedTwiceError, SECOND),
    "wrong shard": (remap(SECOND), e.TensorClaimedTwiceError, "lm_head.weight"),
    "name twice": (twice_in_the_index, e.IndexDuplicateKeyError, "lm_head.weight mapped twice"),
    "parent": (remap("../x.safetensors"), e.PathEscapeError, "lm_head.weight"),
    "absolute": (remap(lambda d: str(d / SECOND)), e.PathEscapeError, "plain"),
    "here": (remap(f"./{SECOND}"), e.PathEscapeError, "plain"),
    "backslash": (remap("..\\x.safetensors"), e.PathEscapeError, "plain"),
    "dots": (remap(".."), e.PathEscapeError, "plain"),
    "empty": (remap(""), e.PathEscapeError, "plain"),
    "NUL": (remap("x\0.safetensors"), e.PathEscapeError, "plain"),
    "other suffix": (remap("config.json"), e.PathEscapeError, "plain"),
    "link out of the directory": (outside, e.PathEscapeError, "outside the directory"),
    "link to nowhere": (special(lambda p: p.symlink_to(p.parent / "gone.safetensors")), e.MissingFileError, SECOND),
    "pipe": (special(os.mkfifo), e.NotRegularFileError, SECOND),
    "directory": (special(os.mkdir), e.NotRegularFileError, SECOND),
    "number": (remap(3), e.IndexSyntaxError, "expected a string"),
    "no map": (lambda d: put(d, {"metadata": {}}), e.IndexSyntaxError, "no weight_map"),
    "empty map": (lambda d: put(d, {"weight_map": {}}), e.IndexSyntaxError, "no weight_map"),
    "unknown section": (lambda d: put(d, {"weights": {}}), e.IndexSyntaxError, "weights"),
    "section twice": (lambda d: put(d, b'{"metadata":{},"metadata":{}}'), e.IndexDuplicateKeyError, "metadata"),
    "total size negative": (lambda d: put(d, {"metadata": {"total_size": -1}}), e.IndexSyntaxError, "-1"),
    "metadata deep": (lambda d: put(d, b'{"metadata":{"a":' + b"[" * 9999), e.IndexSyntaxError, "nested too deeply"),
    "not json": (lambda d: put(d, b"{"), e.IndexSyntaxError, edit.INDEX),
    "not utf-8": (lambda d: put(d, b'{"weight_map":{"\xff":"a"}}'), e.HeaderEncodingError, edit.INDEX),
    "no index": (lambda d: (d / edit.INDEX).unlink(), e.MissingFileError, edit.INDEX),
    "index is a pipe": (
        index_pipe,
        e.NotRegularFileError,
        edit.INDEX,
    ),
    "index too large": (lambda d: os.truncate(d / edit.INDEX, HEADER_CAP + 1), e.IndexTooLargeError, edit.INDEX),
}


@pytest.mark.parametrize(("change", "error", "words"), INDEX.values(), ids=INDEX)
def test_directories_that_lie(tmp_path, change, error, words):
    directory = copy_of(tmp_path, "libertai")
    open_directory(directory).close()
    change(directory)
    with pytest.raises(e.CheckpointError, match=words) as caught:
        open_directory(directory)
    assert type(caught.value) is error


def test_no_directory(tmp_path):
    with pytest.raises(e.MissingFileError, match="not a directory"):
        open_directory(tmp_path / "nowhere")


def test_links_inside_the_directory_are_fine(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    (directory / SECOND).rename(directory / "blob")
    (directory / SECOND).symlink_to("blob")
    open_directory(directory).close()


def test_closing_again_closes_nobody_else_s_file():
    directory = open_directory(shared("libertai"))
    numbers = {shard.fd for shard in directory.shards}
    directory.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in numbers]
    assert numbers & set(others), "descriptors are given out again"
    directory.close()
    for other in others:
        os.close(other)


@pytest.mark.parametrize("export", ["nvidia", "libertai"])
def test_every_tensor_is_where_a_naive_reader_finds_it(export):
    directory = open_directory(shared(export))
    wanted = edit.read_tensors(shared(export))
    assert directory.tensors.keys() == wanted.keys()
    for name, info in directory.tensors.items():
        stored = wanted[name]
        shard = directory.shards[info.shard]
        assert (info.dtype, info.shape, shard.path.name) == (stored.dtype, stored.shape, stored.shard)
        assert os.pread(shard.fd, info.end - info.begin, info.begin) == stored.data
    assert directory.total_size == sum(len(t.data) for t in wanted.values())
    directory.close()


def classes(base):
    return {base} | {c for sub in base.__subclasses__() for c in classes(sub)}


def test_every_class_of_lie_is_told_here():
    """A class of `fast.errors` for files that no case above raises would be a check that cannot fail."""
    raised = {error for _, error, *_ in (*BAD.values(), *INDEX.values())}
    groups = {e.CheckpointError, e.HeaderError}
    elsewhere = {e.FileChangedError}
    assert {c for c in classes(e.CheckpointError) if c.__module__ == "fast.errors"} - groups - elsewhere == raised
