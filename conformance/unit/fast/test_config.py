"""The fast engine's config: everything read as written, everything else refused by key."""

import copy
import json
import os
from typing import Any

import pytest

from conformance.checkpoints import geometry
from conformance.checkpoints.configs import config_json
from conformance.checkpoints.shared import copy_of
from fast import config
from fast import errors as e
from fast.keys import READ
from fast.strictjson import MAX_CONFIG_BYTES
from reference import config as oracle
from reference.errors import InputError as OracleInputError

EXPORTS = ("nvidia", "libertai")
GEOMETRIES = ("tiny", "odd", "one-layer", "full")


def raw_config(export="libertai", name="full"):
    return json.loads(config_json(geometry(name).config, export))


def changed(path, value, export="libertai"):
    """The released config with the key at a dotted path replaced; `...` removes it."""
    return changed_in(raw_config(export), path, value)


def changed_in(raw, path, value):
    raw = copy.deepcopy(raw)
    section = raw
    *sections, key = path.split(".")
    for part in sections:
        section = section[part]
    if value is ...:
        del section[key]
    else:
        section[key] = value
    return raw


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("export", EXPORTS)
def test_fields_are_the_keys(export, name):
    raw = raw_config(export, name)
    parsed = config.parse(raw)
    text, linear = raw["text_config"], raw["text_config"]["linear_attn_config"]
    flat = {"linear_num_heads": linear["num_heads"], "linear_head_dim": linear["head_dim"]}
    for field in config.TextConfig.__dataclass_fields__:
        wanted = flat.get(field, linear.get(field, text.get(field)))
        found = getattr(parsed.text, field)
        if field == "indexer_types":
            wanted = [t if i in linear["full_attn_layers"] else None for i, t in enumerate(wanted)]
        assert (list(found) if isinstance(found, tuple) else found) == wanted, field
    for field in config.VisionConfig.__dataclass_fields__:
        assert getattr(parsed.vision, field) == raw["vision_config"][field], field
    assert parsed.quantization is not None
    assert parsed.quantization.quantized_activations == (export == "nvidia")
    assert parsed.quantization.kv_cache_bits == (8 if export == "nvidia" else None)
    assert list(parsed.quantization.ignore) == raw["quantization_config"]["ignore"]


def test_released_layers():
    text = config.parse(raw_config()).text
    assert [i for i in range(45) if text.layer_kind(i) == "dsa"] == list(range(3, 44, 4))
    assert [text.kv_slot(i) for i in range(3, 44, 4)] == list(range(11))
    assert (text.layer_kind(45), text.is_sparse(45), text.indexer_type(45)) == ("dsa", True, "full")
    assert text.mtp_layers == (45,)
    assert [text.is_sparse(i) for i in (0, 2, 3, 44)] == [False, False, True, True]
    assert (text.hc_rows, text.qk_head_dim, text.shared_intermediate_size) == (24, 256, 2048)
    with pytest.raises(ValueError, match="not in tuple"):
        text.kv_slot(4)


def test_odd_layers():
    text = config.parse(raw_config(name="odd")).text
    assert [text.indexer_type(i) for i in range(8)] == [None, "full", None, None, "full", "shared", None, "full"]
    assert [text.kv_slot(i) for i in (1, 4, 5)] == [0, 1, 2]


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("export", EXPORTS)
def test_both_parsers_read_the_same(export, name):
    """Two parsers written apart: every field that both have, and the kind of every layer."""
    raw = raw_config(export, name)
    ours, theirs = config.parse(raw), oracle.parse(raw)
    common = set(config.TextConfig.__dataclass_fields__) & set(type(theirs.text).__dataclass_fields__)
    assert len(common) > 30
    for field in common:
        assert getattr(ours.text, field) == getattr(theirs.text, field), field
    assert [ours.text.layer_kind(i) for i in range(ours.text.num_hidden_layers)] == list(theirs.text.layer_kinds)


