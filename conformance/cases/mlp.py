"""SwiGLU: values on both sides of the limit, at it, and far into the half that has no clamp; mixtures of experts."""

import numpy as np

from conformance.cases.case import Case, Inputs, draw

D, F, E = 8, 6, 5


def _activation(scale: float, limit: float) -> Inputs:
    return {"gate": draw(1, 7, 16, scale=scale), "up": draw(2, 7, 16, scale=scale), "limit": limit}


def _corners() -> Inputs:
    """Every pair of values at, just inside and just outside the limit, zero, and far below."""
    edge = [10.0, -10.0, 9.5, -9.5, 12.0, -15.0, 0.0, -0.0, 500.0, -500.0]
    gate, up = np.meshgrid(edge, edge)
    return {"gate": gate, "up": up, "limit": 10.0}


def _routed(indices: list[list[int]], limit: float = 10.0) -> Inputs:
    T, k = len(indices), len(indices[0])
    made = {
        "x": draw(3, T, D),
        "indices": np.array(indices, np.int32),
        "weights": np.abs(draw(4, T, k)),
        "limit": limit,
    }
    for part, name in enumerate(("gate_proj", "up_proj", "down_proj")):
        made[name] = draw(5 + part, E, *((D, F) if name == "down_proj" else (F, D)))
    return made


CASES = (
    Case("activation", "within the limit", lambda: _activation(1.0, 10.0)),
    Case("activation", "across the limit", lambda: _activation(12.0, 10.0)),
    Case("activation", "a small limit", lambda: _activation(3.0, 1.5)),
    Case("activation", "corners", _corners),
    Case("routed", "spread out", lambda: _routed([[0, 2], [1, 4], [0, 3]])),
    Case("routed", "all tokens to one expert", lambda: _routed([[1, 2], [1, 2], [1, 2], [1, 2]])),
    Case("routed", "one token", lambda: _routed([[0, 1, 2, 3, 4]])),
    Case("routed", "a limit that cuts", lambda: _routed([[0, 4], [3, 2]], limit=0.5)),
)
