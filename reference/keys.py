"""What becomes of config keys that the parser does not read.

* null, or generic to every `transformers` config: accepted in silence;
* known to change the mathematics of related models (RoPE, sliding windows, softcapping, attention sinks, extra norms,
  other gates, multipliers, ...): accepted at a value that switches the feature off, refused at any other;
* everything else: let through and kept in `Unknown.unread` with its value, for a person to judge. A released config may
  hold keys that nobody has described, and a checkpoint is not wrong because of them.
"""

import re
from typing import Any, NamedTuple

from reference import errors as e

GENERIC = """
    _attn_implementation _attn_implementation_internal _name_or_path architectures attention_dropout auto_map
    bos_token_id chunk_size_feed_forward decoder_start_token_id dropout dtype embd_pdrop hidden_dropout id2label
    initializer_range is_decoder is_encoder_decoder label2id max_length model_type num_return_sequences
    output_attentions output_hidden_states output_router_logits prefix problem_type resid_pdrop return_dict
    router_aux_loss_coef router_z_loss_coef seq_aux sep_token_id task_specific_params tie_word_embeddings
    tokenizer_class torch_dtype torchscript transformers_version use_bfloat16 use_cache
"""
GENERIC_KEYS = frozenset(GENERIC.split())
# key -> the values at which a related model has no such feature (or the one that this model has).
OFF_VALUES: dict[str, tuple[Any, ...]] = {
    # RoPE layouts that say nothing where no column is rotated; every other key with "rope" is in FAMILIES.
    "indexer_rope_interleave": (True, False),
    "rope_interleave": (True, False),
    "partial_rotary_factor": (0, 1),
    # attention
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (1,),
    "attn_output_gate": (False,),
    "attn_temperature_tuning": (False, 0),
    "is_causal": (True,),
    "layer_group_size": (1,),
    "qkv_bias": (False,),
    "query_pre_attn_scalar": (),
    "use_attention_gate": (False,),
    "use_bidirectional_attention": (False,),
    # indexer schedules; `indexer_types` says the same thing here
    "index_skip_topk_offset": (2,),
    "index_topk_freq": (1,),
    "index_topk_pattern": (),
    # KDA
    "allow_neg_eigval": (False,),
    "conv_bias": (False,),
    "gate_fn": ("sigmoid",),
    "output_gate_type": ("sigmoid",),
    "safe_gate": (True,),
    "use_conv_bias": (False,),
    # feed-forward
    "decoder_sparse_step": (1,),
    "ep_size": (1,),
    "interleave_moe_layer_step": (1,),
    "mlp_bias": (False,),
    "mlp_only_layers": ([],),
    "moe_layer_freq": (1,),
    "moe_router_activation_func": ("sigmoid",),
    "moe_router_use_sigmoid": (True,),
    "shared_expert_gate": (False,),
    "swiglu_alpha": (1,),
    "swiglu_beta": (0,),
    "use_shared_expert_gate": (False,),
    "zero_expert_num": (0,),
    # norms, multipliers, layout of the stack
    "embedding_multiplier": (1,),
    "layernorm_zero_centered": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "lm_head_bias": (False,),
    "parallel_residual": (False,),
    "pretraining_tp": (1,),
    "pruned_heads": ({},),
    "residual_multiplier": (1,),
    "sandwich_norm": (False,),
    "scale_depth": (1,),
    "scale_emb": (1,),
    "use_parallel_residual": (False,),
    "use_post_norm": (False,),
    "use_pre_norm": (True,),
    # vision towers
    "deepstack_visual_indexes": ([],),
    "fullatt_block_indexes": ([],),
    "vision_feature_layer": (),
}
# Words that name such a feature wherever they stand in a key. "sinkhorn" is no attention sink.
FAMILIES = (
    (re.compile(r"rope|rotary|yarn"), "there is no RoPE in this model's text stack"),
    (re.compile(r"alibi"), "this model has no position bias"),
    (re.compile(r"sliding|window_size|local_attention"), "this model has no sliding window"),
    (re.compile(r"soft_?cap"), "this model caps no logits"),
    (re.compile(r"sink(?!horn)"), "this model has no attention sinks"),
    (re.compile(r"qk_(layer)?norm|query_key_norm"), "DSA queries and keys have no norm of their own"),
    (re.compile(r"^mup_|_mup$|^mup$"), "this model has no width multipliers"),
)
NOTHING: tuple[Any, ...] = (False, 0, [], {})


class UnreadKey(NamedTuple):
    """A key that nothing here reads: its dotted path within the file, and its value."""

    key: str
    value: Any


class Unknown:
    """Judges the keys that nobody asked for, and keeps those that were let through without being understood."""

    def __init__(self) -> None:
        self.unread: list[UnreadKey] = []

    def judge(self, where: str, path: str, value: Any) -> None:
        """`path` is dotted, below the file `where`. Raises `ConfigUnsupportedError`."""
        key = path.rpartition(".")[2]
        if value is None or key in GENERIC_KEYS:
            return
        off, why = OFF_VALUES.get(key), "this model has no such feature"
        if off is None:
            why = next((reason for words, reason in FAMILIES if words.search(key)), "")
            if not why:
                self.unread.append(UnreadKey(path, value))
                return
            off = NOTHING
        if not any(_same(value, one) for one in off):
            raise e.ConfigUnsupportedError(f"{where}: {path}: {e.show(value)}; {why}")


def _same(value: Any, one: Any) -> bool:
    """Equal, with true and false no numbers and 1.0 a way to write 1."""
    return type(value) in (type(one), *((float,) if type(one) is int else ())) and value == one
