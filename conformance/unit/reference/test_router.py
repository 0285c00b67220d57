"""reference.ops.router: choice, groups, ties, weights."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from conformance.unit.reference.bounds import Recorder, check, gamma
from reference.arithmetic import Arithmetic, Sliced
from reference.ops import router

EXACT = Arithmetic()


def _best_set(biased: list[float], k: int, n_group: int, topk_group: int) -> list[int]:
    """The definition, by sorting (score descending, index ascending)."""
    size = len(biased) // n_group
    groups = [sum(sorted(biased[g * size : (g + 1) * size], reverse=True)[:2]) for g in range(n_group)]
    standing = sorted(range(n_group), key=lambda g: (-groups[g], g))[:topk_group]
    experts = [e for e in range(len(biased)) if n_group == 1 or e // size in standing]
    return sorted(sorted(experts, key=lambda e: (-biased[e], e))[:k])


@pytest.mark.parametrize(
    ("E", "k", "n_group", "topk_group"), [(16, 4, 1, 1), (10, 3, 2, 1), (12, 4, 4, 2), (6, 6, 1, 1)]
)
@pytest.mark.parametrize("levels", [3, 1000])
def test_choice_is_the_definition(E, k, n_group, topk_group, levels):
    """Few levels make ties everywhere, among experts and among groups."""
    rng = np.random.default_rng(E * levels)
    biased = rng.integers(0, levels, (50, E)) / 8.0
    found = router.choose(EXACT, biased, k, n_group, topk_group)
    assert found.dtype == np.int32
    assert found.tolist() == [_best_set(row, k, n_group, topk_group) for row in biased.tolist()]


def test_equal_scores_take_the_lower_experts():
    assert router.choose(EXACT, np.zeros((1, 9)), 3, 1, 1).tolist() == [[0, 1, 2]]
    assert router.choose(EXACT, np.zeros((1, 8)), 2, 4, 1).tolist() == [[0, 1]]


def test_a_group_counts_its_two_best_not_its_best():
    biased = np.array([[0.9, 0.0, 0.0, 0.5, 0.5, 0.0]])
    assert router.choose(EXACT, biased, 2, 2, 1).tolist() == [[3, 4]]


def test_experts_of_fallen_groups_are_never_taken_even_where_scores_are_negative():
    biased = np.array([[-1.0, -2.0, -3.0, -4.0, -9.0, -9.5]])
    assert router.choose(EXACT, biased, 2, 3, 1).tolist() == [[0, 1]]
    assert router.choose(EXACT, biased[:, ::-1], 2, 3, 1).tolist() == [[4, 5]]


def _route(x, gate, bias, **changes):
    settings = {
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    } | changes
    return router.route(settings.pop("ar", EXACT), x, Sliced.of_weight(gate), bias, **settings)


@pytest.mark.parametrize(("normalised", "factor"), list(itertools.product([True, False], [1.0, 2.5])))
def test_weights_are_unbiased_scores_normalised_and_scaled_once(normalised, factor):
    rng = np.random.default_rng(3)
    x, gate, bias = rng.standard_normal((4, 6)), rng.standard_normal((7, 6)), 5 * rng.standard_normal(7)
    found = _route(x, gate, bias, norm_topk_prob=normalised, routed_scaling_factor=factor)
    for t in range(4):
        logits = [math.fsum(a * b for a, b in zip(x[t], row, strict=True)) for row in gate]
        error = gamma(2) * (np.abs(gate) @ np.abs(x[t]))
        check(found.logits[t], logits, error)
        scores = [1 / (1 + math.exp(-v)) for v in logits]
        chosen = _best_set([s + b for s, b in zip(scores, bias, strict=True)], 3, 1, 1)
        assert found.indices[t].tolist() == chosen
        weights = np.array([scores[e] for e in chosen])
        expected = factor * (weights / (math.fsum(weights) + 1e-20) if normalised else weights)
        # exp turns the error of a logit into a relative one, once in the score and once in the sum.
        check(found.weights[t], expected, (gamma(12) + 2 * error.max()) * expected)


def test_given_experts_are_used_and_weighted_by_their_own_scores():
    rng = np.random.default_rng(4)
    x, gate, bias = rng.standard_normal((2, 6)), rng.standard_normal((5, 6)), np.zeros(5)
    indices = np.array([[0, 1, 4], [1, 2, 3]], np.int32)
    found = _route(x, gate, bias, indices=indices)
    assert np.array_equal(found.indices, indices)
    scores = 1 / (1 + np.exp(-(x @ gate.T)))
    expected = np.take_along_axis(scores, indices.astype(int), 1)
    expected = 2.5 * expected / expected.sum(1, keepdims=True)
    check(found.weights, expected, gamma(40) * expected)


def test_nothing_here_may_be_bf16():
    ar = Recorder()
    rng = np.random.default_rng(5)
    _route(rng.standard_normal((2, 6)), rng.standard_normal((8, 6)), np.zeros(8), ar=ar, n_group=2, topk_group=1)
    assert ar.points("store") == ar.points("maybe") == ar.points("none") == set()
    assert {"router.logits", "router.scores", "router.biased", "router.group", "router.weights"} <= ar.points("single")


def test_leading_axes_are_independent():
    rng = np.random.default_rng(6)
    x, gate, bias = rng.standard_normal((2, 3, 5, 6)), rng.standard_normal((8, 6)), rng.standard_normal(8)
    whole, flat = _route(x, gate, bias), _route(x.reshape(30, 6), gate, bias)
    for a, b in zip(whole, flat, strict=True):
        assert np.array_equal(a.reshape(b.shape), b)
