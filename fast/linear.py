"""The one matrix product of the engine: every weight, dense or packed, is applied here.

K input width, N output width, T rows. Sums are accumulated in fp32 whatever the storage dtype, then rounded once.
A row's bits may depend on how many rows stand beside it (BLAS picks its reduction by shape), so a caller that needs
row-invariant bits passes rows one at a time: `fast.model` does so for calls of at most `ROWS` tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast import scratch
from fast.nvfp4 import unscaled

ROWS = 8
"""Calls of at most this many tokens (decode, and the verification of drafts) are computed row by row."""

BLOCK_BYTES = 1 << 26
"""Bound on the fp32 copy of a weight that is alive at a time."""


def exact_sums() -> None:
    """Forbid CUDA's matrix products to sum in less than fp32: no bf16 partial sums, no TF32 factors."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False


def linear(x: Tensor, weight: Any, out: torch.dtype | None = None) -> Tensor:
    """x [T, K] times weight [N, K] transposed -> [T, N] in `out` (default: x's dtype).

    `weight` is a tensor, or a packed NVFP4 weight (codes [N, K/2], scale [N, K/16], scale_2 []): code times block
    scale is exact in bf16, and scale_2 multiplies the fp32 accumulator before the one rounding to `out`.
    """
    out = x.dtype if out is None else out
    if isinstance(weight, Tensor):
        assert x.shape[1] == weight.shape[1], (tuple(x.shape), tuple(weight.shape))
        return _product(x, weight, out)
    codes, scale = weight.codes, weight.scale
    (T, K), N = x.shape, codes.shape[0]
    assert (codes.shape, scale.shape) == ((N, K // 2), (N, K // 16)), (K, tuple(codes.shape), tuple(scale.shape))
    step = max(1, BLOCK_BYTES // (4 * K))
    y = scratch.empty((T, N), out, x.device)
    for n in range(0, N, step):
        rows = slice(n, n + step)
        with scratch.outside():
            y[:, rows] = _product(x, unscaled(codes[rows], scale[rows], x.dtype), torch.float32) * weight.scale_2
    return y


def _product(x: Tensor, weight: Tensor, out: torch.dtype) -> Tensor:
    K, N = x.shape[1], weight.shape[0]
    y = scratch.empty((x.shape[0], N), out, x.device)
    if x.is_cuda and x.dtype == weight.dtype and out in (x.dtype, torch.float32):
        return torch.mm(x, weight.T, out=y) if out == x.dtype else torch.mm(x, weight.T, out_dtype=out, out=y)
    x = x.float()
    step = N if weight.dtype == torch.float32 else max(1, BLOCK_BYTES // (4 * K))
    for n in range(0, N, step):
        y[:, n : n + step] = F.linear(x, weight[n : n + step].float())
    return y
