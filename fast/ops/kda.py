"""Kimi delta attention (model.md 2.2), after the projections. T tokens, H heads, d head width, w chunk width.

Decay, beta, normalised q and k, and the state M [H, d_k, d_v] are fp32. Per token:
    M = diag(exp g) M;   M = M + k outer (beta (v - M^T k));   o = M^T q
`recurrent` is that, `chunked` is the same in WY form: with u_i = beta_i (v_i - (what M recalls for k_i)), a chunk is
(I + diag(beta) A) U = diag(beta) (V - (K e^G) M), a unit triangular system solved by substitution.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

import torch
from torch import Tensor

from fast import scratch

# Widest sub-block: inside one, decays between two tokens come from sums of the g in between, never from e^(+x).
SUB = 8
SEGMENT = 256  # tokens whose chunks are prepared together: bounds the temporaries of `chunked`

# torch loads the linear algebra of GPUs when it is first called, and fails where two threads are the first.
_alone = threading.Lock()
_loaded: set[str] = set()  # device types whose first call has returned


def conv(x: Tensor, weight: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, c], weight [c, 1, n], history [n-1, c] -> (silu(causal depthwise conv) [T, c], history after x).

    weight[.., n-1] meets the current token. Products are added oldest first in fp32, rounded once after the silu.
    """
    (T, c), (c_, one, n) = x.shape, weight.shape
    assert (c_, one, history.shape) == (c, 1, (n - 1, c)), (c, tuple(weight.shape), tuple(history.shape))
    kernel, out = weight.float(), scratch.empty((T, c), x.dtype, x.device)
    for rows in scratch.tiles(T, 16 * c):
        padded, t = torch.cat([history, x[rows]]), rows.stop - rows.start
        total = padded[:t].float() * kernel[:, 0, 0]
        for j in range(1, n):
            total = total + padded[j : j + t].float() * kernel[:, 0, j]
        out[rows] = total * torch.sigmoid(total)
        history = padded[t:]
    return out, history.clone()


def decay(f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """f [T, H*d], A_log [H] fp32, dt_bias [H*d] fp32 -> log decay g [T, H, d] fp32, between lower_bound and 0."""
    T, H = f.shape[0], A_log.shape[0]
    assert dt_bias.shape == f.shape[1:], (tuple(f.shape), tuple(dt_bias.shape))
    rate, bias = torch.exp(A_log)[:, None], dt_bias.view(H, -1)
    gate = scratch.by_rows(lambda x: torch.sigmoid(rate * (x + bias)), f.view(T, H, -1), dtype=torch.float32)
    return gate.mul_(lower_bound)


def unit(x: Tensor) -> Tensor:
    """x [.., d] -> x / sqrt(sum x^2 + 1e-6), fp32."""
    return scratch.by_rows(lambda x: x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6), x, dtype=torch.float32)


