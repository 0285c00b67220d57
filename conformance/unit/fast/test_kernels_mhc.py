"""mhc.cu against float64: mix, Sinkhorn, collapse and norm, the fused combine, first and final site, row invariance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance.unit.fast import kernel_cases as cases
from conformance.unit.fast.bounds import check
from conformance.unit.fast.kernel_cases import CUDA, KINDS, Noise, chain, values
from fast.kernels import mhc
from fast.kernels.mhc import Mix, Setting, Site

pytestmark = pytest.mark.gpu

SHAPES = [(4, 4096), (4, 128), (3, 112), (2, 2056)]


def site(C: int, D: int, seed: int) -> Site:
    g, M = cases.generator(seed), (2 + C) * C
    return Site(
        values("normal", M, C * D, seed=seed + 1, scale=2 * (C * D) ** -0.5),
        torch.randn(M, generator=g, device=CUDA),
        torch.rand(3, generator=g, device=CUDA) + 0.5,
        values("normal", D, seed=seed + 2),
    )


def mix(R: int, C: int) -> Mix:
    made = mhc.new_mix(R, C, CUDA, pre=True)
    for x in (made.post, made.comb, made.logits, made.pre):
        assert x is not None
        x.fill_(float("nan"))
    return made


def old_mix(R: int, C: int, seed: int) -> Mix:
    g = cases.generator(seed)
    post, comb = 2 * torch.rand(R, C, generator=g, device=CUDA), torch.rand(R, C, C, generator=g, device=CUDA) / 2
    return Mix(post, comb, comb)


def weigh(noise: Noise, streams: Tensor, w: Site, s: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """streams [R, C, D] float64 -> pre, post, comb."""
    R, C, _ = streams.shape
    flat = streams.flatten(1)
    m = noise.product(flat, w.fn) / (noise.f32(flat.square().mean(-1, keepdim=True), 64) + s.rms_norm_eps).sqrt()
    scale = w.scale.double().repeat_interleave(torch.tensor([C, C, C * C], device=CUDA))
    scaled = m * scale
    logits = scaled + w.base.double() + noise.spread(8 * cases.F32 * (scaled.abs() + w.base.double().abs()))
    pre = noise.f32(torch.sigmoid(logits[:, :C]) + s.hc_eps, 6)
    post = noise.f32(2 * torch.sigmoid(logits[:, C : 2 * C]), 6)
    comb = noise.f32(torch.softmax(logits[:, 2 * C :].view(R, C, C), -1) + s.hc_eps, 8)
    for axis in (-2, *(-1, -2) * (s.iterations - 1)):
        comb = noise.f32(comb / (comb.sum(axis, keepdim=True) + s.hc_eps), 6)
    return pre, post, comb


def collapse(noise: Noise, streams: Tensor, pre: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size = (pre[..., None] * streams).abs().sum(1)
    x = noise.bf16((pre[..., None] * streams).sum(1) + noise.spread(5 * cases.F32 * size))
    unit = x / (noise.f32(x.square().mean(-1, keepdim=True), 64) + eps).sqrt()
    return x, noise.bf16(noise.f32(unit * norm.double(), 4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("C", "D"), SHAPES)
@pytest.mark.parametrize("R", [1, 5, 8])
@pytest.mark.parametrize("setting", [Setting(1e-5, 1e-6, 20), Setting(1e-2, 2e-2, 5)])
def test_a_site_against_float64(R: int, C: int, D: int, kind: str, setting: Setting) -> None:
    streams, w, new = values(kind, R, C, D, seed=40), site(C, D, 41), mix(R, C)
    x, y = (torch.full((R, D), float("nan"), dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    mhc.site(streams, w, setting, y, mix=new, x=x)
    mhc.sinkhorn(new, setting)

    def truth(noise: Noise) -> tuple[Tensor, ...]:
        pre, post, comb = weigh(noise, streams.double(), w, setting)
        return (pre, post, comb, *collapse(noise, streams.double(), pre, w.norm, setting.rms_norm_eps))

    assert new.pre is not None
    for actual, (exact, allowed) in zip((new.pre, new.post, new.comb, x, y), chain(truth, seed=42), strict=True):
        check(actual, exact, allowed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("C", "D"), SHAPES)
@pytest.mark.parametrize("R", [1, 7])
def test_the_fused_combine_is_the_combine_and_then_a_site(R: int, C: int, D: int, kind: str) -> None:
    streams, o, old = values(kind, R, C, D, seed=43), values(kind, R, D, seed=44), old_mix(R, C, 45)
    w, setting = site(C, D, 46), Setting(1e-5, 1e-6, 20)
    combined = mhc.combine(streams, o, old)

    def truth(noise: Noise) -> tuple[Tensor, ...]:
        terms = [old.post.double()[..., None] * o.double()[:, None]]
        terms += [old.comb.double()[:, i, :, None] * streams.double()[:, i, None] for i in range(C)]
        whole, size = torch.stack(terms).sum(0), torch.stack(terms).abs().sum(0)
        return (noise.bf16(whole + noise.spread(6 * cases.F32 * size)),)

    ((exact, allowed),) = chain(truth, seed=47)
    check(combined, exact, allowed)

    results = []
    for given, previous in ((combined, None), (streams, (o, old))):
        new, stored = mix(R, C), torch.full_like(streams, float("nan"))
        y = torch.empty(R, D, dtype=torch.bfloat16, device=CUDA)
        mhc.site(given, w, setting, y, previous=previous, mix=new, new_streams=stored)
        mhc.sinkhorn(new, setting)
        results.append([y, new.post, new.comb, stored])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    in_place = streams.clone()
    mhc.site(in_place, w, setting, y, previous=(o, old), mix=new, new_streams=in_place)
    assert torch.equal(in_place, combined)


def test_rows_have_the_same_bits_alone_and_together() -> None:
    R, C, D = 8, 4, 4096
    streams, o, old, w = (
        values("heavy", R, C, D, seed=48),
        values("heavy", R, D, seed=49),
        old_mix(R, C, 50),
        site(C, D, 51),
    )

    def run(rows: slice) -> list[Tensor]:
        part = streams[rows].clone()
        new, y = mix(part.shape[0], C), torch.empty(part.shape[0], D, dtype=torch.bfloat16, device=CUDA)
        comb = old.comb[rows].contiguous()
        previous = (o[rows].contiguous(), Mix(old.post[rows].contiguous(), comb, comb))
        mhc.site(part, w, Setting(1e-5, 1e-6, 20), y, previous=previous, mix=new, new_streams=part)
        mhc.sinkhorn(new, Setting(1e-5, 1e-6, 20))
        return [y, new.post, new.comb, part]

    together = run(slice(0, R))
    for rows in [*(slice(0, n) for n in range(1, R)), *(slice(r, r + 1) for r in range(R))]:
        assert all(torch.equal(a, b[rows]) for a, b in zip(run(rows), together, strict=True))


@pytest.mark.parametrize("R", [1, 6])
def test_the_first_site_reads_the_embedding_and_the_last_one_the_mean(R: int) -> None:
    C, D, V = 4, 4096, 100
    embed, w, setting = values("normal", V, D, seed=52), site(C, D, 53), Setting(1e-5, 1e-6, 20)
    token = torch.randint(0, V, (R,), generator=cases.generator(54), device=CUDA, dtype=torch.int32)
    repeated = embed[token.long()][:, None].expand(-1, C, -1).contiguous()
    results = []
    for given in (repeated, (token, embed)):
        new, stored = mix(R, C), torch.full_like(repeated, float("nan"))
        y = torch.empty(R, D, dtype=torch.bfloat16, device=CUDA)
        mhc.site(given, w, setting, y, mix=new, new_streams=stored, C=C)
        mhc.sinkhorn(new, setting)
        results.append([y, new.post, new.comb, stored])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    streams, o, old, norm = (
        values("normal", R, C, D, seed=55),
        values("normal", R, D, seed=56),
        old_mix(R, C, 57),
        w.norm,
    )
    x, y = (torch.full((R, D), float("nan"), dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    mhc.site(streams, norm, setting, y, previous=(o, old), x=x)
    combined = mhc.combine(streams, o, old).double()
    pre = torch.full((R, C), 1 / C, dtype=torch.float64, device=CUDA)
    for actual, (exact, allowed) in zip(
        (x, y), chain(lambda noise: collapse(noise, combined, pre, norm, 1e-5), seed=58), strict=True
    ):
        check(actual, exact, allowed)
