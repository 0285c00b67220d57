"""config.json: what is accepted, and that everything else is refused by the class and the words that name it."""

import copy
import hashlib
import json
from typing import Any

import pytest

from conformance.checkpoints import geometry
from conformance.checkpoints.configs import config_json, hf_quant_config_json
from reference import config
from reference import errors as e


def raw(name="full", export="libertai"):
    return json.loads(config_json(geometry(name).config, export))


def changed(**text):
    """The released config with keys of text_config replaced; a value of ... removes the key."""
    result = raw()
    for key, value in text.items():
        place = result["text_config"]
        if key in place["linear_attn_config"]:
            place = place["linear_attn_config"]
        if value is ...:
            del place[key]
        else:
            place[key] = value
    return result


@pytest.mark.parametrize("export", ["nvidia", "libertai"])
def test_released_config(export):
    parsed = config.parse(raw(export=export))
    text = parsed.text
    assert (text.num_hidden_layers, text.mtp_layer, text.hidden_size, text.vocab_size) == (45, 45, 4096, 154880)
    assert text.full_attn_layers == (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43)
    assert len(text.kda_layers) == 34
    assert text.layer_kinds[44] == "kda"
    assert [layer for layer in range(46) if not text.is_sparse(layer)] == [0, 1, 2]
    assert {text.indexer(layer) for layer in (*text.full_attn_layers, 45)} == {"full"}
    assert text.indexer(0) is None
    assert (text.gate_lower_bound, text.index_kpool, text.qk_rope_head_dim) == (-5.0, 4, 0)
    assert (text.rms_norm_eps, text.hc_eps, text.hc_sinkhorn_iters) == (1e-5, 1e-6, 20)
    assert text.eos_token_id == (154820, 154827, 154829)
    assert parsed.vision is not None
    assert parsed.quantization is not None
    assert parsed.vision.out_hidden_size == 4096
    assert parsed.tokens["image_token_id"] == 154854
    assert parsed.quantization.activations == (export == "nvidia")
    assert parsed.quantization.kv_cache_fp8 == (export == "nvidia")
    assert parsed.unread == ()


def test_odd_shares_a_selection():
    text = config.parse(raw("odd")).text
    assert [text.indexer(layer) for layer in range(8)] == [None, "full", None, None, "full", "shared", None, "full"]


@pytest.mark.parametrize("spelling", ["deepseek_sparse_attention", "indexed_attention", "full_attention"])
def test_three_spellings_of_a_dsa_layer(spelling):
    types = [spelling if i % 4 == 3 else "linear_attention" for i in range(45)]
    assert config.parse(changed(layer_types=types)).text == config.parse(raw()).text


@pytest.mark.parametrize(
    "key", ["layer_types", "mlp_layer_types", "indexer_types", "num_key_value_heads", "qk_head_dim"]
)
def test_cross_checks_may_be_absent(key):
    assert config.parse(changed(**{key: ...})).text == config.parse(raw()).text


