"""Bounds: what a correct engine may differ by passes, and each family of tests has a fault that trips it."""

import math
from statistics import NormalDist

import ml_dtypes
import mpmath
import numpy as np
import pytest

from conformance.judge.bounds import Budget, Layout, Step, half_ulp, judge, on_grid, store, stored_as
from conformance.judge.sampling import Sampler
from conformance.judge.spread import (
    measure,
    scale_quantile,
    size_quantile,
    student_quantile,
    sum_quantile,
    tail_quantile,
)
from reference.arithmetic import Sliced, get_arithmetic

STEP = Step(0, "layers.0.attn.q", 0, "attn.in -> attn.q", ("layers.0.attn.in",))
BUDGET = Budget(1e-6 / 3000)
SHAPES = [(128, 8, 16), (128, 96), (40, 4), (6, 64)]


def drawn(shape, seed, count=16):
    """A smooth value per element, `count` stochastic bf16 stores of it with a little noise before, and one more."""
    rng = np.random.default_rng(seed)
    centre = rng.normal(size=shape) * np.exp(rng.normal(size=shape[-1]))
    noisy = centre + rng.normal(size=(count + 1, *shape)) * 2.0**-9 * np.abs(centre)
    samples = Sampler(seed).store(noisy, "any")
    return centre, samples[:count], samples[count]


def nearest(centre, seed):
    """What an engine that rounds to nearest makes of it."""
    rng = np.random.default_rng([seed, 1])
    return store(centre + rng.normal(size=centre.shape) * 2.0**-10 * np.abs(centre), "bfloat16")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_correct_engines_pass(shape, seed):
    centre, samples, other = drawn(shape, seed)
    for engine in (nearest(centre, seed), other, centre):
        row = judge(STEP, engine.astype(np.float32), centre, samples, BUDGET)
        assert row.passed, row.message
        assert row.compared == centre.size
        assert row.max_ratio < 1


def scaled(centre, engine):
    return engine * 1.005


def half_scaled_columns(centre, engine):
    signs = np.where(np.arange(centre.shape[-1]) % 2, 0.993, 1.007)
    return engine * signs


def wrong_row(centre, engine):
    out = engine.copy()
    out[17] += 3.0 * np.abs(out[17]) * 2.0**-7 * np.sign(np.random.default_rng(5).normal(size=out[17].shape))
    return out


def wrong_column(centre, engine):
    out = engine.copy()
    flat = out.reshape(len(out), -1)
    flat[:, 5] += 3.0 * np.abs(flat[:, 5]) * 2.0**-8 * np.sign(np.random.default_rng(5).normal(size=len(out)))
    return out


def row_scale(centre, engine):
    out = engine.copy()
    out[17] *= 1.008
    return out


def column_scale(centre, engine):
    out = engine.copy()
    out.reshape(len(out), -1)[:, 5] *= 1.01
    return out


def head_scale(centre, engine):
    out = engine.copy()
    out[:, 3] *= 1.004
    return out


def offset(centre, engine):
    return engine + np.abs(centre) * 2.0**-8


def wrong_head(centre, engine):
    out = engine.copy()
    out[:, 3] += 2.0 * np.abs(out[:, 3]) * 2.0**-8 * np.sign(np.random.default_rng(5).normal(size=out[:, 3].shape))
    return out


def one_element(centre, engine):
    out = engine.copy()
    out[100, 2, 3] += 0.25 * np.abs(centre).max()
    return out


def noisier(centre, engine):
    return engine + np.random.default_rng(9).normal(size=engine.shape) * np.abs(engine) * 2.0**-7.5


FAULTS = {
    scaled: "bias",
    half_scaled_columns: "scale.rms",
    wrong_row: "row",
    wrong_column: "column",
    row_scale: "scale.row",
    column_scale: "scale.column",
    head_scale: "scale.head",
    wrong_head: "head",
    one_element: "element",
    noisier: "rms",
}


@pytest.mark.parametrize(("fault", "check"), FAULTS.items(), ids=[fault.__name__ for fault in FAULTS])
def test_each_family_has_a_fault_that_it_catches(fault, check):
    centre, samples, _ = drawn((128, 8, 16), 0)
    row = judge(STEP, fault(centre, nearest(centre, 0)).astype(np.float32), centre, samples, BUDGET)
    failed = {c.name for c in row.checks if not c.passed}
    assert not row.passed
    assert check in failed
    assert row.message


@pytest.mark.parametrize(("name", "axis"), [("mean.row", 1), ("mean.column", 0), ("mean.rms", 0)])
def test_offsets_are_caught_per_row_and_per_column(name, axis):
    centre, samples, _ = drawn((128, 96), 3)
    shift = np.zeros(centre.shape)
    sigma = measure(centre, samples - centre).sigma
    if name == "mean.rms":
        shift = sigma * np.where(np.arange(96) % 2, 0.6, -0.6)
    elif axis:
        shift[17] = sigma[17] * 1.2
    else:
        shift[:, 5] = sigma[:, 5] * 1.2
    row = judge(STEP, (nearest(centre, 3) + shift).astype(np.float32), centre, samples, BUDGET)
    assert name in {c.name for c in row.checks if not c.passed}


