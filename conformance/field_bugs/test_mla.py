"""Faults of the latent attention."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.checkpoints.shared import shared
from conformance.field_bugs.sides import SIDES, close

FORMS = pytest.mark.parametrize("form", ["absorbed", "expanded"])
H, N, V, L = 2, 4, 3, 6


def tensors(seed: int, T: int, n: int):
    generator = np.random.default_rng(seed)
    return tuple(generator.standard_normal(shape) for shape in ((T, H, N), (n, L), (H * (N + V), L)))


@SIDES
@FORMS
def test_fb100_a_query_that_sees_nothing_gives_zeros(side, form):
    """Row 1 selects nothing: 0, not NaN, and its neighbours are what they are without it."""
    q, latents, kv_b = tensors(100, 3, 5)
    selected = np.array([[0, 2, -1], [-1, -1, -1], [1, 3, 4]], np.int32)
    found = side.attend(q, latents, selected, kv_b, form)
    assert np.array_equal(found[1], np.zeros((H, V)))
    for t in (0, 2):
        alone = side.attend(q[t : t + 1], latents, selected[t : t + 1], kv_b, form)
        close(side, found[t], alone[0], 64, np.abs(latents).sum() * np.abs(kv_b).sum())
        assert np.abs(alone).min() > 0


@SIDES
@FORMS
def test_fb103_what_was_not_selected_is_never_read(side, form):
    """NaN in the latents that no query selects, as unused bytes of a packed cache row would be."""
    q, latents, kv_b = tensors(103, 2, 6)
    selected = np.array([[0, 2, -1], [2, 5, -1]], np.int32)
    expected = side.attend(q, latents, selected, kv_b, form)
    latents[[1, 3, 4]] = np.nan
    assert np.array_equal(side.attend(q, latents, selected, kv_b, form), expected)


@SIDES
def test_fb103_the_query_is_as_wide_as_the_latent(side):
    """No rotary part anywhere: the cache row is kv_lora_rank wide, and the scale is that of the key width alone."""
    model = side.model(shared("nvidia", "odd"))
    model.prefill([1, 2, 3])
    text = getattr(model.config, "text", model.config)
    assert side.latents(model, 1).shape == (3, text.kv_lora_rank)
    q, latents, kv_b = np.ones((1, 1, 4)), np.eye(2), np.zeros((5, 2))
    kv_b[:4, 0], kv_b[4] = 0.5, (1.0, 0.0)
    found = side.attend(q, latents, np.array([[0, 1]], np.int32), kv_b, "absorbed")
    close(side, found[0, 0, 0], 1 / (1 + np.exp(-(4 * 0.5) * 4**-0.5)), 8)
