"""Delta attention: decays at both ends, keys that nearly coincide, keys that are zero, lengths around a chunk."""

from functools import partial

import numpy as np

from conformance.cases.case import Case, Inputs, draw

H, d = 2, 8


def _sequence(T: int, decay: float | None = None, beta: float | None = None, near: float = 1.0) -> Inputs:
    """q, k, v before normalisation, log decay g, beta and a start state; `near` is how much keys differ."""
    shared = draw(9, 1, H, d) if near < 1 else 0.0
    keys = (shared + near * draw(2, T, H, d)).astype(np.float32).astype(np.float64)
    gates = -np.abs(draw(4, T, H, d)) if decay is None else np.full((T, H, d), decay)
    writes = 1 / (1 + np.exp(-draw(5, T, H))) if beta is None else np.full((T, H), beta)
    return {
        "q": draw(1, T, H, d),
        "k": keys,
        "v": draw(3, T, H, d),
        "g": gates,
        "beta": writes.astype(np.float32).astype(np.float64),
        "state": draw(6, H, d, d),
    }


def _zero_keys() -> Inputs:
    made = _sequence(9)
    made["k"][3:5] = 0.0
    made["q"][4] = 0.0
    return made


def _one_hot() -> Inputs:
    """Key e1, value e2: the state gets one entry, and only a state laid out [key, value] answers the query e1."""
    made = _sequence(2, decay=0.0, beta=1.0)
    made["state"][:] = 0.0
    for name, hot in (("q", 1), ("k", 1), ("v", 2)):
        made[name][:] = 0.0
        made[name][..., hot] = 1.0
    return made


def _conv(T: int, history: float = 1.0) -> Inputs:
    U = 3 * H * d
    return {"u": draw(7, T, U), "history": draw(8, 3, U, scale=history), "weight": draw(10, U, 1, 4)}


def _decay(f: float, lower_bound: float = -5.0) -> Inputs:
    return {
        "f": draw(11, 5, H * d, scale=f),
        "A_log": np.array([-0.5, 1.25]),
        "dt_bias": draw(12, H * d),
        "lower_bound": lower_bound,
    }


CASES = (
    *(Case("rule", f"{T} tokens", partial(_sequence, T)) for T in (1, 2, 15, 16, 17, 63, 64, 65, 130)),
    Case("rule", "no decay", lambda: _sequence(70, decay=0.0)),
    Case("rule", "strongest decay", lambda: _sequence(70, decay=-5.0)),
    Case("rule", "nothing is written", lambda: _sequence(20, beta=0.0)),
    Case("rule", "everything is overwritten", lambda: _sequence(20, beta=1.0)),
    Case("rule", "near-parallel keys", lambda: _sequence(70, decay=-(2.0**-10), beta=0.96875, near=0.05)),
    Case("rule", "zero keys and queries", _zero_keys),
    Case("rule", "one-hot keys show the layout of the state", _one_hot),
    Case("conv", "longer than the kernel", lambda: _conv(9)),
    Case("conv", "one token", lambda: _conv(1)),
    Case("conv", "no history", lambda: _conv(2, history=0.0)),
    Case("decay", "ordinary", lambda: _decay(1.0)),
    Case("decay", "saturated", lambda: _decay(40.0)),
    Case("decay", "another bound", lambda: _decay(1.0, lower_bound=-3.0)),
)
