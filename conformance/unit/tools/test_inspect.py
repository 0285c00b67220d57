"""`glm53 inspect`: every tensor accounted for, and every departure listed, however many there are."""

import dataclasses
import json
import os
import struct

import pytest

from conformance.checkpoints import edit, geometry
from conformance.checkpoints.configs import config_json, hf_quant_config_json
from conformance.checkpoints.export import Writer, _write_index, plan_shards
from conformance.checkpoints.shared import copy_of, shared
from conformance.unit.tools.command import glm53
from reference import config, layout
from reference.errors import IndexFileError
from tools.inspect import inspect

T = layout.TEXT


@pytest.mark.parametrize("export", layout.EXPORTS)
@pytest.mark.parametrize("name", ["tiny", "odd"])
def test_good_checkpoint(export, name):
    directory = shared(export, name)
    result = inspect(directory)
    tensors = edit.read_tensors(directory)
    assert result["problems"] == []
    assert result["unread_keys"] == result["departures"] == []
    assert result["export"] == export
    assert result["tensors"] == len(tensors) == sum(family["tensors"] for family in result["families"].values())
    assert result["bytes"] == sum(len(tensor.data) for tensor in tensors.values())
    assert result["bytes"] == sum(role["bytes"] for role in result["roles"])
    assert list(result["families"]) == list(layout.FAMILIES)
    assert result["config_sha256"] == config.load(directory).sha256
    # nvidia's ignore list does not name its BF16 MTP block; LibertAI's names every unpacked layer.
    assert len(result["notes"]) == (export == "nvidia")
    assert all("ignore list does not say so (first: model.language_model.layers." in note for note in result["notes"])


@pytest.mark.parametrize(
    ("export", "tensors", "size"),
    [("nvidia", 147_661, 204_419_110_596), ("libertai", 113_074, 194_644_803_576)],
)
def test_released_geometry(tmp_path, export, tensors, size):
    """All headers of the released model, over sparse files: every tensor known, every byte accounted for."""
    raw = geometry("full").config
    parsed = config.parse(raw)
    specs = list(layout.tensors(parsed, export, 128))
    shards = plan_shards(specs, export)
    Writer(tmp_path, shards).close()
    _write_index(tmp_path, shards)
    (tmp_path / "config.json").write_text(config_json(raw, export))
    if export == "nvidia":
        (tmp_path / "hf_quant_config.json").write_text(hf_quant_config_json(raw))
    result = inspect(tmp_path, read_values=False)
    assert result["problems"] == result["departures"] == []
    assert (result["export"], result["tensors"], result["bytes"]) == (export, tensors, size)
    assert result["families"] == {
        family: {"tensors": count, "bytes": size} for family, (count, size) in layout.totals(iter(specs)).items()
    }


def damaged(tmp_path):
    """A checkpoint with one problem of each kind that leaves the rest readable."""
    directory = copy_of(tmp_path, "libertai", "odd")
    tensors = edit.read_tensors(directory)
    expert = f"{T}layers.3.mlp.experts."
    del tensors[f"{T}norm.weight"], tensors[f"{expert}2.up_proj.weight_scale"]
    a_log = f"{T}layers.0.self_attn.A_log"
    tensors[a_log] = dataclasses.replace(tensors[a_log], dtype="U16", shape=(12,))
    flat = f"{T}layers.0.self_attn.dt_bias"
    tensors[flat] = dataclasses.replace(tensors[flat], shape=(6, 16))
    tensors["stray.weight"] = edit.Stored("U8", (1,), b"\0", tensors["lm_head.weight"].shard)
    tensors[f"{expert}4.up_proj.weight_packed"] = edit.Stored("U8", (1,), b"\0", tensors["lm_head.weight"].shard)
    scale, scale_2 = f"{expert}5.up_proj.weight_scale", f"{expert}6.down_proj.weight_scale_2"
    tensors[scale] = tensors[scale].with_byte(8, 0xFF)
    tensors[scale_2] = dataclasses.replace(tensors[scale_2], data=struct.pack("<f", float("nan")))
    zero = f"{expert}7.down_proj.weight_scale_2"
    tensors[zero] = dataclasses.replace(tensors[zero], data=bytes(4))
    infinite = f"{T}layers.2.input_layernorm.weight"
    tensors[infinite] = tensors[infinite].with_byte(0, 0x80).with_byte(1, 0x7F)
    edit.write_tensors(directory, tensors)
    index = edit.read_json(directory / edit.INDEX)
    index["metadata"]["total_size"] += 1
    index["weight_map"]["ghost"] = tensors["lm_head.weight"].shard
    edit.write_json(directory / edit.INDEX, index)
    (directory / "model-extra.safetensors").write_bytes(edit.join({}, b""))
    return directory