def test_transformers_resave_with_rope_parameters_of_the_tower():
    again = raw(export="nvidia")
    again["vision_config"]["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "axial"}
    again["text_config"] |= {
        "return_dict": True,
        "id2label": {"0": "LABEL_0"},
        "_name_or_path": "",
        "problem_type": None,
    }
    assert config.parse(again).text == config.parse(raw()).text


def test_text_only_config():
    text_only = raw()
    text_only["vision_config"] = None
    assert config.parse(text_only).vision is None


TYPES = ["linear_attention", "linear_attention", "linear_attention", "deepseek_sparse_attention"] * 12
KDA = [i for i in range(45) if i % 4 != 3]
DSA = [i for i in range(45) if i % 4 == 3]

REFUSED = [
    # layer lists
    ({"kda_layers": [*KDA, 3]}, e.ConfigLayersError, "layer 3 is in both kda_layers and full_attn_layers"),
    ({"kda_layers": [*KDA, 4]}, e.ConfigLayersError, "layer 4 is twice in kda_layers"),
    ({"kda_layers": KDA[1:]}, e.ConfigLayersError, "layer 0 is in neither"),
    ({"full_attn_layers": [*DSA, 45]}, e.ConfigLayersError, "layer 45 is out of range 0..44"),
    ({"full_attn_layers": [-1, *DSA]}, e.ConfigLayersError, "layer -1 is out of range"),
    ({"kda_layers": [i + 1 for i in KDA], "full_attn_layers": [i + 1 for i in DSA]}, e.ConfigLayersError, "1-based"),
    ({"kda_layers": [*KDA[:-1], 44.0]}, e.ConfigTypeError, "kda_layers[33]: 44.0 is not an integer"),
    ({"kda_layers": "all"}, e.ConfigTypeError, "kda_layers: 'all' is not a list"),
    ({"layer_types": TYPES[:44]}, e.ConfigLayersError, "layer_types: 44 entries for num_hidden_layers 45"),
    ({"layer_types": TYPES[1:46]}, e.ConfigLayersError, "layer_types: layer 2 is 'deepseek_sparse_attention'"),
    ({"layer_types": ["sliding_attention", *TYPES[1:45]]}, e.ConfigEnumError, "layer 0 is 'sliding_attention'"),
    ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 43}, e.ConfigLayersError, "mlp_layer_types: layer 2 is 'sparse'"),
    ({"mlp_layer_types": ["dense"] * 3}, e.ConfigLayersError, "mlp_layer_types: 3 entries"),
    ({"mlp_layer_types": ["moe"] * 45}, e.ConfigEnumError, "mlp_layer_types: layer 0 is 'moe'"),
    ({"first_k_dense_replace": 46}, e.ConfigLayersError, "first_k_dense_replace: 46 exceeds"),
    ({"first_k_dense_replace": 4}, e.ConfigLayersError, "mlp_layer_types: layer 3 is 'sparse'"),
    ({"indexer_types": ["shared"] * 45}, e.ConfigLayersError, "layer 3 is 'shared', but no 'full' layer"),
    ({"indexer_types": ["full"] * 44}, e.ConfigLayersError, "indexer_types: 44 entries"),
    ({"indexer_types": ["none"] * 45}, e.ConfigEnumError, "indexer_types: layer 0 is 'none'"),
    ({"num_hidden_layers": 46}, e.ConfigLayersError, "layer 45 is in neither"),
    # values without a default
    ({"gate_lower_bound": ...}, e.ConfigMissingKeyError, "linear_attn_config.gate_lower_bound: missing"),
    ({"gate_lower_bound": None}, e.ConfigMissingKeyError, "linear_attn_config.gate_lower_bound: null"),
    ({"gate_lower_bound": 5.0}, e.ConfigValueError, "gate_lower_bound: 5.0"),
    ({"index_kpool": ...}, e.ConfigMissingKeyError, "index_kpool: missing"),
    ({"hc_eps": ...}, e.ConfigMissingKeyError, "hc_eps: missing"),
    ({"rms_norm_eps": ...}, e.ConfigMissingKeyError, "rms_norm_eps: missing"),
    ({"swiglu_limit": ...}, e.ConfigMissingKeyError, "swiglu_limit: missing"),
    ({"swiglu_limit": 0}, e.ConfigValueError, "swiglu_limit: 0"),
    ({"hidden_size": "4096"}, e.ConfigTypeError, "hidden_size: '4096' is not an integer"),
    ({"hidden_size": 4096.0}, e.ConfigTypeError, "hidden_size: 4096.0 is not an integer"),
    ({"hidden_size": True}, e.ConfigTypeError, "hidden_size: True is not an integer"),
    ({"hidden_size": 0}, e.ConfigValueError, "hidden_size: 0"),
    ({"hidden_size": 2**31}, e.ConfigValueError, "hidden_size: 2147483648"),
    ({"rms_norm_eps": 10**400}, e.ConfigValueError, "rms_norm_eps"),
    ({"rms_norm_eps": "1e-5"}, e.ConfigTypeError, "rms_norm_eps: '1e-5' is not a number"),
    ({"norm_topk_prob": 1}, e.ConfigTypeError, "norm_topk_prob: 1 is not true or false"),
    # divisibility
    ({"index_topk": 2046}, e.ConfigValueError, "index_topk: 2046 is not divisible by index_kpool 4"),
    ({"n_group": 5}, e.ConfigValueError, "5 groups do not divide n_routed_experts 288"),
    ({"n_group": 288, "topk_group": 8}, e.ConfigValueError, "two best, it has 1"),
    ({"n_group": 4, "topk_group": 5}, e.ConfigValueError, "topk_group: 5 exceeds n_group 4"),
    ({"num_experts_per_tok": 289}, e.ConfigValueError, "num_experts_per_tok: 289 exceeds the 288"),
    ({"num_nextn_predict_layers": 2}, e.ConfigUnsupportedError, "only one MTP block"),
    ({"eos_token_id": [1, 154880]}, e.ConfigValueError, "eos_token_id: 154880 is not in 0..154879"),
    ({"eos_token_id": ["a"]}, e.ConfigTypeError, "eos_token_id: 'a' is not an integer"),
    # unknown words and switches
    ({"scoring_func": "softmax"}, e.ConfigEnumError, "scoring_func: 'softmax'"),
    ({"topk_method": "greedy"}, e.ConfigEnumError, "topk_method: 'greedy'"),
    ({"hidden_act": "gelu"}, e.ConfigEnumError, "hidden_act: 'gelu'"),
    ({"hidden_act": 3}, e.ConfigEnumError, "hidden_act: 3"),
    ({"moe_router_dtype": "bfloat16"}, e.ConfigEnumError, "moe_router_dtype: 'bfloat16'"),
    ({"dtype": "float16"}, e.ConfigEnumError, "dtype: 'float16'"),
    ({"model_type": "glm4"}, e.ConfigEnumError, "text_config.model_type: 'glm4'"),
    ({"qk_rope_head_dim": 64, "qk_head_dim": 320, "head_dim": 64}, e.ConfigUnsupportedError, "qk_rope_head_dim: 64"),
    ({"mhc": False}, e.ConfigUnsupportedError, "mhc: false"),
    ({"index_kpool_compress": False}, e.ConfigUnsupportedError, "index_kpool_compress: false"),
    ({"index_kpool_always_select_tail": False}, e.ConfigUnsupportedError, "index_kpool_always_select_tail: false"),
    ({"tie_word_embeddings": True}, e.ConfigUnsupportedError, "tie_word_embeddings: true"),
    ({"attention_bias": True}, e.ConfigUnsupportedError, "attention_bias: true"),
    ({"rope_theta": 10000.0}, e.ConfigUnsupportedError, "rope_theta: 10000.0"),
    ({"sliding_window": 4096}, e.ConfigUnsupportedError, "sliding_window: 4096"),
    ({"index_topk_freq": 4}, e.ConfigUnsupportedError, "index_topk_freq: 4"),
    ({"sliding_window": 0.5}, e.ConfigUnsupportedError, "sliding_window: 0.5"),
    ({"use_sliding_window": True}, e.ConfigUnsupportedError, "use_sliding_window: True; this model has no sliding"),
    ({"swiglu_alpha": 1.7}, e.ConfigUnsupportedError, "swiglu_alpha: 1.7; this model has no such feature"),
    ({"attn_logit_softcapping": 50.0}, e.ConfigUnsupportedError, "attn_logit_softcapping: 50.0; this model caps no"),
    ({"num_sink_tokens": 4}, e.ConfigUnsupportedError, "num_sink_tokens: 4; this model has no attention sinks"),
    ({"use_qk_norm": True}, e.ConfigUnsupportedError, "use_qk_norm: True; DSA queries"),
    ({"mla_qk_layernorm": True}, e.ConfigUnsupportedError, "mla_qk_layernorm: True"),
    ({"sandwich_norm": True}, e.ConfigUnsupportedError, "sandwich_norm: True"),
    ({"attn_output_gate": True}, e.ConfigUnsupportedError, "attn_output_gate: True"),
    ({"gate_fn": "tanh"}, e.ConfigUnsupportedError, "gate_fn: 'tanh'"),
    ({"moe_router_activation_func": "softmax"}, e.ConfigUnsupportedError, "moe_router_activation_func: 'softmax'"),
    ({"index_topk_pattern": "FSSS"}, e.ConfigUnsupportedError, "index_topk_pattern: 'FSSS'"),
    ({"logits_scaling": 8.0}, e.ConfigUnsupportedError, "logits_scaling: 8.0"),
    ({"is_causal": False}, e.ConfigUnsupportedError, "is_causal: False"),
    ({"mlp_only_layers": [4]}, e.ConfigUnsupportedError, "mlp_only_layers: [4]"),
    ({"mup_width_multiplier": 8}, e.ConfigUnsupportedError, "mup_width_multiplier: 8"),
    ({"use_alibi": True}, e.ConfigUnsupportedError, "use_alibi: True; this model has no position bias"),
    # keys that repeat another
    ({"num_key_value_heads": 8}, e.ConfigContradictionError, "num_key_value_heads: 8, but other keys make it 64"),
    ({"qk_head_dim": 192}, e.ConfigContradictionError, "qk_head_dim: 192"),
    ({"head_dim": 64}, e.ConfigContradictionError, "head_dim: 64"),
    ({"linear_lower_bound": -4.0}, e.ConfigContradictionError, "linear_lower_bound: -4.0, but other keys make it -5.0"),
    ({"linear_num_heads": 32}, e.ConfigContradictionError, "linear_num_heads: 32"),
    ({"linear_key_head_dim": 64}, e.ConfigContradictionError, "linear_key_head_dim: 64"),
    ({"num_experts": 256}, e.ConfigContradictionError, "num_experts: 256, but other keys make it 288"),
    ({"linear_conv_kernel_dim": "4"}, e.ConfigTypeError, "linear_conv_kernel_dim: '4' is not a number"),
]


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(changes, error, words):
    broken = raw()
    for key, value in changes.items():
        linear = broken["text_config"]["linear_attn_config"]
        # `head_dim` exists in both objects; the one of text_config is meant here.
        place = linear if key in linear and key != "head_dim" else broken["text_config"]
        place[key] = value
        if value is ...:
            del place[key]
    with pytest.raises(error) as caught:
        config.parse(broken)
    assert type(caught.value) is error
    assert words in str(caught.value)
    assert "config.json" in str(caught.value)


