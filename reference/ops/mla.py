"""NoPE multi-head latent attention over selected tokens (model.md section 2.3), expanded and absorbed.

H heads, N = qk_nope_head_dim, O = v_head_dim, L = kv_lora_rank. `kv_b_proj` rows, per head: N key rows, then O value
rows. bf16 points: linear outputs, norm outputs, the attention output; fp32 points: attention logits and softmax.
Further points: the softmax weights, and in the absorbed form the absorbed query and the latent output.
"""

from __future__ import annotations

import numpy as np

from reference.arithmetic import Arithmetic, rsqrt, softmax
from reference.ops.norm import rms_norm
from reference.weights import Weights

TILE = 1 << 23


def query_residual(ar: Arithmetic, x: np.ndarray, w: Weights, eps: float) -> np.ndarray:
    """x [.., T, D] -> r = norm(q_a_proj x) [.., T, Q]."""
    r = ar.linear(x, w.linear("q_a_proj.weight"), "mla.q_a")
    return rms_norm(ar, r, w.array("q_a_layernorm.weight"), eps, "mla.q_a_layernorm")


def queries(ar: Arithmetic, r: np.ndarray, w: Weights, H: int) -> np.ndarray:
    """r [.., T, Q] -> q [.., T, H, N]."""
    q = ar.linear(r, w.linear("q_b_proj.weight"), "mla.q_b")
    return q.reshape(*q.shape[:-1], H, q.shape[-1] // H)


def latent(ar: Arithmetic, x: np.ndarray, w: Weights, eps: float) -> np.ndarray:
    """x [.., T, D] -> c = norm(kv_a_proj_with_mqa x) [.., T, L], the only per-token state."""
    c = ar.linear(x, w.linear("kv_a_proj_with_mqa.weight"), "mla.kv_a")
    return rms_norm(ar, c, w.array("kv_a_layernorm.weight"), eps, "mla.kv_a_layernorm")


def attend(ar: Arithmetic, q: np.ndarray, c: np.ndarray, selected: np.ndarray, w: Weights, form: str) -> np.ndarray:
    """q [.., T, H, N], c [.., n, L] all latents so far, selected [.., T, W] rows of c (-1: none) -> [.., T, H, O].

    Only the selected rows are read, wherever in its row of `selected` they stand. A query that selects nothing gives 0.
    form: "expanded" or "absorbed".
    """
    *B, T, _, _ = q.shape
    assert selected.shape[:-1] == (*B, T), (q.shape, selected.shape)
    core = {"expanded": expanded, "absorbed": absorbed}[form]
    used = (selected >= 0).any(axis=tuple(range(selected.ndim - 1)))
    selected = selected[..., used if used.any() else slice(1)].astype(np.int64)
    width = selected.shape[-1]
    step = max(1, TILE // (int(np.prod(B)) * width * max(w.shape("kv_b_proj.weight")[0], c.shape[-1])))
    tiles = [slice(t, t + step) for t in range(0, max(T, 1), step)]
    return np.concatenate([core(ar, q[..., t, :, :], c, selected[..., t, :], w) for t in tiles], axis=-3)


def expanded(ar: Arithmetic, q: np.ndarray, c: np.ndarray, selected: np.ndarray, w: Weights) -> np.ndarray:
    """Keys and values of the selected latents are formed, then ordinary attention. Shapes as in `attend`."""
    *_, H, N = q.shape
    used = np.unique(selected[selected >= 0])
    kv = ar.linear(c[..., used, :], w.linear("kv_b_proj.weight"), "mla.kv_b")
    kv = _gather(kv, np.where(selected < 0, -1, np.searchsorted(used, selected))).reshape(
        *selected.shape, H, kv.shape[-1] // H
    )
    keys, values = np.moveaxis(kv[..., :N], -3, -1), np.moveaxis(kv[..., N:], -3, -2)
    logits = ar.dot(q[..., None, :], keys, "mla.qk", out="fp32")[..., 0, :]
    share = weigh(ar, logits, selected, N)
    return ar.dot(share[..., None, :], values, "mla.core")[..., 0, :]


def absorbed(ar: Arithmetic, q: np.ndarray, c: np.ndarray, selected: np.ndarray, w: Weights) -> np.ndarray:
    """The key half of kv_b_proj goes onto the query, the value half onto the weighted latent. Shapes as in `attend`."""
    *_, H, N = q.shape
    kv_b = w.array("kv_b_proj.weight").reshape(H, -1, c.shape[-1])
    onto = ar.dot(np.moveaxis(q, -2, -3), kv_b[:, :N], "mla.q_absorbed", out="fp32")
    onto = np.moveaxis(ar.maybe(onto, "mla.q_absorbed"), -3, -2)
    rows = _gather(c, selected)
    logits = ar.dot(onto, np.swapaxes(rows, -1, -2), "mla.qk", out="fp32")
    share = weigh(ar, logits, selected, N)
    mixed = ar.dot(share, rows, "mla.mixed", out="fp32")
    mixed = np.moveaxis(ar.maybe(mixed, "mla.mixed"), -3, -2)
    return np.moveaxis(ar.dot(mixed, np.swapaxes(kv_b[:, N:], -1, -2), "mla.core"), -3, -2)


def weigh(ar: Arithmetic, logits: np.ndarray, selected: np.ndarray, N: int) -> np.ndarray:
    """q . k [.., T, H, W] -> softmax over the selected tokens at scale N^-0.5, 0 elsewhere (and everywhere if none)."""
    scaled = ar.single(logits * rsqrt(np.asarray(N)), "mla.scaled")
    share = softmax(np.where((selected >= 0)[..., None, :], scaled, -np.inf))
    return ar.maybe(ar.single(share, "mla.softmax"), "mla.softmax")


def output(ar: Arithmetic, core: np.ndarray, w: Weights) -> np.ndarray:
    """core [.., T, H, O] -> o_proj(concatenated heads) [.., T, D]."""
    flat = core.reshape(*core.shape[:-2], core.shape[-2] * core.shape[-1])
    return ar.linear(flat, w.linear("o_proj.weight"), "mla.o_proj")


def _gather(rows: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """rows [.., n, K], selected [.., T, W] -> [.., T, W, K]; zeros where selected is -1, whatever the rows hold."""
    *B, T, W = selected.shape
    n, K = rows.shape[-2:]
    if n == 0:
        return np.zeros((*B, T, W, K))
    lead = int(np.prod(B))
    first = (np.arange(lead) * n).reshape(*B, 1, 1)
    taken = rows.reshape(lead * n, K)[np.maximum(selected, 0) + first]
    taken[selected < 0] = 0.0
    return taken
