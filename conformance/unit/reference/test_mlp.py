"""reference.ops.mlp: the clamps, the sum over experts, the rounding points."""

from __future__ import annotations

import math

import numpy as np
import pytest

from conformance.unit.reference.bounds import Recorder, check, gamma
from reference.arithmetic import Arithmetic, get_arithmetic
from reference.ops import mlp
from reference.weights import Weights

EXACT = Arithmetic()


def _projections(rng: np.random.Generator, F: int, D: int) -> dict[str, np.ndarray]:
    shapes = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    return {f"{name}.weight": rng.standard_normal(shape) for name, shape in shapes.items()}


def _silu(v: float) -> float:
    return v / (1 + math.exp(-v))


@pytest.mark.parametrize("limit", [1.5, 10.0])
@pytest.mark.parametrize("gate", [-40.0, -10.5, -1.0, 0.0, 1.5, 9.0, 10.0, 12.0])
@pytest.mark.parametrize("up", [-15.0, -1.6, 0.5, 9.5, 15.0])
def test_gate_is_clamped_above_only_and_up_on_both_sides(gate, up, limit):
    found = mlp.activation(EXACT, np.array([gate]), np.array([up]), limit, "m")
    expected = _silu(min(gate, limit)) * max(-limit, min(up, limit))
    check(found, [expected], gamma(8) * abs(expected))


def _swiglu(x: np.ndarray, w: dict[str, np.ndarray], limit: float) -> np.ndarray:
    """The definition with NumPy's own products and functions."""
    gate = np.minimum(x @ w["gate_proj.weight"].T, limit)
    up = np.clip(x @ w["up_proj.weight"].T, -limit, limit)
    return (gate / (1 + np.exp(-gate)) * up) @ w["down_proj.weight"].T


def _magnitude(w: dict[str, np.ndarray], x: np.ndarray, limit: float) -> np.ndarray:
    """Bound on the sum of the sizes of all terms: what a relative rounding error is relative to."""
    sizes = np.abs(x) @ (np.abs(w["gate_proj.weight"]) + np.abs(w["up_proj.weight"])).T
    return ((1 + limit) * (limit + sizes)) @ np.abs(w["down_proj.weight"]).T


@pytest.mark.parametrize("limit", [1.5, 10.0])
def test_swiglu_is_its_definition(limit):
    rng = np.random.default_rng(1)
    w, x = _projections(rng, 9, 6), rng.standard_normal((2, 5, 6))
    found = mlp.swiglu(EXACT, x, Weights.of(w), limit, "m")
    check(found, _swiglu(x, w, limit), gamma(6 + 9 + 12) * _magnitude(w, x, limit))


@pytest.mark.parametrize("seed", [2, 3])
def test_routed_is_the_weighted_sum_over_the_chosen_experts(seed):
    rng = np.random.default_rng(seed)
    experts = [_projections(rng, 7, 6) for _ in range(5)]
    held = Weights.of({f"{e}.{name}": value for e, w in enumerate(experts) for name, value in w.items()})
    x = rng.standard_normal((2, 4, 6))
    indices = np.sort(np.argsort(rng.random((2, 4, 5)), -1)[..., :3], -1).astype(np.int32)
    weights = rng.random((2, 4, 3))
    found = mlp.routed(EXACT, x, indices, weights, lambda e: held.at(f"{e}."), 10.0)
    for b, t in np.ndindex(2, 4):
        pairs = list(zip(indices[b, t], weights[b, t], strict=True))
        expected = sum(share * _swiglu(x[b, t], experts[e], 10.0) for e, share in pairs)
        size = sum(share * _magnitude(experts[e], x[b, t], 10.0) for e, share in pairs)
        check(found[b, t], expected, gamma(40) * size)


def test_only_touched_experts_are_read():
    rng = np.random.default_rng(4)
    asked: list[int] = []
    w = Weights.of(_projections(rng, 3, 4))

    def expert(index: int) -> Weights:
        asked.append(index)
        return w

    indices = np.array([[7, 2], [2, 9], [-1, -1]], np.int32)
    out = mlp.routed(EXACT, rng.standard_normal((3, 4)), indices, np.ones((3, 2)), expert, 10.0)
    assert asked == [2, 7, 9]
    assert np.array_equal(out[2], np.zeros(4))


@pytest.mark.parametrize("name", ["exact", "bf16"])
def test_a_row_does_not_depend_on_the_rows_beside_it(name):
    rng = np.random.default_rng(5)
    ar, w = get_arithmetic(name), Weights.of(_projections(rng, 8, 6))
    x, indices, weights = rng.standard_normal((6, 6)), np.zeros((6, 1), np.int32), rng.random((6, 1))
    whole = mlp.routed(ar, x, indices, weights, lambda e: w, 10.0)
    for t in range(6):
        one = mlp.routed(ar, x[t : t + 1], indices[t : t + 1], weights[t : t + 1], lambda e: w, 10.0)
        assert np.array_equal(whole[t : t + 1], one)


def test_rounding_points():
    ar = Recorder()
    rng = np.random.default_rng(6)
    w = Weights.of(_projections(rng, 8, 6))
    x = rng.standard_normal((2, 6))
    routed = mlp.routed(ar, x, np.zeros((2, 1), np.int32), np.ones((2, 1)), lambda e: w, 10.0)
    mlp.moe_sum(ar, routed, mlp.swiglu(ar, x, w, 10.0, "shared"))
    assert ar.points("store") == {"routed.out", "mlp.out"} | {
        f"{scope}.{point}" for scope in ("expert", "shared") for point in ("gate", "up", "product", "down")
    }
    assert ar.points("maybe") == {"expert.silu", "shared.silu", "routed.weights", "routed.contribution"}
