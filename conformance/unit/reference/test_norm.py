"""reference.ops.norm against its equation in rational arithmetic and square roots of 60 digits."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from conformance.unit.reference.bounds import check, gamma
from reference.arithmetic import Arithmetic, get_arithmetic
from reference.ops import norm

EXACT = Arithmetic()


def _true_rms(x: np.ndarray, eps: float) -> list[mpmath.mpf]:
    with mpmath.workdps(60):
        mean = sum(mpmath.mpf(v) ** 2 for v in x.tolist()) / len(x)
        return [mpmath.mpf(v) / mpmath.sqrt(mean + mpmath.mpf(eps)) for v in x.tolist()]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(("D", "eps"), [(1, 1e-5), (7, 1e-2), (128, 1e-5)])
def test_rms_norm_is_its_equation(D, eps, scale):
    rng = np.random.default_rng(D)
    x, w = scale * rng.standard_normal(D), 1 + 0.3 * rng.standard_normal(D)
    expected = np.array([float(v) for v in _true_rms(x, eps)]) * w
    check(norm.rms_norm(EXACT, x, w, eps, "n"), expected, gamma(D + 6) * np.abs(expected))


def test_epsilon_is_inside_the_root_and_added_to_the_mean():
    x, eps = np.array([3.0, 4.0]), 3.5
    assert np.array_equal(norm.unit_rms(EXACT, x, eps, "n"), x / 4.0)


def test_layer_norm_subtracts_the_mean_and_adds_the_bias():
    x, w, b = np.array([1.0, 3.0, 5.0, 7.0]), np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.5, -1.0, 0.25, 2.0])
    # mean 4, deviations -3 -1 1 3, variance 5; eps 4 makes the root 3.
    assert np.array_equal(norm.layer_norm(EXACT, x, w, b, 4.0, "n"), w * (x - 4.0) / 3.0 + b)


def test_layer_norm_of_a_constant_row_is_the_bias():
    b = np.array([0.5, -1.0, 0.25])
    assert np.array_equal(norm.layer_norm(EXACT, np.full((2, 3), 1e6), np.ones(3), b, 1e-6, "n"), np.stack([b, b]))


def test_a_zero_row_gives_zeros():
    assert np.array_equal(norm.rms_norm(EXACT, np.zeros((2, 5)), np.ones(5), 1e-5, "n"), np.zeros((2, 5)))


def test_statistics_are_fp32_and_the_result_is_bf16():
    rng = np.random.default_rng(5)
    x, w = get_arithmetic("bf16").store(rng.standard_normal((3, 64)), "x"), 1 + 0.3 * rng.standard_normal(64)
    w = get_arithmetic("bf16").store(w, "w")
    bf16 = get_arithmetic("bf16")
    stored = norm.rms_norm(bf16, x, w, 1e-5, "n")
    assert np.array_equal(bf16.store(stored, "again"), stored)
    unit = norm.unit_rms(bf16, x, 1e-5, "n")
    assert np.array_equal(bf16.single(unit, "again"), unit)
    assert not np.array_equal(bf16.store(unit, "again"), unit)


def test_leading_axes_are_independent():
    rng = np.random.default_rng(6)
    x, w, b = rng.standard_normal((2, 3, 9)), rng.standard_normal(9), rng.standard_normal(9)
    whole = norm.rms_norm(EXACT, x, w, 1e-5, "n"), norm.layer_norm(EXACT, x, w, b, 1e-6, "n")
    for i, j in np.ndindex(2, 3):
        assert np.array_equal(whole[0][i, j], norm.rms_norm(EXACT, x[i, j], w, 1e-5, "n"))
        assert np.array_equal(whole[1][i, j], norm.layer_norm(EXACT, x[i, j], w, b, 1e-6, "n"))
