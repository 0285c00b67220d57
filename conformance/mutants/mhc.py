"""Faults of the hyper-connections, of the norms around them and of what follows the last layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.record import ODD, Patch, argument, around, configured, family, layers, output, replace

H, N = "fast.ops.mhc", "fast.ops.norm"
PRE, POST, COMB = "layers.*.attn_hc.pre", "layers.*.attn_hc.post", "layers.*.attn_hc.comb"
MID, IN = "layers.*.mid", "layers.*.attn.in"
_m = family("mHC")
_n = family("norm")


def _rows_last(comb: Tensor, eps: float, iterations: int) -> Tensor:
    for _ in range(iterations):
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
    return comb


def _no_eps(original: Any, comb: Tensor, eps: float, iterations: int) -> Tensor:
    return original(comb - eps, eps, iterations)


def _sites(change: Any) -> Patch:
    """`change` on the weights of both sites of every layer."""

    def edit(layer: Any) -> None:
        layer.sites = {site: change(weights) for site, weights in layer.sites.items()}

    return layers("layer", edit)


def _moved(rows: Any) -> Any:
    return lambda w: w._replace(fn=rows(w.fn, _streams(w)), base=rows(w.base, _streams(w)))


def _streams(weights: Any) -> int:
    """C from (2 + C) C rows."""
    return next(c for c in range(1, 64) if (2 + c) * c == len(weights.base))


def _pre_post(x: Tensor, c: int) -> Tensor:
    return torch.cat([x[c : 2 * c], x[:c], x[2 * c :]])


def _comb_by_column(x: Tensor, c: int) -> Tensor:
    return torch.cat([x[: 2 * c], x[2 * c :].unflatten(0, (c, c)).transpose(0, 1).flatten(0, 1)])


def _stream_order(w: Any) -> Any:
    """fn's columns read as [D, C] instead of [C, D]."""
    c = _streams(w)
    return w._replace(fn=w.fn.unflatten(1, (-1, c)).transpose(1, 2).flatten(1).contiguous())


def _unit_mean(original: Any, streams: Tensor, weights: Any, **named: Any) -> Any:
    """The flattened streams enter without their norm."""
    norm = torch.sqrt(streams.float().square().mean((1, 2)) + named["norm_eps"])
    rows = [
        original(streams[t : t + 1], weights._replace(fn=weights.fn.float() * norm[t]), **named)
        for t in range(len(streams))
    ]
    return type(rows[0])(*(torch.cat(part) for part in zip(*rows, strict=True)))