def test_lists_every_departure(tmp_path):
    result = inspect(damaged(tmp_path))
    kinds = sorted(problem["kind"] for problem in result["problems"])
    assert kinds == sorted(
        [
            *("StrayShardError", "AbsentTensorError", "TotalSizeError"),
            *("MissingTensorError", "MissingScaleError", "TensorDtypeError", "TensorShapeError"),
            *("UnknownTensorError", "ForeignFormatError"),
            *("BlockScaleError", "TensorScaleError", "TensorScaleError", "NonFiniteWeightError"),
        ]
    )
    messages = "\n".join(problem["message"] for problem in result["problems"])
    for words in (
        "model-extra.safetensors",
        "'ghost'",
        f"{T}norm.weight is missing",
        "weight_scale is missing (layer 3, expert 2)",
        "A_log: U16, expected F32",
        "dt_bias: shape [6, 16], expected [96]",
        "'stray.weight' is not part of the libertai export",
        "experts.4.up_proj.weight_packed'",
        "experts.5.up_proj.weight_scale at [1, 1]: F8_E4M3 0xff",
        "experts.6.down_proj.weight_scale_2: F32 0x7fc00000",
        "experts.7.down_proj.weight_scale_2: 0, but the codes are not all zero",
        "layers.2.input_layernorm.weight at [0]: BF16 0x7f80",
    ):
        assert words in messages
    assert result["families"]["unknown"]["tensors"] == 2
    assert not result["values_read"] or len(result["problems"]) == 13
    assert len(inspect(tmp_path / "odd-libertai", read_values=False)["problems"]) == 9


def broken_config(directory):
    (directory / "config.json").write_text("{")


def no_config(directory):
    (directory / "config.json").unlink()


def no_index(directory):
    (directory / edit.INDEX).unlink()


def cut_shard(directory):
    path = directory / "model-00001-of-00003.safetensors"
    os.truncate(path, path.stat().st_size - 7)


def no_shards(directory):
    for path in directory.glob("*.safetensors"):
        path.unlink()


def not_packed(directory):
    tensors = edit.read_tensors(directory)
    edit.write_tensors(directory, {n: t for n, t in tensors.items() if t.dtype != "U8"})


BROKEN = [
    (broken_config, {"ConfigFileError"}),
    (no_config, {"ConfigFileError"}),
    (no_index, {"IndexFileError"}),
    (cut_shard, {"FileLengthError", "TotalSizeError"}),
    (no_shards, {"MissingShardError", "TotalSizeError"}),
    (not_packed, {"ExportError"}),
]


