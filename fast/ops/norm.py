"""RMSNorm and the one LayerNorm (model.md, notation and section 2.3). T any leading axes, D the normalised axis.

Statistics and products are fp32; the result is rounded once, to the dtype of `x` unless `out` says otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fast import scratch


def rms(x: Tensor, weight: Tensor, eps: float, out: torch.dtype | None = None) -> Tensor:
    """x [.., D], weight [D] -> weight * x / sqrt(mean(x^2) + eps), [.., D]."""
    D = x.shape[-1]
    assert weight.shape == (D,), (tuple(x.shape), tuple(weight.shape))
    scale = weight.float()

    def work(wide: Tensor) -> Tensor:
        return scale * (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps))

    return scratch.by_rows(work, x.reshape(-1, D), dtype=out or x.dtype).view(x.shape)


def layer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [.., D], weight [D], bias [D] -> weight * (x - mean) / sqrt(var + eps) + bias, [.., D]; biased variance."""
    D = x.shape[-1]
    assert weight.shape == bias.shape == (D,), (tuple(x.shape), tuple(weight.shape), tuple(bias.shape))
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    wide = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * wide + bias.float()).to(x.dtype)