def top(**changes):
    return raw() | changes


def quantized(*path, value):
    result = raw("full", "nvidia")
    place = result["quantization_config"]
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return result


def tower(**changes):
    result = raw()
    result["vision_config"] |= changes
    return result


GROUP = ("config_groups", "group_0")
REFUSED_ELSEWHERE = [
    (top(model_type="glm4v"), e.ConfigEnumError, "model_type: 'glm4v'"),
    (top(tie_word_embeddings=True), e.ConfigUnsupportedError, "tie_word_embeddings: true"),
    (top(text_config=None), e.ConfigMissingKeyError, "text_config: null"),
    (top(text_config=[]), e.ConfigTypeError, "text_config: [] is not an object"),
    (top(rope_scaling={"type": "yarn"}), e.ConfigUnsupportedError, "rope_scaling"),
    (tower(out_hidden_size=1536), e.ConfigContradictionError, "out_hidden_size is 1536"),
    (tower(num_heads=24), e.ConfigValueError, "24 heads"),
    (tower(attention_bias=False), e.ConfigUnsupportedError, "vision_config.attention_bias: false"),
    (tower(rope_parameters={"rope_theta": 1e6, "rope_type": "axial"}), e.ConfigUnsupportedError, "rope_parameters"),
    (tower(window_size=112), e.ConfigUnsupportedError, "vision_config.window_size: 112"),
    (tower(deepstack_visual_indexes=[5]), e.ConfigUnsupportedError, "vision_config.deepstack_visual_indexes: [5]"),
    (quantized("quant_method", value="compressed-tensors"), e.ConfigEnumError, "quant_method: 'compressed-tensors'"),
    (quantized("quant_algo", value="FP8"), e.ConfigEnumError, "quant_algo: 'FP8'"),
    (quantized("quant_algo", value=...), e.ConfigMissingKeyError, "quant_algo: missing"),
    (quantized(*GROUP, "weights", "group_size", value=32), e.ConfigUnsupportedError, "weights.group_size: 32"),
    (quantized(*GROUP, "weights", "num_bits", value=8), e.ConfigUnsupportedError, "weights.num_bits: 8"),
    (quantized(*GROUP, "weights", "type", value="int"), e.ConfigEnumError, "weights.type: 'int'"),
    (
        quantized(*GROUP, "input_activations", "num_bits", value=8),
        e.ConfigUnsupportedError,
        "input_activations.num_bits",
    ),
    (quantized(*GROUP, "output_activations", value={}), e.ConfigUnsupportedError, "output_activations"),
    (quantized("config_groups", "group_1", value={}), e.ConfigUnsupportedError, "['group_0', 'group_1']"),
    (quantized("kv_cache_scheme", value={"num_bits": 4}), e.ConfigUnsupportedError, "kv_cache_scheme"),
    (quantized("ignore", value="lm_head"), e.ConfigTypeError, "ignore: 'lm_head' is not a list"),
    (quantized("ignore", value=[1]), e.ConfigTypeError, "ignore[0]: 1 is not a string"),
]


