"""Manifold-constrained hyper-connections (model.md 2.1): the residual streams around a sublayer.

T tokens, C streams, D hidden. All arithmetic is fp32; streams and the collapsed input are rounded once, to storage.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fast import scratch


class Weights(NamedTuple):
    """The three tensors of one site: fn [(2+C)C, C*D], base [(2+C)C] fp32, scale [3] fp32 (pre, post, comb)."""

    fn: Tensor
    base: Tensor
    scale: Tensor


class Mix(NamedTuple):
    """What one site computes from the streams: pre [T, C], post [T, C], comb [T, C, C], all fp32."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def mix(streams: Tensor, weights: Weights, *, norm_eps: float, hc_eps: float, iterations: int) -> Mix:
    """streams [T, C, D] -> Mix.

    `norm_eps` (rms_norm_eps) belongs to the unweighted norm of the flattened streams, `hc_eps` to pre and to the
    Sinkhorn steps. Columns (axis -2) are normalised first and last.
    """
    T, C, D = streams.shape
    tiles = scratch.tiles(T, 8 * C * D)
    if len(tiles) > 1:
        parts = [mix(streams[rows], weights, norm_eps=norm_eps, hc_eps=hc_eps, iterations=iterations) for rows in tiles]
        return Mix(*(torch.cat(part) for part in zip(*parts, strict=True)))
    fn, base, scale = weights
    rows = (2 + C) * C
    assert (fn.shape, base.shape, scale.shape) == ((rows, C * D), (rows,), (3,)), (tuple(fn.shape), C, D)
    flat = streams.reshape(T, C * D).float()
    flat = flat / torch.sqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    m = F.linear(flat, fn.float())
    pre = torch.sigmoid(m[:, :C] * scale[0] + base[:C]) + hc_eps
    post = 2.0 * torch.sigmoid(m[:, C : 2 * C] * scale[1] + base[C : 2 * C])
    comb = (m[:, 2 * C :] * scale[2] + base[2 * C :]).view(T, C, C)
    return Mix(pre, post, sinkhorn(torch.softmax(comb, dim=-1) + hc_eps, hc_eps, iterations))


def sinkhorn(comb: Tensor, eps: float, iterations: int) -> Tensor:
    """comb [T, C, C], positive -> nearly doubly stochastic; one column pass, then `iterations` - 1 (row, column)."""
    comb = comb / comb.sum(-2, keepdim=True).add_(eps)
    for _ in range(iterations - 1):
        comb.div_(comb.sum(-1, keepdim=True).add_(eps))
        comb.div_(comb.sum(-2, keepdim=True).add_(eps))
    return comb


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """streams [T, C, D], pre [T, C] -> sum_i pre[i] S[i], [T, D] in storage."""
    T, C, D = streams.shape
    assert pre.shape == (T, C), (tuple(streams.shape), tuple(pre.shape))

    def work(streams: Tensor, pre: Tensor) -> Tensor:
        return (pre[:, :, None] * streams).sum(1)

    return scratch.by_rows(work, streams, pre, dtype=streams.dtype, shape=(T, D))


def combine(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """streams [T, C, D], out [T, D], post [T, C], comb [T, C, C] -> S'[j] = post[j] out + sum_i comb[i, j] S[i].

    comb is applied transposed: its first index is the stream that gives, its second the stream that receives.
    """
    T, C, D = streams.shape
    found = out.shape, post.shape, comb.shape
    assert found == ((T, D), (T, C), (T, C, C)), (tuple(streams.shape), found)

    def work(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return torch.bmm(comb.transpose(1, 2), streams) + post[:, :, None] * out[:, None, :]

    return scratch.by_rows(work, streams, out, post, comb, dtype=streams.dtype)
