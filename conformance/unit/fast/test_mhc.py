"""fast.ops.mhc against the equations of model.md 2.1 written out element by element in float64."""

from __future__ import annotations

import math

import pytest
import torch

from conformance.unit.fast import bounds
from fast.ops import mhc

EPS = {"norm_eps": 1e-5, "hc_eps": 1e-6}


def site(seed: int, C: int, D: int) -> tuple[torch.Tensor, mhc.Weights]:
    generator = torch.Generator().manual_seed(seed)
    streams = torch.randn(5, C, D, generator=generator)
    rows = (2 + C) * C
    fn = (torch.randn(rows, C * D, generator=generator) / math.sqrt(C * D)).bfloat16()
    base, scale = torch.randn(rows, generator=generator), 1 + 0.3 * torch.randn(3, generator=generator)
    return streams.bfloat16(), mhc.Weights(fn, base, scale)


def written_out(streams, weights, norm_eps, hc_eps, iterations):
    """The page, index by index: pre, post, comb in float64, and the bound on the fp32 error of the raw weights."""
    T, C, D = streams.shape
    fn, base, scale = (w.double() for w in weights)
    pre, post, comb, slack = torch.zeros(T, C), torch.zeros(T, C), torch.zeros(T, C, C), torch.zeros(T)
    pre, post, comb = pre.double(), post.double(), comb.double()
    for t in range(T):
        f = streams[t].double().flatten()
        f = f / math.sqrt(float((f * f).mean()) + norm_eps)
        m = [float(fn[r] @ f) for r in range(len(base))]
        widest = float((fn.abs() @ f.abs()).max() * scale.abs().max() + base.abs().max())
        slack[t] = bounds.gamma(2 * C * D + 8) * widest
        for i in range(C):
            pre[t, i] = 1 / (1 + math.exp(-(m[i] * scale[0] + base[i]))) + hc_eps
            post[t, i] = 2 / (1 + math.exp(-(m[C + i] * scale[1] + base[C + i])))
            raw = [math.exp(m[2 * C + i * C + j] * scale[2] + base[2 * C + i * C + j]) for j in range(C)]
            for j in range(C):
                comb[t, i, j] = raw[j] / sum(raw) + hc_eps
        for step in range(2 * iterations - 1):
            for i in range(C):
                line = (slice(None), i) if step % 2 == 0 else (i, slice(None))
                comb[(t, *line)] = comb[(t, *line)] / (float(comb[(t, *line)].sum()) + hc_eps)
    return pre, post, comb, slack.double()


@pytest.mark.parametrize("C", [2, 3, 4])
@pytest.mark.parametrize("iterations", [1, 5, 20])
def test_mix(C, iterations):
    """A Sinkhorn step only rescales rows or columns, which never increases the largest ratio between two matrices:
    relative errors of comb add up over the steps, they do not multiply."""
    streams, weights = site(10 * C + iterations, C, 16)
    found = mhc.mix(streams, weights, iterations=iterations, **EPS)
    pre, post, comb, slack = written_out(streams, weights, iterations=iterations, **EPS)
    few = bounds.gamma(8)
    bounds.check(found.pre, pre, slack[:, None] / 4 + few * pre)
    bounds.check(found.post, post, slack[:, None] / 2 + few * post)
    relative = 2 * (2 * slack + few + 2 * iterations * bounds.gamma(C + 3))
    bounds.check(found.comb, comb, relative[:, None, None] * comb)


def test_the_two_epsilons_are_not_one():
    streams, weights = site(3, 4, 16)
    small = (1e-3 * streams.float()).bfloat16()
    base = mhc.mix(small, weights, norm_eps=1e-5, hc_eps=1e-6, iterations=3)
    assert not torch.equal(base.pre, mhc.mix(small, weights, norm_eps=1e-6, hc_eps=1e-6, iterations=3).pre)
    moved = mhc.mix(small, weights, norm_eps=1e-5, hc_eps=2.0**-7, iterations=3)
    assert torch.equal(moved.post, base.post)
    bounds.check(moved.pre - base.pre, torch.full_like(base.pre, 2.0**-7 - 1e-6).double(), bounds.gamma(4) * base.pre)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("C", [3, 4])
def test_collapse_and_combine(C, dtype):
    generator = torch.Generator().manual_seed(C)
    T, D = 5, 12
    streams = torch.randn(T, C, D, generator=generator).to(dtype)
    out = torch.randn(T, D, generator=generator).to(dtype)
    pre, post, comb = (torch.rand(*shape, generator=generator) for shape in ((T, C), (T, C), (T, C, C)))
    wide = streams.double()
    x = torch.einsum("tc,tcd->td", pre.double(), wide)
    size = torch.einsum("tc,tcd->td", pre.double(), wide.abs())
    bounds.check(mhc.collapse(streams, pre), x, bounds.stored(x, bounds.gamma(C + 1) * size, dtype))
    mixed = torch.einsum("tij,tid->tjd", comb.double(), wide) + post.double()[:, :, None] * out.double()[:, None]
    size = torch.einsum("tij,tid->tjd", comb.double(), wide.abs()) + (post[:, :, None] * out.abs()[:, None]).double()
    bounds.check(mhc.combine(streams, out, post, comb), mixed, bounds.stored(mixed, bounds.gamma(C + 2) * size, dtype))