def update(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """state [H, d, d]; k, v, g [H, d] and beta [H] of one token, fp32 -> the state after it (a new tensor)."""
    state = state * torch.exp(g)[:, :, None]
    recalled = torch.matmul(k[:, None, :], state)
    return state + k[:, :, None] * (beta[:, None, None] * (v[:, None, :] - recalled))


def _check(q: Tensor, *others: Tensor) -> None:
    (T, H, d), found = q.shape, [tuple(x.shape) for x in others]
    assert found == [(T, H, d)] * 3 + [(T, H), (H, d, d)], (T, H, d, found)


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """q (scaled), k, v, g [T, H, d], beta [T, H], state [H, d, d], all fp32 -> (core [T, H, d], state)."""
    _check(q, k, v, g, beta, state)
    core = []
    for t in range(q.shape[0]):
        state = update(state, k[t], v[t], g[t], beta[t])
        core.append(torch.matmul(q[t, :, None, :], state)[:, 0])
    return torch.stack(core), state


def chunked(w: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """As `recurrent(*inputs)`, in chunks of `w` tokens; the last one is filled up with tokens that change nothing."""
    _check(*inputs)
    q, k, v, g, beta, state = inputs
    (T, H, d), w = q.shape, min(w, -(-len(q) // SUB) * SUB)
    step = max(1, SEGMENT // w) * w
    core = scratch.empty((T, H, d), q.dtype, q.device)
    for t in range(0, T, step):
        out, state = _segment([_split(x[t : t + step], w) for x in (q, k, v, g, beta[:, :, None])], state)
        core[t : t + step] = out.permute(0, 2, 1, 3).reshape(-1, H, d)[: min(step, T - t)]
    return core, state


def _split(x: Tensor, w: int) -> Tensor:
    """[T, H, n] -> [chunks, H, w, n], zero filled."""
    (T, H, n), chunks = x.shape, -(-len(x) // w)
    return torch.cat([x, x.new_zeros(chunks * w - T, H, n)]).view(chunks, w, H, n).transpose(1, 2).contiguous()


def _segment(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """q, k, v, g [N, H, w, d], beta [.., 1] -> (core [N, H, w, d], state). Only the loop over chunks is sequential."""
    q, k, v, g, beta = inputs
    N, _, w, d = q.shape
    A, B = _decayed(q, k, g)
    since = g.cumsum(2).exp()
    until = (g.flip(2).cumsum(2).flip(2) - g).exp()
    eye = torch.eye(w, dtype=g.dtype, device=g.device)
    right = torch.cat([beta * v, beta * k * since], -1)
    solved = _substitute(eye + beta * A, right)
    fresh, recall = solved[..., :d], solved[..., d:]
    asked, kept, whole = q * since, (k * until).transpose(2, 3), since[:, :, -1, :, None]
    core = []
    for n in range(N):
        u = fresh[n] - recall[n] @ state
        core.append(asked[n] @ state + B[n] @ u)
        state = whole[n] * state + kept[n] @ u
    return torch.stack(core), state


def _substitute(matrix: Tensor, right: Tensor) -> Tensor:
    """matrix [.., w, w], unit lower triangular, right [.., w, n] -> X [.., w, n] with matrix X = right. Several threads
    may call it at once, the first time as well."""
    kind = matrix.device.type
    with nullcontext() if kind in _loaded else _alone:
        solved = torch.linalg.solve_triangular(matrix, right, upper=False, unitriangular=True)
    _loaded.add(kind)
    return solved


def _decayed(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """-> A[i, j] = sum_c k_i k_j e^(G_i - G_j) for j < i, and B likewise with q_i for j <= i; [N, H, w, w].

    G is the running sum of g. Every exponent taken is a sum of g, so at most 0: between sub-blocks e^(G_i - G_j) is
    split at the first token of i's sub-block; inside one, the pairs at each distance carry their own running sum.
    """
    N, H, w, _ = q.shape
    sub = next(s for s in range(min(SUB, w), 0, -1) if w % s == 0)
    A, B = q.new_zeros(N, H, w, w), q.new_zeros(N, H, w, w)
    position = torch.arange(w, device=q.device)
    between = torch.zeros_like(g)
    for distance in range(sub):
        later = position[position % sub >= distance]
        earlier = later - distance
        if distance:
            between = between[:, :, : w - distance] + g[:, :, distance:]
        scaled = k[:, :, earlier] * between[:, :, earlier].exp()
        B[:, :, later, earlier] = (q[:, :, later] * scaled).sum(-1)
        if distance:
            A[:, :, later, earlier] = (k[:, :, later] * scaled).sum(-1)
    for start in range(sub, w, sub):
        rows = slice(start, start + sub)
        head = g[:, :, rows].cumsum(2).exp()
        gap = (g[:, :, :start].flip(2).cumsum(2).flip(2) - g[:, :, :start]).exp()
        scaled = (k[:, :, :start] * gap).transpose(2, 3)
        A[:, :, rows, :start] = (k[:, :, rows] * head) @ scaled
        B[:, :, rows, :start] = (q[:, :, rows] * head) @ scaled
    return A, B


def gated_norm(core: Tensor, gate: Tensor, o_norm: Tensor, eps: float) -> Tensor:
    """core, gate [T, H, d], o_norm [d], shared by the heads -> norm(core) * sigmoid(gate), [T, H*d] in storage."""
    T, H, d = core.shape
    assert (gate.shape, o_norm.shape) == ((T, H, d), (d,)), (tuple(gate.shape), tuple(o_norm.shape))
    root, scale = lambda x: torch.sqrt(x.square().mean(-1, keepdim=True) + eps), o_norm.float()
    return scratch.by_rows(lambda x, z: x / root(x) * scale * torch.sigmoid(z), core, gate, dtype=core.dtype).flatten(1)
