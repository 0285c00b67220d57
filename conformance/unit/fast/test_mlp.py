"""fast.ops.mlp: the clamp, the dense block and the grouped experts against one token and one expert at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from conformance.unit.fast import bounds
from fast.linear import linear
from fast.nvfp4 import encode
from fast.ops import mlp

LIMIT = 1.5


def block(generator, D: int, F: int, packed: bool) -> mlp.Projections:
    weights = [torch.randn(*shape, generator=generator) / shape[1] ** 0.5 for shape in ((F, D), (F, D), (D, F))]
    return mlp.Projections(*(encode(w) if packed else w.bfloat16() for w in weights))


def bank(seed: int, experts: int, D: int, F: int) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    blocks = [block(generator, D, F, packed=True) for _ in range(experts)]
    lists = {name: [getattr(b, name) for b in blocks] for name in mlp.Projections._fields}
    return SimpleNamespace(first=0, count=experts, total=experts, **lists)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_swiglu_clamps_the_gate_above_and_the_value_on_both_sides(dtype):
    gate = torch.tensor([[-40.0, -3.0, 0.0, 1.0, 1.5, 2.0, 40.0]]).repeat(7, 1).to(dtype)
    up = gate.T.contiguous()
    g, u = gate.double().clamp(max=LIMIT), up.double().clamp(-LIMIT, LIMIT)
    expected = g / (1 + torch.exp(-g)) * u
    bounds.check(
        mlp.swiglu(gate, up, LIMIT), expected, bounds.stored(expected, bounds.gamma(8) * expected.abs(), dtype)
    )
    assert float(mlp.swiglu(gate, up, LIMIT)[6, 0]) != float(mlp.swiglu(gate.clamp(min=-LIMIT), up, LIMIT)[6, 0])


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_dense_block_is_its_three_products(packed):
    generator = torch.Generator().manual_seed(7)
    weights = block(generator, 32, 48, packed)
    x = torch.randn(5, 32, generator=generator).bfloat16()
    product = mlp.swiglu(linear(x, weights.gate), linear(x, weights.up), LIMIT)
    assert torch.equal(mlp.dense(x, weights, LIMIT), linear(product, weights.down))
    assert mlp.dense(x, weights, LIMIT, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("T", "k"), [(1, 1), (1, 3), (9, 3), (40, 2)])
def test_grouping_by_expert_changes_nothing(dtype, T, k):
    """Against each token alone through each of its experts; only the product's shape differs, so bounds, not bits."""
    experts, D, F = 6, 32, 48
    generator = torch.Generator().manual_seed(T * 10 + k)
    x = torch.randn(T, D, generator=generator).to(dtype)
    held = bank(5, experts, D, F)
    indices = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(T)]).int()
    weights = torch.rand(T, k, generator=generator)
    found = mlp.routed(x, held, indices, weights, LIMIT)
    assert found.dtype == torch.float32
    expected, size = torch.zeros(T, D, dtype=torch.float64), torch.zeros(T, D, dtype=torch.float64)
    for t in range(T):
        for slot in range(k):
            e = int(indices[t, slot])
            y = mlp.dense(x[t : t + 1], mlp.Projections(held.gate[e], held.up[e], held.down[e]), LIMIT)[0].double()
            expected[t] += float(weights[t, slot]) * y
            size[t] += float(weights[t, slot]) * _size(x[t : t + 1], held, e, dtype)
    bounds.check(found, expected, size)


def _size(x, held, e, dtype):
    """Twice the bound on one expert's error: both sides may err by it. Storage roundings may fall either way."""
    values = {
        name: linear(torch.eye(w[e].shape[1]), w[e], torch.float32).T
        for name, w in (("gate", held.gate), ("up", held.up), ("down", held.down))
    }
    gate, up = (bounds.product(x, values[name]) for name in ("gate", "up"))
    g, u = x.double() @ values["gate"].double().T, x.double() @ values["up"].double().T
    gate, up = bounds.stored(g, gate, dtype), bounds.stored(u, up, dtype)
    p = mlp.swiglu(g.float(), u.float(), LIMIT).double()
    lipschitz = 1.1
    slack = bounds.stored(p, lipschitz * gate * LIMIT + up * LIMIT + bounds.gamma(8) * p.abs(), dtype)
    y = p.abs() @ values["down"].double().abs().T
    out = slack @ values["down"].double().abs().T + bounds.gamma(p.shape[1] + 2) * y
    return 2 * bounds.stored(y, out, dtype)[0]


def test_experts_of_other_ranks_contribute_nothing_here():
    held = bank(6, 6, 32, 48)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 32, generator=generator).bfloat16()
    indices = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(12)]).int()
    weights = torch.rand(12, 3, generator=generator)
    whole = mlp.routed(x, held, indices, weights, LIMIT)

    def rank(first: int, count: int) -> torch.Tensor:
        lists = {name: getattr(held, name)[first : first + count] for name in mlp.Projections._fields}
        share = SimpleNamespace(first=first, count=count, total=6, **lists)
        return mlp.routed(x, share, indices, weights, LIMIT)

    size = torch.stack([rank(e, 1).abs() for e in range(6)]).sum(0).double()
    parts = [rank(first, count) for first, count in ((0, 1), (1, 1), (2, 2), (4, 2))]
    bounds.check(torch.stack(parts).sum(0), whole, bounds.gamma(3 + 4) * size)
    idle = (rank(0, 1) == 0).all(-1)
    assert torch.equal(idle, (indices != 0).all(-1))


def test_only_chosen_experts_are_read():
    held = bank(8, 4, 32, 48)
    for name in mlp.Projections._fields:
        getattr(held, name)[2] = None
    x, weights = torch.ones(3, 32), torch.ones(3, 2)
    mlp.routed(x, held, torch.tensor([[0, 1], [1, 3], [0, 3]]), weights, LIMIT)
    with pytest.raises(AttributeError):
        mlp.routed(x, held, torch.tensor([[0, 1], [1, 2], [0, 3]]), weights, LIMIT)
