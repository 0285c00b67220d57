"""Routed experts of 1 to 8 rows from NVFP4 weights (experts.cu).

R rows, k experts a row, D hidden, I expert width, F shared width. Weights are reached through address tables, so the
experts may lie anywhere; code and scale bytes are used as the checkpoint holds them. A plan lists the distinct experts
of all rows; it is made behind the router (gemv.py) or by `make_plan`, and the products read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fast.kernels import driver
from fast.kernels.compile import CONVERTING, Variant, target
from fast.kernels.driver import Float, Int, Parameters, Pointer, address

ROWS, MOST_CHOICES = 8, 64
WARPS, TEAM, SLOT, SPAN, TILE_ROWS, BLOCK_ROWS = 16, 8, 2304, 1024, 16, 32
"""Warps of a block, of them on a tile of up; bytes of a ring slot; values of K that a team takes at a time; rows of a
tile of up and of a block of down (experts.cu)."""
TILE_SCALES = 2 * 1024
"""Bytes of a warp's ring for the scales of up, where they are fetched a tile at a time."""
KNOWN = 4096, 2048
"""Hidden size and expert width of the released model, which the compiler is told."""
TABLES = 8704
"""Bytes of static shared memory of a block, at most."""
UP, DOWN, BOTH = 1, 2, 3

PLAN_BYTES = 16 + 64 * (6 * 8 + 3 * 4 + 8 * 4 + 8)
"""sizeof(Plan), plan.cuh."""


class PlannerStruct(Parameters):
    _fields_ = (
        *((name, Pointer) for name in ("address", "scale2", "ids", "weights", "plan")),
        *((name, Int) for name in ("experts", "offset", "rows", "top_k")),
    )


class _Experts(Parameters):
    _fields_ = (
        *((name, Pointer) for name in ("plan", "x", "h", "shared_x", "shared_w", "out", "barrier")),
        *((name, Int) for name in ("rows", "top_k", "hidden", "width", "shared_k", "phases", "early")),
        ("limit", Float),
    )


@dataclass(frozen=True, slots=True)
class Bank:
    """The experts first .. first + count - 1 of one layer, on the device.

    pointers [3, 2, count] int64: addresses of the codes [N, K/2] and of the scales [N, K/16] of gate, up and down;
    scale_2 [3, count] fp32; hidden D, width I. `keep` holds the tensors that the addresses point into.
    """

    pointers: Tensor
    scale_2: Tensor
    first: int
    hidden: int
    width: int
    keep: object

    def __post_init__(self) -> None:
        count = self.pointers.shape[2]
        assert self.pointers.shape == (3, 2, count), tuple(self.pointers.shape)
        assert self.scale_2.shape == (3, count), (tuple(self.scale_2.shape), count)
        assert (self.pointers.dtype, self.scale_2.dtype) == (torch.int64, torch.float32)
        assert self.pointers.is_contiguous(), self.pointers.stride()
        assert self.scale_2.is_contiguous(), self.scale_2.stride()


def bank(gate: Sequence, up: Sequence, down: Sequence, first: int = 0) -> Bank:
    """Lists of packed weights (.codes u8 [N, K/2], .scale u8 [N, K/16], .scale_2 fp32 []) of one device -> Bank."""
    device, (width, half) = gate[0].codes.device, gate[0].codes.shape
    groups = (gate, up, down)
    addresses = [[[w.codes.data_ptr() for w in g], [w.scale.data_ptr() for w in g]] for g in groups]
    scale_2 = torch.stack([torch.stack([w.scale_2.reshape(()) for w in g]) for g in groups])
    return Bank(torch.tensor(addresses).to(device), scale_2.to(device, torch.float32), first, 2 * half, width, groups)


def packed_bytes(rows: int, cols: int) -> int:
    """Codes and scales of one matrix."""
    return rows * cols // 2 + rows * cols // 16


def supported(hidden: int, width: int) -> bool:
    """Whether rows of D and I values lie as the kernels read them: whole 16-byte pieces of codes."""
    return hidden % 32 == 0 and width % 32 == 0 and hidden <= 8192 and width <= 32768


def new_plan(device: torch.device) -> Tensor:
    return torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=device)


def planner(ids: Tensor, weights: Tensor, bank: Bank, plan: Tensor) -> PlannerStruct:
    """ids [R, k] int32 and weights [R, k] fp32 -> what fills `plan` from them."""
    R, k = ids.shape
    assert weights.shape == (R, k), (tuple(weights.shape), R, k)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32), (ids.dtype, weights.dtype)
    assert ids.is_contiguous(), ids.stride()
    assert weights.is_contiguous(), weights.stride()
    assert 0 < R <= ROWS, R
    assert R * k <= MOST_CHOICES, (R, k)
    assert (plan.numel(), plan.dtype) == (PLAN_BYTES, torch.uint8), plan.shape
    tables = address(bank.pointers), address(bank.scale_2), address(ids), address(weights), address(plan)
    return PlannerStruct(*tables, bank.pointers.shape[2], bank.first, R, k)


