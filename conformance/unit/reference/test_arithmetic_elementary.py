"""The portable exp, log, sigmoid, silu, rsqrt, softmax and total, against mpmath and at their edges."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from reference import elementary
from reference.arithmetic import exp, log, rsqrt, sigmoid, silu, softmax, total

NAN_BITS = 0x7FF8000000000000
FOREIGN_NANS = np.array([0xFFF8000000000000, 0x7FF8000000000001, 0xFFFFFFFFFFFFFFFF], np.uint64).view(np.float64)
TINY = 5e-324


@pytest.fixture(autouse=True)
def precision():
    with mpmath.workprec(140):
        yield


def spread(low: float, high: float, seed: int) -> np.ndarray:
    """Uniform points, points near the ends and near multiples of half ln 2, and points around zero if it is inside."""
    rng = np.random.default_rng(seed)
    ends = np.array([low, np.nextafter(low, high), np.nextafter(high, low), high])
    halves = np.arange(np.ceil(2 * low / np.log(2)), 2 * high / np.log(2)) * (np.log(2) / 2)
    near = np.concatenate([np.nextafter(halves, np.inf), halves, np.nextafter(halves, -np.inf)])
    small = rng.choice([-1, 1], 300) * 2.0 ** rng.uniform(-1074, 0, 300)
    x = np.concatenate([rng.uniform(low, high, 1500), ends, near, small])
    return x[(x >= low) & (x <= high)]


def positive(seed: int) -> np.ndarray:
    """Every binade of float64, subnormals included, and a close look at 1."""
    rng = np.random.default_rng(seed)
    binades = 2.0 ** np.arange(-1074.0, 1024.0)
    near_one = 1.0 + rng.choice([-1, 1], 400) * 2.0 ** rng.uniform(-53, -1, 400)
    return np.concatenate(
        [binades, np.nextafter(binades, 0.0)[1:], binades * rng.uniform(1, 2, len(binades)), near_one]
    )


# The last entry counts roundings: one for exp and log (their tails are evaluated far below the last place), and one ulp
# more for each further operation, an operation's half ulp being up to one of a result just above a power of two.
CASES: dict[str, tuple[Callable, Callable, Callable[[int], np.ndarray], float]] = {
    "exp": (exp, mpmath.exp, lambda seed: spread(-745.0, 709.7, seed), 1.0),
    "log": (log, mpmath.log, lambda seed: positive(seed), 1.0),
    "sigmoid": (sigmoid, lambda x: 1 / (1 + mpmath.exp(-x)), lambda seed: spread(-700.0, 40.0, seed), 2.0),
    "silu": (silu, lambda x: x / (1 + mpmath.exp(-x)), lambda seed: spread(-700.0, 700.0, seed), 3.0),
    "rsqrt": (rsqrt, lambda x: 1 / mpmath.sqrt(x), lambda seed: positive(seed)[60:], 2.0),
}


def ulps(got: float, true: mpmath.mpf, bits: int, bottom: int) -> float:
    """|got - true| in units of the last place of `true` on a grid of `bits` bits that stops refining at 2^bottom."""
    exponent = mpmath.frexp(true)[1] if true else bottom
    return float(abs(mpmath.mpf(got) - true) / mpmath.mpf(2) ** max(exponent - bits, bottom))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [1, 2])
def test_error_against_mpmath(name: str, seed: int) -> None:
    ours, theirs, points, limit = CASES[name]
    x = points(seed)
    y = ours(x)
    with np.errstate(over="ignore", under="ignore"):
        y32 = y.astype(np.float32)
    top32 = float(np.finfo(np.float32).max)
    seen = 0
    for xi, yi, yi32 in zip(x.tolist(), y.tolist(), y32.tolist(), strict=True):
        true = theirs(mpmath.mpf(xi))
        assert ulps(yi, true, 53, -1074) <= limit, f"{name}({xi.hex()}) = {yi.hex()}"
        if abs(true) <= top32:
            assert ulps(yi32, true, 24, -149) <= 0.51, f"float32 of {name}({xi.hex()}) = {yi32.hex()}"
            seen += 1
    assert seen > len(x) // 20


EDGES = [
    ("exp", [0.0, -0.0, TINY, -TINY, 2.0**-1022], [1.0, 1.0, 1.0, 1.0, 1.0]),
    ("exp", [np.inf, -np.inf, 1e308, -1e308], [np.inf, 0.0, np.inf, 0.0]),
    ("exp", ["0x1.62e42fefa39efp+9", "0x1.62e42fefa39f0p+9"], ["0x1.fffffffffff2ap+1023", np.inf]),
    ("exp", ["-0x1.74910d52d3051p+9", "-0x1.74910d52d3052p+9"], [TINY, 0.0]),
    ("log", [1.0, 0.0, -0.0, np.inf], [0.0, -np.inf, -np.inf, np.inf]),
    ("log", [TINY, 2.0**-1022], ["-0x1.74385446d71c3p+9", "-0x1.6232bdd7abcd2p+9"]),
    ("sigmoid", [0.0, -0.0, np.inf, -np.inf, TINY, -TINY], [0.5, 0.5, 1.0, 0.0, 0.5, 0.5]),
    ("sigmoid", [40.0, 1e308, -1e308], [1.0, 1.0, 0.0]),
    ("silu", [0.0, -0.0, np.inf, -np.inf, 1e308, -1e308], [0.0, -0.0, np.inf, -0.0, 1e308, -0.0]),
    ("rsqrt", [0.0, -0.0, np.inf, 4.0, 2.0**-1074], [np.inf, -np.inf, 0.0, 0.5, 2.0**537]),
]


def as_float(x: float | str) -> float:
    return float.fromhex(x) if isinstance(x, str) else x


@pytest.mark.parametrize(("name", "x", "expected"), EDGES, ids=lambda v: str(v).replace(" ", ""))
def test_edges(name: str, x: list, expected: list) -> None:
    got = CASES[name][0](np.array([as_float(v) for v in x]))
    want = np.array([as_float(v) for v in expected])
    assert [v.hex() for v in got.tolist()] == [v.hex() for v in want.tolist()]


@pytest.mark.parametrize("name", CASES)
def test_nan_has_one_pattern(name: str) -> None:
    bad = np.concatenate([FOREIGN_NANS, [-1.0, -np.inf] if name in ("log", "rsqrt") else []])
    assert (CASES[name][0](bad).view(np.int64) == NAN_BITS).all()


@pytest.mark.parametrize("function", [exp, log, sigmoid, silu, rsqrt])
def test_position_and_shape_do_not_matter(function: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vector lanes, scalar tails, strides, blocks, what else a block holds and zero-dimensional input all give the same
    bits."""
    x = np.abs(np.random.default_rng(5).standard_normal(257)) + 0.01
    whole = function(x)
    assert [float(function(v)) for v in x] == whole.tolist()
    assert function(x[::2]).tolist() == whole[::2].tolist()
    assert function(x[:256].reshape(4, 64).T).T.reshape(-1).tolist() == whole[:256].tolist()
    assert function(np.float64(2.0)).shape == ()
    assert function(np.append(x, [1e3, np.inf]))[:257].tolist() == whole.tolist()
    monkeypatch.setattr(elementary, "_BLOCK", 100)
    assert function(x).tolist() == whole.tolist()
    assert function(x[:256].reshape(4, 64).T).T.reshape(-1).tolist() == whole[:256].tolist()


