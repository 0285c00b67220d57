"""The null distribution of a step: how far correct engines may lie from the exact result, learnt from samples.

`centre` is the step in `exact` arithmetic, `samples` the same step in `stochastic` arithmetic with different seeds. A
few samples give a poor variance per element, so it is shrunk towards a product model (row x column x binary exponent of
the centre) by as much as the data support. Every allowed value below is a quantile of the samples' own statistic, each
sample judged with a variance made without it, extended beyond the observed range by an exponential tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]

_SWEEPS = 4
_WEIGHTS = (4.0, 32.0, 4096.0)
_ROWS_TRIED = 32
_ELEMENT_TAIL = 2e-3
_GROUP_TAIL = 0.1
_TAIL_POINTS = 20
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Spread:
    """Standardised view of one step.

    `sigma` [T,J] is the standard deviation a correct engine's error may have; `noise` [B,T,J] the samples' deviations,
    each divided by a sigma that leaves that sample out; `template` [T,J] is centre / sigma.
    """

    centre: Floats
    sigma: Floats
    noise: Singles
    template: Singles


def measure(centre: Floats, deviations: Floats, floor: Floats | float = 0.0) -> Spread:
    """centre [T,J], deviations [B,T,J] = samples - centre, `floor` a standard deviation added everywhere.

    Deviations are about the centre, not about their mean, so a shift that stochastic rounding itself causes through a
    non-linear step counts as spread. Of a few weights between model and element, the one is taken whose residuals
    have the lightest tail. Raises ValueError for fewer than three samples.
    """
    count = len(deviations)
    if count < 3:
        raise ValueError(f"{count} samples, need at least 3")
    squares = np.square(deviations)
    total = squares.sum(axis=0)
    model = product_model(total / count, centre)
    grid = np.square(np.maximum(np.abs(centre) * 2.0**-25, _TINY)) + np.square(floor)

    def residuals(weight: float, rows: slice) -> Singles:
        rest = (weight * model[rows] + (total[rows] - squares[:, rows])) / (weight + count - 1) + grid[rows]
        return (deviations[:, rows] / np.sqrt(rest)).astype(np.float32)

    sampled = slice(None, None, max(1, len(centre) // _ROWS_TRIED))
    weight = min(_WEIGHTS, key=lambda w: element_quantile(residuals(w, sampled), 1e-9))
    sigma = np.sqrt((weight * model + total) / (weight + count) + grid)
    return Spread(centre, sigma, residuals(weight, slice(None)), (centre / sigma).astype(np.float32))


def product_model(squares: Floats, centre: Floats) -> Floats:
    """Mean squares [T,J] explained by row factor x column factor x factor of the centre's binary exponent.

    Iterative proportional fitting on sums, so zero rows, columns and exponents stay exactly zero. It counts as this
    many samples in `measure`: 4 (hardly trusted), 32 or 4096 (taken as it is).
    """
    exponent = np.frexp(centre)[1]
    bins = np.where(centre == 0, -40, np.clip(exponent, -39, 40)) + 40
    model = np.ones_like(squares)
    for _ in range(_SWEEPS):
        model *= _ratio(squares.sum(axis=1), model.sum(axis=1))[:, None]
        model *= _ratio(squares.sum(axis=0), model.sum(axis=0))[None, :]
        flat = bins.ravel()
        seen = np.bincount(flat, weights=squares.ravel(), minlength=81)
        model *= _ratio(seen, np.bincount(flat, weights=model.ravel(), minlength=81))[bins]
    return model


def tail_quantile(null: npt.NDArray[np.floating], probability: float, fraction: float = _GROUP_TAIL) -> float:
    """Value that a draw like `null` exceeds with `probability`.

    With enough points: mean excess over the upper `fraction` as an exponential tail (lighter true tails, such as the
    normal one, make it cautious). With fewer: mean plus Student's quantile times the standard deviation.
    """
    flat = np.asarray(null, dtype=np.float64).ravel()
    keep = max(int(flat.size * fraction), _TAIL_POINTS)
    if keep * 4 > flat.size:
        deviation = float(flat.std(ddof=1)) * math.sqrt(1.0 + 1.0 / flat.size)
        return float(flat.mean()) + student_quantile(probability, flat.size - 1) * deviation
    upper = np.partition(flat, flat.size - keep - 1)[flat.size - keep - 1 :]
    threshold = float(upper[0])
    excess = float(upper[1:].mean()) - threshold
    return threshold + excess * max(math.log(keep / flat.size / probability), 0.0)


def element_quantile(noise: Singles, probability: float) -> float:
    """`tail_quantile` of |noise| with the tail taken far out, where single elements are judged."""
    return tail_quantile(np.abs(noise), probability, _ELEMENT_TAIL)


def scale_quantile(null: npt.NDArray[np.floating], probability: float) -> float:
    """Two-sided quantile of zero-mean draws: exponential tail, or Student's about zero when there are few."""
    flat = np.abs(np.asarray(null, dtype=np.float64)).ravel()
    if flat.size >= 8 * _TAIL_POINTS:
        return tail_quantile(flat, probability)
    return student_quantile(probability / 2.0, flat.size) * math.sqrt(float(np.mean(flat**2)))


def sum_quantile(partitions: Sequence[npt.NDArray[np.floating]], probability: float) -> float:
    """Two-sided quantile of a zero-mean sum, from its parts [B,G] under several partitions of the same terms.

    The parts of a partition are taken as independent, which gives the variance many degrees of freedom; the partition
    with the largest variance counts. What the samples' own totals show beyond it (parts that move together) is added.
    """
    best, freedom = 0.0, 1
    for parts in partitions:
        variance = float(np.mean(np.sum(np.square(parts, dtype=np.float64), axis=-1)))
        if variance >= best:
            best, freedom = variance, parts.size
    direct = float(np.mean(np.square(partitions[0].sum(axis=-1, dtype=np.float64))))
    return student_quantile(probability / 2.0, freedom) * math.sqrt(max(best, direct))


def centred(parts: npt.NDArray[np.floating]) -> Floats:
    """[B,G] minus each group's mean over the samples, scaled so that the variance stays unbiased."""
    wide = np.asarray(parts, np.float64)
    return (wide - wide.mean(axis=0)) * math.sqrt(len(wide) / (len(wide) - 1))


def student_quantile(probability: float, freedom: int) -> float:
    """t with P(T > t) = probability for Student's distribution, by bisection on its tail integral."""
    low, high = 0.0, 1.0
    while student_tail(high, freedom) > probability:
        low, high = high, high * 2.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if student_tail(middle, freedom) > probability else (low, middle)
    return high


def student_tail(t: float, freedom: int) -> float:
    """P(T > t), t >= 0: half the regularised incomplete beta function I_x(n/2, 1/2) at x = n / (n + t^2)."""
    x = freedom / (freedom + t * t)
    return 0.5 * _incomplete_beta(0.5 * freedom, 0.5, x)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised I_x(a, b) by Lentz's continued fraction, using the symmetry where it converges faster."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1.0) / (a + b + 2.0):
        return front * _beta_fraction(a, b, x) / a
    return 1.0 - front * _beta_fraction(b, a, 1.0 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1.0 / _away(1.0 - (a + b) * x / (a + 1.0))
    result = d
    for m in range(1, 400):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _away(1.0 + step * d)
            c = _away(1.0 + step / c)
            result *= d * c
        if abs(d * c - 1.0) < 1e-14:
            break
    return result


def _away(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300


def _ratio(top: npt.NDArray, bottom: npt.NDArray) -> Floats:
    return np.divide(top, bottom, out=np.zeros(top.shape), where=bottom > 0)
