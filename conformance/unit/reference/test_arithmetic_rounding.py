"""Rounding to bf16 and float32, nearest and random, and the three arithmetics that are made of it."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from reference.arithmetic import Arithmetic, Sliced, get_arithmetic, matmul, round_bf16, round_f32
from reference.exact import product
from reference.rounding import random_bf16, random_f32

NAN_BITS = 0x7FF8000000000000
BF16 = np.arange(0x7F81, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)  # 0 to infinity, ascending


def float32_sample() -> tuple[np.ndarray, np.ndarray]:
    """Neighbouring float32 values: subnormals, every binade, the top. Ascending pairs [n, 2], codes [n]."""
    rng = np.random.default_rng(1)
    low = np.concatenate([np.arange(0, 300), rng.integers(0, 0x7F800000, 50000), np.arange(0x7F7FFF00, 0x7F800000)])
    low = np.concatenate([low, np.arange(0x00800000 - 200, 0x00800000 + 200), np.arange(1, 255) << 23])
    pair = np.stack([low, low + 1], axis=1).astype(np.uint32)
    return pair.view(np.float32).astype(np.float64), pair[:, 0]


def pairs(grid: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower value, upper value (2^128 in infinity's place) and whether the lower code is even, for neighbours."""
    if grid == "bf16":
        low, high, even = BF16[:-1], BF16[1:].copy(), np.arange(len(BF16) - 1) % 2 == 0
    else:
        values, codes = float32_sample()
        low, high, even = values[:, 0], values[:, 1].copy(), codes % 2 == 0
    high[np.isinf(high)] = 2.0**128
    return low, high, even


NEAREST: dict[str, Callable] = {"bf16": round_bf16, "fp32": round_f32}
RANDOM: dict[str, Callable] = {"bf16": random_bf16, "fp32": random_f32}


def back(x: np.ndarray) -> np.ndarray:
    return np.where(x == 2.0**128, np.inf, x)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("grid", NEAREST)
def test_nearest_even_between_all_neighbours(grid: str, sign: float) -> None:
    """At each value, next to it, at the middle and next to the middle; for bf16 of every pair there is."""
    low, high, even = pairs(grid)
    middle = (low + high) / 2
    points = {
        "low": (low, low),
        "above low": (np.nextafter(low, np.inf), low),
        "below middle": (np.nextafter(middle, 0.0), low),
        "middle": (middle, np.where(even, low, high)),
        "above middle": (np.nextafter(middle, np.inf), high),
        "below high": (np.nextafter(high, 0.0), high),
        "high": (high, high),
    }
    for where, (x, want) in points.items():
        got = NEAREST[grid](sign * x)
        wrong = got.view(np.int64) != (sign * back(want)).view(np.int64)
        assert not wrong.any(), f"{where}: {x[wrong][0].hex()} gave {got[wrong][0].hex()}"


def test_float32_is_the_nearest_multiple_of_its_unit() -> None:
    """In the binade of x, and under the smallest normal; from 2^128 on infinity."""
    rng = np.random.default_rng(2)
    x = rng.integers(0, 1 << 64, 200000, np.uint64).view(np.float64)
    x = np.concatenate([x[np.isfinite(x)], rng.standard_normal(100000) * 2.0 ** rng.integers(-160, 135, 100000)])
    unit = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 24, -149))
    want = np.rint(x / unit) * unit
    want = np.where(np.abs(want) >= 2.0**128, np.copysign(np.inf, x), want)
    assert (round_f32(x).view(np.int64) == want.view(np.int64)).all()


@pytest.mark.parametrize("grid", NEAREST)
def test_specials(grid: str) -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, 1e308, -1e308, 5e-324, -5e-324])
    for got in (NEAREST[grid](x), RANDOM[grid](x, np.full(8, 0.5))):
        want = [0.0, -0.0, np.inf, -np.inf, np.inf, -np.inf, 0.0, -0.0]
        assert [v.hex() for v in got.tolist()] == [v.hex() for v in want]
    nans = np.array([0xFFF8000000000000, 0x7FF0000000000001, 0x7FF8000000000123], np.uint64).view(np.float64)
    assert (NEAREST[grid](nans).view(np.int64) == NAN_BITS).all()
    assert (RANDOM[grid](nans, np.zeros(3)).view(np.int64) == NAN_BITS).all()
    assert NEAREST[grid](np.float64(1.5)).shape == ()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("grid", RANDOM)
