"""reference.ops.indexer: pools, scores, the set a query attends to."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from conformance.unit.reference.bounds import Recorder, check, gamma
from reference.arithmetic import Arithmetic, get_arithmetic
from reference.ops import indexer
from reference.weights import Weights

EXACT = Arithmetic()
h, p = 3, 8


def _weights(rng: np.random.Generator, D: int, Q: int, S: int) -> dict[str, np.ndarray]:
    shapes = {
        "wq_b.weight": (h * p, Q),
        "wk.weight": (p, D),
        "k_norm.weight": (p,),
        "k_norm.bias": (p,),
        "weights_proj.weight": (h, D),
        "index_kpool_compress_gate": (p, D),
        "index_kpool_compress_ape": (S, p),
    }
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def test_projections():
    rng = np.random.default_rng(1)
    w = _weights(rng, 6, 5, 4)
    x, r = rng.standard_normal((2, 7, 6)), rng.standard_normal((2, 7, 5))
    found = indexer.project(EXACT, x, r, Weights.of(w), h)
    check(
        found.q,
        (r @ w["wq_b.weight"].T).reshape(2, 7, h, p),
        (gamma(6) * (np.abs(r) @ np.abs(w["wq_b.weight"]).T)).reshape(2, 7, h, p),
    )
    check(
        found.gate,
        x @ w["index_kpool_compress_gate"].T,
        gamma(7) * (np.abs(x) @ np.abs(w["index_kpool_compress_gate"]).T),
    )
    check(
        found.weights,
        x @ w["weights_proj.weight"].T * h**-0.5,
        gamma(9) * (np.abs(x) @ np.abs(w["weights_proj.weight"]).T),
    )
    raw = x @ w["wk.weight"].T
    centred = raw - raw.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    expected = w["k_norm.weight"] * centred / deviation + w["k_norm.bias"]
    # An absolute error of the key before the norm is divided by the deviation and spread over a row by the statistics.
    error = gamma(6 + 2 * p + 12) * (np.abs(x) @ np.abs(w["wk.weight"]).T).max(-1, keepdims=True) / deviation
    check(found.k, expected, 3 * error * np.abs(w["k_norm.weight"]) + gamma(4) * np.abs(w["k_norm.bias"]))


@pytest.mark.parametrize("S", [1, 4, 8])
def test_a_pool_is_a_softmax_over_its_slots_in_every_channel(S):
    rng = np.random.default_rng(2)
    k, gate, ape = rng.standard_normal((5 * S, p)), 3 * rng.standard_normal((5 * S, p)), rng.standard_normal((S, p))
    found = indexer.pool(EXACT, k, gate, ape)
    for pool, channel in np.ndindex(5, p):
        rows = slice(pool * S, (pool + 1) * S)
        logits = gate[rows, channel] + ape[:, channel]
        mass = [math.exp(v - logits.max()) for v in logits]
        terms = [a * b / math.fsum(mass) for a, b in zip(mass, k[rows, channel], strict=True)]
        size = float(np.abs(terms).sum()) * (1 + float(np.abs(logits).max()))
        check(found[pool, channel], math.fsum(terms), gamma(2 * S + 10) * size)


def test_pools_before_and_after_do_not_touch_each_other():
    rng = np.random.default_rng(3)
    k, gate, ape = rng.standard_normal((12, p)), rng.standard_normal((12, p)), rng.standard_normal((4, p))
    whole = indexer.pool(EXACT, k, gate, ape)
    for pool in range(3):
        rows = slice(4 * pool, 4 * pool + 4)
        assert np.array_equal(indexer.pool(EXACT, k[rows], gate[rows], ape)[0], whole[pool])


def test_scores_are_the_equation():
    """The relu stands between the scaled dot product and the head weights, which may be negative."""
    rng = np.random.default_rng(4)
    q, weights, keys = rng.standard_normal((6, h, p)), rng.standard_normal((6, h)), rng.standard_normal((3, p))
    found = indexer.scores(EXACT, q, weights, keys, 9, 4)
    assert weights.min() < 0
    near = np.einsum("thc,pc->thp", q, keys) * p**-0.5
    size = np.einsum("thc,pc->thp", np.abs(q), np.abs(keys)) * p**-0.5
    expected = np.einsum("th,thp->tp", weights, np.maximum(near, 0))
    visible = (np.arange(3) + 1) * 4 <= (10 + np.arange(6))[:, None]
    bound = gamma(p + h + 6) * np.einsum("th,thp->tp", np.abs(weights), size)
    assert np.array_equal(found > -np.inf, visible)
    check(found[visible], expected[visible], bound[visible])


@pytest.mark.parametrize("tile", [1, 7, 1 << 22])
def test_tiles_do_not_show(tile, monkeypatch):
    rng = np.random.default_rng(5)
    q, weights, keys = rng.standard_normal((2, 9, h, p)), rng.standard_normal((2, 9, h)), rng.standard_normal((2, 5, p))
    whole = indexer.scores(EXACT, q, weights, keys, 12, 4)
    monkeypatch.setattr(indexer, "TILE", tile)
    assert np.array_equal(indexer.scores(EXACT, q, weights, keys, 12, 4), whole)


@pytest.mark.parametrize("S", [1, 4, 8])
def test_a_pool_is_a_candidate_once_its_last_token_is_visible(S):
    P = 3
    q, weights, keys = np.ones((P * S, 1, p)), np.ones((P * S, 1)), np.ones((P, p))
    found = indexer.scores(EXACT, q, weights, keys, 0, S)
    for t, pool in np.ndindex(P * S, P):
        assert (found[t, pool] > -np.inf) == ((pool + 1) * S - 1 <= t)


def _set(row: np.ndarray, n: int, topk: int, S: int) -> list[int]:
    """The definition for one query that sees n tokens."""
    candidates = [pool for pool in range(len(row)) if (pool + 1) * S <= n]
    best = sorted(candidates, key=lambda pool: (-row[pool], pool))[: topk // S]
    return sorted([pool * S + slot for pool in best for slot in range(S)] + list(range(n // S * S, n)))


@pytest.mark.parametrize(("S", "topk"), [(1, 4), (2, 4), (4, 8), (8, 24), (4, 64)])
@pytest.mark.parametrize("seen", [0, 1, 3, 4, 13, 40])
@pytest.mark.parametrize("levels", [2, 1000])
def test_selection_is_the_definition(S, topk, seen, levels):
    """Lengths around every boundary of pools and budget; two levels make nearly all scores tie."""
    T = 3 * S + 2
    rng = np.random.default_rng(S * 100 + seen)
    P = (seen + T) // S
    scores = rng.integers(0, levels, (T, P)) / 4.0
    scores = np.where((np.arange(P) + 1) * S <= (seen + 1 + np.arange(T))[:, None], scores, -np.inf)
    found = indexer.select(scores, seen, topk, S)
    assert found.dtype == np.int32
    assert found.shape == (T, topk + S - 1)
    for t in range(T):
        expected = _set(scores[t], seen + t + 1, topk, S)
        assert found[t].tolist() == expected + [-1] * (topk + S - 1 - len(expected))


def test_no_pools_yet_leaves_the_tail_alone():
    found = indexer.select(np.zeros((3, 0)), 0, 16, 4)
    assert found[:, :4].tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1]]
    assert (found[:, 4:] == -1).all()


def test_negative_and_zero_scores_are_still_candidates():
    """-inf means no candidate; a score of -1e300 or -0.0 is chosen where the budget reaches it."""
    scores = np.array([[-1e300, -0.0, 0.0, -5.0]])
    assert indexer.select(scores, 15, 8, 4)[0, :8].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert sorted(set(indexer.select(scores, 15, 64, 4)[0].tolist())) == [-1, *range(16)]


@pytest.mark.parametrize(("n", "S"), list(itertools.product(range(1, 14), [1, 4])))
def test_every_token_is_seen_while_the_budget_lasts(n, S):
    scores = np.where((np.arange(n // S) + 1) * S <= n, 1.0, -np.inf)[None]
    found = indexer.select(scores, n - 1, 16, S)[0]
    assert found[found >= 0].tolist() == list(range(n))


def test_leading_axes_are_independent():
    rng = np.random.default_rng(6)
    scores = rng.integers(0, 3, (2, 3, 4, 6)).astype(float)
    whole = indexer.select(scores, 23, 8, 4)
    for i, j in np.ndindex(2, 3):
        assert np.array_equal(whole[i, j], indexer.select(scores[i, j], 23, 8, 4))


def test_rounding_points():
    ar = Recorder()
    rng = np.random.default_rng(7)
    w = _weights(rng, 6, 5, 4)
    found = indexer.project(ar, rng.standard_normal((8, 6)), rng.standard_normal((8, 5)), Weights.of(w), h)
    assert ar.points("store") == {f"indexer.{point}" for point in ("q", "wk", "k", "gate", "weights")}
    keys = indexer.pool(ar, found.k, found.gate, w["index_kpool_compress_ape"])
    indexer.scores(ar, found.q, found.weights, keys, 0, 4)
    assert ar.points("maybe") == {f"indexer.{point}" for point in ("pool_share", "pool_keys", "q_scaled")}
    assert {"indexer.scores", "indexer.pool_keys", "indexer.weights", "indexer.qk"} <= ar.points("single")


@pytest.mark.parametrize("name", ["exact", "bf16"])
def test_a_row_does_not_depend_on_the_rows_beside_it(name):
    rng = np.random.default_rng(8)
    ar = get_arithmetic(name)
    q, weights, keys = rng.standard_normal((6, h, p)), rng.standard_normal((6, h)), rng.standard_normal((4, p))
    whole = indexer.scores(ar, q, weights, keys, 10, 4)
    for t in range(6):
        assert np.array_equal(indexer.scores(ar, q[t : t + 1], weights[t : t + 1], keys, 10 + t, 4)[0], whole[t])
