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

import numpy as np

from reference.elementary import total

_DEPTH = 8  # slices per operand before a row or column counts as wide
_KEPT = 1 << 21  # elements of a right operand up to which its slices are kept
_BLOCK = 1 << 20  # elements of a larger one that are cut at a time
_WORK = 1 << 22  # elements of a result worked out at a time
_NEAR = 1 << 14  # the same where the right operand keeps its slices: what a core's own cache holds
_MILD = 250  # exponents smaller than this, on both sides, scale a result in two exact steps


def slice_bits(k: int) -> int:
    """Bits of one slice for K = k: the decision's formula, at most 24 so that a slice also fits float32."""
    return min(24, (51 - max(k - 1, 0).bit_length()) // 2)


def _pow2(n: np.ndarray) -> np.ndarray:
    """2^n for integers n in [-1022, 1023], built from bits."""
    return ((n.astype(np.int64) + 1023) << 52).view(np.float64)


def _largest(x: np.ndarray, axis: int) -> np.ndarray:
    """Largest magnitude along `axis`, kept, float64; NaN or infinity where there is one."""
    if x.size <= _NEAR:
        return np.asarray(np.abs(x).max(axis=axis, keepdims=True, initial=0.0), np.float64)
    top = np.maximum(x.max(axis=axis, keepdims=True, initial=0.0), -x.min(axis=axis, keepdims=True, initial=0.0))
    return np.asarray(np.abs(top), np.float64)


def _exponent(top: np.ndarray) -> np.ndarray:
    """int64 e >= -999 with top < 2^e; the floor keeps s - e a float64 exponent."""
    return np.maximum((top.view(np.int64) >> 52) - 1022, -999)


def _mild(e: np.ndarray) -> bool:
    return int(e.max(initial=0)) < _MILD and int(e.min(initial=0)) > -_MILD


def _lost(x: np.ndarray, e: np.ndarray, s: int, axis: int) -> np.ndarray:
    """Rows (columns) in which scaling would lose low bits: nonzero values more than 2^350 below the largest."""
    if int(e.max(initial=0)) <= s:
        return np.zeros(e.shape, bool)
    return ((x != 0) & (np.abs(x) < _pow2(np.maximum(e - 350, -1022)))).any(axis=axis, keepdims=True)


def _cut(t: np.ndarray, q: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Integer slices of t, most significant first, each worth 2^q of the next; and what is left of t."""
    out = [np.rint(t)]
    t = t - out[0]
    while len(out) < _DEPTH and t.any():
        t *= float(1 << q)
        out.append(np.rint(t))
        t -= out[-1]
    return out, t


class Sliced:
    """A right operand b [..,K,N], finite or not, with what its exact product needs worked out once.

    Small operands keep their slices; large ones keep the column exponents and slice counts and cut one block of
    columns at a time, so a real-size weight costs no memory beyond its own. A float32 b is kept, not copied.
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
        top = _largest(b, -2)
        self.special: np.ndarray | None = None
        if not np.isfinite(top).all():
            self.special = b.astype(np.float64)
            b = np.where(np.isfinite(b), b, b.dtype.type(0))
            top = _largest(b, -2)
        self.values = b
        self.exponent = _exponent(top)
        self.wide = np.zeros(top.shape, bool)
        self._kept: list[np.ndarray] = []
        self._norms: np.ndarray | None = None
        self._blocks: list[tuple[slice, int]] = []  # column ranges and how many slices each needs
        for cols in self._ranges():
            block, e = b[..., cols], self.exponent[..., cols]
            slices, left = _cut(block * _pow2(self.bits - e), self.bits + 1)
            self.wide[..., cols] = _lost(block, e, self.bits, -2) | _left(left, slices, -2)
            self._blocks.append((cols, len(slices)))
            if b.size <= _KEPT:
                self._kept = slices
        self.count = max((count for _, count in self._blocks), default=1)
        self.any_wide = bool(self.wide.any())
        self.shift = self.exponent - 2 * self.bits
        self.unit = _pow2(self.shift) if _mild(self.shift) else None  # 2^shift, where no product needs more care

    @classmethod
    def of_weight(cls, w: np.ndarray) -> Sliced:
        """The right operand W^T of x W^T, for a weight w [N,K] as a checkpoint stores it."""
        return cls(np.swapaxes(np.asarray(w), -1, -2))

    @property
    def norms(self) -> np.ndarray:
        """Euclidean length of each column, [..,N], to a few float64 roundings."""
        if self._norms is None:
            self._norms = np.zeros((*self.shape[:-2], self.n))
            for cols in self._ranges():
                block = self.values[..., cols].astype(np.float64)
                self._norms[..., cols] = np.sqrt(total(block * block, axis=-2))
        return self._norms

    def _ranges(self) -> Iterator[slice]:
        size = self.values.size
        step = max(1, self.n if size <= _KEPT else _BLOCK * self.n // size)
        return (slice(start, min(self.n, start + step)) for start in range(0, self.n, step))

    def slices(self) -> Iterator[tuple[slice, int, np.ndarray]]:
        """Column range, index and integers [..,K,n] of every slice. Yielded arrays are overwritten by the next."""
        if self._kept:
            yield from ((slice(0, self.n), j, kept) for j, kept in enumerate(self._kept))
            return
        rest = head = np.empty(0)
        scale = _pow2(self.bits - self.exponent)
        for cols, count in self._blocks:
            block = self.values[..., cols]
            if rest.shape != block.shape:
                rest = np.empty_like(block, np.float64)
                head = np.empty_like(rest)
            np.multiply(block, scale[..., cols], out=rest)
            for j in range(count):
                np.rint(rest, out=head)
                yield cols, j, head
                if j + 1 < count:
                    np.subtract(rest, head, out=rest)
                    np.multiply(rest, float(2 << self.bits), out=rest)


def _left(left: np.ndarray, slices: list[np.ndarray], axis: int) -> np.ndarray | bool:
    """Rows (columns) that the slices do not cover; there can be some only when none may be added."""
    return (left != 0).any(axis=axis, keepdims=True) if len(slices) == _DEPTH else False


def product(a: np.ndarray, b: np.ndarray | Sliced, *, odd: bool = False) -> np.ndarray:
    """Exact dot products of a [..,M,K] with b [..,K,N], leading axes broadcast, rounded once to float64.

    Ties go to even. Overflow gives infinity and results under 2^-1022 are rounded once to the subnormal grid. An
    exact zero is +0.0. With an infinity or NaN among the factors of an element the IEEE rules decide (NaN wins,
    0 * inf and inf - inf are NaN, and NaN is always the same bits). K = 0 gives zeros.
    `odd`: round to odd instead (the inexact result with an odd last bit), which a second rounding to at most 51 bits
    turns into one single correct rounding.
    """
    a = np.asarray(a, np.float64)
    if not isinstance(b, Sliced) and b.ndim > 2 and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]:
        step = max(1, 2 * _NEAR * len(b) // max(b.size, 1))
        if step < len(b):
            parts = [product(a[i : i + step], Sliced(b[i : i + step]), odd=odd) for i in range(0, len(b), step)]
            return np.concatenate(parts)
    right = b if isinstance(b, Sliced) else Sliced(b)
    if a.ndim < 2 or a.shape[-1] != right.k:
        raise ValueError(f"cannot multiply {a.shape} by {right.shape}: the K axes differ")
    if len(right.shape) == 2 and a.ndim > 2:
        return product(a.reshape(-1, right.k), right, odd=odd).reshape(*a.shape[:-1], right.n)
    rows = a.shape[-2]
    work, width = (_NEAR, max(right.n, right.k)) if right._kept else (_WORK, right.n)
    if len(right.shape) == 2 and rows > 32 and rows * width > work:
        step = max(32, work // width)
        return np.concatenate([product(a[i : i + step], right, odd=odd) for i in range(0, rows, step)])
    lead = np.broadcast_shapes(a.shape[:-2], right.shape[:-2]) if a.ndim > 2 or len(right.shape) > 2 else ()
    out_shape = (*lead, rows, right.n)
    if 0 in out_shape or right.k == 0:
        return np.zeros(out_shape)
    clean, top = a, _largest(a, -1)
    if not np.isfinite(top).all():
        clean = np.where(np.isfinite(a), a, 0.0)
        top = _largest(clean, -1)
    e = _exponent(top)
    q = right.bits + 1
    slices, left = _cut(clean * _pow2(right.bits - e), q)
    wide = _lost(clean, e, right.bits, -1) | _left(left, slices, -1)
    out = _assemble(_limbs(slices, right, out_shape), q, e, right, odd)
    if right.any_wide or wide.any():
        _finish_wide(out, clean, right, wide, odd)
    if clean is not a or right.special is not None:
        _finish_special(out, a, right)
    return out


def _limbs(slices: list[np.ndarray], right: Sliced, shape: tuple[int, ...]) -> np.ndarray:
    """Sums of slice products of equal weight, [G,..,M,N] integers in float64; limb g is worth 2^-(q g) of limb 0.

    All slices of the left operand meet a slice of the right one in one call. Up to four products of at most 2^51 add
    exactly; where more meet in a limb, each hands its high part to the limb above first.
    """
    count, q = len(slices), right.bits + 1
    stacked = np.concatenate(slices, axis=-2) if count > 1 else slices[0]
    lead = len(shape) - 2
    limbs = np.empty((count + right.count - 1, *shape) if len(right._kept) != 1 else 0)
    for cols, j, weight in right.slices():
        got = np.matmul(stacked, weight)
        parts = got.reshape(*got.shape[:-2], count, shape[-2], -1)
        if lead:
            parts = parts.transpose(lead, *range(lead), lead + 1, lead + 2)
        if len(right._kept) == 1:
            return parts
        if j == 0:
            limbs[:count, ..., cols] = parts
            limbs[count:, ..., cols] = 0.0
            parts = limbs[:count, ..., cols]
        if min(count, right.count) > 4:
            carry = np.rint(parts * 2.0**-q)
            top = 0 if j else 1  # limb 0 has nothing above it and takes one product only
            carry[:top] = 0.0
            limbs[j + top - 1 : j + count - 1, ..., cols] += carry[top:]
            parts -= carry * 2.0**q
        if j:
            limbs[j : j + count, ..., cols] += parts
    return limbs


def _assemble(limbs: np.ndarray, q: int, e: np.ndarray, right: Sliced, odd: bool) -> np.ndarray:
    """round(sum_g limbs[g] * 2^(e + right.shift - q g)), once. Destroys `limbs`.

    Carries make every limb but the first at most 2^(q-1) in size. Two such limbs form one exact float64; these are
    added from the top by two-sums until the running sum no longer fits 53 bits (`low` != 0), after which only the
    sign of the first nonzero remainder (`rest`) can matter, and only if `low` is exactly half a unit.

    Of one limb or two, each an exact float64, the sum is rounded by the addition itself, carries or not.
    """
    unit = right.unit if _mild(e) else None
    if len(limbs) < 3 and unit is not None and not odd:
        high = limbs[0] + 0.0
        if len(limbs) == 2:
            limbs[1] *= 2.0**-q
            high += limbs[1]
        high *= _pow2(e)
        high *= unit
        return high
    if len(limbs) >= 7:  # four products may fill a limb to 2^53: make room for the carries from below
        carry = np.rint(limbs[1:] * 2.0**-q)
        limbs[1:] -= carry * 2.0**q
        limbs[:-1] += carry
    for g in range(len(limbs) - 1, 0, -1):
        carry = limbs[g] * 2.0**-q
        np.rint(carry, out=carry)
        limbs[g - 1] += carry
        carry *= 2.0**q
        limbs[g] -= carry
    high = limbs[0] + 0.0
    low = rest = np.zeros_like(high)
    for g in range(1, len(limbs), 2):
        term = limbs[g]
        term *= 2.0 ** (-q * g)
        if g + 1 < len(limbs):
            limbs[g + 1] *= 2.0 ** (-q * (g + 1))
            term += limbs[g + 1]
        added = high + term
        if len(limbs) == 3 and unit is not None and not odd:
            high = added
            break
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
    nearest = to_odd = high
    if len(limbs) > 3 and rest.any():
        # E.g. high + low with low half a unit: the two-sum went to even; a remainder on low's side moves it on.
        beyond = high + 2 * low
        nearest = np.where((beyond - high == 2 * low) & (rest * low > 0), beyond, high)
    if odd or unit is None:
        bits = high.view(np.int64)
        step = np.where((low > 0) == (high > 0), 1, -1)
        to_odd = np.where((low != 0) & ((bits & 1) == 0), bits + step, bits).view(np.float64)
    if unit is not None:
        return (to_odd if odd else nearest) * _pow2(e) * unit
    scale = e + right.shift
    first = np.clip(scale, -600, 600)
    second = np.clip(scale - first, -1022, 1023)
    with np.errstate(over="ignore", under="ignore"):
        result = (to_odd if odd else nearest) * _pow2(first) * _pow2(second)
        return np.where(np.abs(result) <= 2.0**-1022, to_odd * _pow2(first) * _pow2(second), result)


def _finish_wide(out: np.ndarray, a: np.ndarray, right: Sliced, wide: np.ndarray, odd: bool) -> None:
    """Elements whose row or column spans too many bits for slices: exact integer arithmetic, one by one."""
    a = np.broadcast_to(a, (*out.shape[:-2], *a.shape[-2:]))
    b = np.broadcast_to(right.values, (*out.shape[:-2], right.k, right.n))
    for index in np.argwhere(np.broadcast_to(wide | right.wide, out.shape)):
        *lead, m, n = index.tolist()
        pairs = zip(a[(*lead, m)].tolist(), b[(*lead, slice(None), n)].tolist(), strict=True)
        out[(*lead, m, n)] = _round(sum(_units(x) * _units(y) for x, y in pairs), odd)


def _units(x: float) -> int:
    """x in units of 2^-1074, of which every finite float64 is a multiple."""
    over, under = x.as_integer_ratio()
    return over * ((1 << 1074) // under)


def _round(units: int, odd: bool) -> float:
    """units * 2^-2148 to float64, once: nearest even (infinity beyond the range), or to odd."""
    try:
        near = units / (1 << 2148)
    except OverflowError:
        return float("inf") if units > 0 else float("-inf")
    gap = units - (_units(near) << 1074)
    if not odd or gap == 0 or int(np.float64(near).view(np.int64)) & 1:
        return near
    return float(np.nextafter(near, np.inf if gap > 0 else -np.inf))


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