@pytest.mark.parametrize("eighths", range(1, 8))
def test_random_rounding_goes_up_exactly_below_the_covered_fraction(grid: str, sign: float, eighths: int) -> None:
    low, high, _ = pairs(grid)
    x = sign * (low + (high - low) * (eighths / 8))
    lower, upper = (back(low), back(high)) if sign > 0 else (-back(high), -back(low))
    covered = eighths / 8 if sign > 0 else 1 - eighths / 8
    assert (RANDOM[grid](x, np.full(x.shape, covered - 2.0**-53)) == upper).all()
    assert (RANDOM[grid](x, np.full(x.shape, covered)) == lower).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("grid", RANDOM)
def test_random_rounding_leaves_grid_values_alone(grid: str, sign: float) -> None:
    x = sign * pairs(grid)[0]
    for draw in (0.0, 0.5, 1 - 2.0**-53):
        assert (RANDOM[grid](x, np.full(x.shape, draw)).view(np.int64) == x.view(np.int64)).all()


def binomial_slack(n: int, p: float) -> float:
    """Six standard deviations of the mean of n draws: one false alarm in 5e8."""
    return 6 * float(np.sqrt(p * (1 - p) / n))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("call", ["store", "single", "maybe"])
@pytest.mark.parametrize("fraction", [0.0625, 0.5, 0.875])
def test_random_rounding_is_unbiased(call: str, fraction: float, seed: int) -> None:
    unit = 2.0**-23 if call == "single" else 2.0**-7
    n = 40000
    got = getattr(get_arithmetic("stochastic", seed), call)(np.full(n, 1.0 + fraction * unit), "place")
    assert set(np.unique(got)) == {1.0, 1.0 + unit}
    assert abs((got > 1).mean() - fraction) <= binomial_slack(n, fraction)


def written_out_draw(seed: int, point: str, met: int, index: int) -> float:
    """The draw's definition in Python integers."""
    word = (1 << 64) - 1

    def finish(h: int) -> int:
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & word
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & word
        return h ^ (h >> 31)

    h = 0xCBF29CE484222325
    for byte in point.encode():
        h = ((h ^ byte) * 0x100000001B3) & word
    for part in (seed, met):
        h = finish((h + part + 0x9E3779B97F4A7C15) & word)
    return (finish((h + 0x9E3779B97F4A7C15 * (index + 1)) & word) >> 11) * 2.0**-53


@pytest.mark.parametrize("seed", [0, 7, (1 << 64) - 1])
def test_draws_are_the_hash_they_are_said_to_be(seed: int) -> None:
    """Seen through rounding: x covers half the gap, so it goes up exactly where the draw is under a half."""
    ar = get_arithmetic("stochastic", seed)
    for met in range(3):
        got = ar.store(np.full((4, 25), 1.0 + 2.0**-8), "layers.3.attn.q") > 1
        want = [written_out_draw(seed, "layers.3.attn.q", met, i) < 0.5 for i in range(100)]
        assert got.reshape(-1).tolist() == want


def test_first_draws_of_seed_zero() -> None:
    """Stored bits: a change of the generator changes every recorded spread and must be seen here first."""
    draws = [written_out_draw(0, "embed", 0, i).hex() for i in range(3)]
    assert draws == ["0x1.5a4d3ecac0cf0p-4", "0x1.417d443314031p-1", "0x1.34f808e63d43cp-3"]


def test_copies_on_a_leading_axis_are_independent() -> None:
    x = np.broadcast_to(np.random.default_rng(3).standard_normal(4096), (8, 4096))
    up = get_arithmetic("stochastic", 5).store(x, "place") > x
    agree = [(up[i] == up[j]).mean() for i in range(8) for j in range(i)]
    # Two fair choices that agree with chance p^2 + (1-p)^2, p uniform: 2/3.
    assert max(abs(a - 2 / 3) for a in agree) <= binomial_slack(4096, 2 / 3)


def test_draws_depend_on_seed_point_and_call_only() -> None:
    x = np.full(512, 1.0 + 2.0**-8)

    def run(seed: int, *points: str) -> list[list[float]]:
        ar = get_arithmetic("stochastic", seed)
        return [ar.store(x, point).tolist() for point in points]

    a, b, a2 = run(1, "a", "b", "a")
    assert run(1, "b", "a", "a") == [b, a, a2]
    assert len({tuple(v) for v in (a, b, a2, run(2, "a")[0])}) == 4


X = np.random.default_rng(8).standard_normal((3, 40))
W = np.random.default_rng(9).standard_normal((6, 40)).astype(np.float32)
Y = matmul(X, W.T)