def make_plan(ids: Tensor, weights: Tensor, bank: Bank, plan: Tensor, *, pdl: bool = False) -> None:
    """Fill `plan`; experts of other ranks are left out."""
    p = planner(ids, weights, bank, plan)
    device = ids.device.index
    which = variant(roomy=driver.roomy(device), exact=False)
    driver.kernel(which, "experts_plan", device)((1, 1, 1), 64, p, pdl=pdl)


def stages(*, roomy: bool) -> int:
    """Ring slots of a warp."""
    return 2 if roomy else 1


def variant(*, roomy: bool, exact: bool, hidden: int = 0, width: int = 0) -> Variant:
    """`exact`: the shapes fill their tiles; `hidden`, `width`: known to the compiler, or 0."""
    shape = ("STAGES", stages(roomy=roomy)), ("EXACT", int(exact))
    return Variant("experts", (*shape, ("HIDDEN", hidden), ("WIDTH", width)))


def _shared(R: int, hidden: int, device: int) -> int:
    """Bytes of dynamic shared memory of a block: ring, partial sums, x and in the same place h.

    More than half of what there is: two blocks of consecutive launches never share a multiprocessor, which would leave
    others idle.
    """
    roomy = driver.roomy(device)
    slots = WARPS * stages(roomy=roomy)
    ring = slots * SLOT + (WARPS * TILE_SCALES if roomy and hidden == KNOWN[0] else 0)
    inputs = max(2 * -(-hidden // SPAN) * SPAN, slots * 256)
    return max(ring + R * (2 * WARPS * 128 + inputs), driver.shared_limit(device) // 2)


def rows_at_once(device: int, hidden: int) -> int:
    """Rows whose inputs fit into the shared memory of a block."""
    limit = driver.shared_limit(device) - TABLES
    return max(R for R in range(ROWS + 1) if _shared(R, hidden, device) <= limit)


def arranged(h: Tensor) -> Tensor:
    """h [..., I] with every eight values in the order in which the device multiplies them (nvfp4_place)."""
    return h.view(*h.shape[:-1], -1, 2, 4).transpose(-1, -2).reshape(h.shape) if _permuted(h) else h


def natural(h: Tensor) -> Tensor:
    """What `arranged` was given."""
    return h.view(*h.shape[:-1], -1, 4, 2).transpose(-1, -2).reshape(h.shape) if _permuted(h) else h


def _permuted(h: Tensor) -> bool:
    return target(*torch.cuda.get_device_capability(h.device)) not in CONVERTING


def routed(
    x: Tensor,
    plan: Tensor,
    bank: Bank,
    h: Tensor,
    out: Tensor,
    limit: float,
    shared: tuple[Tensor, Tensor] | None = None,
    *,
    phases: int = BOTH,
    early: bool = False,
    pdl: bool = False,
) -> None:
    """x [R, D] bf16 -> h [R, k, I] bf16 = swiglu(gate_e x, up_e x) -> out [R, D] bf16 = sum over the row's experts,
    ascending, of weight * down_e h, plus shared[1] [D, F] times shared[0] [R, F] (both bf16): fp32, one rounding.

    Places of h that belong to other ranks' experts are left alone; every eight values of h lie as `arranged` puts them.
    `phases`: both, or only h (UP), or only out (DOWN). `early`: the launch in front is the router's (gemv.project), and
    x is older.
    """
    (R, k, width), D, device = h.shape, bank.hidden, x.device.index
    assert x.dtype == h.dtype == out.dtype == torch.bfloat16, (x.dtype, h.dtype, out.dtype)
    assert x.shape == out.shape == (R, D), (tuple(x.shape), tuple(out.shape), R, D)
    assert bank.width == width, (width, bank.width)
    assert 0 < R <= ROWS, R
    assert plan.numel() == PLAN_BYTES, plan.shape
    for tensor in (x, h, out):
        assert tensor.is_contiguous(), tensor.stride()
    p = _Experts(plan=address(plan), x=address(x), h=address(h), out=address(out), rows=R, top_k=k)
    p.hidden, p.width, p.limit, p.phases, p.early = D, width, limit, phases, int(early)
    p.barrier = driver.scratch(device)[2:].data_ptr()
    exact = D % SPAN == 0 and width % (WARPS * 128) == 0
    if shared is not None:
        (y, w), F = shared, shared[0].shape[1]
        assert (y.shape, w.shape) == ((R, F), (D, F)), (tuple(y.shape), tuple(w.shape), R, D)
        assert y.is_contiguous(), y.stride()
        assert w.is_contiguous(), w.stride()
        p.shared_x, p.shared_w, p.shared_k = address(y), address(w), F
        exact = exact and F % (WARPS * 32) == 0
    known = exact and (D, width) == KNOWN
    which = variant(roomy=driver.roomy(device), exact=exact, hidden=D if known else 0, width=width if known else 0)
    tiles = -(-width // TILE_ROWS) * min(R * k, bank.pointers.shape[2])
    blocks = max(-(-tiles // (WARPS // TEAM)) if phases & UP else 1, -(-D // BLOCK_ROWS) if phases & DOWN else 1)
    memory = _shared(R, D, device)
    assert memory + TABLES <= driver.shared_limit(device), (R, D, memory)
    kernel = driver.kernel(which, "experts", device)
    kernel((min(blocks, driver.processors(device)), 1, 1), WARPS * 32, p, shared=memory, pdl=pdl)
