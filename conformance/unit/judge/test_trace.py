"""The trace file: what is written is read back bit for bit, and every lie of a file has its own error."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from conformance import errors as e
from conformance.trace import (
    DTYPES,
    REQUIRED_METADATA,
    REQUIRED_TAPS,
    Recorder,
    Schedule,
    Trace,
    wanted,
)
from conformance.unit.judge.small_traces import T, described, traced

BF16 = ml_dtypes.bfloat16


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, code):
    raw = (
        np.random.default_rng(3).integers(0, 2 if code == "BOOL" else 256, 24 * DTYPES[code].itemsize).astype(np.uint8)
    )
    array = raw.view(DTYPES[code]).reshape(2, 3, 4)
    made = Trace(described(), traced().taps | {"embed": array})
    made.save(tmp_path / "a.trace")
    back = Trace.load(tmp_path / "a.trace")
    assert back.metadata == made.metadata
    assert list(back.taps) == list(made.taps)
    assert back.taps["embed"].dtype == array.dtype
    assert back.taps["embed"].tobytes() == array.tobytes()


def test_the_file_is_plain_safetensors(tmp_path):
    made = traced(embed=np.full((T, 8), 1.5, BF16), layers__0__attn__state=np.zeros((0, 3), np.float64))
    made.save(tmp_path / "a.trace")
    read = load_file(tmp_path / "a.trace")
    assert set(read) == set(made.taps)
    assert all(np.array_equal(read[name], tap) for name, tap in made.taps.items())


@pytest.mark.parametrize("order", ["F", "strided", "big-endian", "scalar"])
def test_unusual_memory_layouts_are_stored_row_major_little_endian(tmp_path, order):
    array = {
        "F": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "strided": np.arange(24.0).reshape(3, 8)[:, ::2],
        "big-endian": np.arange(12.0).reshape(3, 4).astype(">f8"),
        "scalar": np.array(2.5),
    }[order]
    Trace(described(), traced().taps | {"x": array}).save(tmp_path / "a.trace")
    assert np.array_equal(Trace.load(tmp_path / "a.trace").taps["x"], array)
    assert Trace.load(tmp_path / "a.trace").taps["x"].shape == array.shape


def test_saving_replaces_the_old_file_or_leaves_it_alone(tmp_path):
    path = tmp_path / "a.trace"
    traced().save(path)
    before = path.read_bytes()
    with pytest.raises(e.TraceHeaderError, match="tap x has dtype complex128"):
        traced(x=np.zeros(3, complex)).save(path)
    with pytest.raises(e.TraceMetadataError, match="metadata tp is 2, expected a string"):
        Trace(described() | {"tp": 2}, traced().taps).save(path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["a.trace"]


def test_loaded_taps_cannot_be_written(tmp_path):
    traced().save(tmp_path / "a.trace")
    with pytest.raises(ValueError, match="read-only"):
        Trace.load(tmp_path / "a.trace").taps["logits"][0, 0] = 1


@pytest.mark.parametrize("cut", [1, 8, 200])
def test_a_truncated_file_is_refused(tmp_path, cut):
    path = tmp_path / "a.trace"
    traced().save(path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(e.TraceTruncatedError, match=r"a\.trace: \d+ bytes of data, its header describes \d+"):
        Trace.load(path)


@pytest.mark.parametrize("size", [0, 5, 8, 30])
def test_a_file_that_ends_in_its_header_is_refused(tmp_path, size):
    path = tmp_path / "a.trace"
    traced().save(path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(e.TraceTruncatedError, match=f"{size} bytes, but its header alone needs"):
        Trace.load(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    for path in (tmp_path / "none.trace", tmp_path):
        with pytest.raises(e.TraceUnreadableError, match=f"{path.name}: cannot be read"):
            Trace.load(path)


def test_bytes_after_the_last_tap_are_refused(tmp_path):
    path = tmp_path / "a.trace"
    traced().save(path)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(e.TraceTruncatedError):
        Trace.load(path)


def headed(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F8", "shape": [1], "data_offsets": [0, 1]}, "dtype 'F8'"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "4 bytes stored, F32 \\[2\\] needs 8"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "are not sizes"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "are not sizes"),
        ({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}, "are not sizes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "-4 bytes stored"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0]}, "are not sizes"),
        ({"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}, "are not sizes"),
        ({"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}, "4 bytes stored"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "starts at byte 4, the one before it ends at 0"),
        ({"dtype": "F32", "shape": [1]}, "expected dtype, shape and data_offsets"),
        ([0, 4], "expected dtype, shape and data_offsets"),
    ],
)
def test_a_malformed_entry_is_refused_by_name(tmp_path, entry, message):
    path = headed(tmp_path / "a.trace", {"__metadata__": described(), "embed": entry}, bytes(8))
    with pytest.raises(e.TraceHeaderError, match=f"tap embed.*{message}"):
        Trace.load(path)


def test_overlapping_taps_are_refused(tmp_path):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    path = headed(tmp_path / "a.trace", {"__metadata__": described(), "a": entry, "b": entry}, bytes(4))
    with pytest.raises(e.TraceHeaderError, match="tap b starts at byte 0, the one before it ends at 4"):
        Trace.load(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{ ", "not JSON"),
        (b"[]", "is a list"),
        (b'{"a":1,"a":2}', "is there twice"),
        (b"\xff\xfe{}", "not JSON"),
        (b"{", "header of 1 bytes"),
    ],
)
def test_a_malformed_header_is_refused(tmp_path, header, message):
    with pytest.raises(e.TraceHeaderError, match=message):
        Trace.load(headed(tmp_path / "a.trace", header))


@pytest.mark.parametrize("found", [None, "glm53-trace/2", "trace"])
def test_another_format_is_refused(tmp_path, found):
    Trace(described(format=found), traced().taps).save(tmp_path / "a.trace")
    with pytest.raises(e.TraceFormatError, match="expected glm53-trace/1"):
        Trace.load(tmp_path / "a.trace")


@pytest.mark.parametrize("key", [key for key in REQUIRED_METADATA if key != "format"])
def test_a_missing_metadata_key_is_named(tmp_path, key):
    kept = {name: value for name, value in described().items() if name != key}
    Trace(kept, traced().taps).save(tmp_path / "a.trace")
    with pytest.raises(e.TraceMetadataError, match=f"metadata {key} is missing"):
        Trace.load(tmp_path / "a.trace")


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "²", ""])
def test_ranks_that_are_no_numbers_are_refused(tmp_path, value):
    Trace(described(ep=value), traced().taps).save(tmp_path / "a.trace")
    with pytest.raises(e.TraceMetadataError, match="metadata ep is"):
        Trace.load(tmp_path / "a.trace")


@pytest.mark.parametrize("name", REQUIRED_TAPS)
def test_a_trace_without_tokens_or_logits_is_refused(tmp_path, name):
    taps = {key: tap for key, tap in traced().taps.items() if key != name}
    Trace(described(), taps).save(tmp_path / "a.trace")
    with pytest.raises(e.TapMissingError, match=f"tap {name} is missing"):
        Trace.load(tmp_path / "a.trace")


# --- the schedule ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        (10, {}, Schedule((10,))),
        (10, {"decode": 3}, Schedule((7,), 3)),
        (10, {"decode": 10}, Schedule((), 10)),
        (10, {"chunk": 4, "decode": 1}, Schedule((4, 4, 1), 1)),
        (10, {"chunk": 40, "pad": 2}, Schedule((10,), 0, 2)),
    ],
)
def test_schedules_cover_exactly_the_input(tokens, options, expected):
    made = Schedule.of(tokens, **options)
    assert made == expected
    assert made.tokens == tokens
    assert Schedule.parse(made.json()) == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"prefill": 3}',
        '{"prefill": [0]}',
        '{"prefill": [3, -1]}',
        '{"prefill": [2.0]}',
        '{"prefill": [true]}',
        '{"prefill": []}',
        '{"prefill": [3], "decode": -1}',
        '{"prefill": [3], "decode": "2"}',
        '{"prefill": [], "decode": 2, "pad": 1}',
        '{"prefill": [3], "steps": 2}',
    ],
)
def test_impossible_schedules_are_refused(text):
    with pytest.raises(e.TraceScheduleError, match="schedule"):
        Schedule.parse(text)


@pytest.mark.parametrize(("decode", "chunk"), [(-1, None), (11, None), (0, 0), (0, -4)])
def test_impossible_feedings_are_refused(decode, chunk):
    with pytest.raises(e.TraceScheduleError):
        Schedule.of(10, decode=decode, chunk=chunk)


# --- the recorder ----------------------------------------------------------------------------------------------------


def test_pieces_are_joined_along_the_first_axis():
    record, pieces = Recorder(), [np.full((n, 3), n, np.float32) for n in (2, 1, 4)]
    for piece in pieces:
        record("embed", piece)
    assert np.array_equal(record.taps()["embed"], np.concatenate(pieces))


def test_states_keep_the_last_one_only():
    record = Recorder()
    for step in range(3):
        for name in ("layers.0.attn.state", "layers.0.attn.conv_state"):
            record(name, np.full((2, 2), step))
    assert all((tap == 2).all() for tap in record.taps().values())


@pytest.mark.parametrize("dtype", [np.float64, np.float32, BF16])
def test_scores_of_pools_to_come_are_minus_infinity(dtype):
    record = Recorder()
    record("layers.3.indexer.scores", np.ones((2, 0), dtype))
    record("layers.3.indexer.scores", np.ones((1, 2), dtype))
    record("layers.3.indexer.scores", np.ones((1, 3), dtype))
    joined = record.taps()["layers.3.indexer.scores"]
    assert joined.dtype == dtype
    assert joined.astype(float).tolist() == [[-np.inf] * 3, [-np.inf] * 3, [1, 1, -np.inf], [1, 1, 1]]


def test_the_recorder_keeps_copies():
    record, buffer = Recorder(), np.zeros((2, 2))
    record("embed", buffer)
    buffer += 1
    assert not record.taps()["embed"].any()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4))),
        (np.zeros((2, 3)), np.zeros((2, 3), np.float32)),
        (np.zeros((2, 3)), np.zeros(3)),
        (np.zeros(()), np.zeros(())),
    ],
)
def test_pieces_that_do_not_fit_are_refused(first, second):
    record = Recorder()
    record("embed", first)
    record("embed", second)
    with pytest.raises(e.TapChunkError, match="tap embed"):
        record.taps()


def test_indices_and_logits_get_the_dtypes_of_the_format():
    record = Recorder()
    record("tokens", np.arange(3))
    record("layers.3.indexer.selected", np.zeros((3, 4), np.int64))
    record("layers.3.router.indices", np.zeros((3, 4), np.uint8))
    record("logits", np.full((3, 5), 1.25, BF16))
    record("layers.3.router.logits", np.zeros((3, 4)))
    kinds = {name: str(tap.dtype) for name, tap in record.taps().items()}
    assert list(kinds.values()) == ["int32", "int32", "int32", "float32", "float64"]


def test_a_filter_never_drops_what_every_trace_needs():
    record = Recorder("layers.1.*,embed")
    for name in ("tokens", "embed", "layers.0.in", "layers.1.in", "layers.11.in", "logits"):
        record(name, np.zeros((1, 1)))
    assert list(record.taps()) == ["tokens", "embed", "layers.1.in", "logits"]
    assert not wanted("layers.1.in", [])
    assert wanted("logits", [])
