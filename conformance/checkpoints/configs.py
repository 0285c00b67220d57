"""config.json, hf_quant_config.json and generation_config.json as each export writes them."""

import json
from typing import Any

LIBERTAI_IGNORE = (
    "lm_head",
    "model.language_model.embed_tokens",
    *(
        f"*.self_attn.{module}"
        for module in (
            *("in_proj_qkvbfg_a", "q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj", "f_b_proj"),
            *("g_b_proj", "fused_qkv_a_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj"),
            *("indexer.wk_weights_proj", "indexer.wk", "indexer.weights_proj", "indexer.wq_b", "o_proj"),
        )
    ),
    *(
        f"*.mlp.{module}"
        for module in (
            *("gate", "gate_up_proj", "down_proj", "shared_experts.gate_up_proj", "shared_experts.down_proj"),
            *("shared_experts.gate_proj", "shared_experts.up_proj", "gate_proj", "up_proj"),
        )
    ),
    "*.eh_proj",
    "model.visual.*",
)
NVIDIA_PRODUCER = {"name": "modelopt", "version": "0.47.0.dev393+ga4bc45b30.d20260828"}


def nvidia_ignore(raw: dict[str, Any]) -> list[str]:
    """The exclusion list in plain string order. Like the released one it does not name the (BF16) MTP block."""
    text = raw["text_config"]
    layers, dense = text["num_hidden_layers"], text["first_k_dense_replace"]
    prefix = "model.language_model.layers"
    return sorted(
        ["lm_head", "model.language_model.embed_tokens", "model.visual*"]
        + [f"{prefix}.{layer}.self_attn*" for layer in range(layers)]
        + [f"{prefix}.{layer}.mlp.{part}" for layer in range(dense, layers) for part in ("gate", "shared_experts*")]
    )


def config_json(raw: dict[str, Any], export: str) -> str:
    """LibertAI keeps the original's keys and order; nvidia's is a re-save by transformers: sorted, `linear_*` added.

    The unquantised `bf16` layout has no `quantization_config`.
    """
    if export == "bf16":
        return json.dumps(raw, indent=1) + "\n"
    if export == "libertai":
        quantization: dict[str, Any] = {
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False, "symmetric": True},
                    "input_activations": None,
                    "output_activations": None,
                }
            },
            "quant_algo": "NVFP4",
            "kv_cache_scheme": None,
            "producer": {"name": "modelopt", "version": "0.45.0"},
            "quant_method": "modelopt",
            "ignore": list(LIBERTAI_IGNORE),
        }
        return json.dumps({**raw, "quantization_config": quantization}, indent=1) + "\n"
    linear = raw["text_config"]["linear_attn_config"]
    text = raw["text_config"] | {
        "bos_token_id": None,
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
        "linear_head_dim": linear["head_dim"],
        "linear_lower_bound": linear["gate_lower_bound"],
        "linear_num_heads": linear["num_heads"],
    }
    saved = _sorted(raw | {"text_config": text, "transformers_version": "5.16.1"})
    group = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    saved["quantization_config"] = {
        "config_groups": {"group_0": {"input_activations": group, "weights": group, "targets": ["Linear"]}},
        "ignore": nvidia_ignore(raw),
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": NVIDIA_PRODUCER,
        "quant_method": "modelopt",
    }
    return json.dumps(saved, indent=4)


def hf_quant_config_json(raw: dict[str, Any]) -> str:
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": nvidia_ignore(raw),
    }
    return json.dumps({"producer": NVIDIA_PRODUCER, "quantization": quantization}, indent=4)


def generation_config_json(raw: dict[str, Any]) -> str:
    text = raw["text_config"]
    config = {
        "do_sample": True,
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
        "temperature": 1.0,
        "top_p": 0.95,
    }
    return json.dumps(config, indent=2) + "\n"


def _sorted(value: Any) -> Any:
    return {key: _sorted(value[key]) for key in sorted(value)} if isinstance(value, dict) else value
