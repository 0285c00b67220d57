"""The norms of the text stack (model.md, head of the page and section 2.3).

`norm(x; w, eps) = w * x / sqrt(mean(x^2) + eps)` everywhere but in the indexer, whose key goes through the one
LayerNorm. Statistics are fp32 points, the result is a bf16 point. Some engines round the normalised row before the
weight is applied: the stochastic arithmetic does so too, at point `<point>.row`. Sums run in the order of
`arithmetic.total`.
"""

from __future__ import annotations

import numpy as np

from reference.arithmetic import Arithmetic, total


def unit_rms(ar: Arithmetic, x: np.ndarray, eps: float, point: str) -> np.ndarray:
    """x [.., D] -> x / sqrt(mean(x^2) + eps) [.., D], an fp32 point; no weight."""
    mean_square = ar.single(total(x * x) / x.shape[-1], f"{point}.mean_square")
    length = ar.single(np.sqrt(mean_square + eps), f"{point}.length")
    return ar.single(x / length[..., None], f"{point}.unit")


def rms_norm(ar: Arithmetic, x: np.ndarray, weight: np.ndarray, eps: float, point: str) -> np.ndarray:
    """x [.., D], weight [D] -> [.., D], a bf16 point."""
    (D,) = weight.shape
    assert x.shape[-1] == D, (x.shape, weight.shape)
    row = ar.maybe(unit_rms(ar, x, eps, point), f"{point}.row")
    return ar.store(weight * row, point)


def layer_norm(
    ar: Arithmetic, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float, point: str
) -> np.ndarray:
    """x [.., D], weight [D], bias [D] -> weight * (x - mean) / sqrt(var + eps) + bias [.., D], a bf16 point.

    The variance is the mean of the squared deviations (two passes), as `torch.nn.LayerNorm` defines it.
    """
    (D,) = weight.shape
    assert x.shape[-1] == D, (x.shape, weight.shape)
    assert bias.shape == (D,), (bias.shape, weight.shape)
    mean = ar.single(total(x) / D, f"{point}.mean")
    centred = ar.single(x - mean[..., None], f"{point}.centred")
    row = unit_rms(ar, centred, eps, point)
    return ar.store(ar.single(weight * row + bias, f"{point}.affine"), point)
