"""Faults of config readers: defaults taken for missing keys, layer lists misread."""

import json

import pytest

from conformance.checkpoints import edit, geometry
from conformance.checkpoints.configs import config_json
from conformance.checkpoints.shared import copy_of
from fast import config as fast_config
from fast import errors as fast_e
from fast.loader import load
from reference import config
from reference import errors as e
from reference.checkpoint import open_checkpoint


def released():
    return json.loads(config_json(geometry("full").config, "libertai"))


def test_fb138_pool_size_is_never_defaulted():
    raw = released()
    assert config.parse(raw).text.index_kpool == 4
    del raw["text_config"]["index_kpool"]
    for renamed in ({}, {"kpool": 4}, {"block_size": 4}, {"index_kpool": None}):
        with pytest.raises(e.ConfigMissingKeyError, match="index_kpool"):
            config.parse(raw | {"text_config": raw["text_config"] | renamed})


def test_fb138_pool_size_is_the_row_count_of_ape(tmp_path):
    """Four rows in the file, 2 or 8 or 16 in the config: refused, naming the tensor and both shapes."""
    directory = copy_of(tmp_path, "libertai")
    for kpool in (2, 8, 16):
        raw = edit.read_json(directory / "config.json")
        raw["text_config"]["index_kpool"] = kpool
        edit.write_json(directory / "config.json", raw)
        with pytest.raises(
            e.TensorShapeError, match=rf"index_kpool_compress_ape: shape \[4, 32\], expected \[{kpool}, 32\]"
        ):
            open_checkpoint(directory)


def test_fb139_released_layer_kinds():
    text = config.parse(released()).text
    dsa = (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43)
    assert tuple(i for i, kind in enumerate(text.layer_kinds) if kind == "dsa") == dsa
    assert text.layer_kinds.count("kda") == 34
    assert text.layer_kinds[44] == "kda"
    assert [text.is_sparse(layer) for layer in range(5)] == [False, False, False, True, True]


def test_fb139_full_attention_means_dsa():
    raw = released()
    alias = {"deepseek_sparse_attention": "full_attention", "linear_attention": "linear_attention"}
    raw["text_config"]["layer_types"] = [alias[kind] for kind in raw["text_config"]["layer_types"]]
    assert config.parse(raw).text == config.parse(released()).text


def one_based(linear):
    linear["kda_layers"] = [layer + 1 for layer in linear["kda_layers"]]
    linear["full_attn_layers"] = [layer + 1 for layer in linear["full_attn_layers"]]


FAULTS = {
    "one-based": (one_based, "layer 45 is out of range 0..44.*1-based"),
    "layer 46": (lambda linear: linear["kda_layers"].append(46), "layer 46 is out of range 0..44"),
    "layer 45, the MTP block": (lambda linear: linear["full_attn_layers"].append(45), "layer 45 is out of range 0..44"),
    "both lists name layer 5": (lambda linear: linear["full_attn_layers"].append(5), "layer 5 is in both"),
    "no list names layer 5": (lambda linear: linear["kda_layers"].remove(5), "layer 5 is in neither"),
}


@pytest.mark.parametrize(("fault", "words"), FAULTS.values(), ids=FAULTS)
def test_fb139_layer_lists(fault, words):
    raw = released()
    fault(raw["text_config"]["linear_attn_config"])
    with pytest.raises(e.ConfigLayersError, match=words):
        config.parse(raw)


@pytest.mark.parametrize("key", ["layer_types", "mlp_layer_types", "indexer_types"])
def test_fb139_length_44(key):
    raw = released()
    raw["text_config"][key].pop()
    with pytest.raises(e.ConfigLayersError, match=f"{key}: 44 entries for num_hidden_layers 45"):
        config.parse(raw)


# --- the engine's parser ---------------------------------------------------------------------------------------------


def test_fb138_fast_pool_size_is_never_defaulted():
    raw = released()
    assert fast_config.parse(raw).text.index_kpool == 4
    del raw["text_config"]["index_kpool"]
    for renamed in ({}, {"kpool": 4}, {"block_size": 4}):
        with pytest.raises(fast_e.ConfigMissingKeyError, match="index_kpool"):
            fast_config.parse(raw | {"text_config": raw["text_config"] | renamed})


def test_fb138_fast_pool_size_is_the_row_count_of_ape(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    for kpool in (2, 8, 16):
        raw = edit.read_json(directory / "config.json")
        raw["text_config"]["index_kpool"] = kpool
        edit.write_json(directory / "config.json", raw)
        words = rf"index_kpool_compress_ape: shape \[4, 32\], expected \[{kpool}, 32\]"
        with pytest.raises(fast_e.WrongShapeError, match=words):
            load(directory)


def test_fb139_fast_released_layer_kinds():
    text = fast_config.parse(released()).text
    assert [i for i in range(45) if text.layer_kind(i) == "dsa"] == list(range(3, 44, 4))
    assert text.layer_kind(44) == "kda"
    assert [text.is_sparse(layer) for layer in range(5)] == [False, False, False, True, True]


FAST_FAULTS = {
    "one-based": (one_based, "layer 45 outside 0 .. 44"),
    "layer 46": (lambda linear: linear["kda_layers"].append(46), "layer 46 outside 0 .. 44"),
    "layer 45, the MTP block": (lambda linear: linear["full_attn_layers"].append(45), "layer 45 outside 0 .. 44"),
    "both lists name layer 5": (lambda linear: linear["full_attn_layers"].append(5), "layer 5 is in kda_layers and in"),
    "no list names layer 5": (lambda linear: linear["kda_layers"].remove(5), "layer 5 is in neither"),
}


@pytest.mark.parametrize(("fault", "words"), FAST_FAULTS.values(), ids=FAST_FAULTS)
def test_fb139_fast_layer_lists(fault, words):
    raw = released()
    fault(raw["text_config"]["linear_attn_config"])
    with pytest.raises(fast_e.LayerListError, match=words):
        fast_config.parse(raw)


@pytest.mark.parametrize("key", ["layer_types", "mlp_layer_types", "indexer_types"])
def test_fb139_fast_length_44(key):
    raw = released()
    raw["text_config"][key].pop()
    with pytest.raises(fast_e.LayerListError, match=f"{key}: found 44 entries, expected num_hidden_layers = 45"):
        fast_config.parse(raw)
