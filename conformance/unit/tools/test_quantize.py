"""`glm53 quantize`: a BF16 or block-FP8 directory becomes what `make-checkpoint` writes from the same weights."""

import dataclasses
import json
import math
import os

import ml_dtypes
import numpy as np
import pytest

from conformance.checkpoints import edit, geometry
from conformance.checkpoints import export as export_writer
from conformance.checkpoints.directory import DirectorySource
from conformance.checkpoints.shared import copy_of, shared
from conformance.checkpoints.source import Synthetic, integers, key_of, round_bf16
from conformance.unit.tools.command import glm53
from reference import config, layout, nvfp4
from reference import errors as e
from reference.checkpoint import open_checkpoint
from tools.quantize import quantize

T = layout.TEXT
WEIGHT = f"{T}layers.3.mlp.experts.2.up_proj.weight"


def fp8_directory(directory, name="odd"):
    """A block-FP8 original of a geometry: random codes of every finite E4M3 value, a scale per 128 x 128 block."""
    raw = geometry(name).config | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}
    chosen = geometry(name)
    source = Synthetic(chosen.config, chosen.gate_rank, 0, chosen.layer_keys)
    plain = source.specs()
    tensors: dict[str, edit.Stored] = {}
    for spec in layout.tensors(source.config, "fp8", chosen.gate_rank):
        if spec.dtype == "F8_E4M3":
            codes = (integers(key_of(1, spec.name), 0, math.prod(spec.shape)) & 0xFF).astype(np.uint8)
            codes[(codes & 0x7F) == 0x7F] = 0x12
            data = codes.tobytes()
        elif spec.name.endswith("weight_scale_inv"):
            draws = integers(key_of(1, spec.name), 0, math.prod(spec.shape)).astype(np.float32)
            data = (np.abs(draws) * np.float32(1e-9) + np.float32(1e-6)).tobytes()
        else:
            values = source.rows(plain[spec.name], 0, spec.shape[0])
            data = values.astype(ml_dtypes.bfloat16 if spec.dtype == "BF16" else "<f4").tobytes()
        shard = f"model-0000{1 + len(tensors) % 2}-of-00002.safetensors"
        tensors[spec.name] = edit.Stored(spec.dtype, spec.shape, data, shard)
    directory.mkdir()
    edit.write_tensors(directory, tensors)
    edit.write_json(directory / "config.json", raw)
    return directory


@pytest.mark.parametrize("name", ["tiny", "odd"])
def test_bf16_twin_gives_the_synthetic_export(tmp_path, name):
    """Byte for byte for LibertAI; for nvidia all but input_scale, which nothing here calibrates."""
    twin = shared("bf16", name)
    for export in layout.EXPORTS:
        quantize(twin, tmp_path / export, export, quiet=True)
        found, expected = edit.read_tensors(tmp_path / export), edit.read_tensors(shared(export, name))
        assert list(found) == list(expected)
        for tensor, stored in expected.items():
            if tensor.endswith("input_scale"):
                stored = dataclasses.replace(stored, data=np.float32(1.0).tobytes())
            assert found[tensor] == stored, tensor
        assert (tmp_path / export / "config.json").read_bytes() == (shared(export, name) / "config.json").read_bytes()
        assert open_checkpoint(tmp_path / export).export == export


@pytest.mark.parametrize("export", layout.EXPORTS)
def test_fp8_original(tmp_path, export):
    """value = E4M3 code x scale of its block, rounded to BF16; ragged blocks at the edges; then as from BF16."""
    original = fp8_directory(tmp_path / "fp8")
    stored = edit.read_tensors(original)
    result = quantize(original, tmp_path / "out", export, quiet=True)
    assert result["source_layout"] == "fp8"
    opened = open_checkpoint(tmp_path / "out")
    checked = 0
    for spec in layout.tensors(config.parse(geometry("odd").config), "bf16", 12):
        if f"{spec.name}_scale_inv" not in stored:
            continue
        codes = np.frombuffer(stored[spec.name].data, ml_dtypes.float8_e4m3fn).reshape(spec.shape).astype(np.float64)
        blocks = stored[f"{spec.name}_scale_inv"]
        scales = np.frombuffer(blocks.data, "<f4").reshape(blocks.shape).astype(np.float64)
        values = np.empty(spec.shape, np.float32)
        for i in range(spec.shape[0]):
            for j in range(0, spec.shape[1], 128):
                values[i, j : j + 128] = codes[i, j : j + 128] * scales[i // 128, j // 128]
        values = round_bf16(values)
        if opened.dtype(spec.name) == "U8":
            amax = float(opened.weight(f"{spec.name}_scale_2")) * 2688
            encoded = nvfp4.encode(values, amax=amax)
            values = nvfp4.decode(encoded.packed, encoded.scale, float(encoded.scale_2))
        np.testing.assert_array_equal(opened.weight(spec.name), values, err_msg=spec.name)
        checked += 1
    assert checked == 4 * 4 + 3 * (2 + 6 + 6 * 10)


def test_f32_sources_are_rounded_and_conv_may_be_wide(tmp_path):
    """A re-save holds conv1d and the router in FP32; that is no other model."""
    twin = copy_of(tmp_path, "bf16", "odd")
    tensors = edit.read_tensors(twin)
    for name, tensor in tensors.items():
        if "conv1d" in name or name.endswith("mlp.gate.weight"):
            wide = np.frombuffer(tensor.data, ml_dtypes.bfloat16).astype("<f4").tobytes()
            tensors[name] = dataclasses.replace(tensor, dtype="F32", data=wide)
    edit.write_tensors(twin, tensors)
    quantize(twin, tmp_path / "out", "libertai", quiet=True)
    assert edit.read_tensors(tmp_path / "out") == edit.read_tensors(shared("libertai", "odd"))


def test_tokenizer_files_come_along(tmp_path):
    twin = copy_of(tmp_path, "bf16", "odd")
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "preprocessor_config.json",
        "README.md",
    ):
        (twin / name).write_text(name)
    quantize(twin, tmp_path / "out", "nvidia", quiet=True)
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"}
    assert copied <= set(os.listdir(tmp_path / "out"))
    assert "README.md" not in os.listdir(tmp_path / "out")


