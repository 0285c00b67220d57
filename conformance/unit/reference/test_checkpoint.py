"""Checkpoint directories: values as written, exports told apart by dtypes, and every inconsistency refused by name."""

import dataclasses
import struct

import ml_dtypes
import numpy as np
import pytest

from conformance.checkpoints import edit, geometry
from conformance.checkpoints.shared import copy_of, shared
from conformance.checkpoints.source import Synthetic, round_bf16
from reference import errors as e
from reference import layout, nvfp4
from reference.checkpoint import open_checkpoint

T = layout.TEXT
SHARD = "model-00002-of-00003.safetensors"
EXPERT = f"{T}layers.4.mlp.experts.5."
BOTH = pytest.mark.parametrize("export", layout.EXPORTS)


@pytest.mark.parametrize("name", ["tiny", "odd"])
@BOTH
def test_values_are_those_of_the_source(export, name):
    """Unpacked tensors hold the source's values, packed ones what the codec makes of them; nothing is left out."""
    opened = open_checkpoint(shared(export, name))
    chosen = geometry(name)
    source = Synthetic(chosen.config, chosen.gate_rank, 0, chosen.layer_keys)
    assert opened.export == export
    assert opened.gate_rank == chosen.gate_rank
    packed = 0
    for spec in source.specs().values():
        expected = source.rows(spec, 0, spec.shape[0])
        if opened.dtype(spec.name) == "U8":
            packed += 1
            scale_2 = opened.weight(f"{spec.name}_scale_2")
            codes = nvfp4.encode(expected, amax=float(scale_2) * 2688)
            expected = nvfp4.decode(codes.packed, codes.scale, float(codes.scale_2))
        elif opened.dtype(spec.name) == "BF16":
            expected = round_bf16(expected)
        found = opened.weight(spec.name)
        assert found.dtype == np.float32
        assert opened.shape(spec.name) == spec.shape
        np.testing.assert_array_equal(found, expected, err_msg=spec.name)
    assert packed == sum(spec.dtype == "U8" for spec in opened.specs.values()) > 0


def test_raw_is_what_the_file_holds():
    directory = shared("nvidia")
    opened = open_checkpoint(directory)
    stored = edit.read_tensors(directory)
    assert set(opened.names()) == set(stored)
    for name, tensor in stored.items():
        dtype, shape, data = opened.raw(name)
        assert (dtype, shape, bytes(data)) == (tensor.dtype, tensor.shape, tensor.data)
        assert data.readonly or not len(data)


@BOTH
def test_rows(export):
    opened = open_checkpoint(shared(export, "odd"))
    for name in (
        f"{T}embed_tokens.weight",
        f"{T}layers.3.mlp.experts.1.up_proj.weight",
        f"{T}layers.0.self_attn.dt_bias",
    ):
        whole = opened.weight(name)
        for start, stop in ((0, 1), (7, 7), (5, 48), (40, 10**6)):
            np.testing.assert_array_equal(opened.rows(name, start, stop), whole[start:stop])


def test_weights_own_their_memory():
    opened = open_checkpoint(shared("nvidia"))
    for name in (f"{T}norm.weight", f"{T}layers.0.self_attn.dt_bias", f"{EXPERT}up_proj.weight"):
        first, second = opened.weight(name), opened.weight(name)
        kept = first.copy()
        first += 1
        np.testing.assert_array_equal(second, kept)
        np.testing.assert_array_equal(opened.weight(name), kept)


def test_both_exports_differ_exactly_as_published():
    """exports.md 2.11: which roles have another dtype, and that all other tensors have the same bytes."""
    nvidia, libertai = (edit.read_tensors(shared(export)) for export in layout.EXPORTS)
    differing = set()
    for name, tensor in libertai.items():
        role, layer, _ = layout.classify(name)
        leaf = role.removeprefix(f"{T}layers.N.")
        other = nvidia.get(name)
        if other is None or other.dtype != tensor.dtype:
            differing.add((leaf, "MTP" if layer == 9 else "text"))
        elif "mlp.experts.E.gate" in leaf or "mlp.experts.E.up" in leaf:
            continue  # the shared scale of nvidia changes codes and scales
        else:
            assert (other.shape, other.data) == (tensor.shape, tensor.data), name
    experts = {
        f"mlp.experts.E.{half}_proj.{part}" for half in ("gate", "up", "down") for part in layout.PACKED_SUFFIXES[:3]
    }
    assert differing == (
        {(f"self_attn.{which}_conv1d.weight", "text") for which in "qkv"}
        | {(f"hc_{site}_{part}", "text") for site in ("attn", "ffn") for part in ("base", "scale")}
        | {(f"mlp.{half}_proj.weight", "text") for half in ("gate", "up", "down")}
        | {(leaf, "MTP") for leaf in experts}
    )
    for name, tensor in nvidia.items():
        if name.endswith("_conv1d.weight"):
            widened = np.frombuffer(libertai[name].data, ml_dtypes.bfloat16).astype("<f4")
            assert tensor.data == widened.tobytes()
        if "hc_attn_base" in name or "hc_ffn_scale" in name:
            values = np.frombuffer(libertai[name].data, "<f4")
            rounded = np.frombuffer(tensor.data, ml_dtypes.bfloat16)
            np.testing.assert_array_equal(rounded, values.astype(ml_dtypes.bfloat16))
            assert (rounded.astype(np.float32) != values).any()


