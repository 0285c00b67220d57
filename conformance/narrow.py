"""Small models that every kernel takes: `tiny` and `odd` with the head widths of the released model.

The kernels are written for its head widths, so the two geometries themselves take torch operations on a GPU too.
Everything else stays small or odd where a kernel has no need of its own: few heads, few experts, other constants.
"""

from __future__ import annotations

import copy
from typing import Any

from conformance.checkpoints.geometry import Geometry, geometry

NARROW = ("narrow", "narrow-odd")

_HEADS: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "qk_head_dim": 256,
    "v_head_dim": 256,
}
_ODD: dict[str, Any] = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "hidden_size": 96,
    "index_head_dim": 32,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
}
GATE_RANK = 128


def narrow(name: str, layers: tuple[int, ...] | None = None) -> Geometry:
    """One of `NARROW`, or some of its layers.

    In `narrow-odd` every indexer is its own: no kernel takes over another layer's selection.
    """
    odd = name == "narrow-odd"
    base = geometry("odd" if odd else "tiny", layers=layers)
    config = copy.deepcopy(base.config)
    text = config["text_config"]
    text |= _HEADS | (_ODD if odd else {})
    text["linear_attn_config"] |= {"num_heads": 3 if odd else 2, "head_dim": 128}
    if odd:
        text["indexer_types"] = ["full"] * text["num_hidden_layers"]
        config["vision_config"]["out_hidden_size"] = text["hidden_size"]
    return Geometry(name, config, GATE_RANK, base.layer_keys)
