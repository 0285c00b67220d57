"""The DSA indexer (model.md 2.3): which tokens a query may attend to.

T queries, h index heads, p index width, S slots per pool, P pools, W = index_topk + S - 1 selected tokens. A query at
position t sees n = t + 1 tokens. Scores and pool softmax are fp32; keys, gates and pool keys are kept in storage.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

TILE_BYTES = 1 << 27
"""Bound on the per-head scores alive at a time, whatever T and P."""


def pool(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """keys, gates [P, S, p], ape [S, p] -> pool keys [P, p]: per channel, softmax over the slots of gate + ape."""
    P, S, p = keys.shape
    assert (gates.shape, ape.shape) == ((P, S, p), (S, p)), (tuple(gates.shape), tuple(ape.shape))
    share = torch.softmax(gates.float() + ape.float(), dim=1)
    return (share * keys.float()).sum(1).to(keys.dtype)


def scores(q: Tensor, weights: Tensor, pool_keys: Tensor) -> Tensor:
    """q [T, h, p], weights [T, h] fp32, pool_keys [P, p] -> sum_h w relu(q . k p^-0.5), [T, P] fp32.

    Queries are taken in tiles; within a tile pools are too, so that the per-head scores stay within TILE_BYTES.
    """
    (T, h, p), (P, p_) = q.shape, pool_keys.shape
    assert (p_, weights.shape) == (p, (T, h)), (p_, tuple(weights.shape), tuple(q.shape))
    result = weights.new_empty(T, P)
    columns = max(1, min(P, TILE_BYTES // (8 * h)))
    rows = max(1, TILE_BYTES // (8 * h * columns))
    for c in range(0, P, columns):
        keys = pool_keys[c : c + columns].float().T
        for t in range(0, T, rows):
            query = q[t : t + rows].float()
            dots = F.relu(torch.matmul(query, keys).mul_(p**-0.5))
            result[t : t + rows, c : c + columns] = torch.matmul(weights[t : t + rows, None, :], dots)[:, 0]
    return result


def candidates(visible: Tensor, P: int, S: int) -> Tensor:
    """visible [T] int (tokens each query sees) -> [T, P] bool: the pool's last token is among them."""
    last = torch.arange(1, P + 1, device=visible.device) * S
    return last[None, :] <= visible[:, None]


def best(scores: Tensor, budget: int) -> Tensor:
    """scores [T, P], -inf where no candidate -> [T, min(budget, P)] pool indices, ascending, then -1.

    Equal scores take the lower pool. The value of the last place is found first; everything above it is in, and of
    the pools that equal it the first ones fill the places left.
    """
    T, P = scores.shape
    k = min(budget, P)
    if k == 0:
        return torch.full((T, 0), -1, dtype=torch.long, device=scores.device)
    alive = scores > float("-inf")
    last = scores.topk(k, dim=-1).values[:, -1:]
    above = alive & (scores > last)
    equal = alive & (scores == last)
    places = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= places))
    return _positions(chosen, k)


def _positions(chosen: Tensor, k: int) -> Tensor:
    """chosen [T, P] bool, at most k per row -> the positions of the True, ascending, then -1; [T, k]."""
    T, P = chosen.shape
    target = torch.where(chosen, chosen.cumsum(-1) - 1, k)
    positions = torch.arange(P, device=chosen.device).expand(T, P)
    table = torch.full((T, k + 1), -1, dtype=torch.long, device=chosen.device)
    return table.scatter_(1, target, positions)[:, :k]


def tokens(pools: Tensor, visible: Tensor, S: int, width: int) -> Tensor:
    """pools [T, k] (ascending, then -1), visible [T] -> selected [T, width] int32: token ids ascending, then -1.

    The tokens of the pools, then the visible tail that fills no pool. `width` must hold k * S + S - 1, or every
    visible token. A pool whose last token is not visible is dropped.
    """
    (T, k), n = pools.shape, visible[:, None]
    pools = torch.where((pools + 1) * S <= n, pools, -1)
    count = (pools >= 0).sum(-1, keepdim=True) * S
    place = torch.arange(width, device=pools.device).expand(T, width)
    tail = n - n % S + place - count
    selected = torch.where(tail < n, tail, -1)
    if k:
        member = pools.gather(1, (place // S).clamp(max=k - 1)) * S + place % S
        selected = torch.where(place < count, member, selected)
    return selected.int()


def select(q: Tensor, weights: Tensor, pool_keys: Tensor, visible: Tensor, S: int, topk: int) -> Tensor:
    """q [T, h, p], weights [T, h], pool_keys [P, p], visible [T] -> selected [T, W'] int32, queries in tiles.

    W' is W, or the largest number of visible tokens where that is less. No scores are computed while every candidate
    fits the budget.
    """
    T, P, budget = q.shape[0], pool_keys.shape[0], topk // S
    width = min(topk + S - 1, int(visible.max()))
    if budget >= P:
        pools = torch.arange(P, device=q.device).expand(T, P)
        return tokens(torch.where(candidates(visible, P, S), pools, -1), visible, S, width)
    rows = max(1, TILE_BYTES // (16 * P))
    parts = []
    for t in range(0, T, rows):
        tile = slice(t, t + rows)
        pools = best(masked(q[tile], weights[tile], pool_keys, visible[tile], S), budget)
        parts.append(tokens(pools, visible[tile], S, width))
    return torch.cat(parts)


def masked(q: Tensor, weights: Tensor, pool_keys: Tensor, visible: Tensor, S: int) -> Tensor:
    """`scores` with -inf where the pool is no candidate, [T, P]."""
    return scores(q, weights, pool_keys).masked_fill(~candidates(visible, pool_keys.shape[0], S), float("-inf"))
