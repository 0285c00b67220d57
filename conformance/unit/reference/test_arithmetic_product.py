"""The exact matrix product against exact rational arithmetic, and its independence of order and partition."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from reference import exact
from reference.arithmetic import Sliced, matmul

NAN_BITS = 0x7FF8000000000000
MAX = float(np.finfo(np.float64).max)


def to_float(x: Fraction) -> float:
    """Python divides integers with one correct rounding, subnormals included; beyond the range it raises."""
    try:
        return x.numerator / x.denominator
    except OverflowError:
        return float("inf") if x > 0 else float("-inf")


def rational(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of finite 2-D operands in rational arithmetic, then one rounding."""
    rows = [[Fraction(v) for v in row] for row in a.tolist()]
    columns = [[Fraction(v) for v in column] for column in b.T.tolist()]
    return np.array(
        [[to_float(sum((x * y for x, y in zip(r, c, strict=True)), Fraction(0))) for c in columns] for r in rows]
    ).reshape(len(a), b.shape[1])


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    different = np.argwhere(got.view(np.int64) != np.asarray(want).view(np.int64))
    if len(different):
        at = tuple(different[0])
        pytest.fail(f"{len(different)} elements differ, first at {at}: {got[at].hex()}, expected {want[at].hex()}")


def normals(seed: int, *shape: int, spread: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)


@pytest.mark.parametrize("spread", [0, 4, 40, 120, 480])
@pytest.mark.parametrize("k", [1, 2, 3, 16, 17, 128, 1000])
def test_against_rationals(k: int, spread: int) -> None:
    a, b = normals(k, 3, k, spread=spread), normals(k + 1, k, 4, spread=spread)
    same_bits(matmul(a, b), rational(a, b))


@pytest.mark.parametrize("spread", [0, 40])
@pytest.mark.parametrize("k", [4096, 16384])
def test_long_rows_against_rationals(k: int, spread: int) -> None:
    a, b = normals(k, 2, k, spread=spread), normals(k + 1, k, 2, spread=spread)
    same_bits(matmul(a, b), rational(a, b))