TEXT, LINEAR, VISION, QUANT = (
    "text_config.",
    "text_config.linear_attn_config.",
    "vision_config.",
    "quantization_config.",
)
GROUP = QUANT + "config_groups.group_0."
VALUES = {
    "model_type": "glm4",
    "architectures": ["Glm4"],
    "tie_word_embeddings": True,
    TEXT + "model_type": "glm4_text",
    TEXT + "dtype": "float16",
    TEXT + "mhc": False,
    TEXT + "mla_use_nope": False,
    TEXT + "scoring_func": "softmax",
    TEXT + "topk_method": "greedy",
    TEXT + "moe_router_dtype": "bfloat16",
    TEXT + "hidden_act": "gelu",
    TEXT + "attention_bias": True,
    TEXT + "qk_rope_head_dim": 64,
    TEXT + "index_kpool_compress": False,
    TEXT + "index_kpool_always_select_tail": False,
    TEXT + "hidden_size": 0,
    TEXT + "num_hidden_layers": 2**20,
    TEXT + "num_nextn_predict_layers": 2,
    TEXT + "n_shared_experts": 0,
    TEXT + "rms_norm_eps": 0.0,
    TEXT + "hc_eps": -1e-6,
    TEXT + "hc_sinkhorn_iters": 0,
    TEXT + "swiglu_limit": 0.0,
    TEXT + "routed_scaling_factor": 10**400,
    TEXT + "layer_types": ["linear_attention"] * 44 + ["mamba"],
    TEXT + "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 41 + ["wide"],
    TEXT + "indexer_types": ["full"] * 44 + ["half"],
    LINEAR + "gate_lower_bound": 0.0,
    LINEAR + "short_conv_kernel_size": 1,
    VISION + "model_type": "clip",
    VISION + "hidden_act": "gelu",
    QUANT + "quant_method": "compressed-tensors",
    QUANT + "quant_algo": "FP8",
    QUANT + "kv_cache_scheme": {"num_bits": 4, "type": "float", "dynamic": False},
    GROUP + "weights.num_bits": 8,
    GROUP + "weights.type": "int",
    GROUP + "weights.group_size": 32,
}
CONTRADICTIONS = {
    TEXT + "num_key_value_heads": 8,
    TEXT + "qk_head_dim": 320,
    TEXT + "head_dim": 64,
    TEXT + "index_topk": 2047,
    TEXT + "pad_token_id": 154880,
    TEXT + "eos_token_id": [154820, 200000],
    "image_token_id": 154880,
    "video_token_id": 10**6,
    TEXT + "topk_group": 2,
    TEXT + "num_experts_per_tok": 289,
    TEXT + "linear_lower_bound": -4.0,
    TEXT + "first_k_dense_replace": 4,
    TEXT + "indexer_types": ["shared"] * 45,
    VISION + "out_hidden_size": 2048,
    VISION + "num_heads": 15,
}
TYPES = {
    TEXT + "hidden_size": "4096",
    TEXT + "vocab_size": True,
    TEXT + "hc_mult": 4.0,
    TEXT + "norm_topk_prob": 1,
    TEXT + "rms_norm_eps": None,
    TEXT + "linear_attn_config": [],
    TEXT + "layer_types": "linear_attention",
    TEXT + "eos_token_id": [1, -1],
    LINEAR + "kda_layers": [0.0],
    QUANT + "ignore": "lm_head",
    "text_config": None,
    "vision_config": 3,
}
NEVER_DEFAULTED = [
    *(TEXT + key for key in config.TextConfig.__dataclass_fields__ if key in geometry("full").config["text_config"]),
    *(LINEAR + key for key in ("num_heads", "head_dim", "short_conv_kernel_size", "gate_lower_bound", "kda_layers")),
    *(TEXT + key for key in ("mhc", "scoring_func", "topk_method", "hidden_act", "linear_attn_config")),
    *(VISION + key for key in config.VisionConfig.__dataclass_fields__),
    QUANT + "quant_algo",
    QUANT + "quant_method",
    GROUP + "weights",
    "text_config",
    "model_type",
    "tie_word_embeddings",
]
OPTIONAL = {TEXT + key for key in ("indexer_types", "eos_token_id", "pad_token_id")}


@pytest.mark.parametrize(("path", "value"), VALUES.items(), ids=VALUES)
def test_unknown_values_are_refused(path, value):
    with pytest.raises(e.ConfigValueError, match=path.rsplit(".", 1)[-1]):
        config.parse(changed(path, value))


@pytest.mark.parametrize(("path", "value"), CONTRADICTIONS.items(), ids=CONTRADICTIONS)
def test_contradictions_are_refused(path, value):
    key = "mlp_layer_types" if "first_k" in path else path.rsplit(".", 1)[-1]
    with pytest.raises(e.ConfigContradictionError, match=key):
        config.parse(changed(path, value))


@pytest.mark.parametrize(("path", "value"), TYPES.items(), ids=TYPES)
def test_wrong_types_are_refused(path, value):
    with pytest.raises(e.ConfigTypeError, match=path.rsplit(".", 1)[-1]):
        config.parse(changed(path, value))


@pytest.mark.parametrize("path", sorted(set(NEVER_DEFAULTED) - OPTIONAL))
def test_nothing_that_counts_is_defaulted(path):
    with pytest.raises(e.ConfigMissingKeyError, match=path.rsplit(".", 1)[-1]):
        config.parse(changed(path, ...))


