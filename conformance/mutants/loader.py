"""Faults of loading: a weight bound to the wrong bytes. The operands show each, whatever the trace says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.record import Patch, around, bound, family, packed

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


LAST = ".layers.0.self_attn.q_proj.weight"
MUTANTS = (
    _m(
        "loader-k-read-as-v",
        "FB48",
        "*",
        exchanged("k_proj.weight", "v_proj.weight"),
        operand="*.[kv]_proj.weight",
        fast=True,
    ),
    _m(
        "loader-q-transposed",
        "model.md",
        "*",
        bound(".self_attn.q_proj.weight", lambda w: w.T.contiguous()),
        operand="*.q_proj.weight",
    ),
    _m("loader-q-last-row-missing", "FB34", "*", bound(LAST, _zero_last_row), operand="*.0.*.q_proj.weight"),
    _m(
        "loader-o-tail-of-zeros",
        "FB34",
        "*",
        bound(".5.self_attn.o_proj.weight", _zero_end),
        operand="*.5.*.o_proj.weight",
    ),
    _m(
        "loader-one-bit-of-embedding",
        "FB32",
        "*",
        bound("embed_tokens.weight", _one_bit),
        operand="*.embed_tokens.weight",
    ),
    _m(
        "loader-one-bit-of-a-norm",
        "FB32",
        "*",
        bound(".6.input_layernorm.weight", _one_bit),
        operand="*.6.input_layernorm.weight",
    ),
    _m("loader-one-bit-of-A_log", "FB32", "*", bound(".4.self_attn.A_log", _one_bit), operand="*.4.*.A_log"),
    _m(
        "loader-zero-weight",
        "FB33",
        "*",
        bound(".2.self_attn.g_b_proj.weight", torch.zeros_like),
        operand="*.2.*.g_b_proj.weight",
    ),
    _m(
        "loader-head-rows-shifted",
        "model.md 2",
        "*",
        bound("lm_head.weight", lambda w: w.roll(1, 0)),
        operand="lm_head.weight",
    ),
    _m(
        "loader-norms-exchanged",
        "FB48",
        "*",
        exchanged("input_layernorm.weight", "post_attention_layernorm.weight"),
        operand="*_layernorm.weight",
    ),
    _m("loader-hc-sites-exchanged", "FB48", "*", exchanged("hc_attn_fn", "hc_ffn_fn"), operand="*.hc_*_fn"),
    _m(
        "loader-conv-flipped",
        "model.md 2.2",
        "*",
        bound("q_conv1d.weight", lambda w: w.flip(-1)),
        operand="*.q_conv1d.weight",
    ),
    _m(
        "loader-conv-exchanged",
        "FB32",
        "*",
        exchanged("k_conv1d.weight", "v_conv1d.weight"),
        operand="*.[kv]_conv1d.weight",
    ),
    _m(
        "loader-router-bias-zero",
        "FB27",
        "*",
        bound("e_score_correction_bias", torch.zeros_like),
        operand="*.e_score_correction_bias",
    ),
    _m(
        "loader-index-norm-bias-zero",
        "model.md 2.3",
        "*",
        bound("k_norm.bias", torch.zeros_like),
        operand="*.k_norm.bias",
    ),
    _m(
        "loader-stale-buffer",
        "FB32",
        "*",
        bound("kv_a_proj_with_mqa.weight", lambda w: w.roll(1, 0)),
        operand="*.kv_a_proj_with_mqa.weight",
    ),
    _m(
        "loader-nibbles-swapped",
        "exports.md 3.1",
        "*",
        packed("up_proj", "codes", _nibbles),
        operand="*.up_proj.weight",
        fast=True,
    ),
    _m(
        "loader-gate-up-exchanged",
        "FB32",
        "*",
        exchanged("gate_proj", "up_proj", values=False),
        operand="*.mlp.*_proj.weight",
    ),
    _m(
        "loader-scales-swizzled",
        "exports.md 3.1",
        "*",
        packed("down_proj", "scale", _swizzled),
        operand="*.down_proj.weight",
    ),
    _m(
        "loader-scale_2-of-gate-for-up",
        "FB18",
        "*",
        packed(".4.mlp.experts.3.up_proj", "scale_2", lambda s: s * 0.99),
        operand="*.4.mlp.experts.3.up_proj.weight",
    ),
    _m(
        "loader-scale_2-inverted",
        "FB08",
        "*",
        packed("down_proj", "scale_2", lambda s: 1 / s),
        operand="*.down_proj.weight",
    ),
    _m(
        "loader-experts-shifted",
        "FB61",
        "*",
        exchanged("experts.0.down_proj", "experts.1.down_proj", values=False),
        operand="*.experts.[01].down_proj.weight",
    ),
    _m(
        "loader-one-code-of-one-expert",
        "FB32",
        "*",
        packed(".5.mlp.experts.9.gate_proj", "codes", lambda c: c ^ 1),
        operand="*.5.mlp.experts.9.gate_proj.weight",
    ),
    _m(
        "loader-scale-byte-raised",
        "FB01",
        "*",
        packed(".3.mlp.experts.2.gate_proj", "scale", lambda s: s + 1),
        operand="*.3.mlp.experts.2.gate_proj.weight",
    ),
    _m(
        "loader-missing-expert-zero",
        "FB33",
        "*",
        packed(".6.mlp.experts.7.down_proj", "codes", torch.zeros_like),
        operand="*.6.mlp.experts.7.down_proj.weight",
    ),
)
