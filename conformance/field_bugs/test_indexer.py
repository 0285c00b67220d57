"""Faults of the DSA indexer: pools, tails, ties, rows with nothing to choose from, workspace."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conformance.checkpoints.shared import shared
from conformance.field_bugs.sides import SIDES, Fast
from conformance.unit.fast.workspace import Peak
from fast.ops import indexer

DSA = 1
"""First DSA layer of the geometry used here; pools of 8 tokens."""

S = 8


def masked(scores: np.ndarray, seen: int, size: int) -> np.ndarray:
    """-inf where the pool's last token is not visible to the row."""
    complete = (seen + 1 + np.arange(scores.shape[0])) // size
    return np.where(np.arange(scores.shape[1]) < complete[:, None], scores, -np.inf)


@SIDES
def test_fb80_every_pool_has_a_slot_of_its_own(side):
    """80 tokens fed in uneven calls: 10 pools, all different, each readable where it was put, each as in one call."""
    tokens = np.random.default_rng(80).integers(0, 257, 80)
    whole, pieces = side.model(shared("nvidia", "odd")), side.model(shared("nvidia", "odd"))
    whole.prefill(tokens)
    kept: list[np.ndarray] = []
    start = 0
    for length in (30, 3, 10, 21, 16):
        pieces.prefill(tokens[start : start + length])
        start += length
        keys = side.pool_keys(pieces, DSA)
        assert len(keys) == start // S
        assert np.array_equal(keys[: len(kept)], np.array(kept).reshape(len(kept), keys.shape[1]))
        kept = list(keys.copy())
    assert len(np.unique(np.array(kept), axis=0)) == 80 // S
    nearest = np.linalg.norm(np.array(kept)[:, None] - side.pool_keys(whole, DSA)[None], axis=-1).argmin(axis=1)
    assert nearest.tolist() == list(range(80 // S))


@SIDES
def test_fb82_short_rows_hold_no_junk(side):
    """Pool size 4, budget 16 tokens, 6 tokens: query 5 takes pool 0 and the tail. Everything unused is -1."""
    scores = masked(np.full((6, 1), 0.25), 0, 4)
    found = side.select(scores, 0, 16, 4)
    expected = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert found.tolist() == [row + [-1] * (19 - len(row)) for row in expected]


def test_fb82_junk_pools_are_dropped_at_expansion():
    pools = torch.tensor([[0, 1, 3, 12345]])
    assert indexer.tokens(pools, torch.tensor([6]), 4, 19).tolist() == [[0, 1, 2, 3, 4, 5, *[-1] * 13]]


@SIDES
@pytest.mark.parametrize("prefilled", [1, 6, 7])
def test_fb83_a_pool_completed_by_decoding_is_the_same_pool(side, prefilled):
    """The tail keeps each token's key and gate until its pool is complete."""
    tokens = np.random.default_rng(83).integers(0, 257, S)
    whole, split = side.model(shared("nvidia", "odd")), side.model(shared("nvidia", "odd"))
    for token in tokens:
        whole.decode(int(token))
    split.prefill(tokens[:prefilled])
    assert len(side.pool_keys(split, DSA)) == 0
    for token in tokens[prefilled:]:
        split.decode(int(token))
    assert len(side.pool_keys(split, DSA)) == 1
    assert np.array_equal(side.pool_keys(split, DSA), side.pool_keys(whole, DSA))


@SIDES
@pytest.mark.parametrize(
    ("P", "size", "budget", "high"), [(8320, 1, 2048, 100), (600, 4, 512, 0)], ids=["8320 tokens", "600 pools"]
)
def test_fb86_ties_at_the_threshold_lose_nothing(side, P, size, budget, high):
    """A few scores of 1 and the rest exactly 0, as ReLU makes them: `budget` different pools, lowest ties first."""
    scores = np.zeros((1, P))
    ones = np.arange(P - high, P)
    scores[0, ones] = 1.0
    found = side.select(scores, P * size - 1, budget * size, size)[0]
    pools = sorted({*ones.tolist(), *range(budget - high)})
    assert found[found >= 0].tolist() == [pool * size + slot for pool in pools for slot in range(size)]


@SIDES
def test_fb94_pools_follow_their_exact_tokens(side):
    """10 tokens, back to 6, four others: as a fresh run of the final 10."""
    generator = np.random.default_rng(94)
    first, other = generator.integers(0, 257, 10), generator.integers(0, 257, 4)
    model, fresh = side.model(shared("nvidia", "odd")), side.model(shared("nvidia", "odd"))
    model.prefill(first[:6])
    fresh.prefill(first[:6])
    kept = side.snapshot(model)
    for token in first[6:]:
        model.decode(int(token))
    old = side.pool_keys(model, DSA).copy()
    side.restore(model, kept)
    assert len(side.pool_keys(model, DSA)) == 0
    for token in other:
        assert np.array_equal(model.decode(int(token)), fresh.decode(int(token)))
    assert np.array_equal(side.pool_keys(model, DSA), side.pool_keys(fresh, DSA))
    assert not np.array_equal(side.pool_keys(model, DSA), old)


def test_fb94_cutting_back_inside_a_pool_drops_it():
    """The same by a transaction that is rolled back."""
    side, generator = Fast(), np.random.default_rng(95)
    first, other = generator.integers(0, 257, 10), generator.integers(0, 257, 4)
    model, fresh = side.model(shared("nvidia", "odd")), side.model(shared("nvidia", "odd"))
    model.prefill(first[:6])
    fresh.prefill(first[:6])
    model.state.begin()
    model.prefill(first[6:])
    model.state.commit(0)
    for token in other:
        assert np.array_equal(model.decode(int(token)), fresh.decode(int(token)))
    assert np.array_equal(side.pool_keys(model, DSA), side.pool_keys(fresh, DSA))


@pytest.mark.parametrize(("T", "P"), [(4, 65_536), (64, 4_096), (256, 1_024)])
def test_fb129_scores_are_made_in_tiles(monkeypatch, T, P):
    """32 heads: queries x pools x heads x 4 bytes are never alive, whatever their product."""
    monkeypatch.setattr(indexer, "TILE_BYTES", 1 << 20)
    generator = torch.Generator().manual_seed(129)
    q, w = torch.randn(T, 32, 8, generator=generator), torch.randn(T, 32, generator=generator)
    keys = torch.randn(P, 8, generator=generator)
    with Peak() as peak:
        indexer.select(q, w, keys, torch.full((T,), 4 * P), 4, 64)
    assert peak.bytes <= 8 * (1 << 20) + 64 * P
    assert peak.bytes < T * P * 32 * 4
