"""Keys of config.json that no field of `fast.config` comes from.

`leftovers` sorts them into three: those that cannot matter here, those that in some model switch on mathematics this
engine does not do, and those that mean nothing to it. The second are refused unless their value switches the thing
off; the third are returned, so that whoever runs the engine can see what it did not act on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fast.errors import ConfigValueError
from fast.strictjson import short


class Leftover(NamedTuple):
    """Dotted path of a key, and its value."""

    key: str
    value: Any


TEXT, LINEAR = "text_config", "text_config.linear_attn_config"
VISION, QUANTIZATION = "vision_config", "quantization_config"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What `fast.config` looks at or compares, by section.
READ: dict[str, frozenset[str]] = {
    "": _words(
        "model_type architectures tie_word_embeddings text_config vision_config quantization_config image_token_id "
        "video_token_id image_start_token_id image_end_token_id video_start_token_id video_end_token_id"
    ),
    TEXT: _words(
        "model_type dtype hidden_act scoring_func topk_method moe_router_dtype mhc mla_use_nope attention_bias "
        "head_dim attention_dropout tie_word_embeddings index_kpool_compress index_kpool_always_select_tail "
        "linear_attn_config num_hidden_layers layer_types mlp_layer_types indexer_types hidden_size vocab_size "
        "num_nextn_predict_layers num_attention_heads num_key_value_heads q_lora_rank kv_lora_rank qk_nope_head_dim "
        "qk_rope_head_dim qk_head_dim v_head_dim intermediate_size moe_intermediate_size first_k_dense_replace "
        "n_routed_experts num_local_experts num_experts n_shared_experts num_experts_per_tok num_experts_per_token "
        "n_group topk_group norm_topk_prob routed_scaling_factor swiglu_limit rms_norm_eps hc_mult hc_eps "
        "hc_sinkhorn_iters index_n_heads index_head_dim index_topk index_kpool index_share_for_mtp_iteration "
        "linear_num_heads linear_num_key_heads linear_num_value_heads linear_head_dim linear_key_head_dim "
        "linear_value_head_dim linear_conv_kernel_dim linear_lower_bound max_position_embeddings eos_token_id "
        "pad_token_id"
    ),
    LINEAR: _words("num_heads head_dim short_conv_kernel_size gate_lower_bound kda_layers full_attn_layers"),
    VISION: _words(
        "model_type hidden_act attention_bias rope_parameters depth num_heads hidden_size intermediate_size "
        "out_hidden_size projection_intermediate_size image_size patch_size temporal_patch_size spatial_merge_size "
        "in_channels rms_norm_eps swiglu_limit"
    ),
    QUANTIZATION: _words("quant_method quant_algo config_groups kv_cache_scheme ignore producer"),
}

# Names, training, bookkeeping: nothing that runs at inference.
IDLE = re.compile(
    r"architectures|model_type|auto_map|_name_or_path|_attn_implementation(_internal)?|transformers_version"
    r"|(torch_)?dtype|torchscript|use_bfloat16|use_cache|return_dict|is_decoder|is_encoder_decoder|tokenizer_class"
    r"|(bos|sep|decoder_start)_token_id|tie_word_embeddings"
    r"|attention_dropout|(embd|resid)_pdrop|(hidden_)?dropout|initializer_range|chunk_size_feed_forward"
    r"|output_(attentions|hidden_states|router_logits)|router_(aux|z)_loss_coef|seq_aux|num_return_sequences"
    r"|id2label|label2id|max_length|prefix|problem_type|task_specific_params"
)

ABSENT: tuple[Any, ...] = (False, 0, [], {})
ONE: tuple[Any, ...] = (1,)
NEVER: tuple[Any, ...] = ()

# Pattern of a whole key -> values that leave this model's mathematics as it is. The first pattern that fits decides.
SWITCHES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    # positions
    (r"(indexer_)?rope_interleave", (True, False)),
    (r"partial_rotary_factor", (0, 1)),
    (r".*(rope|rotary|yarn|alibi).*", ABSENT),
    # what a query sees
    (r".*(sliding|window_size|local_attention).*", ABSENT),
    (r"attention_chunk_size", NEVER),
    (r"is_causal", (True,)),
    (r"use_bidirectional_attention|add_cross_attention", (False,)),
    (r".*sink(?!horn).*", ABSENT),
    (r"index_topk_freq|layer_group_size", ONE),
    (r"index_skip_topk_offset", (2,)),
    (r"index_topk_pattern", NEVER),
    # logits, norms, scales
    (r".*soft_?cap.*", ABSENT),
    (r".*(qk_(layer)?norm|query_key_norm).*", ABSENT),
    (r"(sandwich|use_post)_norm|layernorm_zero_centered", (False,)),
    (r"use_pre_norm", (True,)),
    (r"query_pre_attn_scalar", NEVER),
    (r"attn_temperature_tuning", (False, 0)),
    (r"logit_scale|logits_scaling|(embedding|residual|attention)_multiplier|scale_(emb|depth)", ONE),
    (r"mup|mup_.*|.*_mup", ABSENT),
    # biases and gates
    (r"(qkv|attention|mlp|lm_head|conv)_(use_)?bias|use_conv_bias", (False,)),
    (r"attn_output_gate|use_attention_gate|(use_)?shared_expert_gate", (False,)),
    (r"gate_fn|output_gate_type|moe_router_activation_func", ("sigmoid",)),
    (r"moe_router_use_sigmoid|safe_gate", (True,)),
    (r"allow_neg_eigval", (False,)),
    (r"swiglu_alpha", ONE),
    (r"swiglu_beta|zero_expert_num", (0,)),
    # which layer is what
    (r"moe_layer_freq|decoder_sparse_step|interleave_moe_layer_step|ep_size|pretraining_tp", ONE),
    (r"mlp_only_layers|deepstack_visual_indexes|fullatt_block_indexes", ([],)),
    (r"pruned_heads", ({},)),
    (r"(use_)?parallel_residual", (False,)),
    (r"vision_feature_layer", NEVER),
)


def leftovers(raw: Mapping[str, Any]) -> tuple[Leftover, ...]:
    """The keys that mean nothing here, in file order. Raises ConfigValueError where one asks for other mathematics."""
    return tuple(_walk("", raw))


def _walk(path: str, section: Mapping[str, Any]) -> Iterator[Leftover]:
    for key, value in section.items():
        where = f"{path}.{key}" if path else key
        if where in READ and isinstance(value, dict):
            yield from _walk(where, value)
        elif key in READ[path] or value is None or IDLE.fullmatch(key):
            continue
        elif (allowed := _switch(key)) is None:
            yield Leftover(where, value)
        elif not any(value == one and type(value) in _spellings(one) for one in allowed):
            wanted = ", ".join(map(repr, allowed)) or "null"
            raise ConfigValueError(f"{where}: found {short(value)}, which is not computed here; expected {wanted}")


def _spellings(one: Any) -> tuple[type, ...]:
    """1.0 is a way to write 1, and no way to write true."""
    return (int, float) if type(one) is int else (type(one),)


def _switch(key: str) -> tuple[Any, ...] | None:
    return next((allowed for pattern, allowed in SWITCHES if re.fullmatch(pattern, key)), None)
