"""reference.ops.kda: recurrent against chunked, against the definition, and each part of it.

The delta rule does not enlarge errors: a step multiplies the state by (1 - beta k k^T) diag(exp(g)), of norm at most 1
for keys of length at most 1. So after T steps the error is at most the sum of what the steps added, each a number of
roundings relative to the norms of state and value met there. `_bounds` adds that up.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from conformance.unit.reference.bounds import Recorder, check, gamma
from reference.arithmetic import Arithmetic, get_arithmetic
from reference.ops import kda
from reference.weights import Weights

EXACT = Arithmetic()
H, d = 3, 16
WIDTHS = (1, 2, 16, 32, 64)
LENGTHS = sorted({n + shift for n in (*WIDTHS, 128) for shift in (-1, 0, 1)} - {0})


def _sequence(seed: int, T: int, *, noise: float = 0.0, decay: float = -1.0, beta: float | None = None):
    """Inputs and a start state. noise > 0: near-parallel keys u + noise * n. `decay` is the middle of g in (-5, 0)."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((T, H, d)) for _ in range(3))
    if noise:
        u = rng.standard_normal((1, H, d))
        k = u / np.linalg.norm(u, axis=-1, keepdims=True) * math.sqrt(d) + noise * k
    g = np.clip(decay * (1 + 0.8 * rng.standard_normal((T, H, d))), -5.0, -1e-4)
    share = 1 / (1 + np.exp(-rng.standard_normal((T, H)))) if beta is None else np.full((T, H), beta)
    return kda.inputs(EXACT, q, k, v, g, share), rng.standard_normal((H, d, d))


