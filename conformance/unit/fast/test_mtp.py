"""fast.mtp.Mtp: float32 against the oracle's block, its own state, and the errors when there is no block."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from conformance.checkpoints import make
from conformance.unit.fast.runs import Taps, distance, tokens
from fast.loader import load
from fast.model import TextModel
from fast.mtp import Mtp, NoDraftBlockError
from reference.checkpoint import open_checkpoint
from reference.model import TextModel as Oracle
from reference.mtp import Block

CASES = [(g, e) for g in ("tiny", "odd") for e in ("nvidia", "libertai")]
EVERY = pytest.mark.parametrize(("geometry", "export"), CASES, ids=["-".join(case) for case in CASES])
AGREEMENT = 2e-5
"""Relative L2 that fp32 without storage rounding is required to reach against exact arithmetic."""

T = 45


@pytest.fixture(scope="module")
def weights(checkpoint):
    return cache(lambda geometry, export="nvidia": load(checkpoint(geometry, export), mtp=True, progress=False))


def inputs(model: TextModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden rows of unit size with every direction in them, and tokens; exact in fp32."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(T, model.config.text.hidden_size, generator=generator)
    return hidden, torch.from_numpy(tokens(7, T, model.config.text.vocab_size))


@EVERY
@pytest.mark.parametrize("cuts", [[T], [1, 30, 3, 11], [1] * T], ids=["whole", "pieces", "rows"])
def test_rows_agree_with_exact_arithmetic(weights, checkpoint, geometry, export, cuts):
    block = Mtp(TextModel(weights(geometry, export), dtype=torch.float32))
    oracle = Block(Oracle(open_checkpoint(checkpoint(geometry, export))))
    hidden, ids = inputs(block.target)
    found, expected = Taps(), Taps()
    for h, t in zip(hidden.split(cuts), ids.split(cuts), strict=True):
        block.follow(h, t, found)
    oracle.logits(oracle.rows(hidden.double().numpy(), ids.numpy(), oracle.fresh(), expected), expected)
    a, b = found.arrays(), expected.arrays()
    assert a.keys() == b.keys()
    for name, value in b.items():
        if name.endswith((".selected", ".indices")):
            assert np.array_equal(a[name], value), name
        else:
            assert distance(a[name], value) <= AGREEMENT, (name, distance(a[name], value))


@pytest.mark.parametrize("geometry", ["tiny", "odd"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seen", [1, 7, 8, 40])
def test_later_rows_take_the_first_selection_and_the_rows_since(tmp_path, geometry, share, seen):
    """Against the oracle's rows with the selection written out; also where the indexer has to run again."""
    directory = make(tmp_path / "c", "nvidia", geometry, config={"index_share_for_mtp_iteration": share})
    block = Mtp(TextModel(directory, dtype=torch.float32, mtp=True))
    oracle = Block(Oracle(open_checkpoint(directory)))
    hidden, ids = inputs(block.target)
    state = oracle.fresh()
    y, selected = block.run(hidden[:seen], ids[:seen])
    wanted = oracle.rows(hidden[:seen].double().numpy(), ids[:seen].numpy(), state)
    assert state.selected is not None
    first = np.sort(state.selected[-1:], axis=-1)
    y = y[-1:]
    for step in range(3):
        token = ids[40 + step : 41 + step]
        taken = np.concatenate([first, np.arange(seen, seen + step + 1, dtype=np.int32)[None]], axis=-1)
        sets = np.sort(taken.view(np.uint32), axis=-1).view(np.int32) if share else None
        wanted = oracle.rows(wanted[-1:], token.numpy(), state, selected=sets)
        y, selected = block.later(y, token, selected)
        assert distance(y.double().numpy(), wanted) <= AGREEMENT


@pytest.mark.parametrize("geometry", ["tiny", "odd"])
def test_the_block_touches_no_state_but_its_own(weights, geometry):
    target = TextModel(weights(geometry))
    block = Mtp(target)
    target.prefill(tokens(1, 20, 250))
    before = target.state.snapshot()
    hidden, ids = inputs(target)
    block.run(hidden[:12].bfloat16(), ids[:12])
    after = target.state.snapshot()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert block.state.length == 12


@pytest.mark.parametrize("geometry", ["tiny", "odd"])
def test_a_row_does_not_depend_on_the_rows_beside_it(weights, geometry):
    hidden, ids = inputs(TextModel(weights(geometry)))
    hidden = hidden.bfloat16()
    alone, beside = (Mtp(TextModel(weights(geometry))) for _ in range(2))
    for block in (alone, beside):
        block.run(hidden[:30], ids[:30])
    rows = torch.cat([alone.run(hidden[t : t + 1], ids[t : t + 1])[0] for t in range(30, 38)])
    assert torch.equal(beside.run(hidden[30:38], ids[30:38])[0], rows)
    a, b = alone.state.arrays(), beside.state.arrays()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_position_zero_keeps_its_embedding(weights):
    """Row 0 depends on its token: nothing is masked there."""
    first, second = (Mtp(TextModel(weights("odd"))) for _ in range(2))
    hidden, _ = inputs(first.target)
    y, _ = first.run(hidden[:1].bfloat16(), torch.tensor([3]))
    other, _ = second.run(hidden[:1].bfloat16(), torch.tensor([4]))
    assert not torch.equal(y, other)


def test_a_block_that_was_not_loaded_is_asked_for(checkpoint):
    with pytest.raises(NoDraftBlockError, match=r"layers\.7: the draft block was not loaded"):
        Mtp(TextModel(load(checkpoint("odd", "nvidia"), progress=False)))
