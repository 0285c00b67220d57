"""Feed-forward (model.md section 2.4): the clamped SwiGLU everywhere, and the weighted sum of routed experts.

`g = min(gate_proj x, L)`, `u = clip(up_proj x, -L, L)`, `down_proj(silu(g) * u)`; g has no lower clamp. bf16 points:
every linear output and the product; the stochastic arithmetic also rounds silu(g), the routing weights and each
expert's contribution.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reference.arithmetic import Arithmetic, silu, total
from reference.weights import Weights


def swiglu(ar: Arithmetic, x: np.ndarray, w: Weights, swiglu_limit: float, point: str) -> np.ndarray:
    """x [.., T, D], w: gate_proj [F, D], up_proj [F, D], down_proj [D, F] -> [.., T, D], a bf16 point."""
    gate = ar.linear(x, w.linear("gate_proj.weight"), f"{point}.gate")
    up = ar.linear(x, w.linear("up_proj.weight"), f"{point}.up")
    hidden = activation(ar, gate, up, swiglu_limit, point)
    return ar.linear(hidden, w.linear("down_proj.weight"), f"{point}.down")


def activation(ar: Arithmetic, gate: np.ndarray, up: np.ndarray, swiglu_limit: float, point: str) -> np.ndarray:
    """gate, up [.., F] -> silu(min(gate, L)) * clip(up, -L, L), [.., F], a bf16 point."""
    assert gate.shape == up.shape, (gate.shape, up.shape)
    limit = swiglu_limit
    act = ar.maybe(ar.single(silu(np.minimum(gate, limit)), f"{point}.silu"), f"{point}.silu")
    return ar.store(act * np.minimum(np.maximum(up, -limit), limit), f"{point}.product")


def routed(
    ar: Arithmetic,
    x: np.ndarray,
    indices: np.ndarray,
    weights: np.ndarray,
    expert: Callable[[int], Weights],
    swiglu_limit: float,
) -> np.ndarray:
    """x [.., T, D], indices [.., T, k] (-1: no expert), weights [.., T, k] -> sum_k weights * expert(x), [.., T, D].

    `expert(e)` gives the weights of one routed expert and is called once per expert that any token chose, in
    ascending order. The sum over k runs in slot order as `arithmetic.total`; the result is a bf16 point.
    """
    *B, T, D = x.shape
    k = indices.shape[-1]
    assert indices.shape == weights.shape == (*B, T, k), (x.shape, indices.shape, weights.shape)
    rows = np.broadcast_to(x[..., None, :], (*B, T, k, D))
    outputs = np.zeros((*B, T, k, D))
    for index in np.unique(indices[indices >= 0]):
        hit = indices == index
        outputs[hit] = swiglu(ar, rows[hit], expert(int(index)), swiglu_limit, "expert")
    share = ar.maybe(weights, "routed.weights")
    contributions = ar.maybe(ar.single(share[..., None] * outputs, "routed.contribution"), "routed.contribution")
    return ar.store(total(contributions, axis=-2), "routed.out")


def moe_sum(ar: Arithmetic, routed_out: np.ndarray, shared_out: np.ndarray) -> np.ndarray:
    """routed_out, shared_out [.., T, D] -> their sum, a bf16 point. The shared expert is never scaled."""
    return ar.store(routed_out + shared_out, "mlp.out")
