"""Faults of the hyper-connections."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conformance.checkpoints.shared import shared
from conformance.field_bugs.sides import SIDES, close
from fast.loader import load
from reference.checkpoint import open_checkpoint


@SIDES
def test_fb107_comb_is_applied_transposed(side):
    """One-hot streams and no sublayer output: new stream j at place i is comb[i, j]."""
    comb = np.array(
        [[0.68, 0.22, 0.03, 0.07], [0.27, 0.62, 0.03, 0.08], [0.04, 0.1, 0.8, 0.06], [0.01, 0.06, 0.14, 0.79]]
    )
    found = side.combine(np.eye(4)[None], np.zeros((1, 4)), np.ones((1, 4)), comb[None])
    close(side, found[0], comb.T, 4)
    assert not np.allclose(comb, comb.T)


@SIDES
@pytest.mark.parametrize(("square", "factor"), [(1e-6, 11 / 2), (1.0, (1 + 1e-5) / (1 + 1e-6))])
def test_fb108_two_epsilons_with_two_jobs(side, square, factor):
    """With rms_norm_eps the raw weights of a site are sqrt(`factor`) smaller than with hc_eps: 2.345 for tiny streams.

    pre = sigmoid(raw) + hc_eps, so raw is read back through the inverse of the sigmoid.
    """
    C, D = 4, 8
    streams = np.sqrt(square) * np.where(np.arange(C * D) % 2, 1.0, -1.0).reshape(1, C, D)
    fn = np.zeros(((2 + C) * C, C * D))
    fn[0, 1] = 3.0
    args = streams, fn, np.zeros((2 + C) * C), np.ones(3)
    raw = {}
    for eps in (1e-5, 1e-6):
        pre = np.asarray(side.mix(*args, norm_eps=eps, hc_eps=1e-6, iterations=2)[0], np.float64)[0, 0] - 1e-6
        raw[eps] = np.log(pre / (1 - pre))
        expected = 3 * np.sqrt(square / (square + eps))
        close(side, raw[eps], expected, 64 * (C * D), 1 / (1 - pre))
    close(side, raw[1e-6] / raw[1e-5], np.sqrt(factor), 256 * (C * D), 1 / (1 - pre))
    zero = side.mix(*args, norm_eps=1e-5, hc_eps=0.25, iterations=2)[0]
    close(side, zero[0, 1], 0.75, 4)


@pytest.mark.parametrize("export", ["nvidia", "libertai"])
def test_fb28_base_and_scale_are_bit_equal_to_the_file(export):
    """fp32 wherever the file has fp32; widened, never rounded, where it has bf16."""
    directory = shared(export)
    weights, checkpoint = load(directory, progress=False), open_checkpoint(directory)
    for layer in range(weights.config.text.num_hidden_layers):
        for site in ("attn", "ffn"):
            for part in ("base", "scale"):
                name = f"model.language_model.layers.{layer}.hc_{site}_{part}"
                bound = weights.tensor(name)
                assert bound.dtype == torch.float32
                assert np.array_equal(bound.numpy(), checkpoint.weight(name))
                assert checkpoint.dtype(name) == ("BF16" if export == "nvidia" else "F32")
