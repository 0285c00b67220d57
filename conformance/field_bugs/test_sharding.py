"""Faults of sharded runs: experts that belong to no rank, or to two."""

import pytest

from fast import sharding as fast
from reference import sharding as reference

SIZES = {
    (288, 5): [58, 58, 58, 57, 57],
    (288, 7): [42, 41, 41, 41, 41, 41, 41],
    (288, 8): [36] * 8,
    (10, 4): [3, 3, 2, 2],
    (1, 1): [1],
}


@pytest.mark.parametrize("plan", [reference, fast], ids=["reference", "fast"])
@pytest.mark.parametrize(("experts", "ranks"), SIZES)
def test_fb61_uneven_experts(plan, experts, ranks):
    """The first (experts mod ranks) ranks hold one more; ranges follow each other and cover every expert once."""
    ranges = [plan.Mesh(1, ranks, rank).experts(experts) for rank in range(ranks)]
    assert [len(one) for one in ranges] == SIZES[experts, ranks]
    assert [expert for one in ranges for expert in one] == list(range(experts))
