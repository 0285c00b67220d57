"""fast.ops.indexer: pools and scores against float64, the choice against a sorted list, a bound on the workspace."""

from __future__ import annotations

import pytest
import torch

from conformance.unit.fast import bounds, workspace
from fast.ops import indexer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("S", [4, 8])
def test_pool(dtype, S):
    generator = torch.Generator().manual_seed(S)
    keys, gates = (torch.randn(5, S, 6, generator=generator).to(dtype) for _ in range(2))
    ape = torch.randn(S, 6, generator=generator).bfloat16()
    logits = gates.double() + ape.double()
    share = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    expected = (share * keys.double()).sum(1)
    size = (share * keys.double().abs()).sum(1)
    spread = logits.abs().amax(1) * 4 + S + 8
    error = bounds.gamma(1) * spread * size
    bounds.check(indexer.pool(keys, gates, ape), expected, bounds.stored(expected, error, dtype))


def tensors(seed: int, T: int, P: int, h: int = 3, p: int = 20):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(T, h, p, generator=generator).bfloat16()
    w = torch.randn(T, h, generator=generator)
    return q, w, torch.randn(P, p, generator=generator).bfloat16()


@pytest.mark.parametrize("tile", [24, 24 * 7, 24 * 100, 1 << 27])
def test_scores(monkeypatch, tile):
    monkeypatch.setattr(indexer, "TILE_BYTES", tile)
    q, w, keys = tensors(1, 11, 37)
    dots = torch.einsum("thp,jp->thj", q.double(), keys.double()) * 20**-0.5
    sizes = torch.einsum("thp,jp->thj", q.double().abs(), keys.double().abs()) * 20**-0.5
    expected = torch.einsum("th,thj->tj", w.double(), dots.relu())
    bound = bounds.gamma(20 + 3 + 4) * torch.einsum("th,thj->tj", w.double().abs(), sizes)
    bounds.check(indexer.scores(q, w, keys), expected, bound)


def by_hand(row: list[float], n: int, S: int, topk: int) -> list[int]:
    whole = [p for p in range(len(row)) if S * (p + 1) <= n]
    best = sorted(whole, key=lambda p: (-row[p], p))[: topk // S]
    return sorted(token for p in best for token in range(S * p, S * p + S)) + list(range(n - n % S, n))


@pytest.mark.parametrize(("S", "topk"), [(4, 16), (8, 24), (4, 4), (1, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_selection_with_ties_takes_the_lower_pool(S, topk, seed):
    """Scores on a grid of three values, one row per number of visible tokens, around every boundary of a pool."""
    T = 5 * topk + 3
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 3, (T, T // S), generator=generator).float()
    visible = torch.arange(1, T + 1)
    scores = scores.masked_fill(~indexer.candidates(visible, T // S, S), float("-inf"))
    width = topk + S - 1
    found = indexer.tokens(indexer.best(scores, topk // S), visible, S, width)
    assert found.dtype == torch.int32
    for t in range(T):
        expected = by_hand(scores[t].tolist(), t + 1, S, topk)
        assert found[t].tolist() == expected + [-1] * (width - len(expected))


@pytest.mark.parametrize("T", [1, 3, 4, 5, 18, 19, 40])
@pytest.mark.parametrize("tile", [64, 1 << 27])
def test_select_is_scores_then_choice(monkeypatch, T, tile):
    """Also where every candidate fits the budget and no score is computed."""
    S, topk = 4, 16
    q, w, keys = tensors(T, T, T // S)
    visible = torch.arange(1, T + 1)
    scores = indexer.masked(q, w, keys, visible, S)
    monkeypatch.setattr(indexer, "TILE_BYTES", tile)
    found = indexer.select(q, w, keys, visible, S, topk)
    assert found.shape == (T, min(topk + S - 1, T))
    for t in range(T):
        expected = by_hand(scores[t].tolist(), t + 1, S, topk)
        assert [x for x in found[t].tolist() if x >= 0] == expected


def test_no_pool_yet():
    q, w, keys = tensors(2, 2, 0)
    assert indexer.select(q, w, keys, torch.tensor([1, 2]), 4, 16).tolist() == [[0, -1], [0, 1]]
    assert indexer.best(torch.zeros(2, 0), 4).shape == (2, 0)


@pytest.mark.parametrize(("T", "P"), [(16, 512), (64, 512), (64, 4096), (256, 1024)])
def test_workspace_is_bounded_whatever_queries_and_pools(monkeypatch, T, P):
    """Beyond inputs and the result, 8 tiles: per-head scores twice, and a row of keys, masks and counts per query."""
    tile = 1 << 16
    monkeypatch.setattr(indexer, "TILE_BYTES", tile)
    q, w, keys = tensors(3, T, P, h=32, p=16)
    result = T * (16 + 3) * 16
    with workspace.Peak() as peak:
        indexer.select(q, w, keys, torch.full((T,), 4 * P), 4, 16)
    assert peak.bytes <= 8 * max(tile, 64 * P) + result
    assert peak.bytes < T * P * 32 * 4, "the untiled scores alone would take this"