def test_one_bad_row_of_4096_is_found_and_named():
    centre, samples, _ = drawn((4096, 32), 1, count=8)
    engine = nearest(centre, 1)
    engine[3071] *= 1.03
    row = judge(STEP, engine.astype(ml_dtypes.bfloat16), centre, samples, BUDGET)
    assert not row.passed
    assert row.worst_row == 3071
    assert row.by_token[3071] == max(row.by_token)


def test_a_zeroed_tensor_fails():
    centre, samples, _ = drawn((64, 32), 2)
    row = judge(STEP, np.zeros((64, 32), np.float32), centre, samples, BUDGET)
    assert not row.passed
    assert row.relative_l2 == 1


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=str)
def test_infinity_and_nan_against_finite_fail(value):
    centre, samples, _ = drawn((64, 32), 2)
    engine = nearest(centre, 2)
    engine[5, 7] = value
    row = judge(STEP, engine.astype(np.float32), centre, samples, BUDGET)
    assert not row.passed
    assert row.checks[0].name == "finite"
    assert math.isinf(row.by_token[5])
    assert row.values[0].index == (5, 7)


def test_nan_on_both_sides_fails():
    centre, samples, _ = drawn((64, 32), 2)
    engine = nearest(centre, 2)
    engine[5, 7] = centre[5, 7] = samples[:, 5, 7] = np.nan
    assert not judge(STEP, engine.astype(np.float32), centre, samples, BUDGET).passed


def test_negative_zero_is_zero():
    centre, samples, _ = drawn((64, 32), 2)
    engine = nearest(centre, 2)
    engine[5, 7], centre[5, 7], samples[:, 5, 7] = -0.0, 0.0, 0.0
    row = judge(STEP, engine.astype(np.float32), centre, samples, BUDGET)
    assert row.passed
    assert row.by_token[5] < 1


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "fp16"])
def test_a_tap_that_must_be_fp32_may_not_be_coarse(kind):
    fine = Step(0, "layers.0.router.logits", 0, "mlp.in -> router.logits", (), fine=True)
    rng = np.random.default_rng(0)
    centre = rng.normal(size=(64, 16))
    samples = centre + rng.normal(size=(16, 64, 16)) * 2.0**-7
    assert judge(fine, centre.astype(np.float32), centre, samples, BUDGET).passed
    row = judge(fine, centre.astype(kind).astype(np.float32), centre, samples, BUDGET)
    assert [c.name for c in row.checks if not c.passed] == ["grid"]


def test_a_coarse_tap_is_judged_against_samples_stored_the_same_way():
    rng = np.random.default_rng(0)
    centre = rng.normal(size=(64, 64))
    samples = centre * (1 + rng.normal(size=(16, 64, 64)) * 2.0**-24)
    assert judge(STEP, centre.astype(ml_dtypes.bfloat16), centre, samples, BUDGET).passed
    assert not judge(STEP, (centre * 1.0001).astype(np.float32), centre, samples, BUDGET).passed


def test_what_is_not_valid_is_not_compared():
    centre, samples, _ = drawn((64, 32), 2)
    engine = nearest(centre, 2)
    valid = np.ones(centre.shape, bool)
    engine[:, 3], valid[:, 3] = 1e9, False
    row = judge(STEP, engine.astype(np.float32), centre, samples, BUDGET, valid=valid)
    assert row.passed
    assert row.compared == 64 * 31


def test_nothing_compared_fails():
    centre, samples, _ = drawn((64, 32), 2)
    row = judge(STEP, centre.astype(np.float32), centre, samples, BUDGET, valid=np.zeros(centre.shape, bool))
    assert not row.passed


def test_other_shapes_are_refused():
    centre, samples, _ = drawn((64, 32), 2)
    with pytest.raises(ValueError, match="engine"):
        judge(STEP, centre[:, :5], centre, samples, BUDGET)
    with pytest.raises(ValueError, match="at least 3"):
        measure(centre, samples[:2])


def test_failing_values_carry_their_bits():
    centre, samples, _ = drawn((64, 32), 2)
    engine = nearest(centre, 2)
    engine[5, 7] += 100
    value = judge(STEP, engine.astype(np.float32), centre, samples, BUDGET).values[0]
    assert value.index == (5, 7)
    assert float.fromhex(value.expected_hex) == centre[5, 7]
    assert float.fromhex(value.actual_hex) == np.float32(engine[5, 7])
    assert value.ratio == value.error / value.allowed


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
def test_half_ulp_is_the_largest_rounding_error(kind):
    dtype = np.dtype(ml_dtypes.bfloat16) if kind == "bfloat16" else np.dtype(kind)
    x = np.random.default_rng(0).normal(size=20000) * np.exp2(np.random.default_rng(1).integers(-12, 12, 20000))
    error = np.abs(store(x, kind) - x) / half_ulp(x, kind)
    assert error.max() <= 1
    assert error.max() > 0.999
    assert np.array_equal(store(x, kind), x.astype(dtype).astype(np.float64))


