"""Synthetic checkpoints: the published layout to the byte, the same bytes everywhere, reductions that keep weights."""

import hashlib
import json
import os

import numpy as np
import pytest
import typer

from conformance import checkpoints
from conformance.checkpoints import edit, geometry
from conformance.checkpoints.configs import config_json, hf_quant_config_json
from conformance.checkpoints.shared import shared
from conformance.checkpoints.source import DEVIATION, Synthetic, integers, key_of, round_bf16
from conformance.unit.tools.command import glm53
from reference import config, layout
from reference.checkpoint import open_checkpoint
from reference.errors import GeometryError, NonFiniteWeightError, OutputError
from tools.make_checkpoint import make_checkpoint, parse_layers

T = layout.TEXT


def digest(directory):
    """sha256 over names and contents of all files."""
    total = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        total.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


DIGESTS = {
    ("nvidia", "tiny"): "e7d7bea2381f081f",
    ("libertai", "tiny"): "acf116c742dacd09",
    ("nvidia", "odd"): "0f0ece17c4d6e512",
    ("libertai", "odd"): "6e0500acfeeb47e5",
}


@pytest.mark.parametrize(("export", "name"), DIGESTS)
def test_the_same_bytes_on_every_machine(export, name):
    assert digest(shared(export, name)) == DIGESTS[export, name]


def test_seeds_differ_and_repeat(tmp_path):
    again = checkpoints.make(tmp_path / "again", "libertai", "odd", 0)
    assert digest(again) == digest(shared("libertai", "odd"))
    other = open_checkpoint(checkpoints.make(tmp_path / "other", "libertai", "odd", 1))
    first = open_checkpoint(again)
    for name in first.names():
        # Two maxima may be the same BF16 value, then so are the scales made from them.
        if not name.endswith("weight_scale_2"):
            assert bytes(first.raw(name)[2]) != bytes(other.raw(name)[2]), name


def test_integers_by_their_definition():
    """splitmix64 of key + (i + 1) * golden ratio, four 16-bit fields summed, in plain Python."""
    key, mask = key_of(7, "w"), 2**64 - 1

    def one(i):
        z = (key + (i + 1) * 0x9E3779B97F4A7C15) & mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        z ^= z >> 31
        return sum(z >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 131070

    for start, count in ((0, 5), (65530, 12), (2**33, 3)):
        assert integers(key, start, count).tolist() == [one(i) for i in range(start, start + count)]


def test_integers_do_not_depend_on_the_block():
    whole = integers(99, 0, 200_001)
    parts = [integers(99, start, min(77_777, 200_001 - start)) for start in range(0, 200_001, 77_777)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    # 200,001 draws: the mean lies within 5 standard errors of 0, the deviation within 2 % of its value.
    assert abs(whole.mean()) < 5 * DEVIATION / np.sqrt(whole.size)
    assert abs(whole.std() / DEVIATION - 1) < 0.02


def test_round_bf16_ties_to_even():
    values = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000], np.uint32).view(np.float32)
    expected = np.array([0x3F800000, 0x3F820000, 0x3F810000, 0x3F800000, 0xBF820000], np.uint32).view(np.float32)
    np.testing.assert_array_equal(round_bf16(values), expected)


@pytest.mark.parametrize("name", ["tiny", "odd"])
def test_no_term_is_hidden(name):
    """No weight is zero or constant, FP32 parameters are not BF16 values, scales differ, embeddings differ."""
    chosen = geometry(name)
    source = Synthetic(chosen.config, chosen.gate_rank, 0, chosen.layer_keys)
    for spec in source.specs().values():
        values = source.rows(spec, 0, spec.shape[0])
        assert np.isfinite(values).all()
        assert len(np.unique(values)) > 2 or values.size < 4, spec.name
        if spec.dtype == "F32":
            assert (round_bf16(values) != values).mean() > 0.8, spec.name
        if "conv1d" in spec.name:
            assert np.abs(values).min() > 0.05
        if spec.name.endswith("norm.weight") and layout.VISION not in spec.name:
            assert 0.3 < values.min() < 0.9
            assert 1.1 < values.max() < 1.7
        if spec.name.endswith(("hc_attn_scale", "hc_ffn_scale")):
            assert values[0] < values[1] < values[2]
        if spec.name.endswith("A_log"):
            assert values.max() - values.min() > 0.3
        if spec.name.endswith("e_score_correction_bias"):
            assert values.max() - values.min() > 0.1
    embed = source.specs()[f"{T}embed_tokens.weight"]
    assert len(np.unique(source.rows(embed, 0, embed.shape[0]), axis=0)) == embed.shape[0]


