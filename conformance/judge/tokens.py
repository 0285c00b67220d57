"""Logits, token by token: the free-running engine against the free-running reference.

The engine's discrete choices are replayed in the reference, so both take the same path; what is left is rounding error
that has grown through the whole stack. The allowed error is the spread of whole-stack runs in `stochastic` arithmetic
that replay the same choices. The step final.norm -> logits is judged by `rebase` like any other; this table adds the
verdict on what a user sees. Tokens whose path rests on a choice that the trace does not hold and that was within the
errors are shown but not judged.
"""

from __future__ import annotations

import math

import numpy as np

from conformance.judge.rebase import Rebase
from conformance.judge.result import TokenRow
from conformance.judge.spread import Floats, measure
from conformance.trace import Trace

SAMPLES = 4
_AT_ONCE = 1 << 22


def compare(owner: Rebase, trace: Trace) -> tuple[TokenRow, ...]:
    """One row per token. The trace must have passed `trace.validate`."""
    centre, draws, doubt = owner.free_run(trace, SAMPLES)
    tokens, engine = trace.taps["tokens"], trace.taps["logits"].astype(np.float64)
    chance = owner.false_alarm / max(engine.size, 1)
    rows: list[TokenRow] = []
    step = max(1, _AT_ONCE // (centre.shape[1] * (len(draws) + 1)))
    for first in range(0, len(tokens), step):
        part = slice(first, first + step)
        rows += _rows(first, tokens[part], engine[part], centre[part], draws[:, part], doubt[part], chance)
    return tuple(rows)


def log_softmax(logits: Floats) -> Floats:
    """[..,V] -> log-probabilities; NaN where a row holds one."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _rows(
    first: int, tokens: np.ndarray, engine: Floats, centre: Floats, draws: Floats, doubt: np.ndarray, chance: float
) -> list[TokenRow]:
    exact = log_softmax(centre)
    spread = measure(exact, log_softmax(draws) - exact)
    allowed = spread.reach(chance) * spread.sigma
    with np.errstate(invalid="ignore", over="ignore"):
        ours = log_softmax(engine)
        difference = np.abs(ours - exact)
    broken = np.any(~np.isfinite(engine), axis=-1)
    out = []
    for t in range(len(tokens)):
        p = np.exp(exact[t])
        kl_allowed = 0.5 * float(np.sum(p * allowed[t] ** 2))
        if broken[t]:
            out.append(_lost(first + t, int(tokens[t]), int(np.argmax(centre[t])), kl_allowed, float(allowed[t].max())))
            continue
        ratio = difference[t] / allowed[t]
        worst = int(np.argmax(ratio))
        best, chosen = int(np.argmax(centre[t])), int(np.argmax(engine[t]))
        margin = float(centre[t, best] - centre[t, chosen])
        margin_allowed = float(allowed[t, best] + allowed[t, chosen])
        judged = not bool(doubt[t])
        out.append(
            TokenRow(
                position=first + t,
                token=int(tokens[t]),
                kl=max(float(np.sum(p * (exact[t] - ours[t]))), 0.0),
                kl_allowed=kl_allowed if judged else math.inf,
                max_diff=float(difference[t, worst]),
                max_diff_allowed=float(allowed[t, worst]) if judged else math.inf,
                mean_diff=float(difference[t].mean()),
                top1=best,
                engine_top1=chosen,
                agree=best == chosen,
                margin=margin,
                margin_allowed=margin_allowed if judged else math.inf,
                passed=not judged or (float(ratio[worst]) <= 1 and margin <= margin_allowed),
            )
        )
    return out


def _lost(position: int, token: int, best: int, kl_allowed: float, allowed: float) -> TokenRow:
    """A row of logits that is not finite."""
    return TokenRow(
        position, token, math.inf, kl_allowed, math.inf, allowed, math.inf, best, -1, False, math.inf, 0.0, False
    )
