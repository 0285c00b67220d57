"""How many blocks a launch has, without a GPU."""

from __future__ import annotations

import pytest

from fast.kernels import kda


@pytest.mark.parametrize(
    ("heads", "sequences", "processors", "blocks"),
    [(64, 1, 132, 64), (64, 2, 132, 128), (64, 32, 132, 128), (32, 32, 132, 128), (64, 8, 48, 64), (6, 3, 132, 18)],
)
def test_the_heads_of_a_kda_step_have_equally_many_blocks(
    heads: int, sequences: int, processors: int, blocks: int
) -> None:
    """More would wait for a multiprocessor, or have no sequence."""
    assert kda.blocks(heads, sequences, processors) == blocks