def test_released_files_of_the_full_geometry():
    raw = geometry("full").config
    quantization = hf_quant_config_json(raw).encode()
    assert len(quantization) == 7_997
    assert hashlib.sha256(quantization).hexdigest().startswith("1277df93")
    assert len(config_json(raw, "libertai").encode()) == 6_529
    assert len(config_json(raw, "nvidia").encode()) == 16_358


@pytest.mark.parametrize("export", layout.EXPORTS)
@pytest.mark.parametrize("name", ["tiny", "odd"])
def test_directory(export, name):
    directory = shared(export, name)
    names = {path.name for path in directory.iterdir()}
    shards = {f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    assert names == shards | {edit.INDEX, "config.json", "generation_config.json"} | (
        {"hf_quant_config.json"} if export == "nvidia" else set()
    )
    assert sum(path.stat().st_size for path in directory.iterdir()) < 15_000_000
    tensors = edit.read_tensors(directory)
    index = edit.read_json(directory / edit.INDEX)
    assert index["metadata"]["total_size"] == sum(len(tensor.data) for tensor in tensors.values())
    assert index["weight_map"] == {tensor: tensors[tensor].shard for tensor in sorted(tensors)}
    apart = [
        tensor
        for tensor in tensors
        if tensors[tensor].dtype == "U8" and tensors[tensor].shard != tensors[f"{tensor}_scale"].shard
    ]
    assert apart, "no weight lies in another shard than its scales"
    for path in directory.glob("*.safetensors"):
        header, _ = edit.split(path)
        assert header.pop("__metadata__") == {"format": "pt"}
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
        widths = {"F32": 4, "BF16": 2}
        assert all(entry["data_offsets"][0] % widths.get(entry["dtype"], 1) == 0 for entry in header.values())


def test_shards_are_read_by_the_safetensors_library():
    from safetensors import safe_open

    directory = shared("nvidia", "odd")
    tensors = edit.read_tensors(directory)
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "np") as opened:
            for name in opened.keys():  # noqa: SIM118
                found[name] = tuple(opened.get_slice(name).get_shape())
    assert found == {name: tensor.shape for name, tensor in tensors.items()}


def test_reduced_models_hold_the_weights_of_the_whole(tmp_path):
    """layers, experts and vocab select; what is kept has the same values under its new name."""
    part = checkpoints.make(tmp_path / "part", "libertai", "tiny", 0, layers=(2, 3, 8), experts=5, vocab=300)
    small, whole = open_checkpoint(part), open_checkpoint(shared("libertai"))
    text = small.config.text
    assert text.layer_kinds == ("kda", "dsa", "kda")
    assert (text.first_k_dense_replace, text.n_routed_experts) == (1, 5)
    assert (text.num_experts_per_tok, text.vocab_size) == (4, 300)
    compared = 0
    for name in small.names():
        original = name
        for new, old in ((3, 9), (2, 8), (1, 3), (0, 2)):
            if name.startswith(f"{T}layers.{new}."):
                original = name.replace(f".layers.{new}.", f".layers.{old}.", 1)
                break
        found, expected = small.weight(name), whole.weight(original)
        if found.shape != expected.shape:
            assert name.endswith(("lm_head.weight", "embed_tokens.weight", "gate.weight", "e_score_correction_bias"))
            assert len(found) < len(expected)
            expected = expected[: len(found)]
        np.testing.assert_array_equal(found, expected, err_msg=name)
        compared += 1
    assert compared == len(small.names())


def test_one_setting_changed(tmp_path):
    made = checkpoints.make(tmp_path / "out", "libertai", "odd", config={"norm_topk_prob": False, "n_group": 1})
    text = open_checkpoint(made).config.text
    assert (text.norm_topk_prob, text.n_group, text.hidden_size) == (False, 1, 112)


def test_one_layer_geometry():
    chosen = geometry("one-layer", experts=4, vocab=1000)
    text = config.parse(chosen.config).text
    assert chosen.layer_keys == (0, 4, 7, 45)
    assert text.layer_kinds == ("kda", "kda", "dsa")
    assert [text.is_sparse(layer) for layer in range(4)] == [False, True, True, True]
    assert (text.hidden_size, text.n_routed_experts, text.num_experts_per_tok) == (4096, 4, 4)
    assert geometry("one-layer", layers=(0, 2)).layer_keys == (0, 7, 45)
    assert geometry("full", layers=(3,)).layer_keys == (3, 45)