@pytest.mark.parametrize(("broken", "error", "words"), REFUSED_ELSEWHERE, ids=lambda value: str(value)[-60:])
def test_refused_outside_the_text_stack(broken, error, words):
    with pytest.raises(error) as caught:
        config.parse(broken)
    assert type(caught.value) is error
    assert words in str(caught.value)


def test_every_required_key_is_required():
    optional = {
        *("attention_dropout", "eos_token_id", "head_dim", "indexer_rope_interleave", "indexer_types"),
        *("initializer_range", "layer_types", "mlp_layer_types", "num_key_value_heads", "output_router_logits"),
        *("pad_token_id", "qk_head_dim", "router_aux_loss_coef", "tie_word_embeddings", "use_cache"),
    }
    for key in raw()["text_config"]:
        broken = raw()
        del broken["text_config"][key]
        if key in optional:
            config.parse(broken)
        else:
            with pytest.raises(e.ConfigMissingKeyError, match=rf"text_config\.{key}: missing"):
                config.parse(broken)


def test_keys_that_nobody_knows_are_kept_in_sight():
    """Wherever they stand, with their values; the model is read as without them."""
    odd = top(torchao_version="1", notes={"a": 1})
    odd["text_config"] |= {"hc_temperature": 0.05, "index_kpool_stride": 4}
    odd["text_config"]["linear_attn_config"]["use_gate_bias"] = [1]
    odd["vision_config"]["merger"] = "mlp"
    odd["quantization_config"]["extra"] = False
    parsed = config.parse(odd)
    assert sorted(parsed.unread) == [
        ("notes", {"a": 1}),
        ("quantization_config.extra", False),
        ("text_config.hc_temperature", 0.05),
        ("text_config.index_kpool_stride", 4),
        ("text_config.linear_attn_config.use_gate_bias", [1]),
        ("torchao_version", "1"),
        ("vision_config.merger", "mlp"),
    ]
    assert parsed.unread[0].key.startswith("text_config.")
    assert (parsed.text, parsed.vision) == (config.parse(raw()).text, config.parse(raw()).vision)


