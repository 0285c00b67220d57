"""reference.ops.mhc against the equations of model.md section 2.1, one scalar at a time."""

from __future__ import annotations

import math
from typing import TypedDict

import numpy as np
import pytest

from conformance.unit.reference.bounds import Recorder, check, gamma
from reference.arithmetic import Arithmetic, Sliced, get_arithmetic
from reference.ops import mhc

EXACT = Arithmetic()


class Settings(TypedDict):
    rms_norm_eps: float
    hc_eps: float
    hc_sinkhorn_iters: int


def _site(seed: int, C: int, D: int, T: int = 3):
    rng = np.random.default_rng(seed)
    streams = rng.standard_normal((T, C, D))
    fn = rng.standard_normal(((2 + C) * C, C * D)) / math.sqrt(C * D)
    return streams, fn, rng.standard_normal((2 + C) * C), 0.5 + rng.random(3)


def _by_hand(S, fn, base, scale, rms_eps, hc_eps, iters):
    """One token, written out with Python floats."""
    C = len(S)
    flat = S.reshape(-1)
    flat = flat / math.sqrt(math.fsum(v * v for v in flat) / len(flat) + rms_eps)
    m = [math.fsum(a * b for a, b in zip(row, flat, strict=True)) for row in fn]

    def sigmoid(v):
        return 1 / (1 + math.exp(-v))

    pre = [sigmoid(m[i] * scale[0] + base[i]) + hc_eps for i in range(C)]
    post = [2 * sigmoid(m[C + i] * scale[1] + base[C + i]) for i in range(C)]
    comb = np.array([[m[2 * C + C * i + j] * scale[2] + base[2 * C + C * i + j] for j in range(C)] for i in range(C)])
    comb = np.exp(comb - comb.max(1, keepdims=True))
    comb = comb / comb.sum(1, keepdims=True) + hc_eps
    comb = comb / (comb.sum(0, keepdims=True) + hc_eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(1, keepdims=True) + hc_eps)
        comb = comb / (comb.sum(0, keepdims=True) + hc_eps)
    return pre, post, comb


@pytest.mark.parametrize(("C", "D", "iters"), [(1, 8, 3), (3, 10, 5), (4, 16, 20)])
@pytest.mark.parametrize(("rms_eps", "hc_eps"), [(1e-5, 1e-6), (1e-2, 2e-2)])
def test_site_weights_are_the_equations(C, D, iters, rms_eps, hc_eps):
    streams, fn, base, scale = _site(C, C, D)
    eps: Settings = {"rms_norm_eps": rms_eps, "hc_eps": hc_eps, "hc_sinkhorn_iters": iters}
    found = mhc.site_weights(EXACT, streams, Sliced.of_weight(fn), base, scale, **eps)
    # Logits of size |m| <= |fn row| |f| = sqrt(C D) |fn row| carry the error of one dot product and a few roundings;
    # sigmoid and softmax do not enlarge an absolute error, each Sinkhorn division adds C + 2 relative roundings twice.
    size = math.sqrt(C * D) * np.abs(fn).sum(1).max() * scale.max() + np.abs(base).max()
    error = gamma(2 * C * D + 20) * size + gamma(4 * iters * (C + 4))
    for t in range(len(streams)):
        pre, post, comb = _by_hand(streams[t], fn, base, scale, rms_eps, hc_eps, iters)
        check(found.pre[t], pre, error)
        check(found.post[t], post, 2 * error)
        check(found.comb[t], comb, 2 * iters * error)


def test_the_column_division_comes_last():
    """After it columns sum to 1 up to hc_eps; rows do not until the iteration has converged."""
    logits = np.random.default_rng(1).standard_normal((5, 4, 4)) * 3
    comb = mhc.sinkhorn(EXACT, logits, 0.0, 2)
    check(comb.sum(-2), np.ones((5, 4)), gamma(12))
    assert np.abs(comb.sum(-1) - 1).min() > gamma(12)


@pytest.mark.parametrize("iters", [1, 2, 19, 20, 21])
def test_every_iteration_counts(iters):
    logits = np.random.default_rng(2).standard_normal((4, 4)) * 6
    one_more = mhc.sinkhorn(EXACT, logits, 1e-6, iters + 1)
    assert not np.array_equal(mhc.sinkhorn(EXACT, logits, 1e-6, iters), one_more)


def test_collapse_and_combine_by_hand():
    S = np.array([[[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]]])
    assert np.array_equal(mhc.collapse(EXACT, S, np.array([[2.0, 0.5, 0.25]])), [[32.0, 64.0]])
    comb = np.arange(9.0).reshape(1, 3, 3)
    hc = mhc.HC(np.zeros((1, 3)), np.array([[1.0, 0.0, -1.0]]), comb)
    out = np.array([[1000.0, 2000.0]])
    expected = [[[1000 + 0 + 30 + 600, 2000 + 0 + 60 + 1200], [1 + 40 + 700, 2 + 80 + 1400], [-148, -296]]]
    assert np.array_equal(mhc.combine(EXACT, S, out, hc), np.array(expected, float))


def test_only_the_listed_points_may_round_to_bf16():
    """Statistics, logits and Sinkhorn are fp32 in every correct engine."""
    ar = Recorder()
    streams, fn, base, scale = _site(3, 4, 8)
    eps: Settings = {"rms_norm_eps": 1e-5, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20}
    hc = mhc.site_weights(ar, streams, Sliced.of_weight(fn), base, scale, **eps)
    assert ar.points("store") == ar.points("maybe") == set()
    mhc.combine(ar, streams, mhc.collapse(ar, streams, hc.pre), hc)
    assert ar.points("store") == {"hc.collapse", "hc.combine"}
    assert ar.points("maybe") == {"hc.combine.post", "hc.combine.comb", "hc.combine.added", "hc.combine.mixed"}


@pytest.mark.parametrize("name", ["exact", "bf16"])
def test_leading_axes_are_independent(name):
    streams, fn, base, scale = _site(4, 3, 8, T=4)
    ar, w = get_arithmetic(name), Sliced.of_weight(fn)
    eps: Settings = {"rms_norm_eps": 1e-5, "hc_eps": 1e-6, "hc_sinkhorn_iters": 5}
    whole = mhc.site_weights(ar, streams.reshape(2, 2, 3, 8), w, base, scale, **eps)
    flat = mhc.site_weights(ar, streams, w, base, scale, **eps)
    for a, b in zip(whole, flat, strict=True):
        assert np.array_equal(a.reshape(b.shape), b)
