"""Faults of sharded runs: experts that belong to no rank, or to two."""

import functools

import numpy as np
import pytest
import torch

from conformance.checkpoints.shared import shared
from fast import sharding as fast
from fast.loader import load
from fast.ops import mlp
from reference import sharding as reference
from reference.checkpoint import open_checkpoint
from reference.model import Moe, TextModel
from reference.ranks import RankMoe, ShardedModel

SIZES = {
    (288, 5): [58, 58, 58, 57, 57],
    (288, 7): [42, 41, 41, 41, 41, 41, 41],
    (288, 8): [36] * 8,
    (10, 4): [3, 3, 2, 2],
    (1, 1): [1],
}
LAYER, EXPERTS, TOKENS = 3, 10, 6


@pytest.mark.parametrize("plan", [reference, fast], ids=["reference", "fast"])
@pytest.mark.parametrize(("experts", "ranks"), SIZES)
def test_fb61_uneven_experts(plan, experts, ranks):
    """The first (experts mod ranks) ranks hold one more; ranges follow each other and cover every expert once."""
    ranges = [plan.Mesh(1, ranks, rank).experts(experts) for rank in range(ranks)]
    assert [len(one) for one in ranges] == SIZES[experts, ranks]
    assert [expert for one in ranges for expert in one] == list(range(experts))


def inputs(width):
    """Rows, every expert chosen by somebody (two a row), and a weight for each choice."""
    rng = np.random.default_rng(61)
    indices = np.sort(np.arange(TOKENS * 2).reshape(TOKENS, 2) % EXPERTS, axis=1).astype(np.int32)
    return rng.standard_normal((TOKENS, width)).astype(np.float32), indices, rng.random((TOKENS, 2), dtype=np.float32)


def reference_moes(ranks):
    checkpoint = open_checkpoint(shared("libertai", "odd"))
    if ranks == 1:
        return [TextModel(checkpoint).layers[LAYER].ffn]
    return [layers[LAYER].ffn for layers in ShardedModel(checkpoint, 1, ranks).ranks]


def reference_parts(ranks, slot):
    moes = reference_moes(ranks)
    assert all(isinstance(moe, RankMoe if ranks > 1 else Moe) for moe in moes)
    x, indices, weights = inputs(moes[0].config.hidden_size)
    return [moe.routed(x.astype(np.float64), indices[:, [slot]], weights[:, [slot]].astype(np.float64)) for moe in moes]


def fast_parts(ranks, slot):
    parts = []
    for rank in range(ranks):
        weights = load(shared("libertai", "odd"), ep=ranks, rank=rank)
        x, indices, shares = (torch.from_numpy(part) for part in inputs(weights.config.text.hidden_size))
        limit = weights.config.text.swiglu_limit
        bank = weights.experts(LAYER)
        parts.append(mlp.routed(x, bank, indices[:, slot : slot + 1], shares[:, slot : slot + 1], limit).numpy())
    return parts


@functools.cache
def alone(parts, slot):
    return parts(1, slot)[0]


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("ranks", [3, 4, 7])
@pytest.mark.parametrize("parts", [reference_parts, fast_parts], ids=["reference", "fast"])
def test_fb61_every_choice_is_computed_once_and_as_on_one_rank(parts, ranks, slot):
    """10 experts on 3, 4 or 7 ranks: each choice comes from one rank, with the bits of n = 1; zero from the others."""
    held = np.stack(parts(ranks, slot))
    assert (np.any(held != 0, axis=-1).sum(axis=0) == 1).all()
    assert np.array_equal(held.sum(axis=0), alone(parts, slot))
    assert np.any(alone(parts, slot) != 0, axis=-1).all()


@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_fb61_output_equals_one_rank(ranks):
    """The whole MLP, shared expert and all: the same but for the float64 roundings of ranks + 3 sums."""
    checkpoint = open_checkpoint(shared("libertai", "odd"))
    x, indices, _ = inputs(checkpoint.config.text.hidden_size)
    indices = np.sort(np.concatenate([indices, (indices[:, 1:] + 1) % EXPERTS], axis=1), axis=1)
    one, many = TextModel(checkpoint).layers[LAYER], ShardedModel(checkpoint, 1, ranks)
    assert isinstance(one.ffn, Moe)
    taps: dict[str, np.ndarray] = {}
    expected = one.mlp(x.astype(np.float64), taps.__setitem__, indices)
    found = many.layers[LAYER].mlp(x.astype(np.float64), indices=indices)
    weights = taps[f"layers.{LAYER}.router.weights"]
    slots = range(indices.shape[1])
    size = sum(np.abs(one.ffn.routed(x.astype(np.float64), indices[:, [j]], weights[:, [j]])) for j in slots)
    size = size + np.abs(taps[f"layers.{LAYER}.shared.out"])
    assert (np.abs(found - expected) <= 2 * (ranks + 3) * 2.0**-53 * size).all()