@pytest.mark.parametrize(("damage", "kinds"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_survives_what_cannot_be_opened(tmp_path, capsys, damage, kinds):
    directory = copy_of(tmp_path, "nvidia", "odd")
    damage(directory)
    assert glm53("inspect", directory, "--json", tmp_path / "result.json") == 1
    result = json.loads((tmp_path / "result.json").read_text())
    assert kinds == {problem["kind"] for problem in result["problems"]}
    printed = capsys.readouterr()
    assert f"{len(result['problems']):,} problems" in printed.out
    assert printed.err == ""


def test_command_on_a_good_directory(tmp_path, capsys):
    assert glm53("inspect", shared("libertai", "odd"), "--json", tmp_path / "result.json") == 0
    printed = capsys.readouterr()
    assert "export libertai, 775 tensors" in printed.out
    assert "as the export stores it" in printed.out
    assert json.loads((tmp_path / "result.json").read_text())["problems"] == []


def test_config_keys_that_nobody_reads_are_listed_and_fail_nothing(tmp_path, capsys):
    directory = copy_of(tmp_path, "nvidia", "odd")
    raw = edit.read_json(directory / "config.json")
    raw["text_config"]["hc_temperature"] = 0.05
    raw["text_config"]["linear_attn_config"]["layout"] = ["k", "v"]
    edit.write_json(directory / "config.json", raw)
    assert glm53("inspect", directory, "--headers-only", "--json", tmp_path / "result.json") == 0
    printed = capsys.readouterr().out
    assert "departure: config.json: text_config.hc_temperature is 0.05; no one here reads this key" in printed
    assert "text_config.linear_attn_config.layout is ['k', 'v']" in printed
    assert "as the export stores it; 2 config keys that no one here reads" in printed
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["problems"] == []
    assert result["unread_keys"] == [
        {"key": "text_config.linear_attn_config.layout", "value": ["k", "v"]},
        {"key": "text_config.hc_temperature", "value": 0.05},
    ]


def test_tensors_stored_as_they_may_be_are_listed_and_fail_nothing(tmp_path, capsys):
    directory = copy_of(tmp_path, "nvidia", "odd")
    tensors = edit.read_tensors(directory)
    conv, scalar = f"{T}layers.0.self_attn.q_conv1d.weight", f"{T}layers.3.mlp.experts.2.up_proj.weight_scale_2"
    narrow = edit.read_tensors(shared("libertai", "odd"))[conv]
    tensors[conv] = dataclasses.replace(narrow, shard=tensors[conv].shard)
    tensors[scalar] = dataclasses.replace(tensors[scalar], shape=(1,))
    edit.write_tensors(directory, tensors)
    assert glm53("inspect", directory, "--json", tmp_path / "result.json") == 0
    printed = capsys.readouterr().out
    assert f"departure: {directory / tensors[conv].shard}: tensor {conv}: BF16, expected F32" in printed
    assert f"tensor {scalar}: shape [1], expected []" in printed
    assert "2 tensors stored otherwise, as may be" in printed
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["problems"] == []
    assert [departure["kind"] for departure in result["departures"]] == ["TensorDtypeError", "TensorShapeError"]
    # A problem as well: the run fails, and both are told.
    tensors[scalar] = dataclasses.replace(tensors[scalar], shape=(1, 1))
    edit.write_tensors(directory, tensors)
    assert glm53("inspect", directory, "--json", tmp_path / "result.json") == 1
    result = json.loads((tmp_path / "result.json").read_text())
    assert [len(result[key]) for key in ("problems", "departures")] == [1, 1]
    assert "1 problems" in capsys.readouterr().out


def test_a_missing_input_scale_is_a_problem_though_nothing_here_reads_it(tmp_path):
    directory = copy_of(tmp_path, "nvidia", "odd")
    tensors = edit.read_tensors(directory)
    del tensors[f"{T}layers.3.mlp.experts.2.up_proj.input_scale"]
    edit.write_tensors(directory, tensors)
    (problem,) = inspect(directory, read_values=False)["problems"]
    assert problem["kind"] == "MissingScaleError"
    assert "input_scale is missing (layer 3, expert 2)" in problem["message"]


def test_quiet_prints_nothing(capsys):
    assert glm53("inspect", shared("libertai", "odd"), "--quiet", "--headers-only") == 0
    assert capsys.readouterr() == ("", "")


def test_no_directory(tmp_path, capsys):
    with pytest.raises(IndexFileError):
        inspect(tmp_path / "absent")
    assert glm53("inspect", tmp_path / "absent") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_json_that_cannot_be_written(tmp_path, capsys):
    assert glm53("inspect", shared("libertai", "odd"), "--json", tmp_path / "absent" / "x.json", "--quiet") == 2
    assert "cannot be written" in capsys.readouterr().err
