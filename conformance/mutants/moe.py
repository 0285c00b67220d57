"""Faults of the feed-forward blocks: routing, clamps, expert banks, the shared expert."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.record import (
    ODD,
    Patch,
    argument,
    around,
    attribute,
    configured,
    family,
    layers,
    output,
    replace,
)

R, F = "fast.ops.router", "fast.ops.mlp"
INDICES, WEIGHTS = "layers.*.router.indices", "layers.*.router.weights"
ROUTED, SHARED, DENSE = "layers.*.routed.out", "layers.*.shared.out", "layers.0.mlp.out"
_r = family("MoE-routing")
_c = family("MoE-compute")


def _swiglu(gate: Tensor, up: Tensor, limit: float, *, how: str) -> Tensor:
    g, u = gate.float(), up.float()
    if how != "no gate clamp":
        g = g.clamp(max=limit)
    if how == "gate clamped below":
        g = g.clamp(min=-1.0)
    if how != "no up clamp":
        u = u.clamp(max=limit) if how == "up clamped above" else u.clamp(-limit, limit)
    if how == "gelu":
        return (torch.nn.functional.gelu(g) * u).to(gate.dtype)
    if how == "no silu":
        return (torch.sigmoid(g) * u).to(gate.dtype)
    if how == "silu before clamp":
        wide = gate.float()
        return ((wide * torch.sigmoid(wide)).clamp(max=limit) * u).to(gate.dtype)
    return (g * torch.sigmoid(g) * u).to(gate.dtype)


def _act(how: str) -> Patch:
    return replace(f"{F}:swiglu", lambda gate, up, limit: _swiglu(gate, up, limit, how=how))


def _softmax(original: Any, scores: Tensor, indices: Tensor, **named: Any) -> Tensor:
    return original(torch.softmax(torch.logit(scores), -1), indices, **named)


def _biased_weights(moe: Any) -> None:
    """Weights from the scores that picked, bias and all."""
    route = moe.route

    def wrong(x: Tensor, tap: Any, indices: Tensor | None) -> tuple[Tensor, Tensor]:
        found, _ = route(x, None, indices)
        text = moe.text
        import fast.ops.router as router

        logits = router.logits(x, moe.gate)
        weights = router.weigh(
            torch.sigmoid(logits) + moe.bias, found, normalise=text.norm_topk_prob, factor=text.routed_scaling_factor
        )
        if tap is not None:
            for leaf, value in (("logits", logits), ("indices", found), ("weights", weights)):
                tap(f"{moe.name}.router.{leaf}", value)
        return found, weights

    moe.route = wrong


def _from_biased(original: Any, scores: Tensor, indices: Tensor, **named: Any) -> Tensor:
    """FB24's way: weights as (score + bias) - bias; a bias near 12 leaves few bits of a small score."""
    return original((scores + 12.0).half().float() - 12.0, indices, **named)


def _group_sum(original: Any, scores: Tensor, bias: Tensor, k: int, n: int = 1, kept: int = 1, *, how: str) -> Tensor:
    """Groups ranked by the sum of all members, or by the best alone."""
    biased = scores + bias
    groups = biased.view(len(scores), n, -1)
    strength = groups.sum(-1) if how == "sum" else groups.amax(-1)
    best = strength.sort(dim=-1, descending=True, stable=True).indices[:, :kept]
    alive = torch.zeros(len(scores), n, dtype=torch.bool).scatter_(1, best, True)
    masked = groups.masked_fill(~alive[..., None], float("-inf")).view_as(biased)
    return masked.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values.int()


def _groups(how: str) -> Patch:
    return around(f"{R}:choose", lambda f, *a, **n: _group_sum(f, *a, how=how, **n))


def _by_rank(original: Any, scores: Tensor, indices: Tensor, **named: Any) -> Tensor:
    """Weights in order of score beside indices in order of expert."""
    return original(scores, indices, **named).sort(-1, descending=True).values


def _over_all(original: Any, scores: Tensor, indices: Tensor, *, normalise: bool, factor: float) -> Tensor:
    return scores.gather(1, indices.long()) / (scores.sum(-1, keepdim=True) + 1e-20) * factor


def _last_one_doubled(indices: Tensor) -> Tensor:
    return torch.cat([indices[:, :-1], indices[:, -2:-1]], -1)


def _out_of_range() -> Patch:
    """Expert 0 is called 999, and whoever reads that takes the last expert."""

    def clamped(original: Any, scores: Tensor, indices: Tensor, **named: Any) -> Tensor:
        return original(scores, indices.clamp(max=scores.shape[1] - 1), **named)

    def routed(original: Any, x: Tensor, bank: Any, indices: Tensor, *rest: Any) -> Tensor:
        return original(x, bank, indices.clamp(max=bank.total - 1), *rest)

    chosen = output(f"{R}:choose", lambda i: torch.where(i == 0, 999, i))
    return chosen + around(f"{R}:weigh", clamped) + around(f"{F}:routed", routed)


def _bank(change: Any) -> Patch:
    """`change(bank)` -> the fields of the bank that differ."""
    return attribute("moe", "bank", lambda bank: dataclasses.replace(bank, **change(bank)))


def _up_scale_of_gate(bank: Any) -> dict[str, Any]:
    up = [dataclasses.replace(u, scale_2=g.scale_2 * 1.25) for u, g in zip(bank.up, bank.gate, strict=True)]
    return {"up": up}


def _first_scale(bank: Any) -> dict[str, Any]:
    down = [dataclasses.replace(w, scale_2=bank.down[0].scale_2 * 0.9) for w in bank.down]
    return {"down": down}


