"""fast.ops.router: choice against a sorted list, weights against float64."""

from __future__ import annotations

import pytest
import torch

from conformance.unit.fast import bounds
from fast.ops import router


def by_hand(biased: list[float], k: int, n_group: int, topk_group: int) -> list[int]:
    size = len(biased) // n_group
    strength = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
    kept = sorted(range(n_group), key=lambda g: (-strength[g], g))[:topk_group]
    alive = [e for e in range(len(biased)) if e // size in kept]
    return sorted(sorted(alive, key=lambda e: (-biased[e], e))[:k])


@pytest.mark.parametrize(
    ("E", "k", "n_group", "topk_group"), [(16, 4, 1, 1), (10, 3, 2, 1), (12, 4, 4, 2), (8, 8, 1, 1)]
)
@pytest.mark.parametrize("seed", range(4))
def test_choice_with_ties_takes_the_lower_index(E, k, n_group, topk_group, seed):
    """Scores on a grid of four values: nearly every choice is decided by a tie. Sums of two are exact."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (32, E), generator=generator) / 4
    bias = torch.randint(0, 2, (E,), generator=generator) / 4
    found = router.choose(scores, bias, k, n_group, topk_group)
    assert found.dtype == torch.int32
    expected = [by_hand(row, k, n_group, topk_group) for row in (scores + bias).tolist()]
    assert found.tolist() == expected


@pytest.mark.parametrize("normalise", [True, False])
def test_weights_are_the_plain_scores(normalise):
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(9, 16, generator=generator)
    indices = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(9)]).int()
    chosen = scores.double().gather(1, indices.long())
    expected = 2.5 * (chosen / (chosen.sum(-1, keepdim=True) + 1e-20) if normalise else chosen)
    found = router.weigh(scores, indices, normalise=normalise, factor=2.5)
    bounds.check(found, expected, bounds.gamma(4 + 4) * expected)


def test_scores_that_underflow_give_no_nan():
    scores = torch.zeros(1, 4)
    assert torch.equal(router.weigh(scores, torch.tensor([[0, 1]]), normalise=True, factor=2.5), torch.zeros(1, 2))


def test_logits_are_fp32_from_storage():
    generator = torch.Generator().manual_seed(4)
    x, gate = torch.randn(5, 64, generator=generator).bfloat16(), torch.randn(12, 64, generator=generator).bfloat16()
    found = router.logits(x, gate)
    assert found.dtype == torch.float32
    bounds.check(found, x.double() @ gate.double().T, bounds.product(x, gate))


def test_a_bias_in_another_dtype_is_refused():
    with pytest.raises(AssertionError):
        router.choose(torch.rand(1, 8), torch.zeros(8, dtype=torch.bfloat16), 2)
