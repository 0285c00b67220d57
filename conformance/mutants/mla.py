"""Faults of latent attention over selected tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.record import ODD, Patch, argument, around, attribute, family, layers, output

A = "fast.ops.mla"
Q, C, CORE, OUT = "layers.*.attn.q_resid", "layers.*.attn.latent", "layers.3.attn.core", "layers.3.attn.out"
"""Layers before 3 of `tiny` have a core too, of another kind."""
EXPANDED = {"options": {"mla": "expanded"}}
_m = family("MLA")


def _scale(factor: Any) -> Patch:
    """The softmax scale off by a factor of (key width, latent width)."""

    def attend(original: Any, q: Tensor, latents: Tensor, *rest: Any, **named: Any) -> Tensor:
        return original((q.float() * factor(q.shape[-1], latents.shape[-1])).to(q.dtype), latents, *rest, **named)

    return around(f"{A}:attend", attend)


def _selection(change: Any) -> Patch:
    return argument(f"{A}:attend", 2, change)


def _everything(original: Any, q: Tensor, latents: Tensor, selected: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Plain causal attention over all tokens: what the selection holds at most is the query itself."""
    n = len(latents)
    every = torch.arange(n, dtype=torch.int32).expand(len(q), n)
    return original(q, latents, torch.where(every <= selected.amax(-1, keepdim=True), every, -1), *rest, **named)


def _values_first(original: Any, q: Tensor, latents: Tensor, selected: Tensor, kv_b: Tensor, **named: Any) -> Tensor:
    """kv_b_proj's rows read as value rows, then key rows, within each head."""
    wide = kv_b.unflatten(0, (q.shape[1], -1))
    values = named["values"]
    return original(q, latents, selected, torch.cat([wide[:, values:], wide[:, :values]], 1).flatten(0, 1), **named)


def _keys_then_values(
    original: Any, q: Tensor, latents: Tensor, selected: Tensor, kv_b: Tensor, **named: Any
) -> Tensor:
    """All heads' keys, then all heads' values, instead of head by head."""
    H, N, values_width = q.shape[1], q.shape[2], named["values"]
    keys, values = kv_b[: H * N].unflatten(0, (H, N)), kv_b[H * N :].unflatten(0, (H, values_width))
    return original(q, latents, selected, torch.cat([keys, values], 1).flatten(0, 1), **named)


def _heads(change: Any) -> Patch:
    """The core's [T, H, O] rearranged before o_proj sees it, after the tap was taken."""
    return attribute("dsa", "o", change)


def _swapped_norms(dsa: Any) -> None:
    dsa.q_norm, dsa.kv_norm = dsa.q_norm.flip(0), dsa.kv_norm


def _not_normed(name: str) -> Patch:
    return attribute("dsa", name, lambda w: w * 0.7)


def _interleaved(w: Tensor) -> Tensor:
    """q_b_proj's rows read as [N, H] instead of [H, N]."""
    return w.unflatten(0, (-1, 8)).transpose(0, 1).flatten(0, 1).contiguous()


def _sink(original: Any, scores: Tensor, valid: Tensor) -> Tensor:
    """One more column of score 0 takes part in the softmax."""
    extra = scores.new_zeros(*scores.shape[:-1], 1)
    open_ = torch.ones_like(valid[..., :1])
    return original(torch.cat([scores, extra], -1), torch.cat([valid, open_], -1))[..., :-1]


def _no_mask(original: Any, scores: Tensor, valid: Tensor) -> Tensor:
    return original(scores, torch.ones_like(valid))


MUTANTS = (
    _m("mla-scale-of-latent-width", "model.md 2.3", CORE, _scale(lambda n, w: (n / w) ** 0.5), fast=True),
    _m("mla-scale-missing", "model.md 2.3", CORE, _scale(lambda n, w: n**0.5)),
    _m("mla-scale-with-rotary-64", "FB103", CORE, _scale(lambda n, w: (n / (n + 64)) ** 0.5)),
    _m("mla-scale-one-percent", "issue 4: bias", CORE, _scale(lambda n, w: 1.01)),
    _m("mla-dense-attention", "model.md 2.3", CORE, around(f"{A}:attend", _everything)),
    _m("mla-first-selected-lost", "model.md 2.3", CORE, _selection(lambda s: s[:, 1:])),
    _m(
        "mla-own-token-lost",
        "model.md 2.3",
        CORE,
        _selection(lambda s: torch.where(s == s.amax(-1, keepdim=True), -1, s)),
    ),
    _m("mla-selection-shifted", "FB80", CORE, _selection(lambda s: torch.where(s > 0, s - 1, s))),
    _m("mla-selection-of-next-query", "FB80", CORE, _selection(lambda s: s.roll(1, 0))),
    _m("mla-unused-places-read-token-0", "FB82", CORE, around(f"{A}:_softmax", _no_mask)),
    _m("mla-unused-places-read-expanded", "FB82", CORE, around(f"{A}:_softmax", _no_mask), **EXPANDED),
    _m("mla-softmax-with-sink", "model.md 2.3", CORE, around(f"{A}:_softmax", _sink)),
    _m("mla-values-before-keys", "model.md 2.3", CORE, around(f"{A}:attend", _values_first)),
    _m("mla-values-before-keys-odd", "model.md 2.3", "layers.1.attn.core", around(f"{A}:attend", _values_first), **ODD),
    _m("mla-keys-of-all-heads-first", "model.md 2.3", CORE, around(f"{A}:attend", _keys_then_values)),
    _m(
        "mla-keys-of-all-heads-first-expanded",
        "model.md 2.3",
        CORE,
        around(f"{A}:attend", _keys_then_values),
        **EXPANDED,
    ),
    _m("mla-heads-of-q-shifted", "model.md 2.3", CORE, argument(f"{A}:attend", 0, lambda q: q.roll(1, 1))),
    _m("mla-q-rows-interleaved", "model.md 2.3", CORE, attribute("dsa", "q_b", _interleaved)),
    _m("mla-latent-norm-scaled", "model.md 2.3", C, _not_normed("kv_norm")),
    _m("mla-q-norm-scaled", "model.md 2.3", Q, _not_normed("q_norm")),
    _m("mla-q-norm-reversed", "model.md 2.3", Q, layers("dsa", _swapped_norms)),
    _m("mla-norm-eps", "model.md 2.3", Q, attribute("dsa", "eps", lambda e: 1e-6), **ODD),
    _m(
        "mla-latents-cached-before-norm",
        "model.md 2.3",
        CORE,
        argument(f"{A}:attend", 1, lambda c: (c.float() * 1.3).to(c.dtype)),
    ),
    _m("mla-o-columns-by-head-shifted", "model.md 2.3", OUT, _heads(lambda w: w.roll(16, 1))),
    _m(
        "mla-o-columns-interleaved",
        "model.md 2.3",
        OUT,
        _heads(lambda w: w.unflatten(1, (8, -1)).transpose(1, 2).flatten(1).contiguous()),
    ),
    _m(
        "mla-core-half-percent", "issue 4: bias", CORE, output(f"{A}:attend", lambda y: (y.float() * 1.005).to(y.dtype))
    ),
)