def _layer_as_rms(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.float() / torch.sqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (weight.float() * wide + bias.float()).to(x.dtype)


def _without(part: str) -> Any:
    """`combine` without one of its terms."""

    def combine(original: Any, streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        if part == "post":
            post = torch.ones_like(post)
        if part == "out":
            out = torch.zeros_like(out)
        if part == "comb":
            comb = torch.eye(comb.shape[-1]).expand_as(comb)
        return original(streams, out, post, comb)

    return around(f"{H}:combine", combine)


def _part(name: str, change: Any) -> Patch:
    return output(f"{H}:mix", lambda mix: mix._replace(**{name: change(getattr(mix, name))}))


def _norms(layer: Any) -> None:
    a, b = layer.norms["input"], layer.norms["post_attention"]
    layer.norms = {"input": b, "post_attention": a}


def _swapped_sites(layer: Any) -> None:
    layer.sites = {"attn": layer.sites["ffn"], "ffn": layer.sites["attn"]}


def _final(how: str) -> Patch:
    """`final` with something else than the mean of the streams."""

    def make(original: Any) -> Any:
        def final(self: Any, streams: Tensor, tap: Any = None) -> Tensor:
            one = streams[:, :1] if how == "first" else streams.float().sum(1, keepdim=True).to(streams.dtype)
            return original(self, one, tap)

        return final

    return Patch((("fast.model:TextModel.final", make),))


# The streams that enter layer 0 are equal: what depends on which stream is which shows at its second site.
MUTANTS = (
    _m(
        "mhc-comb-not-transposed",
        "FB107",
        "layers.0.out",
        argument(f"{H}:combine", 3, lambda c: c.transpose(1, 2)),
        fast=True,
    ),
    _m("mhc-one-eps-hc", "FB108", PRE, argument(f"{H}:mix", "norm_eps", lambda e: 1e-6), **ODD),
    _m("mhc-one-eps-rms", "FB108", PRE, argument(f"{H}:mix", "hc_eps", lambda e: 1e-5), **ODD),
    _m("mhc-sinkhorn-one-less", "model.md 2.1", COMB, configured(hc_sinkhorn_iters=lambda n: n - 1), **ODD),
    _m("mhc-sinkhorn-one-more", "model.md 2.1", COMB, configured(hc_sinkhorn_iters=lambda n: n + 1), **ODD),
    _m("mhc-sinkhorn-once", "model.md 2.1", COMB, configured(hc_sinkhorn_iters=1)),
    _m("mhc-sinkhorn-rows-last", "model.md 2.1", COMB, replace(f"{H}:sinkhorn", _rows_last), **ODD),
    _m("mhc-softmax-without-eps", "model.md 2.1", COMB, around(f"{H}:sinkhorn", _no_eps), **ODD),
    _m("mhc-comb-without-sinkhorn", "model.md 2.1", COMB, replace(f"{H}:sinkhorn", lambda comb, *rest: comb)),
    _m("mhc-comb-rows-read-as-columns", "model.md 2.1", COMB, _sites(_moved(_comb_by_column))),
    _m("mhc-pre-post-swapped", "model.md 2.1", PRE, _sites(_moved(_pre_post))),
    _m("mhc-scale-order", "model.md 2.1", PRE, _sites(lambda w: w._replace(scale=w.scale.roll(1)))),
    _m("mhc-comb-scale-is-post-scale", "model.md 2.1", COMB, _sites(lambda w: w._replace(scale=w.scale[[0, 1, 1]]))),
    _m("mhc-base-missing", "model.md 2.1", PRE, _sites(lambda w: w._replace(base=torch.zeros_like(w.base)))),
    _m("mhc-streams-flattened-by-column", "model.md 2.1", PRE, _sites(_stream_order)),
    _m("mhc-streams-not-normalised", "model.md 2.1", PRE, around(f"{H}:mix", _unit_mean)),
    _m("mhc-post-not-doubled", "model.md 2.1", POST, _part("post", lambda x: x / 2)),
    _m("mhc-pre-without-eps", "model.md 2.1", PRE, _part("pre", lambda x: x - 2e-2), **ODD),
    _m("mhc-pre-half-percent", "issue 4: bias", PRE, _part("pre", lambda x: x * 1.005)),
    _m("mhc-sites-swapped", "model.md 2.1", PRE, layers("layer", _swapped_sites)),
    _m(
        "mhc-collapse-first-stream",
        "model.md 2.1",
        "layers.0.mlp.in",
        argument(f"{H}:collapse", 1, lambda p: p.roll(1, -1)),
    ),
    _m("mhc-post-not-applied", "model.md 2.1", MID, _without("post")),
    _m("mhc-sublayer-not-added", "model.md 2.1", MID, _without("out")),
    _m("mhc-streams-not-mixed", "model.md 2.1", "layers.0.out", _without("comb")),
    _m("mhc-final-sum", "model.md 2", "final.hidden", _final("sum")),
    _m("mhc-final-first-stream", "model.md 2", "final.hidden", _final("first")),
    _n("norm-weight-plus-one", "model.md", IN, argument(f"{N}:rms", 1, lambda w: w + 1)),
    _n("norm-weight-missing", "model.md", IN, argument(f"{N}:rms", 1, torch.ones_like)),
    _n("norm-eps-wrong", "model.md", IN, argument(f"{N}:rms", 2, lambda e: 1e-5), **ODD),
    _n("norm-input-post-swapped", "model.md 2.1", IN, layers("layer", _norms)),
    _n("norm-half-percent", "issue 4: bias", IN, output(f"{N}:rms", lambda y: (y.float() * 1.005).to(y.dtype))),
    _n("norm-index-key-mean-kept", "model.md 2.3", "layers.*.indexer.k", replace(f"{N}:layer", _layer_as_rms)),
    _n("norm-index-key-no-bias", "model.md 2.3", "layers.*.indexer.k", argument(f"{N}:layer", 2, torch.zeros_like)),
    _n(
        "norm-index-key-eps", "model.md 2.3", "layers.*.indexer.k", argument(f"{N}:layer", "eps", lambda e: 1e-2), **ODD
    ),
    _n(
        "norm-index-key-unbiased-variance",
        "model.md 2.3",
        "layers.*.indexer.k",
        argument(f"{N}:layer", 1, lambda w: w.float() * ((len(w) - 1) / len(w)) ** 0.5),
    ),
)
