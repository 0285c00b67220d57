"""NoPE multi-head latent attention over selected tokens (model.md 2.3).

T queries, H heads, N key width, O value width, L latent width, n cached tokens, W selected. kv_b_proj holds, per head,
N key rows, then O value rows. Scores, softmax and sums are fp32; the output is rounded once to storage.

A selection is a set: it is sorted, duplicates and ids outside 0 .. n-1 are dropped, and a query that selects nothing
gets zeros. Queries are taken in tiles, so the workspace is bounded whatever T and n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fast import scratch
from fast.linear import linear

TILE_BYTES = 1 << 27


def attend(q: Tensor, latents: Tensor, selected: Tensor, kv_b: Tensor, *, values: int, absorbed: bool) -> Tensor:
    """q [T, H, N], latents [n, L], selected [T, W] int, kv_b [H*(N+O), L], `values` = O -> core [T, H, O]."""
    (T, H, N), (n, L), W = q.shape, latents.shape, selected.shape[1]
    found = selected.shape[0], kv_b.shape
    assert found == (T, (H * (N + values), L)), (found, T, H, N, values, L)
    if 0 in (W, n):
        return q.new_zeros(T, H, values)
    kernel = _absorbed if absorbed else _expanded
    per_query = 4 * W * (L + 2 * H) if absorbed else 4 * min(W, n) * H * (N + values + 2)
    step = max(1, TILE_BYTES // per_query)
    core = scratch.empty((T, H, values), q.dtype, q.device)
    for t in range(0, T, step):
        rows = slice(t, t + step)
        ids = selected[rows].long().sort(-1).values
        valid = (ids >= 0) & (ids < n)
        valid[:, 1:] &= ids[:, 1:] != ids[:, :-1]
        with scratch.outside():
            core[rows] = kernel(q[rows], latents, ids.clamp(0, n - 1), valid, kv_b, values)
    return core


def _absorbed(q: Tensor, latents: Tensor, ids: Tensor, valid: Tensor, kv_b: Tensor, values: int) -> Tensor:
    """Keys folded into the query, values out of the latent sum: W_k and W_v meet no cached token."""
    (_, H, N), L = q.shape, latents.shape[1]
    per_head = kv_b.view(H, N + values, L)
    asked = torch.bmm(q.float().transpose(0, 1), per_head[:, :N].float()).transpose(0, 1)
    gathered = latents[ids].float()
    share = _softmax(torch.bmm(asked, gathered.transpose(1, 2)) * N**-0.5, valid[:, None, :])
    mixed = torch.bmm(share, gathered).transpose(0, 1)
    return torch.bmm(mixed, per_head[:, N:].float().transpose(1, 2)).transpose(0, 1).to(q.dtype)


def _expanded(q: Tensor, latents: Tensor, ids: Tensor, valid: Tensor, kv_b: Tensor, values: int) -> Tensor:
    """Keys and values of every token that some query of the tile selects; each query masks out the others'."""
    T, H, N = q.shape
    needed, place = torch.unique(ids, return_inverse=True)
    u = needed.shape[0]
    seen = torch.zeros(T, u, dtype=torch.int32, device=q.device).scatter_add_(1, place, valid.int()) > 0
    keys, vals = linear(latents[needed], kv_b).view(u, H, N + values).float().split([N, values], dim=-1)
    share = _softmax(torch.bmm(q.float().transpose(0, 1), keys.permute(1, 2, 0)) * N**-0.5, seen[None])
    return torch.bmm(share, vals.transpose(0, 1)).transpose(0, 1).to(q.dtype)


def _softmax(scores: Tensor, valid: Tensor) -> Tensor:
    """Over the last axis; a row without a valid place is all zeros."""
    share = torch.softmax(scores.masked_fill(~valid, float("-inf")), dim=-1)
    return share.masked_fill(~valid, 0.0)
