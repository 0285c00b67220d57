"""The public torch classes (`Glm5NextTextModel` of `transformers` 5.24) fed with a checkpoint's de-quantised weights.

Everything a class default could get wrong is passed explicitly from the parsed config. Where the classes fall short of
the model definition, this engine does the following and nothing else:

* The rank of the gate bottlenecks (`f_a_proj`, `g_a_proj`) is the rows of the stored weight; the classes assume the
  KDA head width, so those four modules are rebuilt with the stored shapes.
* `pad_token_id` is dropped: it only marks a row that training skips, and must lie inside a small vocabulary.
* In `bf16`, a module with a packed weight computes in float32 (input cast up, output rounded to bf16): a de-quantised
  NVFP4 value does not fit bf16, and rounding the weight would be another model. The head's logits are float32 too.
* A layer of type `shared` gets the selection of the layer right before it only, because the classes drop it after any
  other layer in between; a config that needs more is refused.
* `fp64` runs the same code in double precision: `Lift` turns every float32 the classes ask for into float64. Nothing
  else changes, so a difference from the exact reference is then one of mathematics and not of rounding.
* There is no MTP block, no exact arithmetic, no tensor parallelism; `attention` is "eager" or "sdpa".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.models.glm5_next import modeling_glm5_next as modeling
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

from conformance.engines.base import BaseEngine, as_numpy
from conformance.engines.transformers_taps import Observer
from conformance.errors import EngineOptionError
from conformance.lift import Lift
from reference.checkpoint import open_checkpoint

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
PREFIX = "model.language_model."
# Keys that the classes spell as config.json does.
SAME_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_shared_experts",
    "n_routed_experts",
    "routed_scaling_factor",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_rope_head_dim",
    "v_head_dim",
    "qk_nope_head_dim",
    "n_group",
    "topk_group",
    "num_experts_per_tok",
    "norm_topk_prob",
    "rms_norm_eps",
    "index_topk",
    "index_head_dim",
    "index_n_heads",
    "swiglu_limit",
    "linear_head_dim",
    "linear_num_heads",
    "hc_mult",
    "hc_eps",
    "hc_sinkhorn_iters",
    "index_kpool",
)
_RENAMED = {
    "self_attn.f_a_proj.": "self_attn.forget_gate.f_a_proj.",
    "self_attn.f_b_proj.": "self_attn.forget_gate.f_b_proj.",
    "self_attn.dt_bias": "self_attn.forget_gate.dt_bias",
    "self_attn.A_log": "self_attn.forget_gate.A_log",
    "hc_attn_": "attn_hc.",
    "hc_ffn_": "ffn_hc.",
}
_CONV = ("q_conv1d", "k_conv1d", "v_conv1d")


class TransformersEngine(BaseEngine):
    """Options: `arithmetic` (fp32, bf16, fp64) and `attention` (eager, sdpa)."""

    name: ClassVar[str] = "transformers"
    version: ClassVar[str] = transformers.__version__
    options: ClassVar[dict[str, Any]] = {"arithmetic": "fp32", "attention": "eager"}

    def _open(self, directory: Path) -> None:
        if self.settings["arithmetic"] not in DTYPES:
            raise EngineOptionError(
                f"engine transformers: arithmetic {self.settings['arithmetic']!r}, expected {' or '.join(DTYPES)}"
            )
        if self.settings["attention"] not in ("eager", "sdpa"):
            raise EngineOptionError(
                f"engine transformers: attention {self.settings['attention']!r}, expected eager or sdpa"
            )
        self.checkpoint = open_checkpoint(directory)
        self.config, self.export = self.checkpoint.config, self.checkpoint.export
        self.dtype = DTYPES[self.settings["arithmetic"]]
        self.model = build(self.checkpoint, self.dtype, self.settings["attention"])
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.head = torch.from_numpy(np.array(self.checkpoint.weight("lm_head.weight"))).to(wide)
        self.observer = Observer(self.model)
        transformers.logging.set_verbosity_error()

    @torch.no_grad()
    def _run(self, ids: np.ndarray, schedule: Any, tap: Callable[[str, Any], None]) -> np.ndarray:
        cache = DynamicCache(config=self.model.config)
        rows, start, fed = [], 0, 0
        for index, length in enumerate((*schedule.prefill, *([1] * schedule.decode))):
            pad = schedule.pad if index == 0 else 0
            chunk = torch.from_numpy(ids[start : start + length].astype(np.int64))
            chunk = torch.cat([torch.full((pad,), self.config.text.vocab_size - 1), chunk])
            start, fed = start + length, fed + pad + length
            mask = torch.ones((1, fed), dtype=torch.long)
            mask[:, : schedule.pad] = 0
            lift = Lift() if self.dtype == torch.float64 else nullcontext()
            with lift, self.observer.watch(tap, pad=pad, padded=schedule.pad, cache=cache):
                hidden = self.model(
                    input_ids=chunk[None], attention_mask=mask, cache=cache, use_cache=True
                ).last_hidden_state
            rows.append(as_numpy(nn.functional.linear(hidden[0, pad:].to(self.head.dtype), self.head)))
        return np.concatenate(rows)

    def _describe(self) -> dict[str, Any]:
        return {"arithmetic": self.settings["arithmetic"], "extra": {"attention": self.settings["attention"]}}

    def operands(self, name: str) -> dict[str, np.ndarray] | None:
        """{"value": the bound tensor}; None for what the classes do not hold (scales, MTP block, vision tower)."""
        if name == "lm_head.weight":
            return {"value": as_numpy(self.head)}
        if not name.startswith(PREFIX):
            return None
        bound = dict(self.model.state_dict())
        for target, sources in _targets(self.checkpoint, bound):
            if name in sources:
                tensor, parts = bound[target], sources.index(name)
                if target.endswith("conv1d.weight"):
                    tensor = tensor.chunk(len(sources))[parts]
                elif target.endswith("experts.gate_up_proj"):
                    tensor = tensor[parts // 2].chunk(2)[parts % 2]
                elif target.endswith("experts.down_proj"):
                    tensor = tensor[parts]
                return {"value": as_numpy(tensor)}
        return None


def build(checkpoint: Any, dtype: torch.dtype, attention: str) -> Any:
    """The text model on the CPU, every parameter and buffer bound from the checkpoint (strictly: none is left over)."""
    with torch.device("meta"):
        model = modeling.Glm5NextTextModel(public_config(checkpoint.config.text, attention))
        _fit_gate_rank(model, checkpoint)
    strict = modeling.Glm5NextPreTrainedModel._keep_in_fp32_modules_strict
    state = {}
    for target, sources in _targets(checkpoint, model.state_dict()):
        value = _value(checkpoint, target, sources)
        packed = any(checkpoint.dtype(name) == "U8" for name in sources)
        keep = packed or any(name in f"{target}." for name in strict)
        state[target] = value if keep and dtype == torch.bfloat16 else value.to(dtype)
    model.load_state_dict(state, strict=True, assign=True)
    if dtype == torch.bfloat16:
        _widen_packed(model)
    return model.eval()


def public_config(text: Any, attention: str) -> Any:
    """`text`: reference.config.TextConfig. Every field the classes read is given: no default of theirs counts."""
    layers = range(text.num_hidden_layers)
    indexer_types = [kind or "full" for kind in text.indexer_types]
    for layer in text.full_attn_layers:
        if indexer_types[layer] == "shared" and layer - 1 not in text.full_attn_layers:
            raise EngineOptionError(
                f"engine transformers: layer {layer} shares a selection across layer {layer - 1}, which is no DSA layer"
            )
    kinds = ["linear_attention" if layer in text.kda_layers else "indexed_attention" for layer in layers]
    settings: dict[str, Any] = {
        **{name: getattr(text, name) for name in SAME_KEYS},
        "hidden_act": "silu",
        "num_key_value_heads": text.num_attention_heads,
        "linear_conv_kernel_dim": text.short_conv_kernel_size,
        "linear_lower_bound": text.gate_lower_bound,
        "index_kpool_always_select_tail": True,
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if text.is_sparse(layer) else "dense" for layer in layers],
        "indexer_types": indexer_types,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "pad_token_id": None,
        "use_cache": True,
        "attn_implementation": attention,
        "experts_implementation": "eager",
    }
    return Glm5NextTextConfig(**settings)


def _fit_gate_rank(model: Any, checkpoint: Any) -> None:
    for index, layer in enumerate(model.layers):
        if layer.block_type != "linear_attention":
            continue
        stem = f"{PREFIX}layers.{index}.self_attn."
        for owner, name in ((layer.self_attn.forget_gate, "f"), (layer.self_attn, "g")):
            for part in (f"{name}_a_proj", f"{name}_b_proj"):
                rows, columns = checkpoint.raw(f"{stem}{part}.weight")[1]
                setattr(owner, part, nn.Linear(columns, rows, bias=False))


def _targets(checkpoint: Any, state: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """(name in the classes' state dict, the checkpoint weights it is made of, in order)."""
    for target in state:
        source = target
        for ours, theirs in _RENAMED.items():
            source = source.replace(theirs, ours)
        stem, _, leaf = source.rpartition(".")
        if stem.endswith("self_attn.conv1d"):
            names = [f"{stem.removesuffix('conv1d')}{conv}.weight" for conv in _CONV]
        elif stem.endswith("mlp.experts"):
            parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
            experts = range(checkpoint.config.text.n_routed_experts)
            names = [f"{stem}.{expert}.{part}.weight" for expert in experts for part in parts]
        else:
            names = [source]
        yield target, [PREFIX + name for name in names]


def _value(checkpoint: Any, target: str, sources: list[str]) -> torch.Tensor:
    tensors = [torch.from_numpy(np.array(checkpoint.weight(name), dtype=np.float32)) for name in sources]
    if target.endswith("experts.gate_up_proj"):
        return torch.stack([torch.cat(pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)])
    if target.endswith("experts.down_proj"):
        return torch.stack(tensors)
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _widen_packed(model: Any) -> None:
    """Make the modules whose weights stayed float32 because they were packed take and give the model's bf16."""
    for layer in model.layers:
        module = layer.mlp.experts if hasattr(layer.mlp, "experts") else layer.mlp
        if all(parameter.dtype == torch.float32 for parameter in module.parameters()):
            module.register_forward_pre_hook(_cast_up)
            module.register_forward_hook(_cast_down)


def _cast_up(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].float(), *args[1:])


def _cast_down(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return output.to(torch.bfloat16)
