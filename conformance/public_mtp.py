"""The MTP block put together from the public `transformers` classes, which do not have it: a second opinion for tests.

Sparse attention, experts and norms are the public modules in float32; only the order of the steps (model.md section 3)
is written here. Needs the `transformers` extra.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference.checkpoint import Checkpoint
from reference.layout import TEXT


class PublicBlock:
    """The draft block of a checkpoint, all weights at their stored values."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers.models.glm5_next import configuration_glm5_next as configuration
        from transformers.models.glm5_next import modeling_glm5_next as public

        text = checkpoint.config.text
        assert text.mtp_layer is not None
        self._checkpoint, self._scope = checkpoint, f"{TEXT}layers.{text.mtp_layer}."
        settings = dict(checkpoint.config.raw["text_config"])
        settings["indexer_types"] = ["full"] * text.num_hidden_layers
        config = configuration.Glm5NextTextConfig(**settings)
        config._attn_implementation = "eager"
        D, eps = text.hidden_size, text.rms_norm_eps
        self.attn = self._load(public.Glm5NextTextAttention(config, text.full_attn_layers[0]), "self_attn.")
        moe: Any = public.Glm5NextTextMoE
        self.moe = self._load_experts(moe(config), text.n_routed_experts)
        names = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")
        self.norms = {name: self._load(public.Glm5NextTextRMSNorm(D, eps), f"{name}.") for name in names}

    @torch.inference_mode()
    def rows(self, hidden: np.ndarray, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """hidden [T, D], tokens after them [T] -> the taps z, attn.out, mlp.out, logits, from a fresh state."""
        table, head = (self._value(name) for name in (f"{TEXT}embed_tokens.weight", "lm_head.weight"))
        e, h = table[torch.from_numpy(tokens)][None], torch.from_numpy(hidden).float()[None]
        both = torch.cat([self.norms["enorm"](e), self.norms["hnorm"](h)], dim=-1)
        z = both @ self._value(f"{self._scope}eh_proj.weight").T
        taps = {"z": z}
        visible = torch.ones(z.shape[:2], dtype=torch.bool)
        taps["attn.out"] = self.attn(self.norms["input_layernorm"](z), visible)[0]
        z = z + taps["attn.out"]
        taps["mlp.out"] = self.moe(self.norms["post_attention_layernorm"](z))
        z = z + taps["mlp.out"]
        taps["logits"] = self.norms["shared_head.norm"](z) @ head.T
        return {name: value[0].double().numpy() for name, value in taps.items()}

    def _value(self, name: str) -> Tensor:
        return torch.from_numpy(self._checkpoint.weight(name))

    def _leaves(self, scope: str) -> dict[str, Tensor]:
        prefix = self._scope + scope
        names = [name for name in self._checkpoint.names() if name.startswith(prefix)]
        names = [name for name in names if not name.endswith((".weight_scale", ".weight_scale_2", ".input_scale"))]
        return {name.removeprefix(prefix): self._value(name) for name in names}

    def _load(self, module: Any, scope: str) -> Any:
        module.float().eval().load_state_dict(self._leaves(scope))
        return module

    def _load_experts(self, module: Any, count: int) -> Any:
        values = self._leaves("mlp.")
        gate, up, down = (
            torch.stack([values.pop(f"experts.{e}.{name}_proj.weight") for e in range(count)])
            for name in ("gate", "up", "down")
        )
        values |= {"experts.gate_up_proj": torch.cat([gate, up], dim=1), "experts.down_proj": down}
        module.float().eval().load_state_dict(values)
        return module
