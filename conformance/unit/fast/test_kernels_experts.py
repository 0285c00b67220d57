"""experts.cu against float64: every code and scale, values, row invariance, other ranks' experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance.unit.fast import kernel_cases as cases
from conformance.unit.fast.bounds import check
from conformance.unit.fast.kernel_cases import CUDA, KINDS, Packed, packed, product, swiglu, values
from fast.kernels import experts

pytestmark = pytest.mark.gpu

SHAPES = [(4096, 2048), (128, 64), (160, 96), (4096, 320), (1024, 2048), (4096, 12288)]


def choices(R: int, k: int, E: int, seed: int) -> Tensor:
    g = cases.generator(seed)
    return torch.stack([torch.randperm(E, generator=g, device=CUDA)[:k].sort().values for _ in range(R)]).int()


def plan(ids: Tensor, one: experts.Bank, weights: Tensor | None = None) -> Tensor:
    made = experts.new_plan(CUDA)
    experts.make_plan(ids, torch.ones(ids.shape, device=CUDA) if weights is None else weights, one, made)
    return made


def bank(E: int, D: int, I: int, seed: int) -> tuple[experts.Bank, list[list[Packed]]]:  # noqa: E741
    bits = (0x20, 0x50)  # scales 2^-3 .. 2^3: products of a size that the clamp meets now and then
    weights = [
        [packed(N, K, seed + 100 * m + e, bits=bits, scale_2=2.0**-8) for e in range(E)]
        for m, (N, K) in enumerate([(I, D), (I, D), (D, I)])
    ]
    gate, up, down = weights
    return experts.bank(gate, up, down), weights


def up(x: Tensor, plan: Tensor, bank: experts.Bank, h: Tensor, limit: float) -> None:
    experts.routed(x, plan, bank, h, torch.empty_like(x), limit, phases=experts.UP)
    h.copy_(experts.natural(h))


def down(h: Tensor, plan: Tensor, bank: experts.Bank, out: Tensor, shared: tuple[Tensor, Tensor] | None = None) -> None:
    h = experts.arranged(h)
    experts.routed(torch.empty_like(out), plan, bank, h, out, 0.0, shared, phases=experts.DOWN)


def test_every_code_and_every_scale_is_exact() -> None:
    """One-hot rows read single weights: each of the 127 scales with each of the 16 codes, through `down`."""
    D, K = 128 * 16, 64
    codes = torch.arange(16, device=CUDA, dtype=torch.uint8).repeat_interleave(128)
    scale = torch.arange(128, device=CUDA, dtype=torch.uint8).repeat(16).clamp(max=0x7E)
    block = Packed(
        (codes * 17)[:, None].expand(D, K // 2).contiguous(),
        scale[:, None].expand(D, K // 16).contiguous(),
        torch.ones((), device=CUDA),
    )
    one = experts.bank([packed(K, D, 1)], [packed(K, D, 2)], [block])
    ids, weights = torch.zeros(1, 1, dtype=torch.int32, device=CUDA), torch.ones(1, 1, device=CUDA)
    for column in (0, 1, 4, 15, 16, 37, 63):
        h = torch.zeros(1, 1, K, dtype=torch.bfloat16, device=CUDA)
        h[0, 0, column] = 1.0
        out = torch.empty(1, D, dtype=torch.bfloat16, device=CUDA)
        down(h, plan(ids, one, weights), one, out)
        assert torch.equal(out[0].double(), block.unscaled()[:, column])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("D", "I"), SHAPES)
@pytest.mark.parametrize("R", [1, 3, 8])
def test_gate_up_and_swiglu(R: int, D: int, I: int, kind: str) -> None:  # noqa: E741
    E, k = 12, 4
    one, weights = bank(E, D, I, seed=3)
    x, ids = values(kind, R, D, seed=4, scale=D**-0.5), choices(R, k, E, seed=5)
    out = torch.full((R, k, I), float("nan"), dtype=torch.bfloat16, device=CUDA)
    up(x, plan(ids, one), one, out, 10.0)
    for r in range(R):
        for j in range(k):
            parts = []
            for matrix in weights[:2]:
                w = matrix[int(ids[r, j])]
                value, error = product(x[r], w.unscaled())
                factor = w.scale_2.double()
                parts.append((value * factor, error * factor + 2 * cases.F32 * (value * factor).abs()))
            exact, error = swiglu(parts[0], parts[1], 10.0)
            check(out[r, j], exact, cases.stored(exact, error))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("D", "I"), SHAPES)
@pytest.mark.parametrize(("R", "F"), [(1, 2048), (3, 0), (8, 96)])
def test_down_weighting_and_the_shared_expert(R: int, F: int, D: int, I: int, kind: str) -> None:  # noqa: E741
    E, k = 12, 4
    one, weights = bank(E, D, I, seed=6)
    h, ids = values(kind, R, k, I, seed=7), choices(R, k, E, seed=8)
    share = torch.rand(R, k, generator=cases.generator(9), device=CUDA)
    shared = (values(kind, R, F, seed=10), values("normal", D, F, seed=11, scale=0.1)) if F else None
    out = torch.full((R, D), float("nan"), dtype=torch.bfloat16, device=CUDA)
    down(h, plan(ids, one, share), one, out, shared)
    exact = torch.zeros(R, D, dtype=torch.float64, device=CUDA)
    error = torch.zeros_like(exact)
    if shared is not None:
        exact, error = product(*shared)
    for r in range(R):
        for j in range(k):
            w = weights[2][int(ids[r, j])]
            value, bound = product(h[r, j], w.unscaled())
            factor = w.scale_2.double() * share[r, j].double()
            exact[r] += value * factor
            error[r] += (bound + 16 * cases.F32 * value.abs()) * factor
    check(out, exact, cases.stored(exact, error + 16 * cases.F32 * exact.abs()))


@pytest.mark.parametrize(("D", "I", "F"), [(4096, 2048, 2048), (160, 96, 64)])
def test_rows_have_the_same_bits_alone_and_together(D: int, I: int, F: int) -> None:  # noqa: E741
    R, E, k = 8, 24, 8
    one, _ = bank(E, D, I, seed=12)
    x, ids = values("heavy", R, D, seed=13, scale=D**-0.5), choices(R, k, E, seed=14)
    share = torch.rand(R, k, generator=cases.generator(15), device=CUDA)
    y, w = values("normal", R, F, seed=16), values("normal", D, F, seed=17)

    def both(rows: slice) -> tuple[Tensor, Tensor]:
        n = len(range(*rows.indices(R)))
        h, out = (torch.zeros(n, *s, dtype=torch.bfloat16, device=CUDA) for s in ((k, I), (D,)))
        chosen = plan(ids[rows], one, share[rows])
        experts.routed(x[rows], chosen, one, h, out, 10.0, (y[rows], w))
        return h, out

    together = both(slice(0, R))
    for rows in [*(slice(0, n) for n in range(1, R)), *(slice(r, r + 1) for r in range(R))]:
        assert all(torch.equal(a, b[rows]) for a, b in zip(both(rows), together, strict=True))


@pytest.mark.parametrize("R", [1, 2, 8])
@pytest.mark.parametrize(("D", "I", "F"), [(4096, 2048, 2048), (160, 96, 64)])
def test_one_launch_gives_the_bits_of_two_and_of_itself(R: int, D: int, I: int, F: int) -> None:  # noqa: E741
    """Together and halved, with and without programmatic launch, x early or not, many times over."""
    E, k = 24, 8
    one, _ = bank(E, D, I, seed=22)
    x, ids = values("heavy", R, D, seed=23, scale=D**-0.5), choices(R, k, E, seed=24)
    shared = values("normal", R, F, seed=25), values("normal", D, F, seed=26)
    chosen = plan(ids, one, torch.rand(R, k, generator=cases.generator(27), device=CUDA))
    h, out = (torch.zeros(R, *s, dtype=torch.bfloat16, device=CUDA) for s in ((k, I), (D,)))
    up(x, chosen, one, h, 10.0)
    down(h, chosen, one, out, shared)
    assert out.isfinite().all()
    launches: list[dict[str, bool]] = [{}, {"pdl": True}, {"early": True, "pdl": True}] * 10
    for options in launches:
        again, result = torch.full_like(h, float("nan")), torch.full_like(out, float("nan"))
        experts.routed(x, chosen, one, again, result, 10.0, shared, **options)
        assert torch.equal(experts.natural(again), h)
        assert torch.equal(result, out)


def test_experts_of_other_ranks_add_nothing() -> None:
    D, I, E, k, R = 256, 128, 12, 4, 5  # noqa: E741
    _, weights = bank(E, D, I, seed=18)
    x, ids = values("normal", R, D, seed=19), choices(R, k, E, seed=20)
    share = torch.rand(R, k, generator=cases.generator(21), device=CUDA)
    total, parts = torch.zeros(R, D, dtype=torch.float64, device=CUDA), []
    for first, last in ((0, 5), (5, 12), (0, 12)):
        gate, over, back = (m[first:last] for m in weights)
        part = experts.bank(gate, over, back, first=first)
        h, out = (
            torch.zeros(R, k, I, dtype=torch.bfloat16, device=CUDA),
            torch.empty(R, D, dtype=torch.bfloat16, device=CUDA),
        )
        chosen = plan(ids, part, share)
        experts.routed(x, chosen, part, h, out, 10.0)
        absent = (ids < first) | (ids >= last)
        assert (h[absent] == 0).all()
        parts.append(out.double())
    total = parts[0] + parts[1]
    check(total, parts[2], cases.BF16 * (parts[0].abs() + parts[1].abs() + parts[2].abs()))
