"""The weights of a decode step as the kernels take them, and how a loaded checkpoint fills them.

H heads, d KDA head width, D hidden, F width, V vocabulary; names are the checkpoint's. A packed dense block is a bank
of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fast.kernels import experts, gemv, indexer, kda, mhc, mla, router
from fast.kernels.experts import Bank


@dataclass(frozen=True, slots=True)
class Kda:
    """projections: q, k, v [H*d, D], f_a, g_a [128, D], b [H, D]; o [D, H*d]."""

    projections: tuple[Tensor, ...]
    step: kda.Weights
    o: Tensor


@dataclass(frozen=True, slots=True)
class Dsa:
    """projections: q_a [Q, D], kv_a [L, D], wk, compress gate [p, D], weights_proj [h, D]; queries: q_b, wq_b."""

    projections: tuple[Tensor, ...]
    q_norm: Tensor
    queries: tuple[Tensor, Tensor]
    index: indexer.Weights
    kv_b: Tensor
    o: Tensor


@dataclass(frozen=True, slots=True)
class Moe:
    gate: Tensor
    bias: Tensor
    bank: Bank
    shared: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Dense:
    """gate, up [F, D], down [D, F], or a bank of one packed expert."""

    block: tuple[Tensor, Tensor, Tensor] | Bank


@dataclass(frozen=True, slots=True)
class Layer:
    attn_site: mhc.Site
    mixer: Kda | Dsa
    ffn_site: mhc.Site
    mlp: Moe | Dense


@dataclass(frozen=True, slots=True)
class Model:
    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    lm_head: Tensor
    text: Any

    def site_setting(self) -> mhc.Setting:
        return mhc.Setting(self.text.rms_norm_eps, self.text.hc_eps, self.text.hc_sinkhorn_iters)


def unsupported(text: Any) -> str | None:
    """The first thing of this geometry that the captured step has no kernel for, or None."""
    checks = {
        "indexer_types: shared": "shared" not in text.indexer_types,
        "hidden_size, hc_mult": text.hidden_size % 32 == 0 and text.hidden_size <= 4096 and 2 <= text.hc_mult <= 4,
        "KDA head width, taps": kda.supported(text.linear_head_dim, text.short_conv_kernel_size),
        "MLA widths": (text.qk_nope_head_dim, text.v_head_dim, text.kv_lora_rank) == (mla.N, mla.O, mla.L),
        "indexer": indexer.supported(text.index_n_heads, text.index_head_dim, text.index_kpool),
        "index_topk": text.index_topk + text.index_kpool - 1 <= mla.WIDEST,
        "router": router.supported(text.n_routed_experts, text.num_experts_per_tok, text.n_group),
        "num_experts_per_tok": gemv.ROWS * text.num_experts_per_tok <= experts.MOST_CHOICES,
        "moe_intermediate_size": experts.supported(text.hidden_size, text.moe_intermediate_size),
        "intermediate_size": experts.supported(text.hidden_size, text.intermediate_size),
        "shared experts": text.shared_intermediate_size % 8 == 0,
        "q_lora_rank": text.q_lora_rank % 8 == 0,
    }
    return next((name for name, good in checks.items() if not good), None)


def from_model(model: Any) -> Model:
    """The weights of a `fast.model.TextModel` on a CUDA device; nothing is copied but small tables."""
    text = model.config.text
    layers = []
    for layer in model.layers:
        mixer = _kda(layer.attn, text) if layer.kind == "kda" else _dsa(layer.attn, text)
        sites = [
            mhc.Site(w.fn, w.base, w.scale, layer.norms[norm])
            for w, norm in ((layer.sites["attn"], "input"), (layer.sites["ffn"], "post_attention"))
        ]
        layers.append(Layer(sites[0], mixer, sites[1], _moe(layer.mlp) if layer.sparse else _dense(layer.mlp.block)))
    return Model(model.embed_tokens, tuple(layers), model.norm, model.lm_head, text)


def _kda(attn: Any, text: Any) -> Kda:
    fused = attn.f_b.shape[1] == kda.RANK and text.linear_head_dim == 128
    assert fused, (tuple(attn.f_b.shape), text.linear_head_dim)
    step = kda.Weights(
        attn.conv, attn.A_log, attn.dt_bias, attn.o_norm, attn.lower_bound, attn.eps, f_b=attn.f_b, g_b=attn.g_b
    )
    return Kda((*attn.projections, attn.f_a, attn.g_a, attn.b), step, attn.o)


def _dsa(attn: Any, text: Any) -> Dsa:
    own = attn.indexer
    weight, bias = own.k_norm
    weights = indexer.Weights(attn.kv_norm, weight, bias, own.ape, text.index_n_heads, own.topk, attn.eps)
    projections = (attn.q_a, attn.kv_a, own.wk, own.gate, own.weights)
    return Dsa(projections, attn.q_norm, (attn.q_b, own.wq_b), weights, attn.kv_b, attn.o)


def _moe(mlp: Any) -> Moe:
    bank = mlp.bank
    shared = mlp.shared.gate, mlp.shared.up, mlp.shared.down
    return Moe(mlp.gate, mlp.bias, experts.bank(bank.gate, bank.up, bank.down, bank.first), shared)


def _dense(block: Any) -> Dense:
    parts = block.gate, block.up, block.down
    return Dense(parts if isinstance(block.gate, Tensor) else experts.bank([block.gate], [block.up], [block.down]))
