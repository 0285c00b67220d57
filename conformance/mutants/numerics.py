"""Less precision than every correct engine has: bf16 (or fp16, fp8) where fp32 is required. The operands stay right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.record import ODD, Patch, argument, around, attribute, family, layers, output, replace

K, R, H, X = "fast.ops.kda", "fast.ops.router", "fast.ops.mhc", "fast.ops.indexer"
G, CORE, ATTENTION = "layers.*.attn.g", "layers.*.attn.core", "layers.3.attn.core"
STATE = "layers.*.attn.state"
PRE, POST, COMB = "layers.*_hc.pre", "layers.*_hc.post", "layers.*_hc.comb"
_m = family("numerics")


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def fp16(x: Tensor) -> Tensor:
    return x.half().to(x.dtype)


def fp8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def _site(part: str) -> Patch:
    def edit(layer: Any) -> None:
        layer.sites = {k: w._replace(**{part: bf16(getattr(w, part))}) for k, w in layer.sites.items()}

    return layers("layer", edit)


def _part(part: str, change: Any) -> Patch:
    return output(f"{H}:mix", lambda mix: mix._replace(**{part: change(getattr(mix, part))}))


def _sinkhorn(comb: Tensor, eps: float, iterations: int) -> Tensor:
    comb = bf16(comb)
    comb = bf16(comb / bf16(comb.sum(-2, keepdim=True) + eps))
    for _ in range(iterations - 1):
        comb = bf16(comb / bf16(comb.sum(-1, keepdim=True) + eps))
        comb = bf16(comb / bf16(comb.sum(-2, keepdim=True) + eps))
    return comb


def _state(change: Any) -> Patch:
    """The KDA matrix rounded after every token; chunks one token wide take the recurrent form."""
    return output(f"{K}:update", change) + around(f"{K}:chunked", lambda original, w, *inputs: _recurrent(*inputs))


def _recurrent(*inputs: Tensor) -> Any:
    import fast.ops.kda

    return fast.ops.kda.recurrent(*inputs)


def _carried(change: Any) -> Patch:
    """The KDA matrix rounded where a call ends."""
    ends = [output(f"{K}:{form}", lambda pair: (pair[0], change(pair[1]))) for form in ("recurrent", "chunked")]
    return ends[0] + ends[1]


def _softmax(original: Any, scores: Tensor, valid: Tensor) -> Tensor:
    return original(fp8(scores), valid)


def _sum_in_bf16(original: Any, x: Tensor, weight: Any, out: Any = None) -> Tensor:
    """Products summed in blocks of 16 columns, the running sum kept in bf16."""
    if not isinstance(weight, Tensor):
        return original(x, weight, out)
    total = torch.zeros(len(x), len(weight))
    for k in range(0, x.shape[1], 16):
        total = bf16(total + x[:, k : k + 16].float() @ weight[:, k : k + 16].float().T)
    return total.to(out or x.dtype)


def _mean_in_bf16(original: Any, x: Tensor, weight: Tensor, eps: float, out: Any = None) -> Tensor:
    square = bf16(bf16(x.float().square()).mean(-1, keepdim=True) + eps)
    return (weight.float() * (x.float() / bf16(torch.sqrt(square)))).to(out or x.dtype)


def _scale_first(original: Any, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decoded values in fp8."""
    return fp8(original(codes, scale, dtype))


