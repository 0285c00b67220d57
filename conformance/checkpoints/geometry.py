"""The shapes of synthetic models: the released one and small ones that keep all of its rules.

A geometry is a config without `quantization_config`, the gate rank (no config key), and for each stored layer the layer
of the full-depth model that it is. A model reduced to some layers, experts or vocabulary rows holds exactly the weights
that the unreduced model of that seed has there.
"""

import copy
from dataclasses import dataclass
from typing import Any

from reference.errors import GeometryError

NAMES = ("tiny", "odd", "one-layer", "full")
ONE_LAYER = (0, 4, 7)  # KDA + dense, KDA + MoE, DSA + MoE
IMAGE_TOKENS = ("image", "video", "image_start", "image_end", "video_start", "video_end")

_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 3,
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_kpool": 4,
    "index_kpool_always_select_tail": True,
    "index_kpool_compress": True,
    "index_n_heads": 32,
    "index_topk": 2048,
    "index_share_for_mtp_iteration": True,
    "indexer_rope_interleave": True,
    "indexer_types": [],
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "layer_types": [],
    "linear_attn_config": {
        "num_heads": 64,
        "gate_lower_bound": -5.0,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "kda_layers": [],
        "full_attn_layers": [],
    },
    "max_position_embeddings": 1048576,
    "mhc": True,
    "mla_use_nope": True,
    "mlp_layer_types": [],
    "model_type": "glm5_next_text",
    "moe_intermediate_size": 2048,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "n_routed_experts": 288,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 45,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "output_router_logits": False,
    "pad_token_id": 154820,
    "q_lora_rank": 1536,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 2.5,
    "router_aux_loss_coef": 0.001,
    "scoring_func": "sigmoid",
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
_VISION: dict[str, Any] = {
    "attention_bias": True,
    "attention_dropout": 0.0,
    "depth": 24,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "image_size": 448,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "model_type": "glm5_next_vision",
    "num_heads": 16,
    "out_hidden_size": 4096,
    "patch_size": 14,
    "projection_intermediate_size": 10240,
    "rms_norm_eps": 1e-05,
    "spatial_merge_size": 2,
    "swiglu_limit": 10.0,
    "temporal_patch_size": 2,
}
_TOKENS = {
    "image_token_id": 154854,
    "video_token_id": 154855,
    "image_start_token_id": 154830,
    "image_end_token_id": 154831,
    "video_start_token_id": 154832,
    "video_end_token_id": 154833,
}


@dataclass(frozen=True)
class Geometry:
    """`layer_keys[i]` is the full-depth index of stored layer i, the MTP block last."""

    name: str
    config: dict[str, Any]
    gate_rank: int
    layer_keys: tuple[int, ...]


def geometry(
    name: str, *, layers: tuple[int, ...] | None = None, experts: int | None = None, vocab: int | None = None
) -> Geometry:
    """A geometry by name, optionally reduced to some of its layers (in ascending order), its first experts, its first
    vocabulary rows. Raises `GeometryError`."""
    if name not in NAMES:
        raise GeometryError(f"geometry {name!r}: known are {', '.join(NAMES)}")
    text, vision = copy.deepcopy(_TEXT), copy.deepcopy(_VISION)
    depth, dsa, shared, gate_rank = 45, frozenset(range(3, 44, 4)), frozenset[int](), 128
    if name == "tiny":
        depth, dsa, gate_rank = 9, frozenset((3, 7)), 16
        _tiny(text, vision)
    elif name == "odd":
        depth, dsa, shared, gate_rank = 7, frozenset((1, 4, 5)), frozenset((5,)), 12
        _odd(text, vision)
    elif name == "one-layer":
        layers = ONE_LAYER if layers is None else tuple(ONE_LAYER[i] for i in _chosen(layers, len(ONE_LAYER)))
    keep = tuple(range(depth)) if layers is None else _chosen(layers, depth)
    if shared.intersection(keep) and not dsa.difference(shared).intersection(keep):
        raise GeometryError(f"layers {list(keep)}: a layer that shares a selection is kept without one that makes it")
    dense = text["first_k_dense_replace"]
    text["num_hidden_layers"] = len(keep)
    text["first_k_dense_replace"] = sum(layer < dense for layer in keep)
    text["layer_types"] = ["deepseek_sparse_attention" if i in dsa else "linear_attention" for i in keep]
    text["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in keep]
    text["indexer_types"] = ["shared" if i in shared else "full" for i in keep]
    text["linear_attn_config"]["kda_layers"] = [n for n, i in enumerate(keep) if i not in dsa]
    text["linear_attn_config"]["full_attn_layers"] = [n for n, i in enumerate(keep) if i in dsa]
    tokens = dict(_TOKENS)
    if experts is not None:
        _reduce_experts(text, experts)
    if vocab is not None and vocab > text["vocab_size"]:
        raise GeometryError(f"vocab {vocab}: the geometry {name} has {text['vocab_size']}")
    text["vocab_size"] = text["vocab_size"] if vocab is None else vocab
    if text["vocab_size"] != _TEXT["vocab_size"]:
        _special_tokens(text, tokens)
    config = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        **tokens,
        "tie_word_embeddings": False,
        "model_type": "glm5_next",
        "transformers_version": "5.16.0",
    }
    return Geometry(name, config, gate_rank, (*keep, depth))