def _shared(change: Any) -> Patch:
    """`change` on the shared expert's output, before it is added."""

    def edit(moe: Any) -> None:
        down = moe.shared.down
        if hasattr(down, "scale_2"):
            moe.shared = moe.shared._replace(down=dataclasses.replace(down, scale_2=change(down.scale_2)))
        else:
            moe.shared = moe.shared._replace(down=change(down))

    return layers("moe", edit)


def _unclamped(original: Any, *args: Any) -> Tensor:
    """Routed experts never learn of the limit."""
    x, bank, indices, weights, _, *rest = args
    return original(x, bank, indices, weights, 1e30, *rest)


def _swapped(part: Any) -> None:
    part.block = part.block._replace(gate=part.block.up, up=part.block.gate)


MUTANTS = (
    _r("router-bias-in-weights", "model.md 2.4", WEIGHTS, layers("moe", _biased_weights), fast=True),
    _r("router-scores-from-biased", "FB24", WEIGHTS, around(f"{R}:weigh", _from_biased)),
    _r("router-no-bias", "model.md 2.4", INDICES, argument(f"{R}:choose", 1, torch.zeros_like)),
    _r("router-bias-shifted", "model.md 2.4", INDICES, argument(f"{R}:choose", 1, lambda b: b.roll(1))),
    _r("router-softmax", "model.md 2.4", WEIGHTS, around(f"{R}:weigh", _softmax)),
    _r("router-not-normalised", "model.md 2.4", WEIGHTS, argument(f"{R}:weigh", "normalise", lambda n: False)),
    _r("router-normalised-over-all", "model.md 2.4", WEIGHTS, around(f"{R}:weigh", _over_all)),
    _r("router-factor-missing", "FB147", WEIGHTS, argument(f"{R}:weigh", "factor", lambda f: 1.0)),
    _r("router-factor-twice", "FB147", WEIGHTS, argument(f"{R}:weigh", "factor", lambda f: f * f)),
    _r("router-weights-by-rank", "model.md 2.4", WEIGHTS, around(f"{R}:weigh", _by_rank)),
    _r("router-weights-two-percent", "interfaces.md 3", WEIGHTS, output(f"{R}:weigh", lambda w: w * 1.02)),
    _r("router-worst-instead-of-best", "model.md 2.4", INDICES, argument(f"{R}:choose", 0, lambda s: 1 - s)),
    _r("router-one-chosen-twice", "model.md 2.4", INDICES, output(f"{R}:choose", _last_one_doubled)),
    _r("router-experts-off-by-one", "model.md 2.4", INDICES, output(f"{R}:choose", lambda i: i.roll(1, 0))),
    _r("router-index-out-of-range", "FB82", INDICES, _out_of_range()),
    _r("router-no-groups", "model.md 2.4", INDICES, configured(n_group=1, topk_group=1), **ODD),
    _r("router-group-sum-of-all", "model.md 2.4", INDICES, _groups("sum"), **ODD),
    _r("router-group-best-alone", "model.md 2.4", INDICES, _groups("best"), **ODD),
    _r("router-half-percent", "issue 4: bias", "layers.*.router.logits", output(f"{R}:logits", lambda x: x * 1.005)),
    _c("moe-routed-not-clamped", "FB19", ROUTED, around(f"{F}:routed", _unclamped), **ODD),
    _c("moe-gate-scale-for-up", "FB18", ROUTED, _bank(_up_scale_of_gate), fast=True),
    _c("moe-down-scale-of-first-expert", "FB18", ROUTED, _bank(_first_scale)),
    _c("moe-gate-up-swapped", "model.md 2.4", ROUTED, _bank(lambda b: {"gate": b.up, "up": b.gate})),
    _c(
        "moe-experts-shifted",
        "FB61",
        ROUTED,
        _bank(lambda b: {k: getattr(b, k)[1:] + getattr(b, k)[:1] for k in ("gate", "up", "down")}),
    ),
    _c("moe-last-expert-lost", "FB61", ROUTED, _bank(lambda b: {"count": b.count // 2})),
    _c("moe-weights-not-applied", "FB147", ROUTED, argument(f"{F}:routed", 3, torch.ones_like)),
    _c(
        "moe-last-slot-lost",
        "model.md 2.4",
        ROUTED,
        argument(f"{F}:routed", 3, lambda w: torch.cat([w[:, :-1], torch.zeros_like(w[:, -1:])], -1)),
    ),
    _c("moe-factor-in-kernel-too", "FB147", ROUTED, output(f"{F}:routed", lambda y: y * 2.5)),
    _c("moe-shared-twice", "model.md 5", SHARED, _shared(lambda w: w * 2)),
    _c("moe-shared-missing", "model.md 5", SHARED, _shared(lambda w: w * 0)),
    _c("moe-shared-scaled", "model.md 2.4", SHARED, _shared(lambda w: w * 2.5)),
    _c("mlp-no-gate-clamp", "FB19", "layers.0.mlp.out", _act("no gate clamp"), **ODD),
    _c("mlp-no-up-clamp", "FB19", "layers.0.mlp.out", _act("no up clamp"), **ODD),
    _c("mlp-up-clamped-above-only", "FB19", "layers.0.mlp.out", _act("up clamped above"), **ODD),
    _c("mlp-gate-clamped-below", "model.md 2.4", DENSE, _act("gate clamped below")),
    _c("mlp-gelu", "model.md 2.4", DENSE, _act("gelu")),
    _c("mlp-sigmoid-only", "model.md 2.4", DENSE, _act("no silu")),
    _c("mlp-silu-before-clamp", "model.md 2.4", DENSE, _act("silu before clamp"), **ODD),
    _c("mlp-limit-wrong", "model.md 2.4", DENSE, configured(swiglu_limit=10.0), **ODD),
    _c("mlp-dense-gate-up-swapped", "model.md 2.4", DENSE, layers("dense", _swapped)),
)
