"""Faults of the indexer: pools, scores, candidates, the choice, the tail."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from conformance.mutants.record import Patch, argument, around, attribute, family, output, replace, swap

X = "fast.ops.indexer"
L = "layers.*.indexer."
Q, K, GATE, W = f"{L}q", f"{L}k", f"{L}gate", f"{L}weights"
KEYS, SCORES, SELECTED = f"{L}pool_keys", f"{L}scores", f"{L}selected"
_m = family("DSA-indexer")


def _mean(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    return keys.float().mean(1).to(keys.dtype)


def _per_channel(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """Softmax over channels instead of slots."""
    return (torch.softmax(gates.float() + ape.float(), -1) * keys.float()).sum(1).to(keys.dtype)


def _largest(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """The key of the slot with the largest gate."""
    best = (gates.float() + ape.float()).argmax(1, keepdim=True)
    return keys.gather(1, best)[:, 0]


def _one_gate(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """One share per slot, from the mean over channels."""
    share = torch.softmax((gates.float() + ape.float()).mean(-1, keepdim=True), 1)
    return (share * keys.float()).sum(1).to(keys.dtype)


def _scored(q: Tensor, weights: Tensor, pool_keys: Tensor, *, how: str) -> Tensor:
    dots = torch.matmul(q.float(), pool_keys.float().T)
    if how != "no width":
        dots = dots * q.shape[-1] ** -0.5
    if how == "relu last":
        return functional.relu((weights[:, :, None] * dots).sum(1))
    dots = dots if how == "no relu" else dots.abs() if how == "abs" else functional.relu(dots)
    if how == "max":
        return (weights[:, :, None] * dots).amax(1)
    return (weights[:, :, None] * dots).sum(1)


def _scores(how: str) -> Patch:
    return replace(f"{X}:scores", lambda q, weights, keys: _scored(q, weights, keys, how=how))


def _candidates(first: int) -> Any:
    """A pool counts as soon as its token `first` (from its end) is visible."""

    def candidates(visible: Tensor, P: int, S: int) -> Tensor:
        return (torch.arange(1, P + 1) * S - first)[None, :] <= visible[:, None]

    return candidates


def _best(how: str) -> Any:
    def best(original: Any, scores: Tensor, budget: int) -> Tensor:
        if how == "one less":
            found = original(scores, budget - 1)
            return functional.pad(found, (0, 1), value=-1)
        if how == "worst":
            return original(torch.where(scores > float("-inf"), -scores, scores), budget)
        if how == "first":
            return original(torch.where(scores > float("-inf"), -torch.arange(scores.shape[1]).float(), scores), budget)
        if how == "newest":
            return original(torch.where(scores > float("-inf"), torch.arange(scores.shape[1]).float(), scores), budget)
        if how == "shifted":
            found = original(scores, budget)
            return torch.where(found > 0, found - 1, found)
        if how == "previous query":
            return original(scores, budget).roll(1, 0)
        if how == "of three":
            found = original(scores, max(1, budget // 2))
            return functional.pad(found, (0, budget - found.shape[1]), value=-1)
        raise ValueError(how)

    return around(f"{X}:best", best)


def _tokens(how: str) -> Any:
    def tokens(original: Any, pools: Tensor, visible: Tensor, S: int, width: int) -> Tensor:
        found = original(pools, visible, S, width)
        n = visible[:, None]
        if how == "no tail":
            return torch.where(found >= n - n % S, -1, found)
        if how == "tail without own token":
            return torch.where((found == n - 1) & (n % S > 0), -1, found)
        if how == "junk":
            return torch.where(found < 0, 12345, found)
        if how == "future":
            return torch.where(found == n - 1, found + 1, found)
        if how == "twice":
            return torch.where(found == found[:, 1:2], found[:, :1], found)
        if how == "pad with zero":
            return found.clamp(min=0)
        raise ValueError(how)

    return around(f"{X}:tokens", tokens)


def _quiet_tie(original: Any, scores: Tensor, budget: int) -> Tensor:
    """Equal scores take the higher pool."""
    P = scores.shape[1]
    found = original(scores.flip(1), budget)
    kept = torch.where(found >= 0, P - 1 - found, P)
    return torch.where((kept := kept.sort(-1).values) < P, kept, -1)


MUTANTS = (
    _m("indexer-pool-mean", "model.md 2.3", KEYS, replace(f"{X}:pool", _mean), fast=True),
    _m("indexer-pool-softmax-over-channels", "model.md 2.3", KEYS, replace(f"{X}:pool", _per_channel)),
    _m("indexer-pool-largest-gate", "model.md 2.3", KEYS, replace(f"{X}:pool", _largest)),
    _m("indexer-pool-one-gate-per-slot", "model.md 2.3", KEYS, replace(f"{X}:pool", _one_gate)),
    _m("indexer-pool-no-ape", "model.md 2.3", KEYS, argument(f"{X}:pool", 2, torch.zeros_like)),
    _m("indexer-pool-ape-reversed", "model.md 2.3", KEYS, argument(f"{X}:pool", 2, lambda a: a.flip(0))),
    _m("indexer-pool-slots-reversed", "FB83", KEYS, argument(f"{X}:pool", 0, lambda k: k.flip(1))),
    _m(
        "indexer-pool-last-slot-lost",
        "FB83",
        KEYS,
        argument(f"{X}:pool", 0, lambda k: torch.cat([k[:, :-1], torch.zeros_like(k[:, -1:])], 1)),
    ),
    _m("indexer-pool-keys-shifted", "FB80", KEYS, output(f"{X}:pool", lambda k: k.roll(1, 0))),
    _m("indexer-no-width-scale", "model.md 2.3", SCORES, _scores("no width")),
    _m("indexer-no-relu", "model.md 2.3", SCORES, _scores("no relu")),
    _m("indexer-relu-after-sum", "model.md 2.3", SCORES, _scores("relu last")),
    _m("indexer-abs-for-relu", "model.md 2.3", SCORES, _scores("abs")),
    _m("indexer-max-over-heads", "model.md 2.3", SCORES, _scores("max")),
    _m("indexer-scores-half-percent", "issue 4: bias", SCORES, output(f"{X}:scores", lambda s: s * 1.005)),
    _m("indexer-scores-of-previous-query", "FB80", SCORES, argument(f"{X}:scores", 0, lambda q: q.roll(1, 0))),
    _m("indexer-candidates-too-early", "model.md 2.3", SCORES, replace(f"{X}:candidates", _candidates(1))),
    _m("indexer-candidates-too-late", "model.md 2.3", SCORES, replace(f"{X}:candidates", _candidates(-1))),
    _m("indexer-budget-one-less", "model.md 2.3", SELECTED, _best("one less")),
    _m("indexer-budget-halved", "FB86", SELECTED, _best("of three")),
    _m("indexer-worst-pools", "model.md 2.3", SELECTED, _best("worst")),
    _m("indexer-first-pools", "model.md 2.3", SELECTED, _best("first")),
    _m("indexer-newest-pools", "model.md 2.3", SELECTED, _best("newest")),
    _m("indexer-pools-shifted", "FB80", SELECTED, _best("shifted")),
    _m("indexer-pools-of-previous-query", "FB80", SELECTED, _best("previous query")),
    _m("indexer-no-tail", "model.md 2.3", SELECTED, _tokens("no tail")),
    _m("indexer-tail-without-own-token", "model.md 2.3", SELECTED, _tokens("tail without own token")),
    _m("indexer-junk-in-unused-places", "FB82", SELECTED, _tokens("junk")),
    _m("indexer-sees-next-token", "model.md 2.3", SELECTED, _tokens("future")),
    _m("indexer-token-named-twice", "model.md 2.3", SELECTED, _tokens("twice")),
    _m("indexer-unused-places-zero", "FB82", SELECTED, _tokens("pad with zero")),
    _m("indexer-k-gate-swapped", "model.md 2.3", K, swap("indexer", "wk", "gate")),
    _m("indexer-q-heads-shifted", "model.md 2.3", Q, attribute("indexer", "wq_b", lambda w: w.roll(32, 0))),
    _m("indexer-head-weights-shifted", "model.md 2.3", W, attribute("indexer", "weights", lambda w: w.roll(1, 0))),
    _m(
        "indexer-head-weights-unscaled",
        "model.md 2.3",
        W,
        attribute("indexer", "weights", lambda w: w * w.shape[0] ** 0.5),
    ),
    _m("indexer-gate-halved", "model.md 2.3", GATE, attribute("indexer", "gate", lambda w: w * 0.5)),
    _m("indexer-topk-in-pools", "FB138", SELECTED, attribute("indexer", "topk", lambda n: n * 4)),
    _m(
        "indexer-ties-take-higher-pool",
        "FB86",
        "layers.7.indexer.selected",  # only there are scores equal that the choice depends on
        around(f"{X}:best", _quiet_tie),
    ),
)
