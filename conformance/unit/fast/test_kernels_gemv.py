"""gemv.cu against float64: values, row invariance, the fused epilogues."""

from __future__ import annotations

import pytest
import torch

from conformance.unit.fast import kernel_cases as cases
from conformance.unit.fast.bounds import check
from conformance.unit.fast.kernel_cases import CUDA, KINDS, product, swiglu, values
from fast.kernels import experts, gemv, mhc
from fast.kernels import router as routers
from fast.kernels.gemv import Product

pytestmark = pytest.mark.gpu

REAL = [(4096, 512), (1536, 768), (2048, 512), (8192, 256), (12288, 256), (16384, 256), (512, 512), (128, 512)]
ODD = [(8, 1), (24, 9), (40, 257), (112, 33), (1000, 17), (4104, 48), (5000, 16), (20000, 40)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("K", "N"), REAL + ODD)
@pytest.mark.parametrize("R", [1, 3, 8])
def test_products_stay_within_the_bound_of_their_sum(R: int, K: int, N: int, kind: str) -> None:
    x, w = values(kind, R, K, seed=1), values(kind, N, K, seed=2)
    exact, bound = product(x, w)
    poison = torch.full((R, N), float("nan"), device=CUDA)
    single, half = poison.clone(), poison.bfloat16()
    gemv.project(x, [Product(w, single, "f32"), Product(w, half)])
    check(single, exact, bound + cases.F32 * exact.abs())
    check(half, exact, cases.stored(exact, bound))


@pytest.mark.parametrize(("K", "N"), [(4096, 1000), (8192, 100), (1536, 64), (112, 33)])
def test_rows_have_the_same_bits_alone_and_together(K: int, N: int) -> None:
    x, w = values("heavy", 8, K, seed=3), values("heavy", N, K, seed=4)
    together = gemv.linear(x, w, torch.float32)
    for R in range(1, 9):
        assert torch.equal(gemv.linear(x[:R], w, torch.float32), together[:R])
    for r in range(8):
        assert torch.equal(gemv.linear(x[r : r + 1], w, torch.float32), together[r : r + 1])


