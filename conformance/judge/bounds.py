"""One rebased step, engine against reference: every test whose allowed value is computed from the step's own input.

A tap is laid out as [T, J]: rows are tokens (or whatever its first axis is), columns all other axes, and `heads` groups
columns where the tap has three axes. The tests look at single elements, at the size of the error per row, column, head
and whole, and at its systematic part: its component along the expected values (a scale error) and its mean (an offset).
The last two see shifts far below the element bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from conformance.judge.result import Check, Flip, TapRow, Value
from conformance.judge.spread import (
    Floats,
    Singles,
    Spread,
    centred,
    measure,
    scale_quantile,
    size_quantile,
    sum_quantile,
    tail_quantile,
)

FAMILIES = 15
_SIGNIFICAND = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
_LOWEST = {"bfloat16": -133, "float16": -24, "float32": -149, "float64": -1074}
_FINE_BITS = 13
_SHOWN = 8
_FEW_ROWS = 32
_TINY, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_FAR = 2.0**40


@dataclass(frozen=True)
class Step:
    """What is compared: `tap`, recomputed from `inputs`. `time` says whether axis 0 is the token axis.

    `length` is the longest contraction in the step: an fp32 accumulator that truncates may shift a sum by
    `length` * 2^-24 of its value. `widen` multiplies the samples' deviations, for steps in fp32 only, where the samples
    hold one rounding per dot product and an engine has one per addition (sqrt(length)). `fine` marks a tap that must
    carry fp32 precision. `slope` and `kinked`: see `spread.measure`; `slope` is a function of the expected values.
    `coarse` marks a tap that rests on values rounded to bf16 right before it, whatever it is stored as.
    """

    order: int
    tap: str
    layer: int | None
    name: str
    inputs: tuple[str, ...]
    time: bool = True
    length: int = 1
    widen: float = 1.0
    fine: bool = False
    slope: Callable[[Floats], Floats] | None = None
    kinked: bool = False
    coarse: bool = False

    def row(self, **found: Any) -> TapRow:
        """The row of a report on this step."""
        return TapRow(order=self.order, tap=self.tap, layer=self.layer, step=self.name, inputs=self.inputs, **found)


@dataclass(frozen=True)
class Layout:
    """How a tap becomes [rows, columns]: `shape` is the tap's, `swap` puts axis 1 before axis 0 (a state's heads)."""

    shape: tuple[int, ...]
    flat: tuple[int, int]
    heads: int
    swap: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], time: bool) -> Layout:
        """Axis 1 of a tap with three axes is its heads; a state, without time, has them on axis 0."""
        swap = len(shape) == 3 and not time
        rows = shape[1] if swap else shape[0]
        heads = shape[0 if swap else 1] if len(shape) == 3 else 1
        return cls(shape, (rows, math.prod(shape) // max(rows, 1)), heads, swap)

    def spread(self, array: npt.NDArray) -> npt.NDArray:
        """[.., *shape] -> [.., rows, columns]."""
        lead = array.ndim - len(self.shape)
        array = np.swapaxes(array, lead, lead + 1) if self.swap else array
        return array.reshape(*array.shape[:lead], *self.flat)

    def index(self, flat: int) -> tuple[int, ...]:
        """Position in the tap of a flat position in the layout."""
        shape = (self.shape[1], self.shape[0], *self.shape[2:]) if self.swap else self.shape
        at = tuple(int(i) for i in np.unravel_index(flat, shape))
        return (at[1], at[0], *at[2:]) if self.swap else at


@dataclass(frozen=True)
class Budget:
    """`probability` of a false alarm per family of tests and tap; `clumping` >= 1 widens sums over tokens.

    Equal tokens meet equal rounding errors, so T tokens are worth fewer independent ones: `clumping` is
    sqrt(sum n_c^2 / T) over the counts n_c of each distinct token.
    """

    probability: float
    clumping: float = 1.0

    @classmethod
    def of(cls, run: float, rows: int, tokens: npt.NDArray[np.integer]) -> Budget:
        """Splits the run's false-alarm probability evenly over `rows` taps and their families of tests."""
        counts = np.unique(tokens, return_counts=True)[1].astype(np.float64)
        clumping = math.sqrt(float(np.sum(counts**2)) / max(len(tokens), 1))
        return cls(run / max(rows * FAMILIES, 1), max(clumping, 1.0))