def _truncate(x: Tensor) -> Tensor:
    """Towards zero instead of to nearest even."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32) if x.dtype == torch.float32 else x


MUTANTS = (
    _m("numerics-A_log-bf16", "model.md 4", "layers.1.attn.g", attribute("kda", "A_log", bf16)),
    _m("numerics-dt_bias-bf16", "model.md 4", G, attribute("kda", "dt_bias", bf16)),
    _m("numerics-decay-bf16", "model.md 4", G, output(f"{K}:decay", bf16)),
    _m("numerics-kda-state-bf16", "model.md 4", STATE, _state(bf16), fast=True),
    _m("numerics-kda-state-fp16", "model.md 4", STATE, _state(fp16)),
    _m("numerics-kda-carried-state-bf16", "model.md 4", STATE, _carried(bf16)),
    _m("numerics-kda-carried-state-fp8", "model.md 4", CORE, _carried(fp8)),
    _m("numerics-qk-fp8", "model.md 4", CORE, output(f"{K}:unit", fp8)),
    _m("numerics-router-logits-bf16", "model.md 4", "layers.*.router.logits", output(f"{R}:logits", bf16), fast=True),
    _m(
        "numerics-router-scores-bf16",
        "model.md 4",
        "layers.*.router.weights",
        argument(f"{R}:weigh", 0, fp8),
    ),
    _m("numerics-router-bias-bf16", "FB27", "layers.*.router.indices", argument(f"{R}:choose", 1, bf16)),
    _m("numerics-router-choice-bf16", "FB27", "layers.*.router.indices", argument(f"{R}:choose", 0, bf16)),
    _m("numerics-router-weights-fp8", "model.md 4", "layers.*.router.weights", output(f"{R}:weigh", fp8)),
    _m("numerics-hc-base-bf16", "FB28", PRE, _site("base"), **ODD),
    _m("numerics-hc-scale-bf16", "FB28", PRE, _site("scale"), **ODD),
    _m("numerics-hc-pre-bf16", "model.md 4", PRE, _part("pre", bf16)),
    _m("numerics-hc-post-fp8", "model.md 4", POST, _part("post", fp8)),
    _m("numerics-hc-comb-fp8", "model.md 4", COMB, _part("comb", fp8)),
    _m("numerics-sinkhorn-bf16", "FB28", COMB, replace(f"{H}:sinkhorn", _sinkhorn)),
    _m("numerics-sinkhorn-bf16-odd", "FB28", COMB, replace(f"{H}:sinkhorn", _sinkhorn), **ODD),
    _m(
        "numerics-hc-fn-fp8",
        "FB28",
        PRE,
        layers(
            "layer",
            lambda layer: setattr(layer, "sites", {k: w._replace(fn=fp8(w.fn)) for k, w in layer.sites.items()}),
        ),
    ),
    _m("numerics-norm-statistics-bf16", "model.md 4", "layers.*.attn.in", around("fast.ops.norm:rms", _mean_in_bf16)),
    _m("numerics-index-scores-bf16", "model.md 4", "layers.*.indexer.scores", output(f"{X}:scores", bf16)),
    _m("numerics-attention-scores-fp8", "model.md 4", ATTENTION, around("fast.ops.mla:_softmax", _softmax)),
    _m("numerics-latents-fp8", "model.md 4", ATTENTION, argument("fast.ops.mla:attend", 1, fp8)),
    _m(
        "numerics-linear-sums-bf16",
        "model.md 4",
        "layers.*.attn.q",
        around("fast.layers:linear", _sum_in_bf16),
    ),
    _m(
        "numerics-nvfp4-values-fp8",
        "model.md 4",
        "layers.*.mlp.out",
        around("fast.linear:unscaled", _scale_first),
    ),
    _m(
        "numerics-logits-bf16",
        "model.md 4",
        "logits",
        around("fast.model:linear", lambda f, x, w, out: bf16(f(x, w, out))),
    ),
    _m(
        "numerics-logits-fp8",
        "model.md 4",
        "logits",
        around("fast.model:linear", lambda f, x, w, out: fp8(f(x, w, out))),
    ),
    _m("numerics-experts-sum-bf16", "model.md 4", "layers.*.routed.out", argument("fast.ops.mlp:routed", 3, fp8)),
    _m("numerics-router-logits-truncated", "model.md 4", "layers.*.router.logits", output(f"{R}:logits", _truncate)),
)
