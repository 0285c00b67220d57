"""Routed experts of 1 to 8 rows from NVFP4 weights (experts.cu).

R rows, k experts a row, D hidden, I expert width, F shared width. Weights are reached through address tables, so the
experts may lie anywhere; code and scale bytes are used as the checkpoint holds them. A plan lists the distinct experts
of all rows; it is made behind the router (gemv.py) or by `plan`, and both kernels read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fast.kernels import driver
from fast.kernels.compile import Variant
from fast.kernels.driver import Float, Int, Parameters, Pointer, address

ROWS, MOST_CHOICES = 8, 64
WARPS, TEAM, STAGES, UP, RING, TILES, GROUP, SLOT = 16, 4, 2, 2, 2, 2, 128, 1152
"""Warps of a block, of them on one tile; ring slots of up and groups in one; ring slots of down and a warp's row tiles;
values and bytes of a group (experts.cu)."""
TABLES = 7168
"""Bytes of static shared memory of a block of up, at most."""

PLAN_BYTES = 16 + 64 * (6 * 8 + 3 * 4 + 8 * 4 + 8)
"""sizeof(Plan), plan.cuh."""


class PlannerStruct(Parameters):
    _fields_ = (
        *((name, Pointer) for name in ("address", "scale2", "ids", "weights", "plan")),
        *((name, Int) for name in ("experts", "offset", "rows", "top_k")),
    )


class _Experts(Parameters):
    _fields_ = (
        *((name, Pointer) for name in ("plan", "x", "shared_x", "shared_w", "out")),
        *((name, Int) for name in ("rows", "top_k", "k", "n", "shared_k", "early")),
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
    driver.kernel(variant(exact=False), "experts_plan", ids.device.index)((1, 1, 1), 64, p, pdl=pdl)


def variant(*, exact: bool, roomy: bool = True, hidden: int = 0, width: int = 0) -> Variant:
    """`exact`: the shapes fill their tiles; `hidden`, `width`: contraction widths known to the compiler, or 0."""
    up = UP if roomy else UP // 2
    return Variant("experts", (("EXACT", int(exact)), ("UP", up), ("K_UP", hidden), ("K_DOWN", width)))


def _variant(exact: bool, bank: Bank, device: int) -> Variant:
    known = exact and (bank.hidden, bank.width) == (4096, 2048)
    hidden, width = (bank.hidden, bank.width) if known else (0, 0)
    return variant(exact=exact, roomy=driver.roomy(device), hidden=hidden, width=width)


def _up_shared(R: int, hidden: int, roomy: bool) -> tuple[int, int]:
    """(Bytes of dynamic shared memory of a block of up, values of K that its ring takes at a time)."""
    up = UP if roomy else UP // 2
    span = TEAM * up * GROUP
    return WARPS * STAGES * up * SLOT + 2 * WARPS * 128 * 4 + R * 2 * -(-hidden // span) * span, span


def up(x: Tensor, plan: Tensor, bank: Bank, out: Tensor, limit: float, *, pdl: bool = False) -> None:
    """x [R, D] bf16 -> out [R, k, I] bf16 = swiglu(gate_e x, up_e x); places of other ranks' experts are left alone."""
    (R, k, width), D, device = out.shape, x.shape[1], x.device.index
    _check(x, out, plan, R)
    assert x.shape == (R, bank.hidden), (tuple(x.shape), R, bank.hidden)
    assert bank.width == width, (width, bank.width)
    shared, span = _up_shared(R, D, driver.roomy(device))
    assert shared + TABLES <= driver.shared_limit(device), (R, D, shared)
    tiles = -(-width // 8) * min(R * k, bank.pointers.shape[2])
    blocks = min(-(-tiles // (WARPS // TEAM)), driver.processors(device))
    p = _Experts(plan=address(plan), x=address(x), out=address(out), rows=R, top_k=k, k=D, n=width, limit=limit)
    exact = D % span == 0 and width % 8 == 0
    kernel = driver.kernel(_variant(exact, bank, device), "experts_up", device)
    kernel((blocks, 1, 1), WARPS * 32, p, shared=shared, pdl=pdl)


def rows_at_once(device: int, hidden: int) -> int:
    """Rows whose inputs fit into the shared memory of a block of `up`."""
    roomy, limit = driver.roomy(device), driver.shared_limit(device) - TABLES
    return max(R for R in range(ROWS + 1) if _up_shared(R, hidden, roomy)[0] <= limit)


def down(
    h: Tensor,
    plan: Tensor,
    bank: Bank,
    out: Tensor,
    shared: tuple[Tensor, Tensor] | None = None,
    *,
    early: bool = False,
    pdl: bool = False,
) -> None:
    """h [R, k, I] bf16 -> out [R, D] bf16 = sum over the row's experts, ascending, of weight * down_e h, plus
    shared[1] [D, F] times shared[0] [R, F] (both bf16): fp32 throughout, one rounding. `early`: the launch in front is
    `up` of the same plan."""
    (R, k, width), D, device = h.shape, bank.hidden, h.device.index
    _check(h, out, plan, R)
    assert bank.width == width, (width, bank.width)
    assert out.shape == (R, D), (tuple(out.shape), R, D)
    p = _Experts(plan=address(plan), x=address(h), out=address(out), rows=R, top_k=k, k=width, n=D)
    p.early = int(early)
    exact = D % (16 * TILES) == 0 and width % (WARPS * GROUP) == 0
    if shared is not None:
        (y, w), F = shared, shared[0].shape[1]
        assert (y.shape, w.shape) == ((R, F), (D, F)), (tuple(y.shape), tuple(w.shape), R, D)
        assert y.is_contiguous(), y.stride()
        assert w.is_contiguous(), w.stride()
        p.shared_x, p.shared_w, p.shared_k = address(y), address(w), F
        exact = exact and F % (WARPS * 32) == 0
    kernel = driver.kernel(_variant(exact, bank, device), "experts_down", device)
    shared_bytes = WARPS * TILES * (RING * SLOT + 128 * 4)
    kernel((-(-D // (16 * TILES)), 1, 1), WARPS * 32, p, shared=shared_bytes, pdl=pdl)


def _check(x: Tensor, out: Tensor, plan: Tensor, R: int) -> None:
    assert x.dtype == out.dtype == torch.bfloat16, (x.dtype, out.dtype)
    assert x.is_contiguous(), x.stride()
    assert out.is_contiguous(), out.stride()
    assert plan.numel() == PLAN_BYTES, plan.shape
    assert 0 < R <= ROWS, R