def _chosen(layers: tuple[int, ...], depth: int) -> tuple[int, ...]:
    if not layers or sorted(set(layers)) != list(layers) or not 0 <= layers[0] <= layers[-1] < depth:
        raise GeometryError(f"layers {list(layers)}: expected different layers of 0..{depth - 1} in ascending order")
    return tuple(layers)


def _tiny(text: dict[str, Any], vision: dict[str, Any]) -> None:
    text |= {"hidden_size": 128, "vocab_size": 512, "max_position_embeddings": 4096}
    text["linear_attn_config"] |= {"num_heads": 8, "head_dim": 16}
    text |= {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 32}
    text |= {"qk_nope_head_dim": 16, "qk_head_dim": 16, "v_head_dim": 16}
    text |= {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 32}
    text |= {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "intermediate_size": 256}
    vision |= {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 128}
    vision |= {"image_size": 56, "projection_intermediate_size": 160}


def _odd(text: dict[str, Any], vision: dict[str, Any]) -> None:
    text |= {"hidden_size": 112, "vocab_size": 257, "max_position_embeddings": 4096, "hc_mult": 3, "hc_eps": 2e-2}
    text |= {"hc_sinkhorn_iters": 5, "rms_norm_eps": 1e-2, "swiglu_limit": 1.5, "first_k_dense_replace": 2}
    text["linear_attn_config"] |= {"num_heads": 6, "head_dim": 16, "gate_lower_bound": -3.0}
    text |= {"num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": 40, "kv_lora_rank": 24}
    text |= {"qk_nope_head_dim": 24, "qk_head_dim": 24, "v_head_dim": 20}
    text |= {"index_n_heads": 3, "index_head_dim": 20, "index_topk": 24, "index_kpool": 8}
    text |= {"n_routed_experts": 10, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1}
    text |= {"moe_intermediate_size": 48, "intermediate_size": 80}
    vision |= {"depth": 1, "hidden_size": 48, "num_heads": 4, "intermediate_size": 72, "out_hidden_size": 112}
    vision |= {"image_size": 42, "patch_size": 7, "projection_intermediate_size": 88, "swiglu_limit": 1.5}
    vision |= {"rms_norm_eps": 1e-2}


def _reduce_experts(text: dict[str, Any], experts: int) -> None:
    groups = text["n_group"]
    if not 2 * groups <= experts <= text["n_routed_experts"] or experts % groups:
        raise GeometryError(
            f"experts {experts}: expected {2 * groups} to {text['n_routed_experts']}, a multiple of {groups}"
        )
    text["n_routed_experts"] = experts
    text["num_experts_per_tok"] = min(text["num_experts_per_tok"], experts // groups * text["topk_group"])


def _special_tokens(text: dict[str, Any], tokens: dict[str, int]) -> None:
    """Special ids inside a small vocabulary: above the 256 byte ids where there is room, else control bytes."""
    vocab = text["vocab_size"]
    if vocab < 16:
        raise GeometryError(f"vocab {vocab}: expected at least 16")
    ids = iter(range(vocab - 9, vocab)) if vocab >= 256 + 9 else iter((vocab - 1, 1, 2, 3, 4, 5, 6, 14, 15))
    text["eos_token_id"] = [next(ids) for _ in range(3)]
    text["pad_token_id"] = text["eos_token_id"][0]
    for kind in IMAGE_TOKENS:
        tokens[f"{kind}_token_id"] = next(ids)
