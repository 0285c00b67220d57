"""Absorbed latent attention of decode rows over selected tokens (mla.cu), at q and v width 256, latent width 512."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fast.kernels import driver
from fast.kernels.compile import Variant
from fast.kernels.driver import Int, Parameters, Pointer, address

N, O, L, PARTS = 256, 256, 512, 4  # noqa: E741
ROWS = 8
SPLITS, LEAST_KEYS = 64, 64
WIDEST = SPLITS * LEAST_KEYS
"""Selected tokens that every device attends to: in at most SPLITS parts, of LEAST_KEYS where shared memory is short."""

Launch = Callable[[bool], None]
"""launch(pdl)"""


class _Mla(Parameters):
    _fields_ = (
        *((name, Pointer) for name in ("q", "kv_b", "qa", "latents", "selected", "count", "part", "part_ml", "out")),
        *((name, Int) for name in ("rows", "heads", "tokens", "capacity", "width", "splits", "ld_q")),
    )


@dataclass(frozen=True, slots=True)
class Workspace:
    """qa [R, H, L] bf16, part [R, splits, H, L] and part_ml [R, splits, H, 2] fp32."""

    qa: Tensor
    part: Tensor
    part_ml: Tensor


def keys(device: int) -> int:
    """Selected tokens per block, by the shared memory a block may have."""
    return 2 * LEAST_KEYS if driver.roomy(device) else LEAST_KEYS


def variant(*, roomy: bool) -> Variant:
    return Variant("mla", (("KEYS", 2 * LEAST_KEYS if roomy else LEAST_KEYS),))


def workspace(R: int, H: int, width: int, device: torch.device) -> Workspace:
    splits = -(-width // keys(device.index or 0))
    return Workspace(
        torch.empty(R, H, L, dtype=torch.bfloat16, device=device),
        torch.empty(R, splits, H, L, dtype=torch.float32, device=device),
        torch.empty(R, splits, H, 2, dtype=torch.float32, device=device),
    )


def launches(
    q: Tensor,
    kv_b: Tensor,
    latents: Tensor,
    selected: Tensor,
    count: Tensor,
    work: Workspace,
    out: Tensor,
) -> tuple[Launch, Launch, Launch]:
    """q [R, H*256] bf16, kv_b [H*512, 512], latents [S, capacity, 512], selected [R, W] int32, count [R] int32 -> out
    [R, H*256] bf16, by three launches: absorb the queries, attend per split, merge. The first count[r] entries of a
    selection count; the first launch does not need it."""
    R, (S, capacity, _) = q.shape[0], latents.shape
    H = kv_b.shape[0] // (N + O)
    assert kv_b.shape == (H * (N + O), L), tuple(kv_b.shape)
    assert (q.shape, out.shape) == ((R, H * N), (R, H * O)), (tuple(q.shape), tuple(out.shape), H)
    assert latents.shape[2] == L, tuple(latents.shape)
    assert 0 < R <= ROWS, R
    assert R % S == 0, (R, S)
    for x in (kv_b, latents, selected, out, work.qa, work.part):
        assert x.is_contiguous(), x.stride()
    device, splits = q.device.index, work.part.shape[1]
    roomy, block = driver.roomy(device), keys(device)
    assert splits == -(-selected.shape[1] // block), (splits, tuple(selected.shape))
    p = _Mla(*map(address, (q, kv_b, work.qa, latents, selected, count, work.part, work.part_ml, out)))
    p.rows, p.heads, p.tokens, p.capacity = R, H, R // S, capacity
    p.width, p.splits, p.ld_q = selected.shape[1], splits, q.stride(0)
    assert splits <= SPLITS, splits
    row = 2 * L + 16
    plans: dict[str, tuple[tuple[int, int, int], int, int]] = {
        "mla_absorb": ((H * PARTS, 1, 1), 512, 8 * 512 * 16 + 32 * 128 * 4),
        "mla_partial": ((splits, -(-H // 16), R), 2 * block, block * row + 16 * row + 2 * 16 * (2 * block + 16)),
        "mla_merge": ((H * PARTS, 1, 1), 512, 16 * 4096 + 4 * 64 * 8 * 4 + 8 * L * 2 + 8 * 64 * 4 + 8 * L * 4),
    }

    def launch(name: str) -> Launch:
        grid, threads, shared = plans[name]
        kernel = driver.kernel(variant(roomy=roomy), name, device)

        def run(pdl: bool) -> None:
            kernel(grid, threads, p, shared=shared, pdl=pdl)

        return run

    return launch("mla_absorb"), launch("mla_partial"), launch("mla_merge")


def attend(
    q: Tensor, kv_b: Tensor, latents: Tensor, selected: Tensor, count: Tensor, work: Workspace, out: Tensor
) -> None:
    """The three launches of `launches`, one after the other."""
    for launch in launches(q, kv_b, latents, selected, count, work, out):
        launch(False)
