"""Checkpoint directories that are not what an index, a config and an export promise: refused by name."""

import dataclasses
import os
import random
import struct

import ml_dtypes
import numpy as np
import pytest

from conformance.checkpoints import edit
from conformance.checkpoints.shared import copy_of, shared
from reference import errors as e
from reference import layout
from reference.checkpoint import departures, open_checkpoint, scan

T = layout.TEXT
EXPERT = f"{T}layers.4.mlp.experts.5."
BOTH = pytest.mark.parametrize("export", layout.EXPORTS)


# --- the index and the shards ---


def refuse(directory, error, words):
    with pytest.raises(error) as caught:
        open_checkpoint(directory)
    assert type(caught.value) is error, caught.value
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    found = [problem for problem in scan(directory).problems if type(problem) is error and words in str(problem)]
    assert found


SHARD = "model-00002-of-00003.safetensors"


def remap(directory, change):
    index = edit.read_json(directory / edit.INDEX)
    change(index["weight_map"])
    edit.write_json(directory / edit.INDEX, index)


@pytest.mark.parametrize(
    ("file_name", "error"),
    [
        ("../model-00002-of-00003.safetensors", e.ShardPathError),
        ("sub/model-00002-of-00003.safetensors", e.ShardPathError),
        ("..\\model.safetensors", e.ShardPathError),
        ("/etc/passwd", e.ShardPathError),
        ("/etc/model.safetensors", e.ShardPathError),
        (".hidden.safetensors", e.ShardPathError),
        ("model.bin", e.ShardPathError),
        ("", e.ShardPathError),
        ("a\0.safetensors", e.ShardPathError),
        ("model-00004-of-00003.safetensors", e.MissingShardError),
    ],
    ids=repr,
)
def test_shard_names_that_leave_the_directory(tmp_path, file_name, error):
    directory = copy_of(tmp_path, "libertai", "odd")
    remap(directory, lambda weight_map: weight_map.update({"lm_head.weight": file_name}))
    refuse(directory, error, "safetensors" if error is e.MissingShardError else "file name")


def test_symlink_out_of_the_directory(tmp_path):
    directory = copy_of(tmp_path, "libertai", "odd")
    (directory / SHARD).rename(tmp_path / "elsewhere.safetensors")
    os.symlink(tmp_path / "elsewhere.safetensors", directory / SHARD)
    refuse(directory, e.ShardPathError, "leads out of the directory")


def test_symlink_to_the_directory_is_fine(tmp_path):
    os.symlink(shared("libertai", "odd"), tmp_path / "link")
    assert open_checkpoint(tmp_path / "link").export == "libertai"


def test_index_names_an_absent_tensor(tmp_path):
    directory = copy_of(tmp_path, "libertai", "odd")
    remap(directory, lambda weight_map: weight_map.update({"ghost.weight": SHARD}))
    refuse(directory, e.AbsentTensorError, "does not hold tensor 'ghost.weight'")


def test_index_names_the_wrong_shard(tmp_path):
    directory = copy_of(tmp_path, "libertai", "odd")
    index = edit.read_json(directory / edit.INDEX)["weight_map"]
    other = next(name for name in sorted(set(index.values())) if name != index["lm_head.weight"])
    remap(directory, lambda weight_map: weight_map.update({"lm_head.weight": other}))
    refuse(directory, e.AbsentTensorError, f"it is in {index['lm_head.weight']}")


def test_tensor_in_no_index(tmp_path):
    directory = copy_of(tmp_path, "libertai", "odd")
    remap(directory, lambda weight_map: weight_map.pop("lm_head.weight"))
    refuse(directory, e.UnindexedTensorError, "'lm_head.weight' is not in model.safetensors.index.json")


def test_tensor_in_two_shards(tmp_path):
    directory = copy_of(tmp_path, "libertai", "odd")
    tensors = edit.read_tensors(directory)
    first, second = sorted({tensor.shard for tensor in tensors.values()})[:2]
    name, tensor = next((n, t) for n, t in tensors.items() if t.shard == first)
    twice = {n: t for n, t in tensors.items() if t.shard == second} | {name: tensor}
    (directory / second).write_bytes(edit.join(*edit.pack(twice)))
    refuse(directory, e.TwoShardsError, f"{name!r} is also in {first}")