IMPOSSIBLE = [
    ("huge", {}, "geometry 'huge'"),
    ("tiny", {"layers": (3, 2)}, "layers [3, 2]"),
    ("tiny", {"layers": (2, 2)}, "layers [2, 2]"),
    ("tiny", {"layers": ()}, "layers []"),
    ("tiny", {"layers": (9,)}, "of 0..8"),
    ("tiny", {"layers": (-1,)}, "of 0..8"),
    ("odd", {"layers": (0, 5)}, "shares a selection"),
    ("tiny", {"experts": 17}, "experts 17: expected 2 to 16"),
    ("odd", {"experts": 5}, "a multiple of 2"),
    ("tiny", {"experts": 0}, "experts 0"),
    ("tiny", {"vocab": 513}, "vocab 513"),
    ("tiny", {"vocab": 4}, "vocab 4"),
]


@pytest.mark.parametrize(("name", "reduction", "words"), IMPOSSIBLE, ids=str)
def test_impossible_geometries(name, reduction, words):
    with pytest.raises(GeometryError) as caught:
        geometry(name, **reduction)
    assert words in str(caught.value)


def test_full_geometry_is_planned_as_published():
    """Shard counts of the public copies, no shard far from the mean, every tensor once."""
    from conformance.checkpoints.export import plan_shards

    parsed = config.parse(geometry("full").config)
    for export, count in (("nvidia", 33), ("libertai", 120)):
        specs = list(layout.tensors(parsed, export, 128))
        shards = plan_shards(specs, export)
        assert len(shards) == count
        assert sum(len(shard) for shard in shards) == len(specs) == len({s.name for shard in shards for s in shard})
        sizes = [sum(spec.nbytes for spec in shard) for shard in shards]
        assert max(sizes) < 1.6 * sum(sizes) / count
        assert "vision" in {spec.family for spec in shards[-1]}
        assert ({spec.layer for spec in shards[0]} == {45}) == (export == "nvidia")


def test_refuses_a_directory_that_holds_something(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("x")
    (tmp_path / "file").write_text("x")
    for taken in ("full", "file"):
        with pytest.raises(OutputError, match="not an empty directory"):
            checkpoints.make(tmp_path / taken, "nvidia", "odd")
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]
    (tmp_path / "empty").mkdir()
    assert open_checkpoint(checkpoints.make(tmp_path / "empty", "nvidia", "odd")).export == "nvidia"


def test_disk_that_fails(tmp_path, monkeypatch):
    def full(file, data, position):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match="No space left on device"):
        checkpoints.make(tmp_path / "out", "libertai", "odd")
    assert os.listdir(tmp_path) == []


def test_nothing_is_left_behind_when_writing_fails(tmp_path, monkeypatch):
    def poisoned(self, spec, start, stop, plain=Synthetic.rows):
        values = plain(self, spec, start, stop).copy()
        if ".experts.3." in spec.name:
            values[0, 0] = np.nan
        return values

    monkeypatch.setattr(Synthetic, "rows", poisoned)
    with pytest.raises(NonFiniteWeightError, match=r"experts\.3\.gate_proj\.weight: nan at row 0, column 0"):
        checkpoints.make(tmp_path / "out", "libertai", "odd")
    assert os.listdir(tmp_path) == []


def test_command(tmp_path, capsys):
    arguments = ["--export", "libertai", "--geometry", "odd", "--layers", "0,1", "--experts", "4", "--seed", "3"]
    assert glm53("make-checkpoint", tmp_path / "out", *arguments, "--json", tmp_path / "summary.json") == 0
    printed = capsys.readouterr()
    assert "libertai odd, seed 3" in printed.out
    assert printed.err == ""
    summary = json.loads((tmp_path / "summary.json").read_text())
    opened = open_checkpoint(tmp_path / "out")
    assert (summary["tensors"], summary["experts"], summary["layers"]) == (len(opened.names()), 4, [0, 1])
    assert summary["bytes"] == sum(spec.nbytes for spec in opened.specs.values())
    expected = make_checkpoint(tmp_path / "again", "libertai", "odd", seed=3, layers=(0, 1), experts=4, quiet=True)
    assert expected | {"directory": ""} == summary | {"directory": ""}
    assert digest(tmp_path / "again") == digest(tmp_path / "out")


BAD_USAGE = [
    (["--export", "libertai", "--geometry", "odd", "--layers", "9"], "layers [9]"),
    (["--export", "libertai", "--geometry", "odd", "--layers", "a"], "'a' is not a list of layer numbers"),
    (["--export", "hub", "--geometry", "odd"], "hub"),
    (["--geometry", "odd"], "--export"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_USAGE, ids=str)
def test_bad_usage_exits_with_2(tmp_path, capsys, arguments, words):
    assert glm53("make-checkpoint", tmp_path / "out", *arguments) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert "Traceback" not in printed.err
    assert os.listdir(tmp_path) == []


def test_parse_layers():
    assert parse_layers(None) is None
    assert parse_layers("0,3, 7") == (0, 3, 7)
    with pytest.raises(typer.BadParameter):
        parse_layers("0,,3")
