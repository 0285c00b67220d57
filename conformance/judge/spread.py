"""The null distribution of a step: how far correct engines may lie from the exact result, learnt from samples.

`centre` is the step in `exact` arithmetic, `samples` the same step in `stochastic` arithmetic with different seeds. A
few samples give a poor variance per element, so it is shrunk towards a product model (row x column x binary exponent of
the centre) by as much as the data support. Every allowed value below is a quantile of the samples' own statistic, each
sample judged with a variance made without it, extended beyond the observed range by an exponential tail.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]

_SWEEPS = 4
_PRIOR = 64.0
_CHANCE = 2.0
_WEIGHTS = (4, 32, 4096)
_ROWS_TRIED = 32
_ELEMENT_TAIL = 2e-3
_TAIL_POINTS = 20
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Spread:
    """Standardised view of one step.

    `sigma` [T,J] is the standard deviation a correct engine's error may have; `noise` [B,T,J] the samples' deviations,
    each divided by a sigma that leaves that sample out; `template` [T,J] is centre / sigma. `freedom` is how many
    values stand behind each sigma.
    """

    centre: Floats
    sigma: Floats
    noise: Singles
    template: Singles
    freedom: int

    def reach(self, probability: float) -> float:
        """How many sigma a single element may lie off, with `probability` for each to lie further."""
        return _element_quantile(self.noise, probability, self.freedom)


def measure(
    centre: Floats,
    deviations: Floats,
    *,
    slope: Floats | None = None,
    kinked: bool = False,
    floor: Floats | float = 0.0,
) -> Spread:
    """centre [T,J], deviations [B,T,J] = samples - centre; no standard deviation is taken to be below `floor`.

    `slope` [T,J] is how strongly each element reacts to what was rounded before it; the model explains the deviations
    divided by it. `kinked` marks a step whose elements may show no deviation in any sample for want of luck (behind a
    ReLU, or all resting on one rounding): there the model is taken as it is, exponents apart.

    Deviations are about the centre, not about their mean, so a shift that stochastic rounding itself causes through a
    non-linear step counts as spread. Of a few weights between model and element, the one is taken whose residuals
    have the lightest tail. Raises ValueError for fewer than three samples.
    """
    count = len(deviations)
    if count < 3:
        raise ValueError(f"{count} samples, need at least 3")
    squares = np.square(deviations)
    total = squares.sum(axis=0)
    react = np.ones_like(centre) if slope is None else np.square(np.maximum(slope, np.abs(centre) * 2.0**-24 + _TINY))
    model = product_model(total / count / react, np.ones_like(centre) if kinked else centre, count) * react
    grid = np.square(np.maximum(np.abs(centre) * 2.0**-25, _TINY))
    least = np.broadcast_to(np.square(floor), centre.shape)

    def residuals(weight: int, rows: slice) -> Singles:
        explained, whole, out = weight * model[rows], total[rows], np.empty((count, *model[rows].shape), np.float32)
        for one in range(count):
            rest = whole - squares[one, rows]
            rest += explained
            rest /= weight + count - 1
            rest += grid[rows]
            np.maximum(rest, least[rows], out=rest)
            out[one] = deviations[one, rows] / np.sqrt(rest, out=rest)
        return out

    sampled = slice(None, None, max(1, len(centre) // _ROWS_TRIED))

    def cost(weight: int) -> float:
        return _element_quantile(residuals(weight, sampled), 1e-12, weight + count - 1)

    weight = _WEIGHTS[-1] if kinked else min(_WEIGHTS, key=cost)
    sigma = np.sqrt(np.maximum((weight * model + total) / (weight + count) + grid, least))
    noise = residuals(weight, slice(None))
    return Spread(centre, sigma, noise, (centre / sigma).astype(np.float32), weight + count - 1)


def product_model(squares: Floats, centre: Floats, count: int) -> Floats:
    """Mean squares [T,J] over `count` samples, explained by row x column x binary exponent of the centre.

    Iterative proportional fitting on sums. A factor that rests on few values is drawn towards 1 as if `_PRIOR` values
    had said so, lest a short row or column be believed.
    """
    exponent = np.frexp(centre)[1]
    bins = (np.where(centre == 0, -40, np.clip(exponent, -39, 40)) + 40).ravel()
    members = np.bincount(bins, minlength=81)
    model = np.full(squares.shape, squares.mean() if squares.size else 0.0)
    for _ in range(_SWEEPS):
        model *= _factor(squares.sum(axis=1), model.sum(axis=1), count * squares.shape[1])[:, None]
        model *= _factor(squares.sum(axis=0), model.sum(axis=0), count * squares.shape[0])[None, :]
        seen = np.bincount(bins, weights=squares.ravel(), minlength=81)
        held = np.bincount(bins, weights=model.ravel(), minlength=81)
        model *= _factor(seen, held, count * members)[bins].reshape(model.shape)
    return model


def tail_quantile(null: npt.NDArray[np.floating], probability: float, freedom: int, fraction: float = 0.1) -> float:
    """Value that a draw like `null` exceeds with `probability`.

    The larger of two: mean excess over the upper `fraction` as an exponential tail, where there are points enough (true
    tails are lighter when values are plenty), and mean plus standard deviation times Student's quantile, for draws that
    are no more independent than `freedom` values.
    """
    flat = np.asarray(null, dtype=np.float64).ravel()
    student = student_quantile(probability, max(freedom - 1, 1)) * float(flat.std()) + float(flat.mean())
    keep = max(int(flat.size * fraction), _TAIL_POINTS)
    if keep * 4 > flat.size:
        return student
    upper = np.partition(flat, flat.size - keep - 1)[flat.size - keep - 1 :]
    threshold = float(upper[0])
    excess = float(upper[1:].mean()) - threshold
    return max(student, threshold + excess * max(math.log(keep / flat.size / probability), 0.0))


def scale_quantile(null: npt.NDArray[np.floating], probability: float, freedom: int) -> float:
    """As `tail_quantile`, two-sided, for draws whose mean is known to be zero."""
    flat = np.abs(np.asarray(null, dtype=np.float64)).ravel()
    student = student_quantile(probability / 2.0, freedom) * math.sqrt(float(np.mean(flat**2)))
    return max(student, tail_quantile(flat, probability, flat.size)) if flat.size >= 8 * _TAIL_POINTS else student


def _element_quantile(noise: Singles, probability: float, freedom: int) -> float:
    """The tail is taken far out, where single elements are judged."""
    far = tail_quantile(np.abs(noise), probability, noise.size, _ELEMENT_TAIL)
    return max(far, student_quantile(probability / 2.0, freedom))


def sum_quantile(partitions: Sequence[npt.NDArray[np.floating]], probability: float, most: int | None = None) -> float:
    """Two-sided quantile of a zero-mean sum, from its parts [B,G] under several partitions of the same terms.

    The parts of a partition are taken as independent, which gives the variance many degrees of freedom; the partition
    with the largest variance counts. Where the samples' own totals vary more than twice that (parts that move
    together), the excess is added with the few degrees of freedom that it was seen with. `most` caps the freedom.
    """
    best, freedom = 0.0, 1
    for parts in partitions:
        variance = float(np.mean(np.sum(np.square(parts, dtype=np.float64), axis=-1)))
        if variance >= best:
            best, freedom = variance, parts.size
    totals = partitions[0].sum(axis=-1, dtype=np.float64)
    freedom = freedom if most is None else min(freedom, most)
    excess = max(float(np.mean(np.square(totals))) - _CHANCE * best, 0.0)
    square = best * student_quantile(probability / 2.0, freedom) ** 2
    if excess > 0:
        square += excess * student_quantile(probability / 2.0, totals.size) ** 2
    return math.sqrt(square)


def size_quantile(
    partitions: Sequence[npt.NDArray[np.floating]], mean: float, probability: float, most: int | None = None
) -> float:
    """Quantile of a sum of squares with this mean and these parts [B,G], centred: Wilson and Hilferty's cube.

    Matched to the mean and the variance, so that a sum of few squares keeps its long tail.
    """
    variance = max(float(np.mean(np.sum(np.square(parts, dtype=np.float64), axis=-1))) for parts in partitions)
    if variance <= 0 or mean <= 0:
        return mean
    reach = sum_quantile(partitions, 2.0 * probability, most) / math.sqrt(variance)
    c = variance / (9.0 * mean * mean)
    return float(mean * (1.0 - c + reach * math.sqrt(c)) ** 3)


def centred(parts: npt.NDArray[np.floating]) -> Floats:
    """[B,G] minus each group's mean over the samples, scaled so that the variance stays unbiased."""
    wide = np.asarray(parts, np.float64)
    return (wide - wide.mean(axis=0)) * math.sqrt(len(wide) / (len(wide) - 1))


@functools.cache
def student_quantile(probability: float, freedom: int) -> float:
    """t that Student's distribution exceeds with `probability` (below 1/2) or less.

    Wallace's bound (Ann. Math. Statist. 30, 1959): with n degrees of freedom the tail at sqrt(n expm1(z^2 / (n - 1/2)))
    is no heavier than the normal one at z. From n = 15 on that t is at most 3 % too large.
    """
    z = NormalDist().inv_cdf(probability)
    return math.sqrt(freedom * math.expm1(z * z / (freedom - 0.5)))


def _factor(seen: npt.NDArray, held: npt.NDArray, values: npt.NDArray | int) -> Floats:
    ratio = np.divide(seen, held, out=np.ones(seen.shape), where=held > 0)
    return (values * ratio + _PRIOR) / (values + _PRIOR)