def _definition(x: kda.Inputs, M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence with NumPy's own products."""
    out = []
    for q, k, v, g, beta in zip(*x, strict=True):
        M = M * np.exp(g)[..., None]
        delta = beta[:, None] * (v - np.einsum("hkv,hk->hv", M, k))
        M = M + k[..., None] * delta[:, None, :]
        out.append(np.einsum("hkv,hk->hv", M, q))
    return np.stack(out), M


def _bounds(x: kda.Inputs, M: np.ndarray, roundings: int) -> tuple[float, float]:
    """(any element of the core, of the state): `roundings` per step, relative to the norms met on the way."""
    met = float(np.linalg.norm(M))
    for t in range(len(x.q)):
        _, M = _definition(kda.Inputs(*(part[t : t + 1] for part in x)), M)
        met += float(2 * np.linalg.norm(M) + np.linalg.norm(x.v[t]))
    error = gamma(roundings) * met
    return error * float(np.linalg.norm(x.q, axis=-1).max()), error


def _agree(found, expected, x: kda.Inputs, M: np.ndarray, roundings: int) -> None:
    for actual, wanted, bound in zip(found, expected, _bounds(x, M, roundings), strict=True):
        check(actual, wanted, bound)


@pytest.mark.parametrize("T", [1, 2, 17, 65])
def test_recurrent_is_the_definition(T):
    x, M = _sequence(T, T)
    _agree(kda.recurrent(EXACT, x, M), _definition(x, M), x, M, 2 * d + 16)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("T", LENGTHS)
def test_chunked_is_recurrent(T, width):
    x, M = _sequence(1000 + T, T)
    _agree(kda.chunked(EXACT, x, M, width), kda.recurrent(EXACT, x, M), x, M, 4 * d + 2 * min(width, T) + 32)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", [7, 8])
def test_near_parallel_keys(width, seed):
    """beta 0.97, key = u + 0.3 noise, hardly any decay: powers of the triangular matrix grow like binomials there."""
    x, M = _sequence(seed, 128, noise=0.3, decay=-1e-3, beta=0.97)
    cosines = np.einsum("thk,shk->hts", x.k, x.k)
    assert cosines.min() > 0.7
    _agree(kda.chunked(EXACT, x, M, width), kda.recurrent(EXACT, x, M), x, M, 4 * d + 2 * width + 32)


def test_identical_keys():
    x, M = _sequence(9, 65, noise=1e-9, decay=-1e-4, beta=1.0)
    _agree(kda.chunked(EXACT, x, M, 64), kda.recurrent(EXACT, x, M), x, M, 4 * d + 2 * 64 + 32)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_strongest_decay_neither_overflows_nor_divides_by_zero(width):
    """64 tokens at g = -5 make exp(-320): its inverse would not fit fp32, nor exp(+1000) float64."""
    x, M = _sequence(10, 200)
    x = x._replace(g=np.full_like(x.g, -5.0))
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        found = kda.chunked(EXACT, x, M, width)
    _agree(found, kda.recurrent(EXACT, x, M), x, M, 4 * d + 2 * width + 32)


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
@pytest.mark.parametrize("cut", [1, 3, 4, 5, 8])
def test_a_carried_state_is_used_as_it_is(form, cut):
    """Whole against two calls: bit for bit in the recurrent form and where the chunk boundary is the same."""
    x, M = _sequence(11, 9)

    def run(part: kda.Inputs, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if form == "recurrent":
            return kda.recurrent(EXACT, part, state)
        return kda.chunked(EXACT, part, state, 4)

    core, after = run(x, M)
    first, middle = run(kda.Inputs(*(part[:cut] for part in x)), M)
    second, last = run(kda.Inputs(*(part[cut:] for part in x)), middle)
    if form == "recurrent" or cut % 4 == 0:
        assert np.array_equal(np.concatenate([first, second]), core)
        assert np.array_equal(last, after)
    _agree((np.concatenate([first, second]), last), (core, after), x, M, 4 * d + 40)


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_the_start_state_is_not_written_to(form):
    x, M = _sequence(12, 5)
    before = M.copy()
    if form == "recurrent":
        kda.recurrent(EXACT, x, M)
    else:
        kda.chunked(EXACT, x, M, 2)
    assert np.array_equal(M, before)


def test_rows_of_the_state_are_keys_and_columns_are_values():
    """One token, k = e_2, v = 7 e_5, beta 0.5: M[2, 5] = 3.5; q = e_2 reads it into o[5]. Decay acts on rows."""
    k, v, q = np.zeros((1, 1, d)), np.zeros((1, 1, d)), np.zeros((1, 1, d))
    k[..., 2], v[..., 5], q[..., 2] = 1.0, 7.0, 1.0
    x = kda.Inputs(q, k, v, np.zeros((1, 1, d)), np.full((1, 1), 0.5))
    core, M = kda.recurrent(EXACT, x, np.zeros((1, d, d)))
    expected = np.zeros((1, d, d))
    expected[0, 2, 5] = 3.5
    assert np.array_equal(M, expected)
    assert core[0, 0].tolist() == [3.5 if c == 5 else 0.0 for c in range(d)]
    g = np.zeros((1, 1, d))
    g[..., 2] = -1.0
    rest = x._replace(k=np.zeros_like(k), v=np.zeros_like(v), g=g)
    _, decayed = kda.recurrent(EXACT, rest, np.ones((1, d, d)))
    check(decayed[0, 2], np.full(d, math.exp(-1)), gamma(2))
    assert np.array_equal(np.delete(decayed[0], 2, axis=0), np.ones((d - 1, d)))


def test_queries_and_keys_are_normalised_then_queries_scaled():
    rng = np.random.default_rng(13)
    q, k, v, g = (rng.standard_normal((2, H, d)) for _ in range(4))
    q[0, 0] = 0.0
    x = kda.inputs(EXACT, q, k, v, g, np.ones((2, H)))
    for found, raw, scale in ((x.q, q, d**-0.5), (x.k, k, 1.0)):
        expected = raw / np.sqrt((raw * raw).sum(-1, keepdims=True) + 1e-6) * scale
        check(found, expected, gamma(d + 8) * np.abs(expected))
    assert x.v is v


def _conv_weights(rng: np.random.Generator, channels: int, K: int) -> dict[str, np.ndarray]:
    return {f"{name}_conv1d.weight": rng.standard_normal((channels, 1, K)) for name in "qkv"}


def test_conv_index_three_is_the_current_token_and_zero_the_oldest():
    """An impulse comes out as the weights in reverse order of index."""
    w = _conv_weights(np.random.default_rng(14), 2, 4)
    u = np.zeros((6, 6))
    u[1] = 1.0
    out, history = kda.conv(EXACT, u, np.zeros((3, 6)), Weights.of(w))
    kernel = np.concatenate([w[f"{name}_conv1d.weight"][:, 0] for name in "qkv"])
    expected = np.zeros((6, 6))
    for lag in range(4):
        tap = kernel[:, 3 - lag]
        expected[1 + lag] = tap / (1 + np.exp(-tap))
    check(out, expected, gamma(8) * np.abs(expected))
    assert np.array_equal(history, u[3:])


@pytest.mark.parametrize("K", [2, 4])
@pytest.mark.parametrize("cuts", [(1,), (2, 3), (1, 2, 3, 4, 5, 6, 7, 8), ()])
def test_conv_history_makes_chunks_equal_one_call(K, cuts):
    rng = np.random.default_rng(15)
    w = Weights.of(_conv_weights(rng, 4, K))
    u, history = rng.standard_normal((2, 9, 12)), rng.standard_normal((2, K - 1, 12))
    whole, last = kda.conv(EXACT, u, history, w)
    parts = []
    for part in np.split(u, cuts, axis=1):
        out, history = kda.conv(EXACT, part, history, w)
        parts.append(out)
    assert np.array_equal(np.concatenate(parts, axis=1), whole)
    assert np.array_equal(history, last)


def test_gates():
    """Per-head A_log, per-channel dt_bias, the bound as a factor; beta per head."""
    rng = np.random.default_rng(16)
    D, R = 5, 4
    shapes = {"f_a_proj.weight": (R, D), "f_b_proj.weight": (H * d, R), "b_proj.weight": (H, D)}
    w = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    w |= {"A_log": rng.standard_normal(H), "dt_bias": rng.standard_normal(H * d)}
    x = rng.standard_normal((3, D))
    g, beta = kda.gates(EXACT, x, Weights.of(w), H, -3.0)
    f = (x @ w["f_a_proj.weight"].T) @ w["f_b_proj.weight"].T
    size = (np.abs(x) @ np.abs(w["f_a_proj.weight"]).T) @ np.abs(w["f_b_proj.weight"]).T + np.abs(w["dt_bias"])
    z = np.exp(w["A_log"])[:, None] * (f + w["dt_bias"]).reshape(3, H, d)
    # The sigmoid's slope is at most 1/4, the factor 3.
    slack = gamma(D + R + 6) * np.exp(w["A_log"])[:, None] * size.reshape(3, H, d)
    check(g, -3.0 / (1 + np.exp(-z)), 0.75 * slack + gamma(8) * 3)
    b = x @ w["b_proj.weight"].T
    check(beta, 1 / (1 + np.exp(-b)), gamma(D + 2) * (np.abs(x) @ np.abs(w["b_proj.weight"]).T) + gamma(8))
    assert g.min() >= -3.0
    assert g.max() <= 0.0


def test_output_gate_is_outside_the_norm_and_the_norm_is_per_head():
    rng = np.random.default_rng(17)
    D, R = 6, 4
    shapes = {
        "g_a_proj.weight": (R, D),
        "g_b_proj.weight": (H * d, R),
        "o_norm.weight": (d,),
        "o_proj.weight": (D, H * d),
    }
    w = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    core, x = rng.standard_normal((2, H, d)), rng.standard_normal((2, D))
    found = kda.output(EXACT, core, x, Weights.of(w), 1e-2)
    logits = (x @ w["g_a_proj.weight"].T) @ w["g_b_proj.weight"].T
    gate = 1 / (1 + np.exp(-logits.reshape(2, H, d)))
    normed = core / np.sqrt((core * core).mean(-1, keepdims=True) + 1e-2) * w["o_norm.weight"]
    expected = (normed * gate).reshape(2, H * d) @ w["o_proj.weight"].T
    size = (np.abs(x) @ np.abs(w["g_a_proj.weight"]).T) @ np.abs(w["g_b_proj.weight"]).T
    terms = np.abs(normed).reshape(2, H * d) * (1 + size)
    check(found, expected, gamma(H * d + 2 * d + D + R + 16) * (terms @ np.abs(w["o_proj.weight"]).T))


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_state_and_decay_are_never_bf16(form):
    ar = Recorder()
    raw, M = _sequence(18, 5)
    x = kda.inputs(ar, raw.q, raw.k, raw.v, raw.g, raw.beta)
    if form == "recurrent":
        kda.recurrent(ar, x, M)
    else:
        kda.chunked(ar, x, M, 2)
    assert ar.points("store") == {"kda.core"}
    assert ar.points("maybe") == {"kda.q.unit", "kda.k.unit"}
    assert "kda.state" in ar.points("single")


@pytest.mark.parametrize("name", ["exact", "bf16"])
@pytest.mark.parametrize("width", [0, 4])
def test_leading_axes_are_independent(name, width):
    ar = get_arithmetic(name)
    parts = [_sequence(seed, 6) for seed in (20, 21)]
    x = kda.Inputs(*(np.stack(pair) for pair in zip(*(p[0] for p in parts), strict=True)))
    M = np.stack([p[1] for p in parts])

    def run(x: kda.Inputs, M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return kda.chunked(ar, x, M, width) if width else kda.recurrent(ar, x, M)

    whole = run(x, M)
    for i, part in enumerate(parts):
        for together, alone in zip(whole, run(*part), strict=True):
            assert np.array_equal(together[i], alone)


def test_stochastic_samples_on_a_leading_axis_differ_and_stay_near():
    x, M = _sequence(22, 12)
    ar = get_arithmetic("stochastic", seed=3)
    stacked = kda.Inputs(*(np.broadcast_to(part, (8, *part.shape)) for part in x))
    _, states = kda.recurrent(ar, stacked, np.broadcast_to(M, (8, *M.shape)))
    _, true = kda.recurrent(EXACT, x, M)
    assert len({state.tobytes() for state in states}) == 8
    # fp32 points only: a rounding up or down is off by at most 2^-23, twice the 2^-24 of one to nearest.
    check(states, np.broadcast_to(true, states.shape), _bounds(x, M, 2 * d + 16)[1] * 2.0**53 * 2.0**-23)
