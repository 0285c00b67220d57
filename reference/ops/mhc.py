"""Manifold-constrained hyper-connections: one site (model.md section 2.1; two sites per layer, `attn` and `ffn`).

Everything up to the collapse is fp32, every intermediate an fp32 point. Two epsilons with two jobs: `rms_norm_eps`
under the square root of the input norm, `hc_eps` in `pre` and in the Sinkhorn divisions. `comb[i, j]` is the share of
old stream i in new stream j, so it is applied transposed. Further points: post, comb, post * o, the mixed streams.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from reference.arithmetic import Arithmetic, Sliced, sigmoid, softmax, total
from reference.ops.norm import unit_rms

TILE = 1 << 16


class HC(NamedTuple):
    """pre [.., T, C], post [.., T, C], comb [.., T, C, C]."""

    pre: np.ndarray
    post: np.ndarray
    comb: np.ndarray


def site_weights(
    ar: Arithmetic,
    streams: np.ndarray,
    fn: Sliced,
    base: np.ndarray,
    scale: np.ndarray,
    *,
    rms_norm_eps: float,
    hc_eps: float,
    hc_sinkhorn_iters: int,
) -> HC:
    """streams [.., T, C, D], fn [(2+C)C, C*D], base [(2+C)C], scale [3] (pre, post, comb) -> HC."""
    *B, T, C, D = streams.shape
    assert base.shape == ((2 + C) * C,), (base.shape, C)
    assert scale.shape == (3,), scale.shape

    flat = unit_rms(ar, streams.reshape(*B, T, C * D), rms_norm_eps, "hc.input_norm")
    mix = ar.linear(flat, fn, "hc.fn", out="fp32")
    parts = {"pre": slice(0, C), "post": slice(C, 2 * C), "comb": slice(2 * C, None)}

    def logits(part: str) -> np.ndarray:
        row = ar.single(mix[..., parts[part]] * scale[list(parts).index(part)], f"hc.{part}.scaled")
        return ar.single(row + base[parts[part]], f"hc.{part}.logits")

    pre = ar.single(ar.single(sigmoid(logits("pre")), "hc.pre.sigmoid") + hc_eps, "hc.pre")
    post = 2 * ar.single(sigmoid(logits("post")), "hc.post")
    comb = sinkhorn(ar, logits("comb").reshape(*B, T, C, C), hc_eps, hc_sinkhorn_iters)
    return HC(pre, post, comb)


def sinkhorn(ar: Arithmetic, logits: np.ndarray, hc_eps: float, iterations: int) -> np.ndarray:
    """logits [.., C, C] -> comb [.., C, C], nearly doubly stochastic: columns (axis -2) first, last division included.

    One iteration is the softmax (which normalises the rows) and the column division; each further one divides by the
    row sums, then by the column sums.
    """
    comb = ar.single(ar.single(softmax(logits), "hc.comb.softmax") + hc_eps, "hc.comb.start")
    for axis in (-2, *(-1, -2) * (iterations - 1)):
        sums = ar.single(ar.single(total(comb, axis=axis), "hc.comb.sum") + hc_eps, "hc.comb.divisor")
        comb = ar.single(comb / np.expand_dims(sums, axis), "hc.comb")
    return comb


def collapse(ar: Arithmetic, streams: np.ndarray, pre: np.ndarray) -> np.ndarray:
    """streams [.., T, C, D], pre [.., T, C] -> sum_i pre[i] S[i], [.., T, D], a bf16 point."""
    assert streams.shape[:-1] == pre.shape, (streams.shape, pre.shape)
    return ar.store(total(pre[..., None] * streams, axis=-2), "hc.collapse")


def combine(ar: Arithmetic, streams: np.ndarray, out: np.ndarray, hc: HC) -> np.ndarray:
    """streams [.., T, C, D], out [.., T, D] -> S'[j] = post[j] o + sum_i comb[i, j] S[i], a bf16 point."""
    *B, T, C, D = streams.shape
    assert out.shape == (*B, T, D), (out.shape, streams.shape)
    assert hc.comb.shape == (*B, T, C, C), (hc.comb.shape, streams.shape)
    post = ar.maybe(hc.post, "hc.combine.post")
    comb = ar.maybe(hc.comb, "hc.combine.comb")
    added = ar.maybe(post[..., None] * out[..., None, :], "hc.combine.added")
    mixed = ar.maybe(_mix(comb.reshape(-1, C, C), streams.reshape(-1, C, D)).reshape(streams.shape), "hc.combine.mixed")
    return ar.store(added + mixed, "hc.combine")


def _mix(comb: np.ndarray, streams: np.ndarray) -> np.ndarray:
    """comb [T, C, C], streams [T, C, D] -> sum_i comb[i, j] S[i], [T, C, D]; in tiles of tokens, for the products are C
    times as many."""
    T, C, D = streams.shape
    out = np.empty((T, C, D))
    step = max(1, TILE // (C * C * D))
    for t in range(0, T, step):
        out[t : t + step] = total(comb[t : t + step, :, :, None] * streams[t : t + step, :, None, :], axis=-3)
    return out
