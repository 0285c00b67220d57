"""Kimi delta attention (model.md section 2.2), the recurrent and the chunked (WY) form.

H heads of width d; U = 3*H*d channels, q then k then v, each head by head. bf16 points: the projections, the conv
output, the core output, the gated norm, the output. fp32 points: q/k normalisation, decay, beta, state. Further points:
q and k after normalisation, beta, the norm before its gate. Sums run in the order of `arithmetic.total`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from reference.arithmetic import Arithmetic, exp, rsqrt, sigmoid, silu, total
from reference.ops.norm import unit_rms
from reference.weights import Weights

QK_EPS = 1e-6


class Inputs(NamedTuple):
    """q, k, v, g [.., T, H, d] (q, k normalised, q scaled; g the log decay), beta [.., T, H]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray


def project(ar: Arithmetic, x: np.ndarray, w: Weights) -> np.ndarray:
    """x [.., T, D] -> pre-activation conv inputs [.., T, U], bf16 points."""
    return np.concatenate([ar.linear(x, w.linear(f"{n}_proj.weight"), f"kda.{n}_proj") for n in "qkv"], axis=-1)


def conv(ar: Arithmetic, u: np.ndarray, history: np.ndarray, w: Weights) -> tuple[np.ndarray, np.ndarray]:
    """u [.., T, U], history [.., K-1, U] (oldest first) -> silu(causal depthwise conv) [.., T, U], the next history.

    Weight index K-1 multiplies the current token, index 0 the token K-1 back.
    """
    kernel = np.concatenate([w.array(f"{n}_conv1d.weight")[:, 0, :] for n in "qkv"])
    U, K = kernel.shape
    T = u.shape[-2]
    assert u.shape[-1] == U, (u.shape, kernel.shape)
    assert history.shape[-2:] == (K - 1, U), (history.shape, kernel.shape)
    window = np.concatenate([history, u], axis=-2)
    taps = np.stack([window[..., i : i + T, :] * kernel[:, i] for i in range(K)])
    return ar.store(silu(ar.single(total(taps, axis=0), "kda.conv")), "kda.silu"), window[..., T:, :]


def gates(ar: Arithmetic, x: np.ndarray, w: Weights, H: int, gate_lower_bound: float) -> tuple[np.ndarray, np.ndarray]:
    """x [.., T, D] -> g [.., T, H, d] (A_log per head, dt_bias per channel), beta [.., T, H]."""
    f = ar.linear(ar.linear(x, w.linear("f_a_proj.weight"), "kda.f_a"), w.linear("f_b_proj.weight"), "kda.f_b")
    f = ar.single(f + w.array("dt_bias"), "kda.dt").reshape(*f.shape[:-1], H, -1)
    rate = ar.single(exp(w.array("A_log")), "kda.A")[:, None]
    g = ar.single(gate_lower_bound * ar.single(sigmoid(ar.single(rate * f, "kda.rate")), "kda.gate"), "kda.g")
    beta = ar.single(sigmoid(ar.linear(x, w.linear("b_proj.weight"), "kda.b")), "kda.beta")
    return g, ar.maybe(beta, "kda.beta")


def inputs(ar: Arithmetic, q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray) -> Inputs:
    """Normalises q and k per head and scales q by d^-0.5 (after the normalisation)."""
    d = q.shape[-1]
    assert q.shape == k.shape == v.shape == g.shape, (q.shape, k.shape, v.shape, g.shape)
    assert beta.shape == q.shape[:-1], (beta.shape, q.shape)

    def unit(row: np.ndarray, name: str) -> np.ndarray:
        length = ar.single(np.sqrt(ar.single(total(row * row), f"kda.{name}.square") + QK_EPS), f"kda.{name}.length")
        return ar.maybe(ar.single(row / length[..., None], f"kda.{name}.unit"), f"kda.{name}.unit")

    return Inputs(ar.single(unit(q, "q") * rsqrt(np.asarray(d)), "kda.q.scaled"), unit(k, "k"), v, g, beta)


