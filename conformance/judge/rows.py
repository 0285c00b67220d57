"""Rows of exact verdicts: copies that must be equal, discrete choices, steps whose inputs cannot be used."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from conformance.judge.bounds import Step
from conformance.judge.margins import Verdict
from conformance.judge.result import Check, Flip, TapRow, Value
from conformance.judge.spread import Floats

_SHOWN = 8


def exact_row(
    step: Step,
    checks: list[Check],
    compared: int,
    by_token: tuple[float, ...],
    values: tuple[Value, ...] = (),
    choices: int = 0,
    flips: tuple[Flip, ...] = (),
    message: str = "",
) -> TapRow:
    """A row of kind `exact`: it passes when every check does and something was compared."""
    bad = [check for check in checks if not check.passed]
    ratios = np.asarray(by_token if by_token else [check.ratio for check in checks], np.float64)
    if bad and not message:
        message = "; ".join(f"{check.name} {check.statistic:.4g} ({check.where})" for check in bad)
    return step.row(
        kind="exact",
        passed=not bad and compared > 0,
        compared=compared,
        failing=int(sum(check.statistic for check in bad if check.name != "choice"))
        + sum(not flip.excused for flip in flips),
        max_ratio=float(ratios.max(initial=0.0)),
        p999_ratio=_quantile(ratios, 0.999),
        median_ratio=_quantile(ratios, 0.5),
        bias=0.0,
        bias_ratio=0.0,
        relative_l2=0.0,
        relative_l2_allowed=0.0,
        worst_row=int(np.argmax(ratios)) if by_token and ratios.max(initial=0.0) > 0 else None,
        worst_row_ratio=float(ratios.max(initial=0.0)) if by_token else 0.0,
        worst_column=None,
        worst_column_ratio=0.0,
        checks=tuple(checks),
        by_token=by_token,
        values=values,
        choices=choices,
        flips=flips,
        message=message,
    )


def copy_row(step: Step, engine: npt.NDArray, source: Floats) -> TapRow:
    """A tap that must hold the very values of its source (the table's rows, the last layer's output).

    The dtype may differ as long as every value is kept; -0 and 0 are the same value.
    """
    actual = engine.astype(np.float64)
    different = ~(actual == source)
    count = int(different.sum())
    rows = different.reshape(len(different), -1).any(axis=1)
    where = f"row {int(np.argmax(rows))}" if count else ""
    check = Check("equal", float(count), 0.0, math.inf if count else 0.0, count == 0, where)
    values = []
    for index in np.argwhere(different)[:_SHOWN]:
        at = tuple(int(i) for i in index)
        want, got = float(source[at]), float(actual[at])
        values.append(Value(at, at[0], want, got, want.hex(), got.hex(), abs(got - want), 0.0, math.inf))
    by_token = tuple(np.where(rows, math.inf, 0.0).tolist())
    return exact_row(step, [check], engine.size, by_token, tuple(values))


def choice_row(step: Step, engine: npt.NDArray, verdict: Verdict) -> TapRow:
    values = tuple(
        Value(
            (flip.token, flip.chosen), flip.token, float(flip.expected), float(flip.chosen),
            hex(flip.expected), hex(flip.chosen), flip.gap, flip.allowed,
            flip.gap / flip.allowed if flip.allowed > 0 else math.inf,
        )
        for flip in verdict.flips
        if not flip.excused
    )[:_SHOWN]  # fmt: skip
    return exact_row(step, verdict.checks, int(engine.size), verdict.by_token, values, verdict.choices, verdict.flips)


def refused_row(step: Step, engine: npt.NDArray, reason: str) -> TapRow:
    """A step that cannot be recomputed because the engine's own inputs to it are unusable: it fails and says why."""
    check = Check("finite", 1.0, 0.0, math.inf, False, reason)
    return exact_row(step, [check], 0, (math.inf,) * len(engine) if step.time else (), message=reason)


def unfit_row(order: int, tap: str, engine: npt.NDArray, reason: str) -> TapRow:
    """A tap that cannot be compared at all because its shape or dtype is not the format's."""
    layer = int(tap.split(".")[1]) if tap.startswith("layers.") else None
    step = Step(order, tap, layer, f"{tap} as stored", (tap,))
    check = Check(reason.split()[0], 1.0, 0.0, math.inf, False, reason)
    return exact_row(step, [check], 0, (), message=reason)


def _quantile(ratios: Floats, q: float) -> float:
    """Nearest-rank quantile: interpolation between infinities has no value."""
    if ratios.size == 0:
        return 0.0
    return float(np.sort(ratios)[min(int(q * ratios.size), ratios.size - 1)])