def test_shard_that_the_index_does_not_name(tmp_path):
    directory = copy_of(tmp_path, "libertai", "odd")
    (directory / "model-extra.safetensors").write_bytes(edit.join({}, b""))
    refuse(directory, e.StrayShardError, "model-extra.safetensors")


INDEXES = [
    (b"", e.IndexFileError, "not JSON"),
    (b'{"weight_map": {}}', e.IndexFileError, "not a non-empty object"),
    (b'{"weight_map": []}', e.IndexFileError, "not a non-empty object"),
    (b'{"metadata": {}}', e.IndexFileError, "not a non-empty object"),
    (b'{"weight_map": {"a": 1}}', e.IndexFileError, "weight_map['a'] is 1"),
    (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', e.IndexDuplicateKeyError, "'a' appears twice"),
    (b'{"weight_map": {"\xff": "x"}}', e.IndexFileError, "not UTF-8"),
    (None, e.IndexFileError, "missing"),
]


@pytest.mark.parametrize(("content", "error", "words"), INDEXES, ids=lambda value: str(value)[:40])
def test_broken_index(tmp_path, content, error, words):
    directory = copy_of(tmp_path, "libertai", "odd")
    (directory / edit.INDEX).unlink()
    if content is not None:
        (directory / edit.INDEX).write_bytes(content)
    refuse(directory, error, words)


def test_no_directory(tmp_path):
    refuse(tmp_path / "absent", e.IndexFileError, "not a directory")


def test_truncated_shard(tmp_path):
    directory = copy_of(tmp_path, "libertai", "odd")
    os.truncate(directory / SHARD, (directory / SHARD).stat().st_size - 1)
    refuse(directory, e.FileLengthError, SHARD)


def test_broken_config_is_an_error_of_the_config(tmp_path):
    directory = copy_of(tmp_path, "nvidia", "odd")
    raw = edit.read_json(directory / "config.json")
    raw["text_config"]["linear_attn_config"]["kda_layers"].append(1)
    edit.write_json(directory / "config.json", raw)
    refuse(directory, e.ConfigLayersError, "layer 1 is in both")


def test_hf_quant_config_that_disagrees(tmp_path):
    directory = copy_of(tmp_path, "nvidia", "odd")
    raw = edit.read_json(directory / "hf_quant_config.json")
    raw["quantization"]["quant_algo"] = "FP8"
    edit.write_json(directory / "hf_quant_config.json", raw)
    refuse(directory, e.ConfigEnumError, "quant_algo: 'FP8'")


# --- the layout ---


def stored(dtype, shape, data):
    return edit.Stored(dtype, shape, data, SHARD)


def wide(tensor):
    return np.frombuffer(tensor.data, ml_dtypes.bfloat16).astype("<f4").tobytes()


def narrow(tensor):
    return np.frombuffer(tensor.data, "<f4").astype(ml_dtypes.bfloat16).tobytes()


A_LOG, Q_PROJ = f"{T}layers.0.self_attn.A_log", f"{T}layers.0.self_attn.q_proj.weight"
APE = f"{T}layers.1.self_attn.indexer.index_kpool_compress_ape"
LAYOUTS = {
    "unknown tensor": (
        "nvidia",
        lambda t: {"model.layers.0.mlp.gate.weight": stored("BF16", (1,), b"\0\0")},
        e.UnknownTensorError,
        "'model.layers.0.mlp.gate.weight' is not part of the nvidia export",
    ),
    "missing tensor": (
        "nvidia",
        lambda t: {f"{T}norm.weight": None},
        e.MissingTensorError,
        f"{T}norm.weight is missing",
    ),
    "missing expert": (
        "libertai",
        lambda t: {f"{EXPERT}up_proj.{part}": None for part in ("weight", "weight_scale", "weight_scale_2")},
        e.MissingTensorError,
        "(layer 4, expert 5)",
    ),
    "missing block scales": (
        "libertai",
        lambda t: {f"{EXPERT}up_proj.weight_scale": None},
        e.MissingScaleError,
        f"{EXPERT}up_proj.weight is packed, but weight_scale is missing (layer 4, expert 5)",
    ),
    "missing tensor scale": (
        "nvidia",
        lambda t: {f"{EXPERT}up_proj.weight_scale_2": None},
        e.MissingScaleError,
        "weight_scale_2 is missing (layer 4, expert 5)",
    ),
    "A_log in BF16": (
        "libertai",
        lambda t: {A_LOG: stored("BF16", t[A_LOG].shape, narrow(t[A_LOG]))},
        e.TensorDtypeError,
        f"{A_LOG}: BF16, expected F32",
    ),
    "router bias in BF16": (
        "nvidia",
        lambda t: {
            (n := f"{T}layers.4.mlp.gate.e_score_correction_bias"): stored("BF16", t[n].shape, narrow(t[n])),
        },
        e.TensorDtypeError,
        "e_score_correction_bias: BF16, expected F32",
    ),
    "another matrix as the convolutions may be": (
        "libertai",
        lambda t: {Q_PROJ: stored("F32", t[Q_PROJ].shape, wide(t[Q_PROJ]))},
        e.TensorDtypeError,
        f"{Q_PROJ}: F32, expected BF16 in the libertai export",
    ),
    "codes as I8": (
        "nvidia",
        lambda t: {(n := f"{EXPERT}up_proj.weight"): dataclasses.replace(t[n], dtype="I8")},
        e.TensorDtypeError,
        "I8, expected U8",
    ),
    "scale_2 of shape [1, 1]": (
        "nvidia",
        lambda t: {(n := f"{EXPERT}up_proj.weight_scale_2"): dataclasses.replace(t[n], shape=(1, 1))},
        e.TensorShapeError,
        "shape [1, 1], expected []",
    ),
    "block scales of half the columns": (
        "libertai",
        lambda t: {(n := f"{EXPERT}up_proj.weight_scale"): stored("F8_E4M3", (48, 3), t[n].data[: 48 * 3])},
        e.TensorShapeError,
        "shape [48, 3], expected [48, 7]",
    ),
    "transposed": (
        "libertai",
        lambda t: {(n := f"{T}layers.0.self_attn.o_proj.weight"): dataclasses.replace(t[n], shape=t[n].shape[::-1])},
        e.TensorShapeError,
        "shape [96, 112], expected [112, 96]",
    ),
    "kpool rows": (
        "libertai",
        lambda t: {APE: stored("BF16", (4, 20), t[APE].data[: 4 * 20 * 2])},
        e.TensorShapeError,
        f"{APE}: shape [4, 20], expected [8, 20]",
    ),
    "compressed-tensors codes": (
        "libertai",
        lambda t: {f"{EXPERT}up_proj.weight": None, f"{EXPERT}up_proj.weight_packed": t[f"{EXPERT}up_proj.weight"]},
        e.ForeignFormatError,
        "weight_packed' belongs to compressed-tensors",
    ),
    "compressed-tensors scale": (
        "nvidia",
        lambda t: {f"{EXPERT}up_proj.weight_global_scale": stored("F32", (1,), struct.pack("<f", 3584.0))},
        e.ForeignFormatError,
        "weight_global_scale' belongs to compressed-tensors",
    ),
}


@pytest.mark.parametrize(("export", "change", "error", "words"), LAYOUTS.values(), ids=LAYOUTS)
def test_layout_departures(tmp_path, export, change, error, words):
    directory = copy_of(tmp_path, export, "odd")
    tensors = edit.read_tensors(directory)
    changed = tensors | change(tensors)
    edit.write_tensors(directory, {name: tensor for name, tensor in changed.items() if tensor is not None})
    refuse(directory, error, words)


def test_no_packed_tensor_is_no_export(tmp_path):
    directory = copy_of(tmp_path, "libertai", "odd")
    tensors = edit.read_tensors(directory)
    edit.write_tensors(directory, {n: t for n, t in tensors.items() if t.dtype != "U8"})
    refuse(directory, e.ExportError, "not an NVFP4 export")


def test_one_rule_of_the_other_export_does_not_turn_it_over(tmp_path):
    """Export by majority: a LibertAI pack with nvidia's conv and hc dtypes is still one, these tensors apart."""
    directory = copy_of(tmp_path, "libertai", "odd")
    nvidia = edit.read_tensors(shared("nvidia", "odd"))
    taken = ("conv1d.weight", "hc_attn_base")
    tensors = edit.read_tensors(directory)
    edit.write_tensors(directory, {n: nvidia[n] if n.endswith(taken) else t for n, t in tensors.items()})
    found = scan(directory)
    assert found.export == "libertai"
    assert found.problems == []
    apart = departures(found)
    assert {type(departure) for departure in apart} == {e.TensorDtypeError}
    assert len(apart) == 4 * 3 + 7


def test_two_rules_of_each_export_are_counted_by_tensors(tmp_path):
    """12 convolutions and 28 mHC vectors as nvidia has them, 6 dense and 30 expert weights as LibertAI has them;
    then half of the vectors go back, so that their rule is LibertAI's."""
    directory = copy_of(tmp_path, "libertai", "odd")
    nvidia = edit.read_tensors(shared("nvidia", "odd"))
    tensors = edit.read_tensors(directory)
    taken = ("conv1d.weight", "hc_attn_base", "hc_ffn_base", "hc_attn_scale", "hc_ffn_scale")
    edit.write_tensors(directory, {n: nvidia[n] if n.endswith(taken) else t for n, t in tensors.items()})
    assert open_checkpoint(directory).export == "nvidia"
    mostly = {n for n in tensors if n.endswith(taken[3:])}
    edit.write_tensors(
        directory, {n: nvidia[n] if n.endswith(taken) and n not in mostly else t for n, t in tensors.items()}
    )
    assert open_checkpoint(directory).export == "libertai"


def test_scan_collects_every_problem(tmp_path):
    directory = copy_of(tmp_path, "libertai", "odd")
    tensors = edit.read_tensors(directory)
    del tensors[f"{T}norm.weight"], tensors[f"{EXPERT}up_proj.weight_scale"]
    tensors[A_LOG] = stored("BF16", tensors[A_LOG].shape, narrow(tensors[A_LOG]))
    tensors["stray"] = stored("U8", (1,), b"\0")
    edit.write_tensors(directory, tensors)
    kinds = sorted(type(problem).__name__ for problem in scan(directory).problems)
    assert kinds == ["MissingScaleError", "MissingTensorError", "TensorDtypeError", "UnknownTensorError"]


def test_giant_expert_count_does_not_hang(tmp_path):
    directory = copy_of(tmp_path, "libertai", "odd")
    raw = edit.read_json(directory / "config.json")
    raw["text_config"] |= {"n_routed_experts": 2**30, "n_group": 1, "topk_group": 1}
    edit.write_json(directory / "config.json", raw)
    problems = scan(directory).problems
    assert "stopped after 10000 missing tensors" in str(problems[-1])


@pytest.mark.parametrize("seed", range(3))
def test_mutated_headers_load_right_or_not_at_all(tmp_path, seed):
    """Bytes replaced in the headers of a directory: it opens to exactly what was written, or one of our errors."""
    directory = copy_of(tmp_path, "libertai", "odd")
    path = directory / SHARD
    good = path.read_bytes()
    length = 8 + int.from_bytes(good[:8], "little")
    expected = edit.read_tensors(directory)
    rng = random.Random(seed)
    opened = 0
    for _ in range(60):
        content = bytearray(good)
        for _ in range(rng.choice([1, 1, 2, 8])):
            # Digits among the replacements keep most headers readable, so that their numbers are what is checked.
            content[rng.randrange(length)] = rng.choice(b'0123456789 "[]{},:aU\x00\xff')
        path.write_bytes(content)
        try:
            found = open_checkpoint(directory)
            loaded = {name: found.raw(name) for name in found.names()}
        except e.InputError:
            continue
        opened += 1
        assert loaded.keys() == expected.keys()
        for name, (dtype, shape, data) in loaded.items():
            assert (dtype, shape, bytes(data)) == (expected[name].dtype, expected[name].shape, expected[name].data)
    assert opened < 60


# --- values ---

NAN, INF = 0x7FC00000, 0x7F800000
