"""Expert routing (model.md 2.4). T tokens, D hidden, E experts, k experts per token. All fp32.

The correction bias picks, and only picks: the weights come from the plain sigmoid.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def logits(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, D], gate [E, D] -> [T, E] fp32."""
    assert x.shape[1] == gate.shape[1], (tuple(x.shape), tuple(gate.shape))
    return F.linear(x.float(), gate.float())


def choose(scores: Tensor, bias: Tensor, k: int, n_group: int = 1, topk_group: int = 1) -> Tensor:
    """scores [T, E] fp32 (sigmoid of the logits), bias [E] fp32 -> indices [T, k] int32, ascending.

    With groups, a group counts as the sum of its two best and `topk_group` groups stay. Equal scores take the lower
    index, for groups and experts alike.
    """
    T, E = scores.shape
    assert (bias.shape, bias.dtype, E % n_group) == ((E,), torch.float32, 0), (E, n_group, bias.dtype)
    biased = scores + bias
    if n_group > 1:
        groups = biased.view(T, n_group, E // n_group)
        strength = groups.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        kept = strength.sort(dim=-1, descending=True, stable=True).indices[:, :topk_group]
        alive = torch.zeros(T, n_group, dtype=torch.bool, device=scores.device).scatter_(1, kept, True)
        biased = groups.masked_fill(~alive[..., None], float("-inf")).view(T, E)
    return biased.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values.int()


def weigh(scores: Tensor, indices: Tensor, *, normalise: bool, factor: float) -> Tensor:
    """scores [T, E] fp32, indices [T, k] -> weights [T, k] fp32: scores of the chosen, normalised, times `factor`.

    The denominator is the sum of the chosen plus 1e-20. `factor` (routed_scaling_factor) is applied here and nowhere
    else.
    """
    assert (scores.shape[0], scores.dtype) == (indices.shape[0], torch.float32), (scores.dtype, tuple(indices.shape))
    weights = scores.gather(1, indices.long())
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * factor
