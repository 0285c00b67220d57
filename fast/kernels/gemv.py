"""BF16 products of 1 to 8 rows with several matrices in one launch (gemv.cu).

R rows, K input width, N output width. Every product is row-invariant: the K split depends on K alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fast.kernels import driver
from fast.kernels.compile import Variant
from fast.kernels.driver import Float, Int, Parameters, Pointer, address
from fast.kernels.experts import PlannerStruct
from fast.kernels.mhc import SinkhornStruct
from fast.kernels.router import Router, RouterStruct

ROWS = 8
MATRICES = 8
WARPS, CHUNK, WIDEST, NARROW = 16, 32, 8, 4
STREAMS = 4
"""Streams that the source assumes (sinkhorn.cuh)."""
KINDS = ("bf16", "f32", "swiglu", "router", "argmax")


class _Matrix(Parameters):
    _fields_ = (
        ("w", Pointer),
        ("w2", Pointer),
        ("out", Pointer),
        ("rows", Int),
        ("tile0", Int),
        ("kind", Int),
        ("ld", Int),
    )


class _Gemv(Parameters):
    _fields_ = (
        ("matrix", _Matrix * MATRICES),
        ("router", RouterStruct),
        ("planner", PlannerStruct),
        *((name, Pointer) for name in ("x", "best", "token", "position", "counter")),
        ("side", SinkhornStruct),
        ("router_logits", Pointer),
        *(
            (name, Int)
            for name in ("matrices", "tiles", "blocks", "rows", "k", "ldx", "router_tiles", "beside", "rehearse")
        ),
        ("limit", Float),
    )


@dataclass(frozen=True, slots=True)
class Product:
    """weight [N, K] bf16 -> out [R, N] (rows may be strided), bf16, or fp32 for f32, router and argmax.

    swiglu: `up` [N, K] goes with weight as the gate projection, out is silu(min(gate, limit)) * clip(up), bf16.
    """

    weight: Tensor
    out: Tensor
    kind: str = "bf16"
    up: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Argmax:
    """token [R] int32 receives the argmax of the argmax product; position [R] int32, if given, is advanced by one;
    best [2 * blocks * 8] fp32 is scratch (`argmax_scratch`)."""

    token: Tensor
    best: Tensor
    position: Tensor | None = None


def stages(*, roomy: bool) -> int:
    """Ring slots of a warp: more bytes on the way than these gain nothing, or what shared memory has room for."""
    return 10 if roomy else 4


def split(K: int) -> tuple[int, int]:
    """K -> (chunks a warp owns, K segments): one segment up to 4096, else segments of 2048."""
    chunks = -(-K // (CHUNK * WARPS))
    if chunks <= WIDEST:
        return (chunks if chunks <= NARROW else WIDEST), 1
    return NARROW, -(-chunks // NARROW)


def variant(K: int, *, roomy: bool = True, experts: int = 0, argmax: bool = False, streams: int = STREAMS) -> Variant:
    """`experts`: of a router product, 0 without one; `streams`: of the mHC mix that is finished beside it."""
    chunks, segments = split(K)
    tail = CHUNK * WARPS * chunks * segments != K
    flags = [("TAIL", int(tail)), ("ROUTER", -(-experts // 32)), ("ARGMAX", int(argmax))]
    flags.append(("C", streams if streams != STREAMS else 0))
    shape = (("CW", chunks), ("SEGMENTS", segments), ("STAGES", stages(roomy=roomy)))
    return Variant("gemv", (*shape, *((name, value) for name, value in flags if value)))


def supported(x: Tensor, weight: Tensor) -> bool:
    """Whether `project` takes x [R, K] and weight [N, K]."""
    return (
        x.is_cuda
        and x.dtype == weight.dtype == torch.bfloat16
        and 0 < x.shape[0] <= ROWS
        and x.shape[1] % 8 == 0
        and x.stride(-1) == 1
        and x.stride(0) % 8 == 0
        and weight.is_contiguous()
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    )


def argmax_scratch(device: torch.device) -> Tensor:
    return torch.zeros(4 * driver.processors(device.index or 0) * 8, dtype=torch.float32, device=device)


def project(
    x: Tensor,
    products: Sequence[Product],
    *,
    limit: float = 0.0,
    router: Router | None = None,
    argmax: Argmax | None = None,
    planner: PlannerStruct | None = None,
    side: SinkhornStruct | None = None,
    pdl: bool = False,
) -> None:
    """All products of x [R, K] in one launch.

    `router` takes the logits of the one product of kind router and writes the expert choice; `argmax` takes those of
    the one of kind argmax. `planner` (experts.planner) turns the choice into a plan; `side` (mhc.side) is done by one
    more block.
    """
    (R, K), device = x.shape, x.device.index
    assert 0 < len(products) <= MATRICES, len(products)
    p = _Gemv(x=address(x), rows=R, k=K, ldx=x.stride(0), limit=limit)
    p.rehearse = int(pdl)
    counters, tiles = driver.scratch(device), 0
    for i, q in enumerate(products):
        N, kind = q.weight.shape[0], KINDS.index(q.kind)
        assert supported(x, q.weight), (tuple(x.shape), tuple(q.weight.shape), x.dtype, q.weight.dtype)
        assert q.weight.shape[1] == K, (tuple(q.weight.shape), K)
        assert q.out.shape == (R, N), (tuple(q.out.shape), R, N)
        assert q.out.stride(-1) == 1, q.out.stride()
        assert q.out.dtype == (torch.bfloat16 if kind in (0, 2) else torch.float32), (q.kind, q.out.dtype)
        assert (q.up is not None) == (q.kind == "swiglu"), q.kind
        p.matrix[i] = _Matrix(address(q.weight), address(q.up), address(q.out), N, tiles, kind, q.out.stride(0))
        count = -(-N // (8 if q.up is not None else 16))
        if q.kind == "router":
            assert router is not None
            p.router = router.struct(N)
            p.router.counter = counters.data_ptr()
            assert q.out.is_contiguous(), q.out.stride()
            assert tiles == 0, "the router's product comes first"
            p.router_logits, p.router_tiles = address(q.out), count
        tiles += count
    p.matrices, p.tiles = len(products), tiles
    assert (router is not None) == (p.router_tiles > 0)
    beside = side is not None or router is not None
    p.blocks, p.beside = min(tiles, driver.processors(device) - beside), int(beside)
    if planner is not None:
        assert router is not None
        p.planner = planner
    if side is not None:
        assert side.rows == R, (side.rows, R)
        p.side = side
    if argmax is not None:
        assert [q.kind for q in products] == ["argmax"], [q.kind for q in products]
        p.best, p.token, p.position = address(argmax.best), address(argmax.token), address(argmax.position)
        p.counter = counters.data_ptr() + 4
    shared = WARPS * stages(roomy=driver.roomy(device)) * 1024 + 2 * WARPS * 128 * 4
    experts = p.router.experts if router is not None else 0
    which = variant(
        K,
        roomy=driver.roomy(device),
        experts=experts,
        argmax=argmax is not None,
        streams=STREAMS if side is None else side.streams,
    )
    kernel = driver.kernel(which, "gemv", device)
    kernel((p.blocks + beside, 1, 1), WARPS * 32, p, shared=shared, pdl=pdl)


def linear(x: Tensor, weight: Tensor, out: torch.dtype) -> Tensor:
    """x [R, K], weight [N, K] -> [R, N] in `out` (bfloat16 or float32)."""
    y = torch.empty(x.shape[0], weight.shape[0], dtype=out, device=x.device)
    project(x, [Product(weight, y, "bf16" if out == torch.bfloat16 else "f32")])
    return y