@pytest.mark.parametrize("spread", [0, 40])
@pytest.mark.parametrize("k", [2, 64, 1024, 16384])
def test_cancellation_down_to_the_last_bit(k: int, spread: int) -> None:
    """Every term meets its negative but for one unit in the last place somewhere."""
    half = normals(k, 1, k // 2, spread=spread)
    a = np.concatenate([half, -half], axis=1)
    other = normals(k + 1, k // 2, 1, spread=spread)
    b = np.concatenate([other, other], axis=0)
    zero = matmul(a, b)
    assert zero.tolist() == [[0.0]]
    assert not np.signbit(zero).any()
    b[k // 3] = np.nextafter(b[k // 3], np.inf)
    got = matmul(a, b)
    assert got[0, 0] != 0
    same_bits(got, rational(a, b))


def tie(low: float) -> tuple[np.ndarray, np.ndarray]:
    """1 + 2^-53, exactly between 1 and its successor, and `low` beside it."""
    return np.array([[1.0, 2.0**-53, low]]), np.ones((3, 1))


@pytest.mark.parametrize("low", [0.0, 2.0**-105, -(2.0**-105), 2.0**-160, 2.0**-1074, -(2.0**-1074)])
@pytest.mark.parametrize("first", [1.0, 1.0 + 2.0**-52, -1.0, 2.0**52 + 1])
def test_ties_are_decided_by_the_smallest_term(first: float, low: float) -> None:
    a, b = tie(low)
    a[0, 0] = first
    a[0, 1] *= 2.0 ** np.floor(np.log2(abs(first)))
    same_bits(matmul(a, b), rational(a, b))
    same_bits(matmul(-a, b), rational(-a, b))


@pytest.mark.parametrize("shift", [-1040, -1000, -530, -500, 480, 500])
@pytest.mark.parametrize("other", [-545, -60, 0, 30, 540])
def test_results_over_the_whole_range(shift: int, other: int) -> None:
    """Overflow to infinity, gradual underflow with a single rounding, and everything between."""
    a, b = normals(3, 4, 50) * 2.0**shift, normals(4, 50, 4) * 2.0**other
    same_bits(matmul(a, b), rational(a, b))


def test_subnormal_results_round_once() -> None:
    """2^-1074 * (n + 1/2 +- a little): rounding to 53 bits first would hide the little."""
    rng = np.random.default_rng(9)
    n = rng.integers(1, 1 << 20, 200).astype(np.float64)
    little = rng.choice([-1.0, 0.0, 1.0], 200) * 2.0**-56
    a = np.stack([n, np.full(200, 0.5), little], axis=1) * 2.0**-500
    b = np.full((3, 1), 2.0**-574)
    same_bits(matmul(a, b), rational(a, b))


def test_the_largest_numbers_and_the_edge_of_overflow() -> None:
    a = np.array([[MAX, MAX], [MAX, 2.0**969], [MAX, 2.0**970], [-MAX, -(2.0**970)], [MAX, -MAX]])
    b = np.ones((2, 1))
    same_bits(matmul(a, b), rational(a, b))
    assert matmul(a, b)[:, 0].tolist() == [np.inf, MAX, np.inf, -np.inf, 0.0]


def test_every_slice_count_meets_every_other() -> None:
    """Rows and columns that need one to eight slices and more, in one product."""
    rng = np.random.default_rng(12)
    k = 24
    q = exact.slice_bits(k) + 1
    depth = np.array([1.0, *(q * np.arange(1, 9)), 400, 900])[:, None]
    a = rng.integers(1, 2, (len(depth), k)) * 2.0 ** -np.rint(rng.random((len(depth), k)) * depth)
    a[:, 0], a[:, 1:2] = 1.0, 2.0 ** (1 - depth)
    b = (a * rng.choice([-1.0, 1.0, 1.25], a.shape))[::-1].T.copy()
    same_bits(matmul(a, b), rational(a, b))
    assert {len(exact._cut(row * 2.0 ** (q - 2), q)[0]) for row in a} == set(range(1, exact._DEPTH + 1))
    assert Sliced(b).wide.any()
    assert not Sliced(b).wide.all()


@pytest.mark.parametrize("k", [1, 3, 16, 64, 4096, 16384])
def test_full_slices_stay_exact(k: int) -> None:
    """All slices at their largest and of one sign, the case the slice width is chosen for."""
    s = exact.slice_bits(k)
    assert s == min(24, (53 - int(np.ceil(np.log2(k))) - 2) // 2)
    top = 1.0 - 2.0**-53
    worst = (2.0**s - 1) * 2.0**-s + (2.0**s) * 2.0 ** -(2 * s + 1)
    for value in (top, worst, 1.5, float(np.nextafter(0.5, 1.0))):
        a, b = np.full((1, k), value), np.full((k, 1), value)
        same_bits(matmul(a, b), np.array([[to_float(k * Fraction(value) ** 2)]]))
        b[0] = 2.0**-70
        true = (k - 1) * Fraction(value) ** 2 + Fraction(value) * Fraction(2.0**-70)
        same_bits(matmul(a, b), np.array([[to_float(true)]]))


ANY = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=True)
NEAR = st.floats(-8, 8, allow_subnormal=False).map(lambda x: float(np.float32(x)))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([ANY, NEAR]))
def test_any_operands_against_rationals(data: st.DataObject, elements: st.SearchStrategy) -> None:
    m, k, n = (data.draw(st.integers(1, top)) for top in (3, 7, 3))
    a = data.draw(arrays(np.float64, (m, k), elements=elements))
    b = data.draw(arrays(np.float64, (k, n), elements=elements))
    want = rational(a, b)
    same_bits(matmul(a, b), want)
    order = np.array(data.draw(st.permutations(range(k))))
    same_bits(matmul(a[:, order], b[order]), want)
    same_bits(matmul(b.T, a.T).T.copy(), want)


@pytest.mark.parametrize("spread", [0, 40])
@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16-like"])
def test_order_and_partition_change_no_bit(kind: str, spread: int) -> None:
    rng = np.random.default_rng(spread + 1)
    m, k, n = 5, 300, 40
    a, b = normals(7, m, k, spread=spread), normals(8, k, n, spread=spread)
    if kind == "float32":
        a, b = a.astype(np.float32).astype(np.float64), b.astype(np.float32)
    if kind == "bfloat16-like":
        a, b = (np.round(a / np.abs(a).max() * 128) / 128 for a in (a, b))
    whole = matmul(a, b)
    for _ in range(5):
        order = rng.permutation(k)
        same_bits(matmul(a[:, order], b[order]), whole)
    same_bits(np.concatenate([matmul(a[i : i + 1], b) for i in range(m)]), whole)
    same_bits(np.concatenate([matmul(a, b[:, j : j + 7]) for j in range(0, n, 7)], axis=1), whole)
    same_bits(matmul(np.pad(a, ((0, 2), (0, 9))), np.pad(b, ((0, 9), (0, 3))))[:m, :n], whole)
    same_bits(matmul(a, Sliced(np.asfortranarray(b))), whole)
    same_bits(matmul(a, Sliced.of_weight(b.T.copy())), whole)


@pytest.mark.parametrize("block", [1, 1 << 10, 1 << 13])
def test_large_operands_go_block_by_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = normals(1, 70, 96), normals(2, 96, 50, spread=3)
    b[:, 7] *= 2.0 ** np.linspace(0, -150, 96)
    b[:, 9] = 0.0
    whole = Sliced(b)
    want = matmul(a, whole)
    same_bits(want, rational(a, b))
    monkeypatch.setattr(exact, "_NEAR", block)
    same_bits(matmul(a, whole), want)
    same_bits(matmul(a, Sliced(b)), want)
    monkeypatch.setattr(exact, "_KEPT", 0)
    monkeypatch.setattr(exact, "_BLOCK", block)
    monkeypatch.setattr(exact, "_WORK", 4 * block)
    in_blocks = Sliced(b)
    same_bits(matmul(a, in_blocks), want)
    same_bits(matmul(a, in_blocks), want)
    same_bits(in_blocks.norms, whole.norms)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3, 4, 5), (5, 6)),
        ((3, 4, 5), (3, 5, 2)),
        ((2, 1, 4, 5), (3, 5, 2)),
        ((4, 5), (2, 3, 5, 6)),
        ((1, 0), (0, 3)),
        ((0, 5), (5, 2)),
        ((2, 5), (5, 0)),
        ((0, 3, 2), (2, 4)),
        ((2, 0, 3, 5), (0, 5, 4)),
    ],
    ids=str,
)
def test_leading_axes_broadcast(a: tuple[int, ...], b: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = normals(1, *a), normals(2, *b)
    got = matmul(x, y)
    shape = np.broadcast_shapes(a[:-2], b[:-2])
    assert got.shape == (*shape, a[-2], b[-1])
    x, y = np.broadcast_to(x, (*shape, *a[-2:])), np.broadcast_to(y, (*shape, *b[-2:]))
    for at in np.ndindex(*shape):
        same_bits(got[at], rational(x[at], y[at]))
    monkeypatch.setattr(exact, "_NEAR", 1)
    same_bits(matmul(normals(1, *a), normals(2, *b)), got)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) by \(4, 5\)"):
        matmul(np.ones((2, 3)), np.ones((4, 5)))
    with pytest.raises(ValueError, match=r"\(3,\)"):
        matmul(np.ones((2, 3)), np.ones(3))
    with pytest.raises(ValueError, match=r"\(3,\) by \(3, 2\)"):
        matmul(np.ones(3), np.ones((3, 2)))


INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    ("row", "column", "want"),
    [
        ([INF, 1.0], [1.0, 1.0], INF),
        ([INF, 1.0], [-1.0, 1.0], -INF),
        ([INF, 1.0], [0.0, 1.0], NAN),
        ([INF, 1.0], [-0.0, 1.0], NAN),
        ([INF, INF], [1.0, -1.0], NAN),
        ([INF, 1.0], [INF, -1e308], INF),
        ([1e308, INF], [-1e308, 1.0], INF),
        ([1.0, 2.0], [NAN, 1.0], NAN),
        ([0.0, 2.0], [-INF, 1.0], NAN),
        ([5e-324, 2.0], [-INF, 1.0], -INF),
    ],
)
def test_infinities_and_nans_follow_the_ieee_rules(row: list[float], column: list[float], want: float) -> None:
    """Whatever the order, and without touching the rows and columns beside them."""
    a = np.array([row, [1.0, 2.0]])
    b = np.array([column, [3.0, 4.0]]).T
    for got in (matmul(a, b), matmul(a[:, ::-1], b[::-1]), matmul(b.T, a.T).T):
        assert got[0, 0].tobytes() == np.float64(want).tobytes()
        assert got[1, 1] == 11.0


def test_foreign_nans_become_the_one_nan() -> None:
    a = np.array([[0xFFF8000000000123]], np.uint64).view(np.float64)
    assert matmul(a, np.ones((1, 1))).view(np.int64)[0, 0] == NAN_BITS


def test_the_operand_is_left_alone() -> None:
    a, b = normals(1, 3, 20, spread=30), normals(2, 20, 4, spread=30)
    kept = a.copy(), b.copy()
    right = Sliced(b)
    first = matmul(a, right)
    same_bits(matmul(a, right), first)
    assert (a == kept[0]).all()
    assert (b == kept[1]).all()


def test_norms_are_the_column_lengths() -> None:
    b = normals(5, 33, 6, spread=10)
    want = [np.sqrt(float(sum((Fraction(v) ** 2 for v in column), Fraction(0)))) for column in b.T.tolist()]
    # A tree of 33 squares rounds each term at most 1 + 6 times, halved by the root, and the root once more.
    assert (np.abs(Sliced(b).norms - want) <= (7 / 2 + 1) * np.spacing(want)).all()
