"""The exact matrix product: every element is the true sum of products, rounded once.

Equation: out[m, n] = RN(sum_k a[m, k] * b[k, n]), RN = to nearest float64, ties to even. The value is defined by
the inputs alone, so BLAS, thread count, chunking, blocking and the order of K cannot show in it.

How (design.md, decision 1): each row of `a` and each column of `b` is scaled by a power of two and cut into
integer slices of at most s = floor((53 - ceil(log2 K) - 2) / 2) bits, so that a product of two slices, summed over K in
whatever order BLAS likes, is an integer of at most 51 bits and therefore exact. Products of equal weight form a
limb; carries between limbs and the final rounding are exact float64 operations too, so nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np

_DEPTH = 8  # slices per operand before a row or column counts as wide
_SMALL = 1 << 21  # elements of a right operand whose slices are kept in float64
_BLOCK = 1 << 18  # elements of a right operand that are converted at a time


def slice_bits(k: int) -> int:
    """Bits of one slice for K = k: the decision's formula, at most 24 so that a slice also fits float32."""
    return min(24, (51 - max(k - 1, 0).bit_length()) // 2)


def _pow2(n: np.ndarray) -> np.ndarray:
    """2^n for integers n in [-1022, 1023], built from bits."""
    return ((n.astype(np.int64) + 1023) << 52).view(np.float64)


def _exponent(x: np.ndarray, axis: int) -> np.ndarray:
    """int64 e, kept axis, with |x| < 2^e along `axis`; -1022 for zeros and subnormals. x finite."""
    top = np.abs(x).max(axis=axis, keepdims=True, initial=0.0).astype(np.float64)
    return (top.view(np.int64) >> 52) - 1022


def _to_integers(x: np.ndarray, e: np.ndarray, s: int) -> np.ndarray:
    """x * 2^(s - e) in float64; exact unless a value falls under the float64 range (see `_lost`)."""
    p = s - e
    if int(p.max(initial=0)) > 1023:
        half = p >> 1
        return x * _pow2(half) * _pow2(p - half)
    return x * _pow2(p)


def _lost(x: np.ndarray, e: np.ndarray, s: int, axis: int) -> np.ndarray:
    """Rows (columns) in which scaling would lose low bits: nonzero values more than 2^350 below the largest."""
    if int(e.max(initial=0)) <= s:
        return np.zeros(e.shape, bool)
    return ((x != 0) & (np.abs(x) < _pow2(np.maximum(e - 350, -1022)))).any(axis=axis, keepdims=True)


def _cut(t: np.ndarray, q: int, count: int | None = None) -> tuple[list[np.ndarray], np.ndarray]:
    """Integer slices of t, most significant first, each worth 2^q of the next; and what is left of t."""
    out: list[np.ndarray] = []
    scale = float(1 << q)
    while len(out) < (_DEPTH if count is None else count):
        head = np.rint(t)
        out.append(head)
        t = t - head
        if count is None and not t.any():
            break
        t *= scale
    return out, t


class Sliced:
    """A right operand b [..,K,N], finite or not, with what its exact product needs worked out once.

    Small operands keep their slices; large ones keep the column exponents and the slice count and cut one column
    block at a time, so a real-size weight costs no memory beyond its own. A float32 b is kept, not copied.
    """

    def __init__(self, b: np.ndarray) -> None:
        b = np.asarray(b)
        if b.ndim < 2:
            raise ValueError(f"right operand must be [..,K,N], got shape {b.shape}")
        if b.dtype != np.float32:
            b = np.asarray(b, np.float64)
        self.shape = b.shape
        self.k, self.n = b.shape[-2:]
        self.bits = slice_bits(self.k)
        finite = np.isfinite(b)
        self.special = None if finite.all() else b.astype(np.float64)
        if self.special is not None:
            b = np.where(finite, b, b.dtype.type(0))
        self.values = b
        self.exponent = _exponent(b, -2)
        self.wide = _lost(b, self.exponent, self.bits, -2)
        self._kept: list[np.ndarray] | None = None
        self._norms: np.ndarray | None = None
        self.count = 1
        depth_left = []
        for cols in self._blocks(_BLOCK):
            slices, left = self._slice(cols, None)
            self.count = max(self.count, len(slices))
            depth_left.append((left != 0).any(axis=-2, keepdims=True))
        if depth_left:
            self.wide = self.wide | np.concatenate(depth_left, axis=-1)
        if b.size <= _SMALL:
            self._kept = self._slice(slice(0, self.n), self.count)[0]

    @classmethod
    def of_weight(cls, w: np.ndarray) -> Sliced:
        """The right operand W^T of x W^T, for a weight w [N,K] as a checkpoint stores it."""
        return cls(np.swapaxes(np.asarray(w), -1, -2))

    @property
    def norms(self) -> np.ndarray:
        """Euclidean length of each column, [..,N], to a few float64 roundings."""
        if self._norms is None:
            from reference.arithmetic import total  # the public face imports this module first

            parts = []
            for cols in self._blocks(_BLOCK):
                block = self.values[..., cols].astype(np.float64)
                parts.append(np.sqrt(total(block * block, axis=-2)))
            self._norms = np.concatenate(parts, axis=-1) if parts else np.zeros((*self.shape[:-2], 0))
        return self._norms

    def _blocks(self, elements: int) -> Iterator[slice]:
        step = max(1, elements // max(1, self.values.size // max(1, self.n)))
        for start in range(0, self.n, step):
            yield slice(start, min(self.n, start + step))

    def _slice(self, cols: slice, count: int | None) -> tuple[list[np.ndarray], np.ndarray]:
        block = self.values[..., cols]
        t = _to_integers(block, self.exponent[..., cols], self.bits)
        return _cut(t, self.bits + 1, count)

    def blocks(self) -> Iterator[tuple[slice, list[np.ndarray]]]:
        """Column ranges and their slices, each [..,K,n] of integers in float64."""
        if self._kept is not None:
            yield slice(0, self.n), self._kept
            return
        for cols in self._blocks(_BLOCK):
            yield cols, self._slice(cols, self.count)[0]


def product(a: np.ndarray, b: np.ndarray | Sliced, *, odd: bool = False) -> np.ndarray:
    """Exact dot products of a [..,M,K] with b [..,K,N], leading axes broadcast, rounded once to float64.

    Ties go to even. Overflow gives infinity and results under 2^-1022 are rounded once to the subnormal grid. An
    exact zero is +0.0. With an infinity or NaN among the factors of an element the IEEE rules decide (NaN wins,
    0 * inf and inf - inf are NaN, and NaN is always the same bits). K = 0 gives zeros.
    `odd`: round to odd instead (the inexact result with an odd last bit), which a second rounding to at most 51 bits
    turns into one single correct rounding.
    """
    a = np.asarray(a, np.float64)
    right = b if isinstance(b, Sliced) else Sliced(b)
    if a.ndim < 2 or a.shape[-1] != right.k:
        raise ValueError(f"cannot multiply {a.shape} by {right.shape}: the K axes differ")
    batch = np.broadcast_shapes(a.shape[:-2], right.shape[:-2])
    if len(right.shape) == 2 and a.ndim > 2:
        return product(a.reshape(-1, right.k), right, odd=odd).reshape(*a.shape[:-1], right.n)
    out = np.zeros((*batch, a.shape[-2], right.n))
    if out.size == 0 or right.k == 0:
        return out
    finite = np.isfinite(a)
    clean = a if finite.all() else np.where(finite, a, 0.0)
    e = _exponent(clean, -1)
    slices, left = _cut(_to_integers(clean, e, right.bits), right.bits + 1)
    wide = _lost(clean, e, right.bits, -1) | (left != 0).any(axis=-1, keepdims=True)
    rows = a.shape[-2]
    stacked = np.concatenate(slices, axis=-2) if len(slices) > 1 else slices[0]
    for cols, weights in right.blocks():
        limbs = _limbs(stacked, len(slices), rows, weights, right.bits + 1, batch)
        scale = e + right.exponent[..., cols] - 2 * right.bits
        out[..., cols] = _assemble(limbs, right.bits + 1, scale, odd)
    if wide.any() or right.wide.any():
        _finish_wide(out, clean, right, wide, odd)
    if clean is not a or right.special is not None:
        _finish_special(out, a, right)
    return out


def _limbs(
    stacked: np.ndarray, count: int, rows: int, weights: list[np.ndarray], q: int, batch: tuple[int, ...]
) -> np.ndarray:
    """Sums of slice products of equal weight, [G,..,M,n] integers in float64; limb g is worth 2^-(q g) of limb 0.

    Up to three products of at most 2^51 add exactly; with more, each hands its high part to the next limb first.
    """
    n = weights[0].shape[-1]
    limbs = np.zeros((count + len(weights) - 1, *batch, rows, n))
    deep = min(count, len(weights)) > 3
    for j, weight in enumerate(weights):
        got = np.matmul(stacked, weight)
        parts = np.moveaxis(got.reshape(*got.shape[:-2], count, rows, n), -3, 0)
        if not deep:
            limbs[j : j + count] += parts
            continue
        carry = np.rint(parts * 2.0**-q)
        if j == 0:
            carry[0] = 0.0
        limbs[j : j + count] += parts - carry * 2.0**q
        first = 1 if j == 0 else 0
        limbs[j - 1 + first : j - 1 + count] += carry[first:]
    return limbs


def _assemble(limbs: np.ndarray, q: int, scale: np.ndarray, odd: bool) -> np.ndarray:
    """round(sum_g limbs[g] * 2^(scale - q g)), once. Destroys `limbs`.

    Carries make every limb but the first at most 2^(q-1) in size. Two such limbs form one exact float64; these are
    added from the top by two-sums until the running sum no longer fits 53 bits (`low` != 0), after which only the
    sign of the first nonzero remainder (`rest`) can matter, and only if `low` is exactly half a unit.
    """
    for g in range(len(limbs) - 1, 0, -1):
        carry = np.rint(limbs[g] * 2.0**-q)
        limbs[g - 1] += carry
        carry *= 2.0**q
        limbs[g] -= carry
    high = limbs[0] + 0.0
    low = np.zeros_like(high)
    rest = np.zeros_like(high)
    for g in range(1, len(limbs), 2):
        term = limbs[g] * 2.0 ** (-q * g)
        if g + 1 < len(limbs):
            term += limbs[g + 1] * 2.0 ** (-q * (g + 1))
        added = high + term
        back = added - high
        error = (high - (added - back)) + (term - back)
        if g == 1:
            high, low = added, error
            continue
        closed = low != 0
        rest = np.where(closed & (rest == 0), term, rest)
        high = np.where(closed, high, added)
        low = np.where(closed, low, error)
    high += 0.0
    # E.g. high + low with low half a unit: the two-sum went to even; a remainder on low's side moves it on.
    beyond = high + 2 * low
    nearest = np.where((beyond - high == 2 * low) & (rest * low > 0), beyond, high) if rest.any() else high
    safe = int(scale.min()) > -500 and int(scale.max()) < 900
    if safe and not odd:
        return nearest * _pow2(scale)
    bits = high.view(np.int64)
    step = np.where((low > 0) == (high > 0), 1, -1)
    to_odd = np.where((low != 0) & ((bits & 1) == 0), bits + step, bits).view(np.float64)
    if safe:
        return to_odd * _pow2(scale)
    first = np.clip(scale, -600, 600)
    second = np.clip(scale - first, -1022, 1023)
    with np.errstate(over="ignore", under="ignore"):
        result = (to_odd if odd else nearest) * _pow2(first) * _pow2(second)
        return np.where(np.abs(result) <= 2.0**-1022, to_odd * _pow2(first) * _pow2(second), result)


def _finish_wide(out: np.ndarray, a: np.ndarray, right: Sliced, wide: np.ndarray, odd: bool) -> None:
    """Elements whose row or column spans too many bits for slices: exact rational arithmetic, one by one."""
    a_all = np.broadcast_to(a, (*out.shape[:-2], *a.shape[-2:]))
    b_all = np.broadcast_to(right.values, (*out.shape[:-2], right.k, right.n))
    for index in np.argwhere(np.broadcast_to(wide | right.wide, out.shape)):
        *lead, m, n = index.tolist()
        exact = sum(
            (
                Fraction(x) * Fraction(y)
                for x, y in zip(a_all[(*lead, m)].tolist(), b_all[(*lead, slice(None), n)].tolist(), strict=True)
            ),
            Fraction(0),
        )
        out[(*lead, m, n)] = _round_fraction(exact, odd)


def _round_fraction(x: Fraction, odd: bool = False) -> float:
    """x to float64, once: nearest even (infinity beyond the range), or to odd."""
    try:
        near = x.numerator / x.denominator
    except OverflowError:
        near = float("inf") if x > 0 else float("-inf")
    if not odd or near in (float("inf"), float("-inf")) or Fraction(near) == x:
        return near
    if int(np.float64(near).view(np.int64)) & 1:
        return near
    return float(np.nextafter(near, np.inf if x > Fraction(near) else -np.inf))


def _finish_special(out: np.ndarray, a: np.ndarray, right: Sliced) -> None:
    """Elements with an infinity or NaN among their factors, by the IEEE rules on signs; order cannot matter."""
    b = right.values if right.special is None else right.special
    b = np.broadcast_to(b, (*out.shape[:-2], right.k, right.n))
    a = np.broadcast_to(a, (*out.shape[:-2], *a.shape[-2:]))
    touched = ~np.isfinite(a).all(axis=-1, keepdims=True) | ~np.isfinite(b).all(axis=-2, keepdims=True)
    for index in np.argwhere(touched):
        *lead, m, n = index.tolist()
        x, y = a[(*lead, m)], b[(*lead, slice(None), n)]
        x = np.where(np.isfinite(x), np.sign(x), x)
        y = np.where(np.isfinite(y), np.sign(y), y)
        with np.errstate(invalid="ignore"):
            terms = x * y
        if np.isnan(terms).any() or ((terms == np.inf).any() and (terms == -np.inf).any()):
            out[(*lead, m, n)] = np.nan
        else:
            out[(*lead, m, n)] = np.inf if (terms == np.inf).any() else -np.inf