@pytest.mark.parametrize("method", ["linear", "dot"])
def test_products_in_each_arithmetic(method: str) -> None:
    right = Sliced.of_weight(W)
    exact, bf16 = get_arithmetic("exact"), get_arithmetic("bf16")
    for out in ("bf16", "fp32", "none"):
        assert (getattr(exact, method)(X, right, "p", out=out) == Y).all()
    assert (getattr(bf16, method)(X, right, "p") == round_bf16(Y)).all()
    assert (getattr(bf16, method)(X, right, "p", out="fp32") == round_f32(Y)).all()
    assert (getattr(bf16, method)(X, right, "p", out="none") == Y).all()
    for name in ("exact", "bf16", "stochastic"):
        with pytest.raises(ValueError, match="'fp16'"):
            getattr(get_arithmetic(name), method)(X, right, "p", out="fp16")


def test_accumulator_noise_has_the_size_it_should() -> None:
    copies = np.broadcast_to(X, (2000, *X.shape))
    got = get_arithmetic("stochastic", 3).linear(copies, Sliced.of_weight(W), "p", out="none")
    unit = 2.0**-24 * np.sqrt((X**2).sum(1))[:, None] * np.sqrt((W.astype(np.float64) ** 2).sum(1))
    noise = (got - Y) / unit
    assert np.abs(noise).max() <= 1 + 2.0**-20
    # Uniform on [-1, 1]: the mean of n has deviation 1/sqrt(3n), and the largest of n misses 1 by about 2/n.
    assert np.abs(noise.mean(axis=0)).max() <= 6 / np.sqrt(3 * 2000)
    assert np.abs(noise).max(axis=0).min() >= 1 - 20 / 2000
    stored = get_arithmetic("stochastic", 3).linear(X, Sliced.of_weight(W), "p")
    assert (stored == round_bf16(stored)).all()
    assert (get_arithmetic("stochastic", 3).linear(X, Sliced.of_weight(W), "p", out="fp32") != Y).any()


def test_infinite_products_stay_infinite_under_noise() -> None:
    got = get_arithmetic("stochastic").dot(np.array([[np.inf, 1.0]]), np.ones((2, 2)), "p", out="none")
    assert got.tolist() == [[np.inf, np.inf]]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("out", "unit"), [("bf16", 2.0**-7), ("fp32", 2.0**-23)])
def test_a_product_is_rounded_once(out: str, unit: float, sign: float) -> None:
    """Just above a tie of the target grid, closer than float64 can tell."""
    ones = np.ones((3, 1))
    bf16 = get_arithmetic("bf16")
    for little, want in ((2.0**-60, 1.0 + unit), (-(2.0**-60), 1.0), (0.0, 1.0)):
        a = sign * np.array([[1.0, unit / 2, little]])
        assert bf16.dot(a, ones, "p", out=out).tolist() == [[sign * want]]
    assert matmul(np.array([[1.0, unit / 2, 2.0**-60]]), ones) == 1.0 + unit / 2


@pytest.mark.parametrize("scale", [0, -600, 600])
def test_rounding_to_odd(scale: int) -> None:
    rng = np.random.default_rng(4)
    a = rng.standard_normal((50, 30)) * 2.0**scale
    a[:, 3] *= 2.0 ** -rng.integers(0, 200, 50)
    b = np.concatenate([rng.standard_normal((30, 3)), np.eye(30)[:, :2]], axis=1) * 2.0 ** (-scale // 3)
    near, odd = product(a, b), product(a, b, odd=True)
    exact = near[:, 3:] == a[:, :2] * 2.0 ** (-scale // 3)
    assert exact.all()
    assert (odd[:, 3:] == near[:, 3:]).all()
    assert (odd[:, :3].view(np.int64) & 1).all()
    assert (np.abs(near - odd) <= np.spacing(np.abs(near))).all()


def test_exact_arithmetic_never_rounds() -> None:
    ar = get_arithmetic("exact")
    for call in (ar.store, ar.single, ar.maybe):
        assert (call(X, "p") == X).all()
    assert (get_arithmetic("bf16").maybe(X, "p") == X).all()
    assert (get_arithmetic("bf16").store(X, "p") == round_bf16(X)).all()
    assert (get_arithmetic("bf16").single(X, "p") == round_f32(X)).all()


def test_names() -> None:
    assert [get_arithmetic(n).name for n in ("exact", "bf16", "stochastic")] == ["exact", "bf16", "stochastic"]
    assert type(get_arithmetic("exact")) is Arithmetic
    with pytest.raises(ValueError, match="'float'"):
        get_arithmetic("float")