OFF: list[tuple[str, Any]] = [
    *(("use_sliding_window", False), ("sliding_window", 0), ("final_logit_softcapping", None), ("num_sink_tokens", 0)),
    *(("qk_layernorm", False), ("swiglu_alpha", 1.0), ("gate_fn", "sigmoid"), ("mlp_only_layers", [])),
    *(("moe_router_activation_func", "sigmoid"), ("rope_scaling", None), ("num_experts", 288), ("scale_emb", 1)),
]


@pytest.mark.parametrize(("key", "value"), OFF)
def test_features_that_are_switched_off(key, value):
    changed = raw()
    changed["text_config"][key] = value
    assert config.parse(changed).unread == ()


def test_load_hashes_the_bytes(tmp_path):
    text = config_json(geometry("tiny").config, "nvidia").encode()
    (tmp_path / "config.json").write_bytes(text)
    loaded = config.load(tmp_path)
    assert loaded.sha256 == hashlib.sha256(text).hexdigest()
    assert loaded.text == config.parse(json.loads(text)).text


FILES = [
    (None, e.ConfigFileError, "cannot be read"),
    (b"", e.ConfigFileError, "not JSON"),
    (b"[]", e.ConfigFileError, "not a JSON object"),
    (b'{"a": 1', e.ConfigFileError, "not JSON"),
    (b'{"a": NaN}', e.ConfigFileError, "NaN is not JSON"),
    (b'{"a": "\xff"}', e.ConfigFileError, "not UTF-8 at byte 7"),
    (b"[" * 100_000, e.ConfigFileError, "not JSON"),
    (b'{"a": ' + b"9" * 10_000 + b"}", e.ConfigFileError, "not JSON"),
    (b'{"text_config": {"hc_mult": 4, "hc_mult": 2}}', e.ConfigDuplicateKeyError, "'hc_mult' appears twice"),
]


@pytest.mark.parametrize(("content", "error", "words"), FILES, ids=lambda value: str(value)[:30])
def test_files_that_are_no_config(tmp_path, content, error, words):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(error) as caught:
        config.load(tmp_path)
    assert type(caught.value) is error
    assert words in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_hf_quant_config(tmp_path):
    parsed = config.parse(raw("tiny", "nvidia"))
    path = tmp_path / "hf_quant_config.json"
    good = json.loads(hf_quant_config_json(geometry("tiny").config))
    for change, error in (
        ({}, None),
        ({"quant_algo": "FP8"}, e.ConfigEnumError),
        ({"group_size": 32}, e.ConfigUnsupportedError),
        ({"kv_cache_quant_algo": None}, e.ConfigContradictionError),
        ({"exclude_modules": "lm_head"}, e.ConfigTypeError),
    ):
        broken = copy.deepcopy(good)
        broken["quantization"] |= change
        path.write_text(json.dumps(broken))
        if error is None:
            config.check_hf_quant_config(path, parsed)
        else:
            with pytest.raises(error):
                config.check_hf_quant_config(path, parsed)
    path.write_text(json.dumps(good))
    with pytest.raises(e.ConfigContradictionError):
        config.check_hf_quant_config(path, config.parse(raw("tiny", "libertai")))