def test_the_format_of_a_tap_is_read_off_its_values():
    x = np.random.default_rng(0).normal(size=50).astype(np.float32)
    assert stored_as(x) == "float32"
    assert stored_as(x.astype(ml_dtypes.bfloat16).astype(np.float32)) == "bfloat16"
    assert stored_as(x.astype(ml_dtypes.bfloat16)) == "bfloat16"
    assert list(on_grid(np.array([1.0, 1 + 2.0**-10, 1 + 2.0**-11]), 13)) == [True, True, False]


def test_a_state_is_laid_out_with_its_heads_as_columns():
    layout = Layout.of((3, 4, 5), time=False)
    state = np.arange(60).reshape(3, 4, 5)
    assert (layout.flat, layout.heads) == ((4, 15), 3)
    flat = layout.spread(state).reshape(-1)
    assert all(state[layout.index(i)] == flat[i] for i in range(60))


@pytest.mark.parametrize("freedom", [1, 2, 7, 15, 128, 5000])
@pytest.mark.parametrize("probability", [0.25, 0.01, 1e-6, 1e-11, 1e-16])
def test_student_quantiles_are_never_too_small_and_hardly_too_large(probability, freedom):
    def tail(t):
        x = freedom / (freedom + mpmath.mpf(t) ** 2)
        return mpmath.betainc(mpmath.mpf(freedom) / 2, 0.5, 0, x, regularized=True) / 2

    t = student_quantile(probability, freedom)
    assert tail(t) <= probability
    if freedom >= 15:
        assert tail(t / 1.03) > probability


@pytest.mark.parametrize("freedom", [1, 4, 30, 500])
def test_size_quantiles_are_cautious_about_sums_of_squares(freedom):
    squares = np.random.default_rng(freedom).normal(size=(400, freedom)) ** 2
    quantile = size_quantile([squares - squares.mean(axis=0)], freedom, 1e-9)
    beyond = float(mpmath.gammainc(freedom / 2, quantile / 2, regularized=True))
    assert 1e-14 < beyond < 2e-9


@pytest.mark.parametrize("seed", range(5))
def test_tail_quantiles_are_cautious_about_normal_draws(seed):
    draws = np.random.default_rng(seed).normal(size=20000)
    truth = NormalDist().inv_cdf(1 - 0.5e-9)
    assert truth < scale_quantile(draws, 1e-9, draws.size) < 2 * truth
    assert truth * 0.95 < tail_quantile(draws, 0.5e-9, draws.size) < 2 * truth
    parts = draws.reshape(20, 1000)
    assert truth * 0.9 < sum_quantile([parts], 1e-9) / math.sqrt(1000) < 1.3 * truth


def test_sums_whose_parts_move_together_get_their_own_spread():
    rng = np.random.default_rng(0)
    together = np.repeat(rng.normal(size=(16, 1)), 50, axis=1)
    assert sum_quantile([together], 1e-3) > 10 * sum_quantile([rng.normal(size=(16, 50))], 1e-3) / 3


@pytest.mark.parametrize("rounding", ["store", "single"])
def test_the_fast_sampler_draws_what_the_oracle_draws(rounding):
    x = np.random.default_rng(0).normal(size=200) * np.exp2(np.random.default_rng(1).integers(-8, 8, 200))
    stacked = np.broadcast_to(x, (4000, 200))
    fast = getattr(Sampler(1), rounding)(stacked, "p")
    oracle = getattr(get_arithmetic("stochastic", 1), rounding)(stacked, "p")
    assert np.all((fast.min(0) == oracle.min(0)) & (fast.max(0) == oracle.max(0)))
    step = np.maximum(oracle.max(0) - oracle.min(0), 1e-300)
    assert np.abs((fast.mean(0) - oracle.mean(0)) / step).max() < 6 * 0.5 / math.sqrt(2000)


def test_the_fast_sampler_multiplies_with_the_oracles_noise():
    rng = np.random.default_rng(0)
    a, w = rng.normal(size=(1, 3, 40)), rng.normal(size=(40, 5))
    stacked = np.broadcast_to(a, (3000, 3, 40))
    for operand in (w, Sliced(w)):
        fast = Sampler(2).dot(stacked, operand, "p", "none") - a @ w
        oracle = get_arithmetic("stochastic", 2).dot(stacked, operand, "p", "none") - a @ w
        assert fast.std(0) == pytest.approx(oracle.std(0), rel=0.1)
        assert np.abs(fast).max() <= np.abs(oracle).max() * 1.02


def test_the_budget_shares_one_probability():
    tokens = np.array([1, 1, 1, 2])
    budget = Budget.of(1e-6, 100, tokens)
    assert budget.probability < 1e-8
    assert budget.clumping == pytest.approx(math.sqrt(10 / 4))
