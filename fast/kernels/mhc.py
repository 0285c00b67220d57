"""Hyper-connection sites on the device (mhc.cu). R rows (1 to 8), C streams, D hidden."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fast.kernels import driver
from fast.kernels.compile import Variant
from fast.kernels.driver import Float, Int, Parameters, Pointer, address

ROWS, WARPS, BLOCKS = 8, 16, 8
WIDEST = BLOCKS * WARPS * 32


class _Hc(Parameters):
    _fields_ = (
        *(
            (name, Pointer)
            for name in ("streams", "embedding", "token", "o", "old_post", "old_comb", "fn", "base", "scale")
        ),
        *((name, Pointer) for name in ("norm", "new_streams", "x", "y", "pre", "post", "logits")),
        *((name, Int) for name in ("rows", "d", "rehearse")),
        ("rms_eps", Float),
        ("hc_eps", Float),
    )


@dataclass(frozen=True, slots=True)
class Site:
    """fn [(2+C)C, C*D] bf16, base [(2+C)C], scale [3] fp32, norm [D] bf16 (the layernorm behind the collapse)."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class Mix:
    """post [R, C], comb [R, C, C] fp32, left by one site for the combine behind its block; pre [R, C] or None.

    A site leaves the logits of comb [R, C, C]; `sinkhorn`, or a gemv launch beside its own work, turns them into comb.
    """

    post: Tensor
    comb: Tensor
    logits: Tensor
    pre: Tensor | None = None


def new_mix(R: int, C: int, device: torch.device, *, pre: bool = False) -> Mix:
    shapes = (R, C), (R, C, C), (R, C, C), (R, C)
    post, comb, logits, first = (torch.zeros(*s, dtype=torch.float32, device=device) for s in shapes)
    return Mix(post, comb, logits, first if pre else None)


class SinkhornStruct(Parameters):
    _fields_ = (
        ("logits", Pointer),
        ("comb", Pointer),
        ("rows", Int),
        ("iterations", Int),
        ("streams", Int),
        ("eps", Float),
    )


@dataclass(frozen=True, slots=True)
class Setting:
    rms_norm_eps: float
    hc_eps: float
    iterations: int


def supported(streams: Tensor) -> bool:
    """streams [R, C, D]."""
    R, C, D = streams.shape
    fits = R <= ROWS and C in (2, 3, 4) and D % 8 == 0 and max(D, WIDEST) == WIDEST
    return streams.is_cuda and streams.dtype == torch.bfloat16 and fits


def variant(C: int, *, roomy: bool) -> Variant:
    return Variant("mhc", (("C", C), ("STAGED", C if roomy else min(C, 3))))


def site(
    streams: Tensor | tuple[Tensor, Tensor],
    weights: Site | Tensor,
    setting: Setting,
    y: Tensor,
    *,
    previous: tuple[Tensor, Mix] | None = None,
    mix: Mix | None = None,
    new_streams: Tensor | None = None,
    x: Tensor | None = None,
    C: int = 4,
    pdl: bool = False,
) -> None:
    """streams [R, C, D], or (token [R] int32, embedding [V, D]) for the first site: every stream is the embedding.

    `previous` = (o [R, D], the Mix of the site that led to it) is combined in first; the result goes to `new_streams`
    (which may be `streams`). Then `mix` is filled but for comb, x [R, D] (if given) takes the collapsed row and y
    [R, D] its norm. `weights` a tensor [D]: the final stage, x the stream mean and y its norm with these weights.
    """
    R, D = y.shape
    p = _Hc(
        rows=R,
        d=D,
        rehearse=int(pdl),
        rms_eps=setting.rms_norm_eps,
        hc_eps=setting.hc_eps,
    )
    if isinstance(streams, Tensor):
        C = streams.shape[1]
        assert streams.shape == (R, C, D), (tuple(streams.shape), R, D)
        assert streams.is_contiguous(), streams.stride()
        p.streams = address(streams)
    else:
        token, embedding = streams
        assert (token.shape, token.dtype) == ((R,), torch.int32), (tuple(token.shape), token.dtype)
        p.token, p.embedding = address(token), address(embedding)
    if previous is not None:
        o, old = previous
        assert o.shape == (R, D), (tuple(o.shape), R, D)
        p.o, p.old_post, p.old_comb = address(o), address(old.post), address(old.comb)
    if isinstance(weights, Site):
        M = (2 + C) * C
        assert weights.fn.shape == (M, C * D), (tuple(weights.fn.shape), M, C * D)
        assert (weights.base.shape, weights.scale.shape) == ((M,), (3,)), tuple(weights.base.shape)
        assert weights.fn.dtype == torch.bfloat16, weights.fn.dtype
        assert weights.base.dtype == weights.scale.dtype == torch.float32, weights.base.dtype
        assert mix is not None
        assert mix.post.shape == (R, C), (tuple(mix.post.shape), R, C)
        assert mix.logits.shape == (R, C, C), (tuple(mix.logits.shape), R, C)
        p.fn, p.base, p.scale, p.norm = map(address, (weights.fn, weights.base, weights.scale, weights.norm))
        p.pre, p.post, p.logits = address(mix.pre), address(mix.post), address(mix.logits)
    else:
        p.norm = address(weights)
    p.new_streams, p.x, p.y = address(new_streams), address(x), address(y)
    device = y.device.index
    roomy = driver.roomy(device)
    which = variant(C, roomy=roomy)
    shared = WARPS * (C if roomy else min(C, 3)) * 3 * 512
    driver.kernel(which, "hc_site", device)((BLOCKS, 1, 1), WARPS * 32, p, shared=shared, pdl=pdl)


def side(mix: Mix, setting: Setting) -> SinkhornStruct:
    """What turns mix.logits into mix.comb."""
    R, C, _ = mix.comb.shape
    return SinkhornStruct(address(mix.logits), address(mix.comb), R, setting.iterations, C, setting.hc_eps)


def sinkhorn(mix: Mix, setting: Setting, *, pdl: bool = False) -> None:
    """mix.logits -> mix.comb in a launch of its own, any R."""
    R, C, _ = mix.comb.shape
    device = mix.comb.device.index
    which = variant(C, roomy=driver.roomy(device))
    driver.kernel(which, "hc_sinkhorn", device)((-(-R // 32), 1, 1), 32, side(mix, setting), pdl=pdl)


def combine(streams: Tensor, o: Tensor, mix: Mix) -> Tensor:
    """streams [R, C, D], o [R, D] -> the new streams alone, any R."""
    R, C, D = streams.shape
    assert o.shape == (R, D), (tuple(o.shape), R, D)
    new = torch.empty_like(streams)
    p = _Hc(rows=R, d=D, streams=address(streams), o=address(o), old_post=address(mix.post), old_comb=address(mix.comb))
    p.new_streams = address(new)
    device = streams.device.index
    which = variant(C, roomy=driver.roomy(device))
    driver.kernel(which, "hc_combine", device)((-(-D // 1024), R, 1), 128, p, pdl=False)
    return new
