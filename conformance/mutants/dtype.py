"""Faults of dtypes at load: a weight bound through a narrower type than the file has."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.mutants.numerics import bf16, fp8, fp16
from conformance.mutants.record import ODD, bound, family, packed

_m = family("dtype")


def _narrow(x: Tensor) -> Tensor:
    return x.bfloat16()


def _flushed(x: Tensor) -> Tensor:
    """Values below 2^-7 become zero, as a cast to a type without subnormals does with the smallest."""
    return torch.where(x.abs() < 2**-7, torch.zeros_like(x), x)


MUTANTS = (
    _m("dtype-A_log-bf16", "model.md 4", "*", bound("A_log", bf16), operand="*.A_log"),
    _m("dtype-dt_bias-bf16", "model.md 4", "*", bound("dt_bias", bf16), operand="*.dt_bias"),
    _m(
        "dtype-router-bias-bf16",
        "FB27",
        "*",
        bound("e_score_correction_bias", bf16),
        operand="*.e_score_correction_bias",
        fast=True,
    ),
    _m("dtype-A_log-fp16", "model.md 4", "*", bound("A_log", fp16), operand="*.A_log"),
    _m("dtype-A_log-held-narrow", "model.md 4", "*", bound("A_log", _narrow), operand="*.A_log"),
    _m("dtype-hc-base-bf16", "FB28", "*", bound("hc_attn_base", bf16), operand="*.hc_attn_base", **ODD),
    _m("dtype-hc-scale-fp8", "FB28", "*", bound("hc_ffn_scale", fp8), operand="*.hc_ffn_scale"),
    _m("dtype-hc-fn-fp8", "FB28", "*", bound("hc_attn_fn", fp8), operand="*.hc_attn_fn"),
    _m("dtype-norm-fp8", "model.md 4", "*", bound("o_norm.weight", fp8), operand="*.o_norm.weight"),
    _m("dtype-router-fp8", "model.md 4", "*", bound("mlp.gate.weight", fp8), operand="*.mlp.gate.weight"),
    _m("dtype-head-fp8", "model.md 4", "*", bound("lm_head.weight", fp8), operand="lm_head.weight"),
    _m("dtype-q-fp8", "model.md 4", "*", bound("q_proj.weight", fp8), operand="*.q_proj.weight"),
    _m(
        "dtype-b-flushed",
        "model.md 4",
        "*",
        bound(".self_attn.b_proj.weight", _flushed),
        operand="*.self_attn.b_proj.weight",
    ),
    _m("dtype-scale_2-bf16", "exports.md 3.1", "*", packed("_proj", "scale_2", bf16), operand="*.mlp.*_proj.weight"),
    _m(
        "dtype-ape-fp8", "model.md 4", "*", bound("index_kpool_compress_ape", fp8), operand="*.index_kpool_compress_ape"
    ),
)
