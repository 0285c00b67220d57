"""DSA indexer (model.md section 2.3): which tokens a query attends to.

h index heads of width p; S = index_kpool slots per pool; n counts tokens from the first valid one, so left padding is
neither pooled nor counted. bf16 points: the linear outputs and the LayerNorm output; fp32 points: the pool softmax and
pool keys, weights and scores. Further points: the scaled q, pool softmax weights, pool keys.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from reference.arithmetic import Arithmetic, rsqrt, softmax, total
from reference.ops.norm import layer_norm
from reference.weights import Weights

KEY_NORM_EPS = 1e-6
TILE = 1 << 22


class Projected(NamedTuple):
    """q [.., T, h, p], k [.., T, p] (after the LayerNorm), gate [.., T, p], weights [.., T, h] (times h^-0.5)."""

    q: np.ndarray
    k: np.ndarray
    gate: np.ndarray
    weights: np.ndarray


def project(ar: Arithmetic, x: np.ndarray, r: np.ndarray, w: Weights, h: int) -> Projected:
    """x [.., T, D] mixer input, r [.., T, Q] normalised query residual -> Projected."""
    q = ar.linear(r, w.linear("wq_b.weight"), "indexer.q")
    k = layer_norm(
        ar,
        ar.linear(x, w.linear("wk.weight"), "indexer.wk"),
        w.array("k_norm.weight"),
        w.array("k_norm.bias"),
        KEY_NORM_EPS,
        "indexer.k",
    )
    gate = ar.linear(x, w.linear("index_kpool_compress_gate"), "indexer.gate")
    weights = ar.single(
        ar.linear(x, w.linear("weights_proj.weight"), "indexer.weights") * rsqrt(np.asarray(h)), "indexer.weights"
    )
    return Projected(q.reshape(*q.shape[:-1], h, q.shape[-1] // h), k, gate, weights)


def pool(ar: Arithmetic, k: np.ndarray, gate: np.ndarray, ape: np.ndarray) -> np.ndarray:
    """k, gate [.., P*S, p] of complete pools, ape [S, p] -> pool keys [.., P, p].

    Per channel a softmax over the slots of gate + ape weighs the slots' keys.
    """
    S, p = ape.shape
    *B, n, _ = k.shape
    assert k.shape == gate.shape, (k.shape, gate.shape)
    assert n % S == 0, (n, S)
    slots = (*B, n // S, S, p)
    logits = ar.single(gate.reshape(slots) + ape, "indexer.pool_logits")
    share = ar.maybe(ar.single(softmax(logits, axis=-2), "indexer.pool_share"), "indexer.pool_share")
    return ar.maybe(ar.single(total(share * k.reshape(slots), axis=-2), "indexer.pool_keys"), "indexer.pool_keys")


def scores(
    ar: Arithmetic, q: np.ndarray, weights: np.ndarray, pool_keys: np.ndarray, seen: int, index_kpool: int
) -> np.ndarray:
    """q [.., T, h, p], weights [.., T, h], pool_keys [.., P, p], seen tokens before row 0 -> [.., T, P].

    sum_h weights * relu(q . key * p^-0.5), an fp32 point; -inf where the pool's last token is not visible to the query.
    Computed in tiles of queries, so that memory does not grow with queries x pools x heads.
    """
    *B, T, h, p = q.shape
    P = pool_keys.shape[-2]
    assert weights.shape == (*B, T, h), (q.shape, weights.shape)
    scaled = ar.maybe(ar.single(q * rsqrt(np.asarray(p)), "indexer.q_scaled"), "indexer.q_scaled")
    keys = np.swapaxes(pool_keys, -1, -2)
    out = np.empty((*B, T, P))
    step = max(1, TILE // max(1, int(np.prod(B)) * h * P))
    for t in range(0, T, step):
        rows = scaled[..., t : t + step, :, :]
        near = ar.dot(rows.reshape(*B, rows.shape[-3] * h, p), keys, "indexer.qk", out="fp32").reshape(
            *rows.shape[:-1], P
        )
        share = weights[..., t : t + step, :, None] * np.where(near < 0, 0.0, near)
        out[..., t : t + step, :] = ar.single(total(share, axis=-2), "indexer.scores")
    complete = (seen + 1 + np.arange(T)) // index_kpool
    return np.where(np.arange(P) < complete[:, None], out, -np.inf)


def select(scores: np.ndarray, seen: int, index_topk: int, index_kpool: int) -> np.ndarray:
    """scores [.., T, P] (-inf: no candidate), seen tokens before row 0 -> token sets [.., T, W] int32, -1 unused.

    The tokens of the best min(index_topk / S, candidates) pools, then the visible tail that no complete pool covers,
    in ascending order; W = index_topk + S - 1. Equal scores take the lower pool.
    """
    *B, T, P = scores.shape
    S, W = index_kpool, index_topk + index_kpool - 1
    best = np.argsort(-scores, axis=-1, kind="stable")[..., : index_topk // S]
    best = np.where(np.take_along_axis(scores, best, axis=-1) > -np.inf, best, P)
    best = np.sort(best, axis=-1)[..., None]
    tokens = np.where(best < P, best * S + np.arange(S), -1).reshape(*B, T, best.shape[-2] * S)
    visible = (seen + 1 + np.arange(T))[:, None]
    tail = visible // S * S + np.arange(S - 1)
    tail = np.broadcast_to(np.where(tail < visible, tail, -1), (*B, T, S - 1))
    out = np.full((*B, T, W), -1, dtype=np.int32)
    out[..., : tokens.shape[-1] + S - 1] = np.concatenate([tokens, tail], axis=-1)
    order = np.argsort(out < 0, axis=-1, kind="stable")
    return np.take_along_axis(out, order, axis=-1)
