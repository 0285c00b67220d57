"""Faults of dtypes at load: a weight bound through a narrower type than the file has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.numerics import bf16, fp8, fp16
from conformance.mutants.record import ODD, Mutant, bound, family, packed

_m = family("dtype")


def _narrow(x: Tensor) -> Tensor:
    return x.bfloat16()


def _flushed(x: Tensor) -> Tensor:
    """Values below 2^-7 become zero, as a cast to a type without subnormals does with the smallest."""
    return torch.where(x.abs() < 2**-7, torch.zeros_like(x), x)


def _value(name: str, source: str, first: str, suffix: str, change: Any, **rest: Any) -> Mutant:
    return _m(name, source, first, bound(suffix, change), operand=f"*{suffix}", **rest)


APE = "index_kpool_compress_ape"
BIAS = "e_score_correction_bias"
BETA = ".self_attn.b_proj.weight"
SCALES = packed("_proj", "scale_2", bf16)

MUTANTS = (
    # The first layer's rates lie too close to the bf16 grid for the decay to tell.
    _value("dtype-A_log-bf16", "model.md 4", "layers.1.attn.g", "A_log", bf16),
    _value("dtype-dt_bias-bf16", "model.md 4", "layers.0.attn.g", "dt_bias", bf16),
    _value("dtype-router-bias-bf16", "FB27", "layers.3.router.indices", BIAS, bf16, fast=True),
    _value("dtype-A_log-fp16", "model.md 4", "*.A_log", "A_log", fp16),
    _value("dtype-A_log-held-narrow", "model.md 4", "layers.0.attn.g", "A_log", _narrow),
    _value("dtype-hc-base-bf16", "FB28", "layers.0.attn_hc.pre", "hc_attn_base", bf16, **ODD),
    _value("dtype-hc-scale-fp8", "FB28", "layers.0.ffn_hc.pre", "hc_ffn_scale", fp8),
    _value("dtype-hc-fn-fp8", "FB28", "layers.0.attn_hc.pre", "hc_attn_fn", fp8),
    _value("dtype-norm-fp8", "model.md 4", "layers.0.attn.out", "o_norm.weight", fp8),
    _value("dtype-router-fp8", "model.md 4", "layers.3.router.logits", "mlp.gate.weight", fp8),
    _value("dtype-head-fp8", "model.md 4", "logits", "lm_head.weight", fp8),
    _value("dtype-q-fp8", "model.md 4", "layers.0.attn.q", "q_proj.weight", fp8),
    _value("dtype-b-flushed", "model.md 4", "layers.0.attn.beta", BETA, _flushed),
    _m("dtype-scale_2-bf16", "exports.md 3.1", "layers.1.mlp.out", SCALES, operand="*.mlp.*_proj.weight"),
    _value("dtype-ape-fp8", "model.md 4", "layers.3.indexer.pool_keys", APE, fp8),
)
