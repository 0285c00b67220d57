"""The indexer: pools, scores with exact ties, budgets around the number of candidates, tails of every length."""

from functools import partial

import numpy as np

from conformance.cases.case import Case, Inputs, draw

h, p = 3, 8


def _pool(P: int, S: int, gate: float = 1.0) -> Inputs:
    return {"k": draw(1, P * S, p), "gate": draw(2, P * S, p, scale=gate), "ape": draw(3, S, p)}


def _scores(T: int, S: int, seen: int = 0) -> Inputs:
    P = (seen + T) // S
    return {"q": draw(4, T, h, p), "weights": draw(5, T, h), "pool_keys": draw(6, P, p), "seen": seen, "S": S}


def _select(T: int, S: int, topk: int, seen: int = 0, values: int = 0) -> Inputs:
    """Scores of `values` distinct levels (0: all different), so that ties are everywhere."""
    P = (seen + T) // S
    scores = draw(7, T, P) if not values else np.random.default_rng(8).integers(0, values, (T, P)).astype(np.float64)
    complete = (seen + 1 + np.arange(T)) // S
    return {"scores": np.where(np.arange(P) < complete[:, None], scores, -np.inf), "seen": seen, "S": S, "topk": topk}


CASES = (
    Case("pool", "slots of four", lambda: _pool(5, 4)),
    Case("pool", "slots of eight", lambda: _pool(3, 8)),
    Case("pool", "one slot takes all", lambda: _pool(4, 4, gate=60.0)),
    Case("pool", "no pool", lambda: _pool(0, 4)),
    Case("scores", "from the first token", lambda: _scores(14, 4)),
    Case("scores", "after other tokens", lambda: _scores(5, 4, seen=21)),
    Case("scores", "one token, complete pool", lambda: _scores(1, 4, seen=31)),
    *(Case("select", f"after {seen} tokens", partial(_select, 3, 4, 16, seen)) for seen in range(14, 26)),
    Case("select", "fewer candidates than the budget", lambda: _select(9, 4, 64)),
    Case("select", "no candidate at all", lambda: _select(3, 4, 16)),
    Case("select", "all scores equal", lambda: _select(40, 4, 16, values=1)),
    Case("select", "two levels", lambda: _select(60, 4, 16, values=2)),
    Case("select", "budget of one pool", lambda: _select(30, 8, 8, values=3)),
    Case("select", "slots of one", lambda: _select(12, 1, 5, values=4)),
)
