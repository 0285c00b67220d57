"""Faults of routing and of the experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conformance.field_bugs.sides import SIDES, close
from fast.ops import router


@SIDES
def test_fb18_gate_and_up_keep_their_own_scale(side):
    """Codes 1.0, block scale 1, 16 ones: 0.16 and 0.016."""
    codes, scale = np.full((1, 8), 0x22, np.uint8), np.full((1, 1), 0x38, np.uint8)
    for scale_2 in (0.01, 0.001):
        found = side.packed_linear(np.ones((1, 16)), codes, scale, scale_2)
        close(side, found, [[16 * np.float64(np.float32(scale_2))]], 2)


@SIDES
def test_fb19_every_block_clamps(side):
    """gate 12, up -15 at limit 10: -99.9955, not -179.999; through an expert too."""
    expected = -100 / (1 + np.exp(-10.0))
    close(side, side.swiglu(np.array([[12.0]]), np.array([[-15.0]]), 10.0), [[expected]], 8)
    expert = [np.array([[12.0]]), np.array([[-15.0]]), np.array([[1.0]])]
    found = side.routed(np.ones((1, 1)), np.zeros((1, 1), np.int32), np.ones((1, 1)), [expert], 10.0)
    close(side, found, [[expected]], 16)


@SIDES
def test_fb24_weights_come_from_the_plain_sigmoid(side):
    """Biases of 12 over sigmoids of 1e-8: recovered by subtraction the weights would be 0 or NaN."""
    logits = np.full((1, 6), -30.0)
    logits[0, 2], logits[0, 5] = -18.4207, -16.1181
    chosen = side.choose(1 / (1 + np.exp(-logits)), np.full(6, 0.0), 2)
    assert sorted(chosen[0].tolist()) == [2, 5]
    s = 1 / (1 + np.exp(-logits[0, [2, 5]]))
    close(side, side.weigh(logits, np.array([[2, 5]], np.int32), 2.5), [2.5 * s / (s.sum() + 1e-20)], 64)
    assert np.round(s / s.sum(), 4).tolist() == [0.0909, 0.9091]


@SIDES
def test_fb27_the_bias_decides_in_fp32(side):
    """288 biases 6.817 .. 7.063 over equal logits: the eight largest. In bf16 only 9 different values are left."""
    bias = np.linspace(6.817, 7.063, 288).astype(np.float32)
    order = np.random.default_rng(27).permutation(288)
    found = side.choose(np.full((1, 288), 0.5), bias[order].astype(np.float64), 8)
    assert sorted(order[found[0]].tolist()) == list(range(280, 288))
    assert len(np.unique(torch.from_numpy(bias).bfloat16().float())) == 9


def test_fb27_a_bias_in_bf16_is_refused_by_the_engine():
    with pytest.raises(AssertionError, match="bfloat16"):
        router.choose(torch.full((1, 8), 0.5), torch.zeros(8, dtype=torch.bfloat16), 2)


@SIDES
@pytest.mark.parametrize("path", ["lone", "among others", "several tokens"])
def test_fb147_the_scale_is_applied_once(side, path):
    """An expert whose output is its input, weight normalised to 1: 2.5 x on every path, not x and not 6.25 x."""
    x = np.array([[0.5, 1.0, 2.0]]) if path != "several tokens" else np.array([[0.5, 1.0, 2.0]] * 9)
    big = 60.0
    gate, up = np.zeros((6, 3)), np.zeros((6, 3))
    for i in range(3):
        gate[i], gate[3 + i] = big, -big
        up[i, i], up[3 + i, i] = 1.0, 1.0
    down = np.concatenate([np.eye(3), np.eye(3)], axis=1) / 10.0
    identity = [gate, up, down]
    dead = [np.zeros((6, 3)), np.zeros((6, 3)), np.zeros((3, 6))]
    experts = [dead, identity, dead] if path == "among others" else [identity]
    index = 1 if path == "among others" else 0
    indices = np.full((len(x), 1), index, np.int32)
    weights = side.weigh(np.full((len(x), len(experts)), 0.3), indices, 2.5)
    close(side, weights, np.full((len(x), 1), 2.5), 4)
    close(side, side.routed(x, indices, weights, experts, 10.0), 2.5 * x / (1 + np.exp(-10.0)), 32)
