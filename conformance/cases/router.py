"""Routing: biases that hide the scores, equal scores, groups, and scores so small that their sum is below 1e-20."""

import numpy as np

from conformance.cases.case import Case, Inputs, draw

E = 12


def _choose(bias: float = 0.1, groups: int = 1, kept: int = 1, levels: int = 0, k: int = 3) -> Inputs:
    """Scores and biases are multiples of 1/1024, so that their sums are exact and ties are ties."""

    def grid(values: np.ndarray) -> np.ndarray:
        return np.round(values * 1024) / 1024

    scores = grid(1 / (1 + np.exp(-draw(1, 20, E))))
    if levels:
        scores = np.random.default_rng(2).integers(1, levels + 1, (20, E)) / 8.0
    return {"scores": scores, "bias": grid(draw(3, E, scale=bias)), "k": k, "groups": groups, "kept": kept}


def _weigh(scale: float, normalise: bool = True, factor: float = 2.5) -> Inputs:
    scores = np.abs(draw(4, 6, E)) * scale
    indices = np.sort(np.argsort(draw(5, 6, E), axis=-1)[:, :4], axis=-1).astype(np.int32)
    return {
        "scores": scores.astype(np.float32).astype(np.float64),
        "indices": indices,
        "normalise": normalise,
        "factor": factor,
    }


CASES = (
    Case("choose", "ordinary", _choose),
    Case("choose", "a bias that decides alone", lambda: _choose(bias=50.0)),
    Case("choose", "equal scores, no bias", lambda: _choose(bias=0.0, levels=1)),
    Case("choose", "three levels, no bias", lambda: _choose(bias=0.0, levels=3)),
    Case("choose", "two groups, one kept", lambda: _choose(groups=2)),
    Case("choose", "four groups, two kept", lambda: _choose(groups=4, kept=2)),
    Case("choose", "equal groups", lambda: _choose(bias=0.0, groups=3, kept=2, levels=1)),
    Case("choose", "all experts", lambda: _choose(k=E)),
    Case("weigh", "ordinary", lambda: _weigh(1.0)),
    Case("weigh", "not normalised", lambda: _weigh(1.0, normalise=False)),
    Case("weigh", "a sum near 1e-20", lambda: _weigh(1e-20)),
    Case("weigh", "another factor", lambda: _weigh(1.0, factor=1.0)),
)