def half_ulp(values: Floats, dtype: str) -> Floats:
    """Largest rounding error of storing `values` in `dtype` to nearest, same shape, float64."""
    exponent = np.maximum(np.frexp(np.abs(values))[1] - _SIGNIFICAND[dtype], _LOWEST[dtype])
    return np.ldexp(0.5, exponent)


def on_grid(values: npt.NDArray[np.floating], bits: int) -> npt.NDArray[np.bool_]:
    """True where the fp32 representation of a value has its lowest `bits` bits zero (16: bf16, 13: TF32 or fp16)."""
    with np.errstate(over="ignore"):
        pattern = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return (pattern & np.uint32((1 << bits) - 1)) == 0


def stored_as(engine: npt.NDArray) -> str:
    """The coarsest format that holds every value of a tap: engines may upcast bf16 results to write them."""
    name = str(engine.dtype)
    if name in ("float32", "float64") and bool(np.all(on_grid(engine, 16) | ~np.isfinite(engine))):
        return "bfloat16"
    return name


def store(values: Floats, dtype: str) -> Floats:
    """`values` rounded to nearest even in `dtype`, back as float64."""
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    if dtype not in kinds:
        return values
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32) if dtype == "bfloat16" else values
        return narrow.astype(kinds[dtype]).astype(np.float64)


def judge(
    step: Step,
    engine: npt.NDArray,
    centre: Floats,
    samples: Floats,
    budget: Budget,
    *,
    valid: npt.NDArray[np.bool_] | None = None,
    choices: int = 0,
    flips: tuple[Flip, ...] = (),
) -> TapRow:
    """engine and centre [T,...], samples [B,T,...]; `valid` (broadcastable to centre) marks what is compared.

    The samples are first stored the way the engine stores the tap, and no element is taken to vary less than the last
    rounding to nearest makes it on average. Raises ValueError when shapes differ: the caller
    checks the trace against the config first.
    """
    if engine.shape != centre.shape or samples.shape[1:] != centre.shape:
        raise ValueError(f"{step.tap}: engine {engine.shape}, centre {centre.shape}, samples {samples.shape}")
    layout = Layout.of(centre.shape, step.time)
    shape, heads, kind = layout.flat, layout.heads, stored_as(engine)
    actual, expected = layout.spread(engine.astype(np.float64)), layout.spread(centre)
    used = np.ones(shape, bool) if valid is None else layout.spread(np.broadcast_to(valid, centre.shape))
    broken = used & ~((np.abs(actual) <= _LARGEST) & np.isfinite(expected))
    fit = used & ~broken
    drawn = layout.spread(samples)
    with np.errstate(invalid="ignore"):
        drawn = drawn if step.widen == 1.0 else expected + (drawn - expected) * step.widen
        deviations = np.where(fit, store(drawn, kind) - expected, 0.0)
        error = np.where(fit, actual - expected, 0.0)
    expected_fit = np.where(fit, expected, 0.0)
    slope = None if step.slope is None else step.slope(expected_fit)
    rounding = half_ulp(expected_fit, kind)
    floor = np.maximum(rounding, half_ulp(expected_fit, "bfloat16")) if step.coarse else rounding
    spread = measure(expected_fit, deviations, slope=slope, kinked=step.kinked, floor=floor / math.sqrt(3.0))
    most = _most(layout, step, len(drawn))
    spread = replace(spread, freedom=min(spread.freedom, most))
    drift = step.length * 2.0**-24
    checks = _Tests(step, spread, error, fit, heads, drift, budget, most).run()

    allowed = (
        spread.reach(budget.probability / max(shape[0] * shape[1], 1)) * spread.sigma
        + rounding
        + drift * np.abs(expected_fit)
    )
    ratio = np.where(broken, np.inf, np.divide(np.abs(error), allowed, out=np.zeros(shape), where=error != 0))
    failing = int(np.count_nonzero(ratio > 1))
    checks.insert(0, _element_check(ratio, allowed, error, layout))
    if broken.any():
        checks.insert(0, Check("finite", float(broken.sum()), 0.0, math.inf, False, "NaN, infinity or past float32"))
    if step.fine:
        checks.append(_grid_check(actual, expected, drawn, fit, budget))
    return _row(step, checks, ratio, allowed, actual, expected, error, fit, spread, failing, layout, choices, flips)