def test_a_strided_input_and_many_matrices_share_a_launch() -> None:
    x = values("normal", 5, 3 * 4096, seed=5)[:, 4096:8192]
    weights = [values("normal", N, 4096, seed=6 + N) for N in (16, 1, 40, 300, 17, 64, 128, 8)]
    joint = torch.zeros(5, 1024, dtype=torch.bfloat16, device=CUDA)
    parts, at = [], 0
    for w in weights:
        parts.append(joint[:, at : at + w.shape[0]])
        at += w.shape[0] + 3
    gemv.project(x, [Product(w, out) for w, out in zip(weights, parts, strict=True)])
    for w, out in zip(weights, parts, strict=True):
        assert torch.equal(out, gemv.linear(x, w, torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("D", "F", "limit"), [(4096, 2048, 10.0), (112, 80, 1.5)])
def test_swiglu_pairs(D: int, F: int, limit: float, kind: str) -> None:
    x, gate, up = values(kind, 4, D, seed=7), values("normal", F, D, seed=8, scale=0.2), values("normal", F, D, seed=9)
    out = torch.empty(4, F, dtype=torch.bfloat16, device=CUDA)
    gemv.project(x, [Product(gate, out, "swiglu", up)], limit=limit)
    exact, error = swiglu(product(x, gate), product(x, up), limit)
    check(out, exact, cases.stored(exact, error))


def test_swiglu_keeps_nan() -> None:
    x, w = values("normal", 2, 64, seed=10), values("normal", 16, 64, seed=11)
    x[1, 3] = float("nan")
    out = torch.empty(2, 16, dtype=torch.bfloat16, device=CUDA)
    gemv.project(x, [Product(w, out, "swiglu", w)], limit=10.0)
    assert not out[0].isnan().any()
    assert out[1].isnan().all()


@pytest.mark.parametrize(
    ("experts", "k", "groups", "kept"), [(288, 8, 1, 1), (10, 3, 2, 1), (288, 8, 8, 4), (512, 8, 1, 1), (16, 4, 4, 2)]
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_expert_choice(experts: int, k: int, groups: int, kept: int, tied: bool) -> None:
    R, D = 7, 4096
    x, w = values("normal", R, D, seed=16), values("normal", experts, D, seed=17, scale=D**-0.5)
    bias = torch.randn(experts, generator=cases.generator(18), device=CUDA)
    if tied:  # few distinct scores: almost every choice is between equals
        w = w[torch.arange(experts, device=CUDA) % 3].contiguous()
        bias = bias[torch.arange(experts, device=CUDA) % 3].contiguous()
    logits, shared = torch.empty(R, experts, device=CUDA), torch.empty(R, 64, dtype=torch.bfloat16, device=CUDA)
    gate = values("normal", 64, D, seed=19)
    fused, alone = (
        routers.Router(
            bias,
            torch.full((R, k), -1, dtype=torch.int32, device=CUDA),
            torch.zeros(R, k, device=CUDA),
            groups,
            kept,
            True,
            2.5,
        )
        for _ in range(2)
    )
    products = [Product(w, logits, "router"), Product(gate, shared, "swiglu", gate)]
    for _ in range(2):  # the counter is left as it was found
        gemv.project(x, products, router=fused, limit=10.0)
    routers.choose(logits, alone)
    assert torch.equal(fused.ids, alone.ids)
    assert torch.equal(fused.weights, alone.weights)

    scores = torch.sigmoid(logits.double())
    biased = scores.float() + bias
    if groups > 1:
        strength = biased.view(R, groups, -1).sort(-1, descending=True).values[..., :2].sum(-1)
        alive = strength.sort(dim=-1, descending=True, stable=True).indices[:, :kept]
        mask = torch.zeros(R, groups, dtype=torch.bool, device=CUDA).scatter_(1, alive, True)
        biased = biased.view(R, groups, -1).masked_fill(~mask[..., None], float("-inf")).view(R, experts)
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
    last, following = biased.sort(-1, descending=True).values[:, k - 1 : k + 1].unbind(-1)
    close = (last - following).abs() < 8 * cases.F32  # sigmoid and sum in fp32 may order these either way
    clear = ~close | (last == following)
    assert clear.any()
    assert torch.equal(fused.ids[clear], ids[clear].int())
    chosen = scores.gather(1, fused.ids.long())
    exact = chosen / chosen.sum(-1, keepdim=True) * 2.5
    check(fused.weights, exact, (k + 16) * cases.F32 * exact)


@pytest.mark.parametrize("V", [154880, 257])
def test_the_argmax_takes_the_lowest_of_equals_and_no_nan(V: int) -> None:
    R, D = 4, 512
    x, w = values("normal", R, D, seed=20), values("normal", V, D, seed=21)
    w[V // 2] = w[V - 1] = w[7] * 0 + x[0] * 4
    x[2] = 0
    x[3, 0] = float("nan")
    logits, best = torch.empty(R, V, device=CUDA), gemv.argmax_scratch(CUDA)
    token, position = (
        torch.full((R,), -1, dtype=torch.int32, device=CUDA),
        torch.arange(R, dtype=torch.int32, device=CUDA),
    )
    for step in range(2):
        gemv.project(x, [Product(w, logits, "argmax")], argmax=gemv.Argmax(token, best, position))
        assert position.tolist() == [r + 1 + step for r in range(R)]
    assert token.tolist() == [V // 2, int(logits[1].argmax()), 0, 0]
    assert torch.equal(logits, gemv.linear(x, w, torch.float32)) or logits[3].isnan().all()


def test_side_work_and_the_plan_ride_along() -> None:
    """The block beside the tiles runs Sinkhorn; the router's choice becomes the plan that `make_plan` would make."""
    R, D, E, k, C = 5, 4096, 288, 8, 4
    x, w = values("normal", R, D, seed=22), values("normal", E, D, seed=23, scale=D**-0.5)
    ids, weights = torch.zeros(R, k, dtype=torch.int32, device=CUDA), torch.zeros(R, k, device=CUDA)
    router = routers.Router(torch.zeros(E, device=CUDA), ids, weights, 1, 1, True, 2.5)
    one = cases.packed(8, 32, 24)
    bank = experts.bank([one] * 100, [one] * 100, [one] * 100, first=90)
    plans = [experts.new_plan(CUDA) for _ in range(2)]
    mixes = [mhc.new_mix(R, C, CUDA) for _ in range(2)]
    setting = mhc.Setting(1e-5, 1e-6, 20)
    for mix in mixes:
        mix.logits.copy_(torch.randn(R, C, C, generator=cases.generator(25), device=CUDA))
    logits = torch.empty(R, E, device=CUDA)
    planner, side = experts.planner(ids, weights, bank, plans[0]), mhc.side(mixes[0], setting)
    gemv.project(x, [Product(w, logits, "router")], router=router, planner=planner, side=side)
    experts.make_plan(ids, weights, bank, plans[1])
    mhc.sinkhorn(mixes[1], setting)
    assert torch.equal(mixes[0].comb, mixes[1].comb)
    count = int(plans[0][:4].view(torch.int32))
    inside = torch.unique(ids[(ids >= 90) & (ids < 190)])
    assert count == len(inside) > 0
    assert int(plans[1][:4].view(torch.int32)) == count
    for start, size in ((16 + 64 * 8 * i, 8) for i in range(6)):
        assert torch.equal(plans[0][start : start + count * size], plans[1][start : start + count * size])
    at = 16 + 64 * 60
    shares = plans[0][at : at + count * 32].view(torch.float32).view(count, 8)
    places = plans[0][16 + 64 * 92 :][: count * 8].view(torch.int8).view(count, 8)
    for u, expert in enumerate(inside.tolist()):
        for r in range(8):
            found = (ids[r] == expert).nonzero() if r < R else []
            assert int(places[u, r]) == (int(found[0]) if len(found) else -1)
            assert float(shares[u, r]) == (float(weights[r, int(found[0])]) if len(found) else 0.0)
