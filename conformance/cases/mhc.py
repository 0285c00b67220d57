"""Hyper-connections: gates at rest and saturated, Sinkhorn from flat to nearly a permutation, streams near epsilon."""

import numpy as np

from conformance.cases.case import Case, Inputs, draw

T, D = 4, 16


def _site(C: int = 4, iterations: int = 20, streams: float = 1.0, base: float = 0.8, hc_eps: float = 1e-6) -> Inputs:
    rows = (2 + C) * C
    return {
        "streams": draw(1, T, C, D, scale=streams),
        "fn": draw(2, rows, C * D, scale=0.1),
        "base": draw(3, rows, scale=base),
        "scale": np.array([0.75, 1.125, 1.375]),
        "rms_norm_eps": 1e-5,
        "hc_eps": hc_eps,
        "iterations": iterations,
    }


def _one_hot_streams() -> Inputs:
    """Stream i is 1 in channel i alone and the sublayer gives nothing: the result is comb itself, transposed."""
    C = 4
    streams = np.zeros((T, C, D))
    streams[:, range(C), range(C)] = 1.0
    share = np.arange(1.0, C * C + 1).reshape(C, C) / 32
    return {"streams": streams, "out": np.zeros((T, D)), "post": np.ones((T, C)), "comb": np.tile(share, (T, 1, 1))}


def _combine(C: int) -> Inputs:
    return {
        "streams": draw(4, T, C, D),
        "out": draw(5, T, D),
        "post": np.abs(draw(6, T, C)),
        "comb": np.abs(draw(7, T, C, C)),
    }


CASES = (
    Case("site", "four streams", _site),
    Case("site", "three streams, five iterations", lambda: _site(C=3, iterations=5, hc_eps=0.02)),
    Case("site", "one iteration", lambda: _site(iterations=1)),
    Case("site", "two iterations", lambda: _site(iterations=2)),
    Case("site", "saturated gates, comb near a permutation", lambda: _site(base=12.0)),
    Case("site", "streams at the epsilon of the norm", lambda: _site(streams=3e-3)),
    Case("site", "a large hc_eps", lambda: _site(hc_eps=0.25)),
    Case("site", "one stream", lambda: _site(C=1)),
    Case("combine", "four streams", lambda: _combine(4)),
    Case("combine", "three streams", lambda: _combine(3)),
    Case("combine", "one-hot streams show comb transposed", _one_hot_streams),
)