def test_gate_and_up_scales():
    """One weight_scale_2 for gate and up of an expert in nvidia, two in LibertAI; down has its own."""
    for export, together in (("nvidia", True), ("libertai", False)):
        opened = open_checkpoint(shared(export))
        scales = [
            [
                float(opened.weight(f"{T}layers.5.mlp.experts.{x}.{half}_proj.weight_scale_2"))
                for half in ("gate", "up", "down")
            ]
            for x in range(16)
        ]
        assert all((gate == up) == together for gate, up, _ in scales)
        assert len({down for _, _, down in scales}) == 16
        if not together:
            assert max(max(gate / up, up / gate) for gate, up, _ in scales) > 1.5


def test_input_scales_of_nvidia_are_shared_in_a_layer():
    opened = open_checkpoint(shared("nvidia"))
    for layer in (4, 8):
        stem = f"{T}layers.{layer}.mlp.experts."
        found = {
            half: {float(opened.weight(f"{stem}{x}.{half}_proj.input_scale")) for x in range(16)}
            for half in ("gate", "up", "down")
        }
        assert found["gate"] == found["up"]
        assert len(found["gate"] | found["down"]) == 2
    assert not [name for name in open_checkpoint(shared("libertai")).names() if name.endswith("input_scale")]


def test_single_file(tmp_path):
    directory = copy_of(tmp_path, "libertai", "odd")
    tensors = edit.read_tensors(directory)
    kept = open_checkpoint(directory).weight("lm_head.weight")
    edit.write_tensors(directory, {n: dataclasses.replace(t, shard="model.safetensors") for n, t in tensors.items()})
    (directory / edit.INDEX).unlink()
    np.testing.assert_array_equal(open_checkpoint(directory).weight("lm_head.weight"), kept)


def test_export_comes_from_tensors_not_from_names(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    renamed = directory.rename(tmp_path / "nvidia-GLM-5.3-Flash-NVFP4")
    assert open_checkpoint(renamed).export == "libertai"


VALUES = {
    "block scale NaN": (f"{EXPERT}up_proj.weight_scale", 13, 0x7F, e.BlockScaleError, "at [1, 6]: F8_E4M3 0x7f"),
    "block scale negative NaN": (
        f"{EXPERT}up_proj.weight_scale",
        13,
        0xFF,
        e.BlockScaleError,
        "at [1, 6]: F8_E4M3 0xff",
    ),
    "block scale negative": (f"{EXPERT}down_proj.weight_scale", 0, 0xB8, e.BlockScaleError, "at [0, 0]: F8_E4M3 0xb8"),
    "block scale minus zero": (
        f"{EXPERT}down_proj.weight_scale",
        2,
        0x80,
        e.BlockScaleError,
        "at [0, 2]: F8_E4M3 0x80",
    ),
    "weight infinite": (
        f"{T}layers.0.self_attn.q_proj.weight",
        225,
        0x7F,
        e.NonFiniteWeightError,
        "at [1, 0]: BF16 0x7f",
    ),
    "dt_bias NaN": (f"{T}layers.0.self_attn.dt_bias", 19, 0xFF, e.NonFiniteWeightError, "at [4]: F32 0xff"),
}


@pytest.mark.parametrize(("name", "position", "byte", "error", "words"), VALUES.values(), ids=VALUES)
def test_bad_bytes(tmp_path, name, position, byte, error, words):
    directory = copy_of(tmp_path, "libertai", "odd")
    tensors = edit.read_tensors(directory)
    changed = tensors[name].with_byte(position, byte)
    if byte == 0x7F and tensors[name].dtype == "BF16":
        changed = changed.with_byte(position - 1, 0x80)
    if byte == 0xFF and tensors[name].dtype == "F32":
        changed = changed.with_byte(position - 1, 0xC0)
    edit.write_tensors(directory, tensors | {name: changed})
    opened = open_checkpoint(directory)
    weight = name.removesuffix("_scale") if tensors[name].dtype == "F8_E4M3" else name
    for read in (lambda: opened.weight(weight), lambda: opened.weight(name), lambda: opened.check_values(name)):
        with pytest.raises(error) as caught:
            read()
        assert type(caught.value) is error
        assert words in str(caught.value)
        assert f"tensor {name}" in str(caught.value)
    # Every other tensor still reads.
    for other in (f"{EXPERT}gate_proj.weight", f"{T}norm.weight"):
        opened.weight(other)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "-0.0", "0", "3e38", "1.27e35"])
def test_bad_tensor_scale(tmp_path, value):
    directory = copy_of(tmp_path, "libertai", "odd")
    name = f"{EXPERT}up_proj.weight_scale_2"
    tensors = edit.read_tensors(directory)
    edit.write_tensors(directory, tensors | {name: edit.Stored("F32", (), struct.pack("<f", float(value)), SHARD)})
    opened = open_checkpoint(directory)
    for read in (opened.weight, opened.check_values):
        with pytest.raises(e.TensorScaleError, match=r"up_proj\.weight"):
            read(f"{EXPERT}up_proj.weight")


def test_tensor_scale_of_zero_is_fine_for_zeros(tmp_path):
    directory = copy_of(tmp_path, "libertai", "odd")
    weight = f"{EXPERT}up_proj.weight"
    tensors = edit.read_tensors(directory)
    zero = {
        weight: dataclasses.replace(tensors[weight], data=b"\x80\x08" * (len(tensors[weight].data) // 2)),
        f"{weight}_scale_2": edit.Stored("F32", (), bytes(4), SHARD),
    }
    edit.write_tensors(directory, tensors | zero)
    opened = open_checkpoint(directory)
    opened.check_values(weight)
    assert not opened.weight(weight).any()


def test_no_such_tensor():
    opened = open_checkpoint(shared("libertai", "odd"))
    assert not opened.has("x")
    for read in (opened.weight, opened.raw, opened.dtype, opened.shape, opened.check_values):
        with pytest.raises(e.NoSuchTensorError, match="no tensor 'x'"):
            read("x")