def test_monotonic_where_branches_meet() -> None:
    x = np.linspace(-4.0, 4.0, 200001)
    assert (np.diff(exp(x)) >= 0).all()
    assert (np.diff(log(np.linspace(0.5, 2.0, 200001))) >= 0).all()


def softmax_true(x: np.ndarray) -> list[mpmath.mpf]:
    e = [mpmath.exp(mpmath.mpf(v)) if np.isfinite(v) else mpmath.mpf(0) for v in x.tolist()]
    mass = mpmath.fsum(e)
    return [v / mass for v in e]


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0, 800.0])
@pytest.mark.parametrize("n", [1, 2, 3, 31, 512])
def test_softmax_against_mpmath(scale: float, n: int) -> None:
    x = np.random.default_rng(n).standard_normal(n) * scale
    x[n // 3] = -np.inf if n > 3 else x[n // 3]
    with np.errstate(under="ignore"):
        got = softmax(x).astype(np.float32)
    for value, true in zip(got.tolist(), softmax_true(x), strict=True):
        assert ulps(value, true, 24, -149) <= 0.51


def test_softmax_edges() -> None:
    assert softmax(np.full((2, 3), -np.inf)).tolist() == [[0.0] * 3] * 2
    assert softmax(np.array([-np.inf, 3.0])).tolist() == [0.0, 1.0]
    assert softmax(np.array([1e308, 1e308, -1e308])).tolist() == [0.5, 0.5, 0.0]
    assert (softmax(np.array([np.nan, 1.0])).view(np.int64) == NAN_BITS).all()
    assert (softmax(np.array([np.inf, 1.0])).view(np.int64) == NAN_BITS).all()
    assert softmax(np.zeros((0, 3))).shape == (0, 3)
    x = np.random.default_rng(3).standard_normal((3, 4, 5))
    assert (softmax(x, axis=1) == np.moveaxis(softmax(np.moveaxis(x, 1, -1)), -1, 1)).all()


def tree(values: list[float]) -> float:
    """The order that `total` promises, written as a recursion over a power of two."""
    if len(values) == 1:
        return values[0]
    paired = [values[i] + (values[i + 1] if i + 1 < len(values) else 0.0) for i in range(0, len(values), 2)]
    return tree(paired)


FINITE = st.floats(-1e300, 1e300, allow_subnormal=True)


@given(arrays(np.float64, st.integers(1, 70), elements=FINITE), st.integers(0, 70))
def test_total_is_one_tree_whatever_zeros_follow(x: np.ndarray, zeros: int) -> None:
    got = float(total(x))
    assert got.hex() == (tree(x.tolist()) + 0.0).hex()
    assert float(total(np.concatenate([x, np.zeros(zeros)]))).hex() == got.hex()
    assert float(total(np.concatenate([x, np.full(zeros, -0.0)]))).hex() == got.hex()


def test_total_edges() -> None:
    assert total(np.zeros((2, 0))).tolist() == [0.0, 0.0]
    assert float(total(np.array([-0.0, -0.0]))).hex() == "0x0.0p+0"
    assert total(np.array([np.inf, -np.inf])).view(np.int64) == NAN_BITS
    assert total(np.array([1e308, 1e308])) == np.inf
    x = np.random.default_rng(4).standard_normal((3, 4, 5))
    assert (total(x, axis=0) == np.array([[tree(x[:, i, j].tolist()) for j in range(5)] for i in range(4)])).all()