def _most(layout: Layout, step: Step, copies: int) -> int:
    """Cap on how many independent draws any pool of residuals counts as.

    Values of one row share what was rounded before them, so a tap of few rows is worth one draw per sample and four
    rows; a state rests on few roundings whatever its size, and is worth one draw per sample.
    """
    rows = layout.flat[0]
    if layout.heads > 1 and not step.time:
        return copies
    return copies * max(1, rows // 4) if rows < _FEW_ROWS else copies * rows * layout.flat[1]


@dataclass(frozen=True)
class _Tests:
    """The families of aggregate tests on standardised residuals z = error / sigma, each against the samples' own."""

    step: Step
    spread: Spread
    error: Floats
    fit: npt.NDArray[np.bool_]
    heads: int
    drift: float
    budget: Budget
    most: int

    def run(self) -> list[Check]:
        # Beyond any bound, and small enough that squares and their sums stay in float32.
        z = np.clip(self.error / self.spread.sigma, -_FAR, _FAR).astype(np.float32)
        null, template = self.spread.noise, self.spread.template * self.fit
        axes = ["row", "column"] + ["head"] * (self.heads > 1)
        fit = np.asarray(self.fit, np.float32)
        out, parts = [], {}
        products = z**2, null**2, z * template, null * template
        for axis in axes:
            clumping = 1.0 if axis == "row" else self.clumping
            count, norm = self._sum(fit, axis), np.sqrt(self._sum(template**2, axis))
            drift = self.drift * norm
            square_z, square_null, along_z, along_null = (self._sum(x, axis) for x in products)
            parts[axis] = square_null, along_null
            scale_z, scale_null = _quotient(along_z, norm), _quotient(along_null, norm)
            out.append(self._size(axis, square_z, square_null, count, drift, clumping))
            out.append(self._shift("scale", axis, scale_z, scale_null, drift, clumping))
            if axis == "head":
                continue
            lean = self.drift * _quotient(self._sum(np.abs(template), axis), np.sqrt(count))
            offset_z, offset_null = (_quotient(self._sum(x * fit, axis), np.sqrt(count)) for x in (z, null))
            out.append(self._shift("mean", axis, offset_z, offset_null, lean, clumping))
            if axis == "column" and not self.few:
                out.append(self._crowd("mean.rms", offset_z, offset_null, lean))
                out.append(self._crowd("scale.rms", scale_z, scale_null, drift))
        return [*out, self._whole_size(z, parts), self._whole_shift(z, template, parts)]

    @property
    def clumping(self) -> float:
        return self.budget.clumping if self.step.time else 1.0

    @property
    def few(self) -> bool:
        """Whether this is a state: its columns say nothing together that its heads do not."""
        return self.heads > 1 and not self.step.time

    def _sum(self, x: Singles, axis: str) -> Singles:
        """Sums [..,T,J] over everything but the groups of `axis`: -> [..,G]."""
        if axis == "row":
            return x.sum(axis=-1)
        columns = x.sum(axis=-2)
        if axis == "column":
            return columns
        return self._heads(columns)

    def _heads(self, columns: npt.NDArray) -> npt.NDArray:
        """[..,J] -> sums of each head's columns [..,H]; of all columns where there are no heads."""
        return columns.reshape(*columns.shape[:-1], self.heads, -1).sum(axis=-1)

    def _size(
        self, axis: str, square: Singles, null: Singles, count: Singles, drift: npt.NDArray, clumping: float
    ) -> Check:
        """Root mean square of z per group; the drift adds in quadrature."""
        actual, drawn = np.sqrt(_quotient(square, count)), np.sqrt(_quotient(null, count))
        used = count > 0
        quantile = tail_quantile(drawn[..., used], self._share(used), self._freedom(axis)) if used.any() else 0.0
        middle = float(drawn[..., used].mean()) if used.any() else 0.0
        allowed = np.sqrt((middle + (quantile - middle) * clumping) ** 2 + _quotient(drift**2, count))
        return _worst(axis, axis, actual, allowed)

    def _shift(
        self, name: str, axis: str, z: npt.NDArray, null: npt.NDArray, drift: npt.NDArray, clumping: float
    ) -> Check:
        used = np.any(null != 0, axis=0) | (z != 0)
        quantile = scale_quantile(null[..., used], self._share(used), self._freedom(axis)) if used.any() else 0.0
        return _worst(f"{name}.{axis}", axis, np.abs(z), quantile * clumping + drift)

    def _crowd(self, name: str, z: npt.NDArray, null: npt.NDArray, drift: npt.NDArray) -> Check:
        """Mean square over columns of a per-column shift: many small shifts that no single column shows."""
        squares = np.square(null, dtype=np.float64)
        middle = float(squares.mean())
        shares = centred(squares) / squares.shape[-1]
        quantile = size_quantile([shares, self._heads(shares)], middle, self.budget.probability, self.most)
        allowed = math.sqrt(quantile) * self.clumping + math.sqrt(float(np.mean(drift**2)))
        return _worst(name, "", np.sqrt(np.mean(z**2, keepdims=True)), np.asarray([allowed]))

    def _whole_size(self, z: Singles, parts: dict[str, tuple[Singles, Singles]]) -> Check:
        """Root mean square of z over the whole tap."""
        count = max(float(self.fit.sum()), 1.0)
        middle = float(np.mean(parts["row"][0].sum(axis=-1))) / count
        spread = [centred(square) / count for square, _ in parts.values()]
        beyond = (size_quantile(spread, middle, self.budget.probability, self.most) - middle) * self.clumping
        drift = self.drift * np.sqrt(float(np.sum((self.spread.template * self.fit) ** 2)) / count)
        allowed = math.sqrt(middle + beyond + drift**2)
        return _worst("rms", "", np.asarray([math.sqrt(float(np.sum(z**2)) / count)]), np.asarray([allowed]))

    def _whole_shift(self, z: Singles, template: Singles, parts: dict[str, tuple[Singles, Singles]]) -> Check:
        """Component of the error along the expected values over the whole tap."""
        norm = max(math.sqrt(float(np.sum(template**2))), _TINY)
        quantile = sum_quantile([along / norm for _, along in parts.values()], self.budget.probability, self.most)
        allowed = quantile * self.clumping + self.drift * norm
        return _worst("bias", "", np.asarray([abs(float(np.sum(z * template))) / norm]), np.asarray([allowed]))

    def _freedom(self, axis: str) -> int:
        """How many independent draws the groups of an axis are worth: all of a head may move together."""
        copies, rows, columns = self.spread.noise.shape
        groups = rows if axis == "row" else self.heads if self.heads > 1 else columns
        return min(copies * groups, self.most)

    def _share(self, used: npt.NDArray[np.bool_]) -> float:
        return self.budget.probability / max(int(used.sum()), 1)


def _quotient(top: npt.NDArray, bottom: npt.NDArray) -> npt.NDArray:
    bottom = np.broadcast_to(bottom, top.shape)
    return np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0)


