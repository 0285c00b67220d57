"""Feed-forward blocks (model.md 2.4): the clamped SwiGLU, alone and over routed experts.

T tokens, D hidden, F width of one block, k experts per token. gate_proj and up_proj each carry their own scale_2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast import scratch
from fast.linear import linear


class Projections(NamedTuple):
    """gate_proj [F, D], up_proj [F, D], down_proj [D, F]: tensors, or packed weights."""

    gate: Any
    up: Any
    down: Any


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """gate, up [T, F] -> silu(min(gate, limit)) * clip(up, -limit, limit), fp32, one rounding to storage."""
    assert gate.shape == up.shape, (tuple(gate.shape), tuple(up.shape))

    def work(g: Tensor, u: Tensor) -> Tensor:
        g, u = g.clamp(max=limit), u.clamp(min=-limit, max=limit)
        return g * torch.sigmoid(g) * u

    return scratch.by_rows(work, gate, up, dtype=gate.dtype, temporaries=4)


def dense(x: Tensor, weights: Projections, limit: float, out: torch.dtype | None = None) -> Tensor:
    """x [T, D] -> down_proj(swiglu(gate_proj x, up_proj x)), [T, D] in `out` (default storage)."""
    product = swiglu(linear(x, weights.gate), linear(x, weights.up), limit)
    return linear(product, weights.down, out)


def routed(
    x: Tensor, bank: Any, indices: Tensor, weights: Tensor, limit: float, out: torch.dtype | None = None
) -> Tensor:
    """x [T, D], indices [T, k] int, weights [T, k] fp32 -> sum over slots of weight * expert(x), [T, D] fp32.

    `bank` holds the experts first .. first + count - 1; the others contribute zero here (another rank has them). Tokens
    are grouped by expert and only experts that were chosen are visited. An expert's output is rounded to `out` (default
    storage; fp32 where the rank holds a part of its columns); the weighted sum is fp32, slot 0 first, so that the order
    does not depend on how the tokens were grouped.
    """
    (T, D), k = x.shape, indices.shape[1]
    assert indices.shape == weights.shape == (T, k), (T, tuple(indices.shape), tuple(weights.shape))
    assert weights.dtype == torch.float32, weights.dtype
    flat = indices.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    contributions = scratch.empty((T * k, D), out or x.dtype, x.device).zero_()
    start = 0
    for expert, count in zip(experts.tolist(), counts.tolist(), strict=True):
        slots, start = order[start : start + count], start + count
        i = expert - bank.first
        if 0 <= i < bank.count:
            block = Projections(bank.gate[i], bank.up[i], bank.down[i])
            with scratch.frame():
                mine = torch.index_select(x, 0, slots // k, out=scratch.empty((count, D), x.dtype, x.device))
                contributions[slots] = dense(mine, block, limit, out)

    def work(contributions: Tensor, weights: Tensor) -> Tensor:
        total = weights[:, 0, None] * contributions[:, 0]
        for slot in range(1, k):
            total = total + weights[:, slot, None] * contributions[:, slot]
        return total

    return scratch.by_rows(work, contributions.view(T, k, D), weights, dtype=torch.float32, shape=(T, D))