def recurrent(ar: Arithmetic, x: Inputs, M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """M [.., H, d_k, d_v] -> core output [.., T, H, d] (a bf16 point) and the state after the last token."""
    outputs = []
    decay = ar.single(exp(x.g), "kda.decay")
    for t in range(x.q.shape[-3]):
        q, k, v, beta = (part[..., t, :, :] for part in (x.q, x.k, x.v, x.beta[..., None]))
        M = ar.single(M * decay[..., t, :, :, None], "kda.decayed")
        seen = ar.single(total(M * k[..., None], axis=-2), "kda.seen")
        delta = ar.single(beta * ar.single(v - seen, "kda.miss"), "kda.delta")
        M = ar.single(M + k[..., None] * delta[..., None, :], "kda.state")
        outputs.append(total(M * q[..., None], axis=-2))
    return ar.store(np.stack(outputs, axis=-3), "kda.core"), M


def chunked(ar: Arithmetic, x: Inputs, M: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The same map, `width` tokens at a time; agrees with `recurrent` up to rounding, for any width."""
    heads_first = Inputs(*(np.moveaxis(part, -2, -3) for part in (*x[:4], x.beta[..., None])))
    cores = []
    for first in range(0, x.q.shape[-3], width):
        core, M = _chunk(ar, Inputs(*(part[..., first : first + width, :] for part in heads_first)), M)
        cores.append(np.moveaxis(core, -3, -2))
    return ar.store(np.concatenate(cores, axis=-3), "kda.core"), M


def _chunk(ar: Arithmetic, x: Inputs, M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One chunk of n tokens, heads first: q, k, v, g [.., H, n, d], beta [.., H, n, 1].

    With G_t = g_1 + .. + g_t and A[t, s] = sum_c k_t[c] k_s[c] exp(G_t[c] - G_s[c]) for s < t, the deltas solve
    (I + beta A) delta = beta (v - (exp(G) k) M). U and W are the two right-hand sides, solved by forward substitution,
    so delta = U - W M. Decays are only ever taken from an earlier to a later token: no exponent is positive.
    """
    q, k, v, g, beta = x
    G = ar.single(np.cumsum(g, axis=-2), "kda.G")
    into = ar.single(exp(G), "kda.into")
    U, W, delta, core = np.zeros_like(v), np.zeros_like(k), np.zeros_like(v), np.zeros_like(v)
    for t in range(k.shape[-2]):
        reach = ar.single(exp(G[..., t : t + 1, :] - G[..., : t + 1, :]), "kda.reach") * k[..., : t + 1, :]
        A = ar.single(total(k[..., t : t + 1, :] * reach[..., :t, :]), "kda.A_ts")[..., None]
        B = ar.single(total(q[..., t : t + 1, :] * reach), "kda.B_ts")[..., None]
        v_t, k_t, q_t = v[..., t, :], into[..., t, :] * k[..., t, :], into[..., t, :] * q[..., t, :]
        U[..., t, :] = ar.single(beta[..., t, :] * (v_t - total(A * U[..., :t, :], axis=-2)), "kda.U")
        W[..., t, :] = ar.single(beta[..., t, :] * (k_t - total(A * W[..., :t, :], axis=-2)), "kda.W")
        delta[..., t, :] = ar.single(U[..., t, :] - total(W[..., t, :, None] * M, axis=-2), "kda.delta")
        core[..., t, :] = total(q_t[..., None] * M, axis=-2) + total(B * delta[..., : t + 1, :], axis=-2)
    onto = ar.single(exp(G[..., -1:, :] - G), "kda.onto") * k
    M = into[..., -1, :, None] * M
    for t in range(k.shape[-2]):
        M = M + onto[..., t, :, None] * delta[..., t, None, :]
    return core, ar.single(M, "kda.state")


def output(ar: Arithmetic, core: np.ndarray, x: np.ndarray, w: Weights, eps: float) -> np.ndarray:
    """core [.., T, H, d], mixer input x [.., T, D] -> o_proj(norm(core) * sigmoid(g_b g_a x)) [.., T, D], bf16 points.

    `o_norm` [d] is shared by all heads; norm and gate are one fp32 step, rounded once.
    """
    *B, T, H, d = core.shape
    gate = ar.linear(ar.linear(x, w.linear("g_a_proj.weight"), "kda.g_a"), w.linear("g_b_proj.weight"), "kda.g_b")
    normed = ar.single(w.array("o_norm.weight") * unit_rms(ar, core, eps, "kda.o_norm"), "kda.o_norm")
    gate = ar.single(sigmoid(gate), "kda.output_gate").reshape(*B, T, H, d)
    gated = ar.store(ar.maybe(normed, "kda.o_norm") * gate, "kda.gated")
    return ar.linear(gated.reshape(*B, T, H * d), w.linear("o_proj.weight"), "kda.o_proj")
