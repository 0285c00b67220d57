"""What may vary in how a checkpoint is stored: oracle, engine and judge take the same, and refuse the same."""

import dataclasses
import random
import re
import struct

import numpy as np
import pytest

from conformance.checkpoints import edit
from conformance.checkpoints.shared import copy_of, shared
from conformance.engines.base import Schedule
from conformance.engines.fast import FastEngine
from conformance.judge import bits, compare
from fast import errors as fast_errors
from fast.loader import load
from reference import errors as e
from reference import layout
from reference.checkpoint import departures, open_checkpoint, scan

T = layout.TEXT
MTP = f"{T}layers.7.mlp.experts."
UP = f"{T}layers.4.mlp.experts.5.up_proj."
SHARED = f"{T}layers.4.mlp.shared_experts.up_proj."
ONE = struct.pack("<f", 1.0)


def of(export):
    return edit.read_tensors(shared(export, "odd"))


def rewritten(tmp_path, export, changes):
    """A copy of an export with tensors replaced, added or (None) taken away; each in a shard that the copy has."""
    directory = copy_of(tmp_path, export, "odd")
    tensors = edit.read_tensors(directory)
    shard = tensors["lm_head.weight"].shard
    added = {
        n: t and dataclasses.replace(t, shard=tensors[n].shard if n in tensors else shard) for n, t in changes.items()
    }
    edit.write_tensors(directory, {n: t for n, t in (tensors | added).items() if t is not None})
    return directory


def swapped(export, chosen):
    """The weights whose names `chosen` picks, as the other export stores them, with or without scales."""
    here, there = of(export), of("libertai" if export == "nvidia" else "nvidia")
    picked = {n for n in here if n.rsplit(".", 1)[-1] not in layout.PACKED_SUFFIXES[1:] and chosen(n)}

    def belongs(name):
        stem, _, leaf = name.rpartition(".")
        return name in picked or (leaf in layout.PACKED_SUFFIXES and f"{stem}.weight" in picked)

    return {n: None for n in here if belongs(n)} | {n: t for n, t in there.items() if belongs(n)}


def matching(pattern):
    return lambda export: swapped(export, lambda name: re.search(pattern, name))


def changed(suffix, **fields):
    return lambda export: {n: dataclasses.replace(t, **fields) for n, t in of(export).items() if n.endswith(suffix)}


def input_scales(export):
    """One for each linear of each expert, the draft block's included."""
    names = [n for n in of(export) if ".mlp.experts." in n and n.endswith("_proj.weight")]
    return {f"{n.removesuffix('weight')}input_scale": edit.Stored("F32", (), ONE, "") for n in names}


def gone(*suffixes):
    return lambda export: {n: None for n in of(export) if n.endswith(suffixes)}


DTYPE, SHAPE = "TensorDtypeError", "TensorShapeError"
ACCEPTED = {
    "packed draft experts": ("nvidia", matching(rf"^{MTP}"), DTYPE),
    "one packed draft expert": ("nvidia", matching(rf"^{MTP}3\.up_proj"), DTYPE),
    "BF16 draft experts": ("libertai", matching(rf"^{MTP}"), DTYPE),
    "BF16 dense MLP": ("nvidia", matching(r"layers\.1\.mlp\."), DTYPE),
    "packed dense MLP": ("libertai", matching(r"layers\.1\.mlp\."), DTYPE),
    "F32 convolutions": ("libertai", matching("conv1d"), DTYPE),
    "BF16 mHC base": ("libertai", matching("hc_ffn_base"), DTYPE),
    "F32 mHC scale": ("nvidia", matching("hc_attn_scale"), DTYPE),
    "weight_scale_2 of shape [1]": ("libertai", changed("weight_scale_2", shape=(1,)), SHAPE),
    "input_scale of shape [1]": ("nvidia", changed("input_scale", shape=(1,)), SHAPE),
    "a later revision's input scales": ("libertai", input_scales, "UnknownTensorError"),
    "no input scales": ("nvidia", gone("input_scale"), "MissingScaleError"),
}