def replaced(tensors, name, **changes):
    return tensors | {name: dataclasses.replace(tensors[name], **changes)}


A_LOG = f"{T}layers.0.self_attn.A_log"
BAD = {
    "missing": (lambda t: {n: s for n, s in t.items() if n != A_LOG}, e.MissingTensorError, A_LOG),
    "unknown": (lambda t: t | {"x": t[A_LOG]}, e.UnknownTensorError, "tensor x "),
    "A_log in BF16": (
        lambda t: replaced(t, A_LOG, dtype="BF16", data=t[A_LOG].data[:12]),
        e.TensorDtypeError,
        "A_log: BF16, expected F32",
    ),
    "half": (lambda t: replaced(t, WEIGHT, dtype="F16"), e.SourceError, "F16"),
    "shape": (
        lambda t: replaced(t, WEIGHT, shape=(112, 48)),
        e.TensorShapeError,
        "shape [112, 48], expected [48, 112]",
    ),
    "NaN": (
        lambda t: t | {WEIGHT: t[WEIGHT].with_byte(225, 0x7F).with_byte(224, 0xC0)},
        e.NonFiniteWeightError,
        f"{WEIGHT} at [1, 0]: BF16 0x7fc0",
    ),
}


@pytest.mark.parametrize(("change", "error", "words"), BAD.values(), ids=BAD)
def test_bad_sources(tmp_path, change, error, words):
    twin = copy_of(tmp_path, "bf16", "odd")
    edit.write_tensors(twin, change(edit.read_tensors(twin)))
    with pytest.raises(error) as caught:
        quantize(twin, tmp_path / "out", "libertai", quiet=True)
    assert words in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["odd-bf16"]


FP8_BAD = {
    "code NaN": (f"{T}layers.0.mlp.up_proj.weight", 113, 0x7F, e.NonFiniteWeightError, "at [1, 1]: NaN"),
    "scale negative": (f"{T}layers.0.mlp.up_proj.weight_scale_inv", 3, 0xB0, e.TensorScaleError, "negative"),
    "scale infinite": (f"{T}layers.0.mlp.up_proj.weight_scale_inv", 3, 0xFF, e.NonFiniteWeightError, "F32 0xff"),
}


@pytest.mark.parametrize(("name", "position", "byte", "error", "words"), FP8_BAD.values(), ids=FP8_BAD)
def test_bad_fp8_values(tmp_path, name, position, byte, error, words):
    original = fp8_directory(tmp_path / "fp8")
    tensors = edit.read_tensors(original)
    changed = tensors[name].with_byte(position, byte)
    if byte == 0xFF:
        changed = changed.with_byte(position - 1, 0x80)
    edit.write_tensors(original, tensors | {name: changed})
    with pytest.raises(error) as caught:
        quantize(original, tmp_path / "out", "libertai", quiet=True)
    assert words in str(caught.value)
    assert name in str(caught.value)


def test_an_export_is_no_source(tmp_path):
    with pytest.raises(e.SourceError, match="an export already"):
        quantize(shared("nvidia", "odd"), tmp_path / "out", "libertai")


class Counted(DirectorySource):
    """Remembers how many values it handed out at once."""

    largest = 0

    def rows(self, spec, start, stop):
        values = super().rows(spec, start, stop)
        self.largest = max(self.largest, values.size)
        return values


def test_one_weight_at_a_time(tmp_path, monkeypatch):
    """Rows come on demand: never more than one packed weight, or one block of rows of another."""
    monkeypatch.setattr(export_writer, "ROW_BLOCK", 1024)
    source = Counted(shared("bf16", "odd"))
    export_writer.write_export(source, source.raw, tmp_path / "out", "libertai", lambda name, size: None)
    assert source.largest == 48 * 112
    assert edit.read_tensors(tmp_path / "out") == edit.read_tensors(shared("libertai", "odd"))


def test_command(tmp_path, capsys):
    arguments = [str(shared("bf16", "odd")), str(tmp_path / "out"), "--export", "nvidia"]
    assert glm53("quantize", *arguments, "--json", tmp_path / "summary.json") == 0
    assert "nvidia from bf16: 883 tensors" in capsys.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())["tensors"] == 883
    assert glm53("quantize", *arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "not an empty directory" in printed.err


def test_missing_source(tmp_path, capsys):
    assert glm53("quantize", tmp_path / "absent", tmp_path / "out", "--export", "nvidia") == 2
    assert "config.json: cannot be read" in capsys.readouterr().err


def test_the_twin_is_made_by_the_same_writer():
    assert {spec.name for spec in layout.tensors(config.load(shared("bf16")), "bf16", 16)} == set(
        edit.read_tensors(shared("bf16"))
    )