def _worst(name: str, axis: str, statistic: npt.NDArray, allowed: npt.NDArray) -> Check:
    """The group with the largest statistic / allowed; a statistic of exactly zero passes whatever is allowed."""
    statistic = np.asarray(statistic, np.float64)
    allowed = np.broadcast_to(np.asarray(allowed, np.float64), statistic.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(statistic == 0, 0.0, statistic / allowed)
    at = int(np.argmax(ratio))
    value = float(ratio[at])
    return Check(name, float(statistic[at]), float(allowed[at]), value, value <= 1, f"{axis} {at}" if axis else "")


def _element_check(ratio: Floats, allowed: Floats, error: Floats, layout: Layout) -> Check:
    if ratio.size == 0:
        return Check("element", 0.0, 0.0, math.inf, False, "nothing compared")
    at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    index = layout.index(int(np.argmax(ratio)))
    value = float(ratio[at])
    return Check("element", abs(float(error[at])), float(allowed[at]), value, value <= 1, f"{list(index)}")


def _grid_check(actual: Floats, expected: Floats, drawn: Floats, fit: npt.NDArray[np.bool_], budget: Budget) -> Check:
    """Values with 13 zero low bits although the exact ones have none: chance makes as many as the samples have.

    The allowed count is Bernstein's bound for that many rare events, plus one value in sixteen: values that share a
    factor come in groups, and a tap kept in a coarse format has all of them so.
    """
    telling = fit & ~on_grid(expected, _FINE_BITS) & (np.abs(expected) > 2.0**-100)
    total = int(np.count_nonzero(telling))
    count = int(np.count_nonzero(telling & on_grid(actual, _FINE_BITS)))
    seen = np.count_nonzero(on_grid(drawn, _FINE_BITS) & telling) / len(drawn)
    mean = max(total * 2.0**-_FINE_BITS, float(seen))
    log = -math.log(budget.probability)
    allowed = mean + log / 3.0 + math.sqrt(2.0 * mean * log + (log / 3.0) ** 2) + total / 16
    where = f"{count} of {total} values have at most 11 significant bits; fp32 is required"
    return Check("grid", float(count), allowed, count / allowed, count <= allowed, where if count > allowed else "")


def make_value(
    index: tuple[int, ...],
    token: int | None,
    expected: float,
    actual: float,
    error: float,
    allowed: float,
    ratio: float,
) -> Value:
    return Value(index, token, expected, actual, _hex(expected), _hex(actual), error, allowed, ratio)


def _hex(value: float) -> str:
    return float(value).hex()


def _values(
    step: Step, ratio: Floats, allowed: Floats, actual: Floats, expected: Floats, layout: Layout, failing: int
) -> tuple[Value, ...]:
    """The worst failing elements, or the single worst one of a step without any."""
    count = min(max(failing, 1), _SHOWN, ratio.size)
    order = np.argsort(ratio, axis=None)[::-1][:count]
    out = []
    for flat in order:
        at = np.unravel_index(int(flat), ratio.shape)
        index = layout.index(int(flat))
        want, got, limit = float(expected[at]), float(actual[at]), float(allowed[at])
        token = index[0] if step.time else None
        out.append(make_value(index, token, want, got, abs(got - want), limit, float(ratio[at])))
    return tuple(out)


def _row(
    step: Step,
    checks: list[Check],
    ratio: Floats,
    allowed: Floats,
    actual: Floats,
    expected: Floats,
    error: Floats,
    fit: npt.NDArray[np.bool_],
    spread: Spread,
    failing: int,
    layout: Layout,
    choices: int,
    flips: tuple[Flip, ...],
) -> TapRow:
    named = {check.name: check for check in checks}
    size = max(float(np.sum(np.where(fit, expected, 0.0) ** 2)), 5e-324)
    compared = int(fit.sum()) + sum(check.name == "finite" for check in checks)
    seen = np.sort(ratio[fit]) if fit.any() else np.array([math.inf])
    bad = [check for check in checks if not check.passed]
    rms = named["rms"]
    row, column = named["row"], named["column"]
    message = ""
    if bad:
        worst = bad[0]
        message = f"{worst.name} {worst.statistic:.4g}, allowed {worst.allowed:.4g} ({worst.ratio:.3g} x) {worst.where}"
    return step.row(
        kind="bounded",
        passed=not bad and compared > 0,
        compared=compared,
        failing=failing,
        max_ratio=float(ratio.max(initial=0.0)),
        p999_ratio=float(seen[int(0.999 * (len(seen) - 1))]),
        median_ratio=float(seen[len(seen) // 2]),
        bias=float(np.sum(error * np.where(fit, expected, 0.0))) / size,
        bias_ratio=named["bias"].ratio,
        relative_l2=math.sqrt(float(np.sum(error**2)) / size),
        relative_l2_allowed=math.sqrt(float(np.sum(np.where(fit, spread.sigma, 0.0) ** 2)) / size) * rms.allowed,
        worst_row=_position(row),
        worst_row_ratio=row.ratio,
        worst_column=_position(column),
        worst_column_ratio=column.ratio,
        checks=tuple(checks),
        by_token=tuple(float(x) for x in ratio.max(axis=1)) if step.time else (),
        values=_values(step, ratio, allowed, actual, expected, layout, failing),
        choices=choices,
        flips=flips,
        message=message,
    )


def _position(check: Check) -> int | None:
    return int(check.where.split()[-1]) if check.where else None
