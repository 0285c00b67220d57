"""Faults of loading: a weight bound to the wrong bytes. The operands show each, whatever the trace says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.record import Mutant, Patch, around, bound, family, packed

_m = family("loader")


def exchanged(first: str, second: str, *, values: bool = True) -> Patch:
    """Operands of weights that end in `first` and `second` change places, layer by layer."""

    def wrapper(original: Any, *args: Any, **named: Any) -> Any:
        weights = original(*args, **named)
        table = weights._values if values else weights._packed
        for name in [name for name in table if name.endswith(first)]:
            other = name[: -len(first)] + second
            if other in table:
                table[name], table[other] = table[other], table[name]
        return weights

    return around("fast.model:load", wrapper)


def _zero_last_row(w: Tensor) -> Tensor:
    w[-1] = 0
    return w


def _zero_end(w: Tensor) -> Tensor:
    flat = w.view(-1)
    flat[-8:] = 0
    return w


def _one_bit(w: Tensor) -> Tensor:
    raw = w.view(torch.int16).view(-1) if w.dtype == torch.bfloat16 else w.view(torch.int32).view(-1)
    raw[raw.numel() // 2] ^= 1
    return w


def _swizzled(scale: Tensor) -> Tensor:
    """Scales read in an order of tiles instead of rows."""
    return scale.flatten().view(-1, 2).T.contiguous().view_as(scale)


def _nibbles(codes: Tensor) -> Tensor:
    return (codes >> 4) | (codes << 4)


def _value(name: str, source: str, first: str, suffix: str, change: Any) -> Mutant:
    """A fault of what is bound for the unpacked weights that end in `suffix`."""
    return _m(name, source, first, bound(suffix, change), operand=f"*{suffix}")


def _part(name: str, source: str, first: str, suffix: str, part: str, change: Any, **rest: Any) -> Mutant:
    """A fault of codes, scale or scale_2 of the packed weights that end in `suffix`."""
    return _m(name, source, first, packed(suffix, part, change), operand=f"*{suffix}.weight", **rest)


def _pair(name: str, source: str, first: str, pair: tuple[str, str], operand: str, **rest: Any) -> Mutant:
    """Two weights take each other's place."""
    values = rest.pop("values", True)
    return _m(name, source, first, exchanged(*pair, values=values), operand=operand, **rest)


NORMS = "input_layernorm.weight", "post_attention_layernorm.weight"
LATENT = "kv_a_proj_with_mqa.weight"
KV = "*.[kv]_proj.weight"
CONVS = "k_conv1d.weight", "v_conv1d.weight"
DOWNS = "experts.0.down_proj", "experts.1.down_proj"
BIAS = "e_score_correction_bias"
EXPERT = ".mlp.experts."

MUTANTS = (
    _pair("loader-k-read-as-v", "FB48", "layers.0.attn.k", ("k_proj.weight", "v_proj.weight"), KV, fast=True),
    _value(
        "loader-q-transposed", "model.md", "layers.0.attn.q", ".self_attn.q_proj.weight", lambda w: w.T.contiguous()
    ),
    _value("loader-q-last-row-missing", "FB34", "layers.0.attn.q", ".layers.0.self_attn.q_proj.weight", _zero_last_row),
    _value("loader-o-tail-of-zeros", "FB34", "layers.5.attn.out", ".5.self_attn.o_proj.weight", _zero_end),
    _value("loader-one-bit-of-embedding", "FB32", "*.embed_tokens.weight", "embed_tokens.weight", _one_bit),
    _value("loader-one-bit-of-a-norm", "FB32", "*.6.input_layernorm.weight", ".6.input_layernorm.weight", _one_bit),
    _value("loader-one-bit-of-A_log", "FB32", "*.4.self_attn.A_log", ".4.self_attn.A_log", _one_bit),
    _value("loader-zero-weight", "FB33", "layers.2.attn.out", ".2.self_attn.g_b_proj.weight", torch.zeros_like),
    _value("loader-head-rows-shifted", "model.md 2", "logits", "lm_head.weight", lambda w: w.roll(1, 0)),
    _pair("loader-norms-exchanged", "FB48", "layers.0.attn.in", NORMS, "*_layernorm.weight"),
    _pair("loader-hc-sites-exchanged", "FB48", "layers.0.attn_hc.pre", ("hc_attn_fn", "hc_ffn_fn"), "*.hc_*_fn"),
    _value("loader-conv-flipped", "model.md 2.2", "layers.0.attn.q", "q_conv1d.weight", lambda w: w.flip(-1)),
    _pair("loader-conv-exchanged", "FB32", "layers.0.attn.k", CONVS, "*.[kv]_conv1d.weight"),
    _value("loader-router-bias-zero", "FB27", "layers.3.router.indices", BIAS, torch.zeros_like),
    _value("loader-index-norm-bias-zero", "model.md 2.3", "layers.3.indexer.k", "k_norm.bias", torch.zeros_like),
    _value("loader-stale-buffer", "FB32", "layers.3.attn.latent", LATENT, lambda w: w.roll(1, 0)),
    _part("loader-nibbles-swapped", "exports.md 3.1", "layers.0.mlp.out", "up_proj", "codes", _nibbles, fast=True),
    _pair(
        "loader-gate-up-exchanged",
        "FB32",
        "layers.0.mlp.out",
        ("gate_proj", "up_proj"),
        "*.mlp.*_proj.weight",
        values=False,
    ),
    _part("loader-scales-swizzled", "exports.md 3.1", "layers.0.mlp.out", "down_proj", "scale", _swizzled),
    _part(
        "loader-scale_2-of-another-tensor",
        "FB18",
        f"*.4{EXPERT}3.up_proj.weight",
        f".4{EXPERT}3.up_proj",
        "scale_2",
        lambda s: s * 0.99,
    ),
    _part("loader-scale_2-inverted", "FB08", "layers.0.mlp.out", "down_proj", "scale_2", lambda s: 1 / s),
    _pair(
        "loader-experts-shifted", "FB61", "layers.3.routed.out", DOWNS, "*.experts.[01].down_proj.weight", values=False
    ),
    _part(
        "loader-one-code-of-one-expert",
        "FB32",
        "layers.5.routed.out",
        f".5{EXPERT}9.gate_proj",
        "codes",
        lambda c: c ^ 1,
    ),
    _part(
        "loader-scale-byte-raised", "FB01", "layers.3.routed.out", f".3{EXPERT}2.gate_proj", "scale", lambda s: s + 1
    ),
    _part(
        "loader-missing-expert-zero", "FB33", "layers.6.routed.out", f".6{EXPERT}7.down_proj", "codes", torch.zeros_like
    ),
)