def test_groups_of_experts():
    raw = changed(TEXT + "n_group", 288)
    with pytest.raises(e.ConfigValueError, match="no two best"):
        config.parse(raw)
    raw = changed(TEXT + "n_group", 7)
    with pytest.raises(e.ConfigContradictionError, match="288 experts do not divide into 7"):
        config.parse(raw)
    raw = changed(TEXT + "n_group", 72)
    with pytest.raises(e.ConfigContradictionError, match="1 of 72 groups hold 4"):
        config.parse(raw)


@pytest.mark.parametrize(
    ("kda", "dsa", "words"),
    [
        ([0, 1], [1, 2], "layer 1 is in kda_layers and in full_attn_layers"),
        ([0], [2], "layer 1 is in neither"),
        ([0, 1, 1], [2], "kda_layers: layer 1 named twice"),
        ([1, 2], [3], r"full_attn_layers: layer 3 outside 0 .. 2 \(lists are 0-based\)"),
        ([0, 1, -1], [2], "layer -1 outside"),
    ],
)
def test_layer_lists_cover_every_layer_once(kda, dsa, words):
    raw = raw_config(name="one-layer")
    raw["text_config"]["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": dsa}
    with pytest.raises(e.LayerListError, match=words):
        config.parse(raw)


def test_spellings_of_a_dsa_layer():
    raw = raw_config()
    wanted = config.parse(raw).text
    for spelling in config.DSA_SPELLINGS:
        other = copy.deepcopy(raw)
        other["text_config"]["layer_types"] = [
            t if t == "linear_attention" else spelling for t in raw["text_config"]["layer_types"]
        ]
        assert config.parse(other).text == wanted
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        other = copy.deepcopy(raw)
        del other["text_config"][key]
        assert config.parse(other).text == wanted


def test_re_saved_keys_must_agree():
    """transformers writes some keys of linear_attn_config a second time."""
    raw = raw_config()
    raw["text_config"] |= {"linear_lower_bound": -5.0, "linear_head_dim": 128, "linear_num_heads": 64}
    assert config.parse(raw).text == config.parse(raw_config()).text
    raw["text_config"]["linear_head_dim"] = 64
    with pytest.raises(e.ConfigContradictionError, match="linear_head_dim"):
        config.parse(raw)


FILES = {
    "not json": (b"{", e.ConfigSyntaxError),
    "not utf-8": (b'{"model_type": "\xff"}', e.ConfigSyntaxError),
    "nan": (b'{"a": NaN}', e.ConfigSyntaxError),
    "deep": (b"[" * 100_000, e.ConfigSyntaxError),
    "long number": (b'{"a": ' + b"9" * 10_000 + b"}", e.ConfigSyntaxError),
    "duplicate": (b'{"a": {"b": 1, "b": 1}}', e.ConfigDuplicateKeyError),
    "a list": (b"[]", e.ConfigTypeError),
    "too large": (b" " * (MAX_CONFIG_BYTES + 1), e.ConfigTooLargeError),
    "empty": (b"", e.ConfigSyntaxError),
}


@pytest.mark.parametrize(("data", "error"), FILES.values(), ids=FILES)
def test_files_that_are_not_a_config(tmp_path, data, error):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(error):
        config.load(tmp_path)


