"""Checkpoints that are not what they say: each refused by its own class, none half loaded."""

import gc
import os
import shutil
import struct
from typing import Any

import numpy as np
import pytest
import torch

from conformance import lying_files
from conformance.checkpoints import edit, make
from conformance.checkpoints.shared import copy_of
from fast import errors as e
from fast import layout, loader
from fast.loader import load

T = layout.PREFIX
EXPORTS = ("nvidia", "libertai")
BOTH = pytest.mark.parametrize("export", EXPORTS)
FULL: Any = {"mtp": True, "vision": True}


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def rewrite(directory, name, make_value):
    """Put one tensor through `make_value(Stored) -> Stored | None`."""
    edit.change_tensors(directory, **{name: make_value(edit.read_tensors(directory)[name])})


def renamed(directory, old, new):
    tensors = edit.read_tensors(directory)
    edit.write_tensors(directory, {new if name == old else name: t for name, t in tensors.items()})


def as_dtype(dtype):
    width = {"BF16": 2, "F32": 4, "F16": 2, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}[dtype]

    def change(t):
        n = int(np.prod(t.shape))
        return edit.replace(t, dtype=dtype, data=bytes(n * width))

    return change


Q, A, UP = f"{T}layers.0.self_attn.q_proj.weight", f"{T}layers.0.self_attn.A_log", f"{T}layers.4.mlp.experts.3.up_proj."
LAYOUT: Any = {
    "missing tensor": (lambda d: rewrite(d, Q, lambda t: None), e.MissingTensorError, Q),
    "unknown tensor": (lambda d: renamed(d, Q, Q + "s"), e.UnknownTensorError, Q + "s"),
    "leading zero": (lambda d: renamed(d, Q, Q.replace("layers.0", "layers.00")), e.UnknownTensorError, "layers.00"),
    "without the prefix": (
        lambda d: renamed(d, Q, Q.replace("language_model.", "")),
        e.UnknownTensorError,
        "model.layers",
    ),
    "expert past the last": (
        lambda d: renamed(d, UP + "weight", UP.replace(".3.", ".16.") + "weight"),
        e.UnknownTensorError,
        "16",
    ),
    "A_log in BF16": (lambda d: rewrite(d, A, as_dtype("BF16")), e.WrongDtypeError, A),
    "q_proj in F32": (lambda d: rewrite(d, Q, as_dtype("F32")), e.WrongDtypeError, Q),
    "q_proj in F16": (lambda d: rewrite(d, Q, as_dtype("F16")), e.WrongDtypeError, Q),
    "text expert in BF16": (lambda d: rewrite(d, UP + "weight", as_dtype("BF16")), e.WrongDtypeError, UP),
    "scale in E5M2": (lambda d: rewrite(d, UP + "weight_scale", as_dtype("F8_E5M2")), e.WrongDtypeError, UP),
    "scale in U8": (lambda d: rewrite(d, UP + "weight_scale", as_dtype("U8")), e.WrongDtypeError, UP),
    "no weight_scale": (lambda d: rewrite(d, UP + "weight_scale", lambda t: None), e.MissingScaleError, "weight_scale"),
    "no weight_scale_2": (
        lambda d: rewrite(d, UP + "weight_scale_2", lambda t: None),
        e.MissingScaleError,
        "weight_scale_2",
    ),
    "no codes": (lambda d: rewrite(d, UP + "weight", lambda t: None), e.MissingScaleError, UP),
    "weight_packed": (
        lambda d: renamed(d, UP + "weight", UP + "weight_packed"),
        e.ForeignFormatError,
        "compressed-tensors",
    ),
    "weight_global_scale": (
        lambda d: renamed(d, UP + "weight_scale_2", UP + "weight_global_scale"),
        e.ForeignFormatError,
        "weight_global_scale",
    ),
    "weight_scale_inv": (
        lambda d: renamed(d, UP + "weight_scale", UP + "weight_scale_inv"),
        e.ForeignFormatError,
        "block FP8",
    ),
    "transposed": (
        lambda d: rewrite(d, f"{T}layers.0.self_attn.f_b_proj.weight", lambda t: edit.replace(t, shape=t.shape[::-1])),
        e.WrongShapeError,
        "f_b_proj",
    ),
    "scale in groups of 32": (
        lambda d: rewrite(d, UP + "weight_scale", lambda t: edit.replace(t, shape=(t.shape[0] // 2, t.shape[1] * 2))),
        e.WrongShapeError,
        "weight_scale",
    ),
    "conv of rank 2": (
        lambda d: rewrite(
            d, f"{T}layers.0.self_attn.q_conv1d.weight", lambda t: edit.replace(t, shape=(t.shape[0], t.shape[2]))
        ),
        e.WrongShapeError,
        "q_conv1d",
    ),
    "no elements": (
        lambda d: rewrite(d, f"{T}norm.weight", lambda t: edit.replace(t, shape=(0,), data=b"")),
        e.EmptyTensorError,
        "no elements",
    ),
    "gate ranks that differ": (
        lambda d: rewrite(
            d,
            f"{T}layers.1.self_attn.f_a_proj.weight",
            lambda t: edit.replace(t, shape=(8, 128), data=t.data[: len(t.data) // 2]),
        ),
        e.WrongShapeError,
        "f_a_proj",
    ),
    "NaN weight": (
        lambda d: rewrite(d, Q, lambda t: t.with_byte(5, 0x7F).with_byte(4, 0xC0)),
        e.NonFiniteWeightError,
        r"\[0, 2\]",
    ),
    "infinite bias": (
        lambda d: rewrite(d, A, lambda t: edit.replace(t, data=t.data[:-4] + struct.pack("<f", np.inf))),
        e.NonFiniteWeightError,
        r"\[7\]",
    ),
    "NaN scale": (
        lambda d: rewrite(d, UP + "weight_scale", lambda t: t.with_byte(9, 0x7F)),
        e.ScaleNaNError,
        r"0x7f at \[1, 1\]",
    ),
    "negative scale": (
        lambda d: rewrite(d, UP + "weight_scale", lambda t: t.with_byte(8, 0xB8)),
        e.ScaleNegativeError,
        r"\[1, 0\]",
    ),
    **{
        f"tensor scale {value}": (
            lambda d, value=value: rewrite(
                d, UP + "weight_scale_2", lambda t: edit.replace(t, data=struct.pack("<f", value))
            ),
            e.TensorScaleError,
            UP,
        )
        for value in (float("nan"), float("inf"), -1.0, 0.0, -0.0, 1.27e35, 3e38)
    },
}


@pytest.mark.parametrize(("change", "error", "words"), LAYOUT.values(), ids=LAYOUT)
def test_tensors_that_are_not_the_model_s(tmp_path, change, error, words):
    directory = copy_of(tmp_path, "libertai")
    change(directory)
    with pytest.raises(error, match=words):
        load(directory)


def test_conv_that_rounds_to_infinity(tmp_path):
    """Finite in F32, infinite in the BF16 the model computes with."""
    directory = copy_of(tmp_path, "nvidia")
    name = f"{T}layers.0.self_attn.q_conv1d.weight"
    rewrite(directory, name, lambda t: edit.replace(t, data=struct.pack("<f", 3.4028235e38) + t.data[4:]))
    with pytest.raises(e.NonFiniteWeightError, match="q_conv1d"):
        load(directory)


def test_conv_rounds_to_the_nearest_even(tmp_path):
    directory = copy_of(tmp_path, "nvidia")
    name = f"{T}layers.0.self_attn.q_conv1d.weight"
    words = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000, 0xBF818000]
    rewrite(directory, name, lambda t: edit.replace(t, data=struct.pack("<6I", *words) + t.data[24:]))
    bound = load(directory).tensor(name).reshape(-1)[:6].view(torch.int16)
    assert [w & 0xFFFF for w in bound.tolist()] == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF80, 0xBF82]
    assert load(directory).tensor(name).dtype == torch.bfloat16


def test_mhc_scales_of_either_width(tmp_path):
    """F32 values that BF16 cannot hold survive; BF16 ones are widened."""
    directory = copy_of(tmp_path, "libertai")
    name = f"{T}layers.0.hc_attn_scale"
    values = struct.pack("<3f", 1.2345, 0.0071, -3.3)
    rewrite(directory, name, lambda t: edit.replace(t, data=values))
    assert raw(load(directory).tensor(name)) == values
    rewrite(directory, name, lambda t: edit.replace(t, dtype="BF16", data=b"\x9e\x3f\xe9\x3b\x53\xc0"))
    assert raw(load(directory).tensor(name)) == b"\0\0\x9e\x3f\0\0\xe9\x3b\0\0\x53\xc0"


def test_single_file_checkpoint(tmp_path):
    """One model.safetensors without an index is a checkpoint too; with another shard beside it, it is not."""
    directory = copy_of(tmp_path, "libertai")
    tensors = edit.read_tensors(directory)
    edit.write_tensors(directory, {n: edit.replace(t, shard="model.safetensors") for n, t in tensors.items()})
    (directory / edit.INDEX).unlink()
    weights = load(directory, **FULL)
    assert lying_files.differences(weights, lying_files.read_files(directory)) == []
    shutil.copy(directory / "model.safetensors", directory / "model-2.safetensors")
    with pytest.raises(e.MissingFileError, match="index"):
        load(directory)


def test_refusals_leave_nothing_open(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    rewrite(directory, UP + "weight_scale", lambda t: t.with_byte(9, 0x7F))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(e.ScaleNaNError):
            load(directory, **FULL)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """export -> (working directory, its sound files): one dense KDA and one routed DSA layer."""
    made = {}
    for export in EXPORTS:
        directory = tmp_path_factory.mktemp("lies") / export
        make(directory, export, "tiny", seed=1, layers=(2, 3), experts=4, vocab=32)
        made[export] = directory, lying_files.read_files(directory)
    return made


@pytest.mark.parametrize("seed", range(2))
@BOTH
def test_mutations_load_right_or_are_refused(small, export, seed):
    """120 mutated directories; the long run is `glm53 bench lies`."""
    directory, sound = small[export]
    before = lying_files.peak_memory(reset=True)
    tally = lying_files.run(directory, sound, seed, range(120))
    grown = lying_files.peak_memory() - before
    assert sum(tally.answers.values()) == 120
    assert tally.answers["loaded"] > 10
    assert len(tally.answers) > 15
    assert len(tally.kinds) == len(lying_files.KINDS)
    assert grown < 100 << 20
    assert tally.slowest < 2.0, tally.slowest_case


def test_the_fuzz_can_fail(small, monkeypatch):
    """A loader that reads one byte wrong, and one that raises something else, are both caught."""
    directory, sound = small["nvidia"]
    copy = loader._Loader._copy

    def wrong(self, b, component, source):
        out = copy(self, b, component, source)
        out.view(-1)[0] += 1
        return out

    monkeypatch.setattr(loader._Loader, "_copy", wrong)
    with pytest.raises(AssertionError, match="loaded, but not what the files hold"):
        lying_files.run(directory, sound, 0, range(40))
    monkeypatch.setattr(loader._Loader, "_copy", lambda *a: 1 / 0)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        lying_files.run(directory, sound, 0, range(40))
    lying_files.write(directory, sound)
