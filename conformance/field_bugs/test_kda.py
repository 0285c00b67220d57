"""Faults of the KDA mixer and its state."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.checkpoints.shared import shared
from conformance.field_bugs.sides import SIDES, close

FORMS = pytest.mark.parametrize("w", [0, 16, 64], ids=["recurrent", "chunk16", "chunk64"])


@SIDES
@pytest.mark.parametrize(
    ("A_log", "pre", "expected", "faulty"),
    [(0.0, 0.0, -2.5, -0.693), (1.0, 2.0, -5 / (1 + np.exp(-2 * np.e)), -5.0)],
    ids=["softplus", "clamp"],
)
def test_fb65_decay_is_a_bounded_sigmoid(side, A_log, pre, expected, faulty):
    found = side.decay(np.full((1, 2), pre), np.full(1, A_log), np.zeros(2), -5.0)
    close(side, found, np.full((1, 1, 2), expected), 8)
    assert abs(found[0, 0, 0] - faulty) > 0.02


@SIDES
def test_fb65_bound_multiplies_and_bias_is_per_channel(side):
    pre, A_log, dt_bias = np.array([[0.5, -1.0, 2.0, 0.0]]), np.array([0.3, -0.7]), np.array([0.1, 0.2, -0.3, 0.4])
    expected = -3.0 / (1 + np.exp(-np.exp(A_log).repeat(2) * (pre + dt_bias)))
    close(side, side.decay(pre, A_log, dt_bias, -3.0), expected.reshape(1, 2, 2), 16)


@SIDES
@FORMS
@pytest.mark.parametrize("count", [16, 64])
def test_fb67_near_parallel_keys_stay_finite(side, w, count):
    """Keys u + 0.3 noise, beta 0.97, no decay: powers of A reach 1e9, its inverse stays within 1."""
    generator = np.random.default_rng(67)
    d = 32
    k = generator.standard_normal(d) + 0.3 * generator.standard_normal((count, 1, d))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    q, v = (generator.standard_normal((count, 1, d)) for _ in range(2))
    beta, M = np.full((count, 1), 0.97), np.zeros((1, d, d))
    core, state = side.delta_rule(q, k, v, np.zeros_like(k), beta, M, w)
    expected, size = [], np.float64(0)
    for t in range(count):
        M[0] += np.outer(k[t, 0], 0.97 * (v[t, 0] - M[0].T @ k[t, 0]))
        expected.append(M[0].T @ q[t, 0])
        size += np.linalg.norm(M) + np.linalg.norm(v[t])
    close(side, state, M, 4 * d + 2 * count, size)
    close(side, core[:, 0], np.array(expected), 4 * d + 2 * count, size * np.linalg.norm(q, axis=-1).max())


@SIDES
@FORMS
@pytest.mark.parametrize("cut", [1, 64])
def test_fb68_state_is_keys_by_values_across_chunks(side, w, cut):
    """65 tokens; v and k are different one-hots, so that the state has one entry, off the diagonal."""
    T, d = 65, 8
    q, k, v = np.zeros((T, 1, d)), np.zeros((T, 1, d)), np.zeros((T, 1, d))
    q[:, 0, 2], k[:, 0, 2], v[:, 0, 5] = 1.0, 1.0, 1.0
    g, beta = np.full((T, 1, d), -0.01), np.full((T, 1), 0.5)
    parts, M = [], np.zeros((1, d, d))
    for rows in (slice(0, cut), slice(cut, T)):
        core, M = side.delta_rule(q[rows], k[rows], v[rows], g[rows], beta[rows], M, w)
        parts.append(core)
    entry, outputs = 0.0, []
    for _ in range(T):
        entry = entry * np.exp(-0.01)
        entry += 0.5 * (1 - entry)
        outputs.append(entry)
    expected = np.zeros((1, d, d))
    expected[0, 2, 5] = entry
    close(side, M, expected, 8 * T)
    cores = np.zeros((T, 1, d))
    cores[:, 0, 5] = outputs
    close(side, np.concatenate(parts), cores, 8 * T)


@SIDES
@pytest.mark.parametrize("export", ["nvidia", "libertai"])
@pytest.mark.parametrize("prefill", [[8], [4, 4]], ids=str)
def test_fb75_left_padding_reaches_no_convolution(side, export, prefill):
    """3 pads with a non-zero embedding, then 5 tokens: logits, conv inputs and states of the 5 tokens alone."""
    tokens, pad = np.array([7, 3, 200, 41, 9]), 3
    padded = np.concatenate([np.full(pad, 11), tokens])
    plain, other = side.model(shared(export, "odd")), side.model(shared(export, "odd"))
    first = prefill[0] - pad
    expected = [plain.prefill(tokens[:first])] + ([plain.prefill(tokens[first:])] if len(tokens) > first else [])
    found = [other.prefill(padded[: prefill[0]], pad=pad)]
    found += [other.prefill(padded[prefill[0] :])] if len(prefill) > 1 else []
    assert np.array_equal(np.concatenate(found), np.concatenate(expected))
    for layer in plain.config.kda_layers if side.name == "reference" else plain.config.text.kda_layers:
        assert np.array_equal(side.conv_inputs(other, layer), side.conv_inputs(plain, layer))
        assert np.array_equal(side.matrix(other, layer), side.matrix(plain, layer))
    assert np.array_equal(other.decode(5), plain.decode(5))