@pytest.mark.parametrize(("export", "changes", "kind"), ACCEPTED.values(), ids=ACCEPTED)
def test_accepted_by_all_and_listed(tmp_path, export, changes, kind):
    """Both load it, the judge finds every operand as the file has it, and each tensor at issue is told."""
    changes = changes(export)
    directory = rewritten(tmp_path, export, changes)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.export == export
    stored = edit.read_tensors(directory)
    for name in checkpoint.names():
        checkpoint.check_values(name)
        assert checkpoint.raw(name)[:2] == (stored[name].dtype, stored[name].shape)
    engine = FastEngine()
    engine.open(directory, mtp=1)
    rows = list(bits.compare(checkpoint, engine.operands, bits.weights(checkpoint, drafts=True)))
    assert {row.name for row in rows} == set(bits.weights(checkpoint, drafts=True))
    assert [row for row in rows if not row.passed] == []
    listed = departures(scan(directory))
    assert {type(departure).__name__ for departure in listed} == {kind}
    told = "\n".join(map(str, listed))
    assert all(name in told or f"{name.rpartition('.')[0]}.weight" in told for name in changes)


@pytest.mark.parametrize("seed", range(2))
def test_any_mixture_of_both_exports_is_judged(tmp_path, seed):
    """Each weight as one export or the other has it, some multipliers of shape [1]: every operand and step is right."""
    rng = random.Random(seed)
    changes = swapped("nvidia", lambda name: rng.random() < 0.5)
    changes |= {n: dataclasses.replace(t, shape=(1,)) for n, t in changes.items() if t and not t.shape}
    directory = rewritten(tmp_path, "nvidia", changes)
    engine = FastEngine()
    engine.open(directory, mtp=1)
    trace = engine.run(np.arange(11) * 23 % 257, Schedule((6, 2), 3))
    result = compare(trace, open_checkpoint(directory), operands=engine.operands)
    assert result.passed, result.first_divergence
    assert result.coverage.tensors_missing == ()
    assert any(row.tap == "mtp.logits" for row in result.taps)


def replaced(name, **fields):
    return lambda t: {name: dataclasses.replace(t[name], **fields)}


REFUSED = {
    "scale_2 of shape [1, 1]": (replaced(f"{UP}weight_scale_2", shape=(1, 1)), "shape [1, 1], expected []"),
    "scale_2 of two": (replaced(f"{UP}weight_scale_2", shape=(2,), data=ONE * 2), "shape [2], expected []"),
    "scale_2 of none": (replaced(f"{UP}weight_scale_2", shape=(0,), data=b""), "shape [0]"),
    "codes as I8": (replaced(f"{UP}weight", dtype="I8"), "I8, expected U8"),
    "a text expert in BF16": (
        lambda t: {f"{UP}weight": edit.Stored("BF16", (48, 112), bytes(48 * 112 * 2), "")},
        "BF16, expected U8",
    ),
    "input_scale in BF16": (
        lambda t: {f"{UP}input_scale": edit.Stored("BF16", (), b"\0\0", "")},
        "BF16, expected F32",
    ),
    "input_scale beside BF16": (
        lambda t: {f"{SHARED}input_scale": edit.Stored("F32", (), ONE, "")},
        f"{SHARED}input_scale",
    ),
    "a packed shared expert": (
        lambda t: {f"{SHARED}weight": edit.Stored("U8", (48, 56), bytes(48 * 56), "")},
        "U8, expected BF16",
    ),
    "norm in F32": (
        lambda t: {f"{T}norm.weight": edit.Stored("F32", (112,), bytes(448), "")},
        "F32, expected BF16",
    ),
    "scales of a BF16 dense MLP": (
        lambda t: {f"{T}layers.1.mlp.up_proj.weight_scale_2": edit.Stored("F32", (), ONE, "")},
        "layers.1.mlp.up_proj.weight_scale_2",
    ),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_by_both_in_one_line(tmp_path, change, words):
    """Named are the tensor, what was found and what was expected; the packed weight's scales would fit."""
    tensors = of("libertai")
    changes = change(tensors)
    directory = rewritten(tmp_path, "libertai", changes)
    for read, kind in ((open_checkpoint, e.LayoutError), (load, fast_errors.LayoutError)):
        with pytest.raises(kind) as caught:
            read(directory)
        message = str(caught.value)
        assert words in message
        assert next(iter(changes)) in message
        assert "\n" not in message
