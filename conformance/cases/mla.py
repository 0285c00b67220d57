"""Attention over a selection: none, one or all tokens selected, scores far apart, poison outside the selection."""

import numpy as np

from conformance.cases.case import Case, Inputs, draw

H, N, L, VALUES = 3, 6, 7, 5


def _attend(T: int, n: int, width: int, scale: float = 1.0, fill: int | None = None) -> Inputs:
    """Each query selects up to `width` of `n` latents, ascending, then -1; `fill`: exactly so many."""
    generator = np.random.default_rng(1)
    selected = np.full((T, width), -1)
    for row in selected:
        count = generator.integers(1, min(width, n) + 1) if fill is None else fill
        row[:count] = np.sort(generator.choice(n, count, replace=False))
    return {
        "q": draw(2, T, H, N, scale=scale),
        "c": draw(3, n, L),
        "selected": selected,
        "kv_b": draw(4, H * (N + VALUES), L, scale=0.4),
        "values": VALUES,
    }


def _poisoned() -> Inputs:
    made = _attend(4, 12, 5)
    used = np.unique(made["selected"])
    made["c"][[row for row in range(12) if row not in used]] = 2.0**100
    return made


CASES = (
    Case("attend", "sparse", lambda: _attend(6, 20, 7)),
    Case("attend", "one token each", lambda: _attend(5, 9, 4, fill=1)),
    Case("attend", "every token", lambda: _attend(5, 8, 8, fill=8)),
    Case("attend", "nothing selected gives zero", lambda: _attend(3, 6, 4, fill=0)),
    Case("attend", "scores far apart", lambda: _attend(5, 16, 9, scale=60.0)),
    Case("attend", "huge latents outside the selection", _poisoned),
)