def test_no_file_or_no_regular_file(tmp_path):
    with pytest.raises(e.MissingFileError, match=r"config\.json"):
        config.load(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(e.NotRegularFileError):
        config.load(tmp_path)


def test_hf_quant_config_has_to_agree(tmp_path):
    directory = copy_of(tmp_path, "nvidia")
    assert config.load(directory).sha256 == config.load(directory).sha256
    path = directory / "hf_quant_config.json"
    raw = json.loads(path.read_text())
    raw["quantization"]["quant_algo"] = "FP8"
    path.write_text(json.dumps(raw))
    with pytest.raises(e.ConfigValueError, match=r"hf_quant_config\.json: quantization\.quant_algo"):
        config.load(directory)


def accepted(parse, error, raw):
    try:
        parse(copy.deepcopy(raw))
    except error:
        return False
    return True


ODD_VALUES: list[Any] = [None, 0, -1, 1, 3, 2.5, "x", [], {}, True, False, 2**40]
LENIENT = {"indexer_types", "layer_types", "mlp_layer_types", "eos_token_id", "pad_token_id", "bos_token_id"}


@pytest.mark.parametrize(
    "key", sorted(set(config.TextConfig.__dataclass_fields__) & set(raw_config()["text_config"]) - LENIENT)
)
def test_both_parsers_draw_the_same_line(key):
    """A value that one parser takes and the other refuses is a wrong computation in one of them."""
    for value in ODD_VALUES:
        raw = raw_config()
        raw["text_config"][key] = value
        ours, theirs = accepted(config.parse, e.InputError, raw), accepted(oracle.parse, OracleInputError, raw)
        assert ours == theirs, f"{key} = {value!r}: fast {ours}, reference {theirs}"


UNKNOWN = {
    "text_config.hc_temperature": 0.05,
    "text_config.index_kpool_stride": 4,
    "text_config.linear_attn_config.use_gate_bias": [1],
    "vision_config.merger": "mlp",
    "quantization_config.extra": False,
    "modality": {"a": 1},
}
# key: (a value at which nothing changes, one that asks for other mathematics)
SWITCHES: Any = {
    "rope_theta": (None, 10000.0),
    "rope_scaling": ({}, {"type": "yarn"}),
    "rotary_dim": (0, 64),
    "use_alibi": (False, True),
    "sliding_window": (None, 4096),
    "use_sliding_window": (False, True),
    "attention_chunk_size": (None, 8192),
    "is_causal": (True, False),
    "attn_logit_softcapping": (None, 50.0),
    "final_logit_softcap": (0, 30),
    "attention_sink": (False, True),
    "num_sink_tokens": (0, 4),
    "use_qk_norm": (False, True),
    "qk_layernorm": (False, True),
    "sandwich_norm": (False, True),
    "use_post_norm": (False, True),
    "layernorm_zero_centered": (False, True),
    "attn_output_gate": (False, True),
    "shared_expert_gate": (False, True),
    "gate_fn": ("sigmoid", "silu"),
    "moe_router_activation_func": ("sigmoid", "softmax"),
    "swiglu_alpha": (1.0, 1.702),
    "swiglu_beta": (0, 1),
    "conv_bias": (False, True),
    "mlp_bias": (False, True),
    "allow_neg_eigval": (False, True),
    "logit_scale": (1.0, 0.0625),
    "logits_scaling": (1, 8),
    "embedding_multiplier": (1, 12),
    "query_pre_attn_scalar": (None, 256),
    "mup_width": (0, 8),
    "index_topk_freq": (1, 4),
    "index_topk_pattern": (None, "FSSS"),
    "moe_layer_freq": (1, 2),
    "mlp_only_layers": ([], [4]),
    "zero_expert_num": (0, 64),
    "num_experts": (288, 256),
    "num_local_experts": (288, 128),
    "linear_num_value_heads": (64, 32),
    "linear_key_head_dim": (128, 64),
    "num_experts_per_token": (8, 4),
    "pretraining_tp": (1, 2),
    "use_parallel_residual": (False, True),
}


def plain(unread):
    return sorted((item.key, item.value) for item in unread)


def test_keys_that_nobody_knows_are_named_by_both_parsers():
    raw = raw_config()
    for path, value in UNKNOWN.items():
        raw = changed_in(raw, path, value)
    parsed = config.parse(raw)
    assert plain(parsed.unread) == sorted(UNKNOWN.items()) == plain(oracle.parse(raw).unread)
    assert (parsed.text, parsed.vision) == (config.parse(raw_config()).text, config.parse(raw_config()).vision)
    for export in EXPORTS:
        for name in GEOMETRIES:
            assert config.parse(raw_config(export, name)).unread == ()


RESTATED = [key for key in SWITCHES if key in READ["text_config"]]
PLACES = [
    (section, key) for section in (TEXT, LINEAR, "") for key in SWITCHES if section == TEXT or key not in RESTATED
]


@pytest.mark.parametrize(("section", "key"), PLACES)
def test_mathematics_that_nobody_does_here_is_refused_by_both_parsers(section, key):
    """Switched off it is nothing, not even a note; switched on it is refused by its name."""
    off, on = SWITCHES[key]
    for parse in (config.parse, oracle.parse):
        assert parse(changed_in(raw_config(), section + key, off)).unread == ()
    raw = changed_in(raw_config(), section + key, on)
    with pytest.raises((e.ConfigValueError, e.ConfigContradictionError), match=rf"{section}{key}: "):
        config.parse(raw)
    with pytest.raises(OracleInputError, match=rf"{section}{key}: "):
        oracle.parse(raw)


ABSURD = {"absurd": "value"}
NOT_COMPARED = {"producer"}


@pytest.mark.parametrize("section", READ)
def test_keys_that_count_as_read_are_read(section):
    """A value that no key can have is refused wherever the table says that the parser looks."""
    for key in READ[section] - NOT_COMPARED:
        path = f"{section}.{key}" if section else key
        with pytest.raises(e.InputError, match=key.split("_token")[0]):
            config.parse(changed_in(raw_config("nvidia"), path, ABSURD))


def test_the_axial_positions_of_the_tower_are_no_rope_of_the_text():
    """A re-save by transformers 5.24 writes them out."""
    axial = {"rope_theta": 10000.0, "rope_type": "axial"}
    assert config.parse(changed(VISION + "rope_parameters", axial)).unread == ()
    with pytest.raises(e.ConfigValueError, match=r"vision_config\.rope_parameters"):
        config.parse(changed(VISION + "rope_parameters", axial | {"rope_theta": 1e6}))
