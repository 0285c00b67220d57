"""What a comparison found, as plain frozen records: everything a report prints, nothing that has to be recomputed.

Two kinds of verdict exist and are never mixed. `exact` rows compare bytes, codes, scales, indices and counts; `bounded`
rows compare floats against an allowed error that was computed from the step's own inputs. A ratio is always
error / allowed: above 1 the row fails. Every record turns into JSON with `Result.to_json()` and back with
`Result.from_json()`; non-finite floats travel as the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Kind = Literal["exact", "bounded"]
FORMAT = "glm53-result/1"


@dataclass(frozen=True)
class Value:
    """One compared value that failed, or the worst one of a row that passed.

    `index` is the position in the tap or tensor, `token` the position along axis 0 where that axis is time. `expected`
    and `actual` are decimal, the `_hex` fields spell the same values exactly (`float.hex`, or "0x.." for bytes).
    """

    index: tuple[int, ...]
    token: int | None
    expected: float
    actual: float
    expected_hex: str
    actual_hex: str
    error: float
    allowed: float
    ratio: float


@dataclass(frozen=True)
class Check:
    """One test within a row: `statistic` / `allowed` = `ratio`; `where` names the worst row, column or head.

    Names: `element`, `row`, `column`, `head`, `rms` (root mean square of the error), `bias` (signed component of the
    error along the expected value), `scale.head`, `mean.row`, `mean.column`, `mean.rms`, `grid` (values too coarse for
    the precision a tap must have), `finite`, `shape`, `dtype`, `range`, `causal`, `duplicate`, `sentinel`, `count`,
    `tail`, `choice`.
    """

    name: str
    statistic: float
    allowed: float
    ratio: float
    passed: bool
    where: str = ""


@dataclass(frozen=True)
class Flip:
    """One discrete choice that differs from the reference's, and whether the scores' certified error covers it."""

    token: int
    chosen: int
    expected: int
    gap: float
    allowed: float
    excused: bool


@dataclass(frozen=True)
class TapRow:
    """One rebased step: the reference recomputed `tap` from the engine's own `inputs` and compared.

    `order` is the position in dataflow order; the failing row with the lowest order is the first divergence. `layer` is
    None outside the layers. `by_token` holds the largest error / allowed of each token (the heat map's cells), empty
    where the tap has no time axis. `compared` counts elements, `failing` those past their bound. `bias` is the signed
    relative shift <error, expected> / <expected, expected>; `bias_ratio` that over its allowed spread.
    `flips` lists differing discrete choices (all of them, excused or not) and `choices` how many were compared.
    """

    order: int
    tap: str
    layer: int | None
    step: str
    inputs: tuple[str, ...]
    kind: Kind
    passed: bool
    compared: int
    failing: int
    max_ratio: float
    p999_ratio: float
    median_ratio: float
    bias: float
    bias_ratio: float
    relative_l2: float
    relative_l2_allowed: float
    worst_row: int | None
    worst_row_ratio: float
    worst_column: int | None
    worst_column_ratio: float
    checks: tuple[Check, ...]
    by_token: tuple[float, ...]
    values: tuple[Value, ...]
    choices: int = 0
    flips: tuple[Flip, ...] = ()
    message: str = ""


@dataclass(frozen=True)
class TensorRow:
    """One operand the engine bound for one checkpoint weight, compared bit by bit.

    `part` is "codes", "scale", "scale_2" or "value", of several ranks "codes, rank 0" and so on; `rule` says what may
    lie between the file and the engine ("identical", "upcast", "rounded to BF16"); `differing` counts elements.
    """

    name: str
    role: str
    part: str
    layer: int | None
    file_dtype: str
    bound_dtype: str
    shape: tuple[int, ...]
    rule: str
    passed: bool
    compared: int
    differing: int
    values: tuple[Value, ...]
    message: str = ""


@dataclass(frozen=True)
class TokenRow:
    """One position of the logits: free-running engine against free-running reference, then the verdict.

    `kl` is KL(reference || engine) in nats, `max_diff` and `mean_diff` are over log-probabilities. `top1` and
    `engine_top1` are token ids; `margin` is the reference's gap between them (0 when they agree) and
    `margin_allowed` the part of it that the allowed error covers.
    """

    position: int
    token: int
    kl: float
    kl_allowed: float
    max_diff: float
    max_diff_allowed: float
    mean_diff: float
    top1: int
    engine_top1: int
    agree: bool
    margin: float
    margin_allowed: float
    passed: bool


@dataclass(frozen=True)
class Problem:
    """Something wrong with the trace or the run itself rather than with a number.

    `kind`: "metadata", "missing", "extra", "dtype", "shape", "empty", "operand", "ranks". `fatal` problems fail the
    run; the others (an optional tap left out) are coverage.
    """

    kind: str
    name: str
    found: str
    expected: str
    fatal: bool
    message: str


@dataclass(frozen=True)
class Coverage:
    """What was compared out of what could have been. `taps_missing` and `tensors_missing` were not covered."""

    taps_known: int
    taps_compared: int
    taps_missing: tuple[str, ...]
    taps_unknown: tuple[str, ...]
    tensors_known: int
    tensors_compared: int
    tensors_missing: tuple[str, ...]
    elements: int


@dataclass(frozen=True)
class Divergence:
    """The first failure in dataflow order. `line` is the report's first line: `first divergence: TAP ...`."""

    tap: str
    layer: int | None
    step: str
    check: str
    line: str


@dataclass(frozen=True)
class Statistics:
    """How the allowed errors were made: samples of `stochastic` arithmetic, their seed, the false-alarm budget."""

    samples: int
    seed: int
    false_alarm: float
    checks: int


@dataclass(frozen=True)
class Result:
    """One engine, one checkpoint, one schedule. `passed` is False when anything failed or when nothing was compared."""

    engine: str
    engine_version: str
    checkpoint: str
    export: str
    config_sha256: str
    arithmetic: str
    schedule: str
    tokens: tuple[int, ...]
    layers: int
    passed: bool
    first_divergence: Divergence | None
    problems: tuple[Problem, ...]
    tensors: tuple[TensorRow, ...]
    taps: tuple[TapRow, ...]
    logits: tuple[TokenRow, ...]
    coverage: Coverage
    statistics: Statistics
    format: str = FORMAT

    @property
    def choices(self) -> int:
        return sum(row.choices for row in self.taps)

    @property
    def flips(self) -> int:
        return sum(len(row.flips) for row in self.taps)

    @property
    def excused(self) -> int:
        return sum(flip.excused for row in self.taps for flip in row.flips)

    @property
    def top1_agreement(self) -> float:
        """Fraction of positions whose most likely token agrees; nan when no logits were compared."""
        return sum(row.agree for row in self.logits) / len(self.logits) if self.logits else math.nan

    def heat_map(self) -> list[list[float]]:
        """[layers, T] largest error / allowed over the taps of each layer and token; nan where nothing was compared."""
        cells = [[math.nan] * len(self.tokens) for _ in range(self.layers)]
        for row in self.taps:
            if row.layer is None or row.layer >= self.layers:
                continue
            for token, ratio in enumerate(row.by_token):
                old = cells[row.layer][token]
                cells[row.layer][token] = ratio if math.isnan(old) else max(old, ratio)
        return cells

    def failing_taps(self) -> list[TapRow]:
        return sorted((row for row in self.taps if not row.passed), key=lambda row: row.order)

    def to_dict(self) -> dict[str, Any]:
        return _plain(asdict(self))

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Raises ValueError when the text is not a result of this format."""
        try:
            data = json.loads(text)
        except RecursionError:
            raise ValueError("nested too deeply for a result") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"not a {FORMAT} result: format is {found!r}")
        return _build(cls, data)


_LISTS: dict[str, type] = {
    "problems": Problem,
    "tensors": TensorRow,
    "taps": TapRow,
    "logits": TokenRow,
    "checks": Check,
    "values": Value,
    "flips": Flip,
}
_SINGLES: dict[str, type] = {"first_divergence": Divergence, "coverage": Coverage, "statistics": Statistics}
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _build(kind: Any, data: dict[str, Any]) -> Any:
    made: dict[str, Any] = {}
    for field in fields(kind):
        value = data[field.name]
        if field.name in _LISTS and isinstance(value, list):
            value = tuple(_build(_LISTS[field.name], item) for item in value)
        elif field.name in _SINGLES and isinstance(value, dict):
            value = _build(_SINGLES[field.name], value)
        elif isinstance(value, list):
            value = tuple(_number(item, str(field.type)) for item in value)
        else:
            value = _number(value, str(field.type))
        made[field.name] = value
    return kind(**made)


def _number(value: Any, annotation: str) -> Any:
    return _NON_FINITE[value] if isinstance(value, str) and "float" in annotation else value
