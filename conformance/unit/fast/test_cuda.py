"""The torch path on a GPU: against the oracle, row by row, with drafts, and over NCCL."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conformance.unit.fast.runs import Taps, distance, feed, tokens
from fast.generate import generate
from fast.linear import ROWS
from fast.model import TextModel
from fast.mtp import Mtp
from fast.session import launch
from fast.worker import Job
from reference.checkpoint import open_checkpoint
from reference.model import TextModel as Oracle

pytestmark = pytest.mark.gpu

CASES = [(g, e) for g in ("tiny", "odd") for e in ("nvidia", "libertai")]
EVERY = pytest.mark.parametrize(("geometry", "export"), CASES, ids=["-".join(case) for case in CASES])
AGREEMENT = 2e-5
"""Relative L2 that fp32 without storage rounding is required to reach against exact arithmetic."""

MESHES = [(2, 1), (1, 2), (2, 2)] if torch.cuda.device_count() > 1 else [(1, 1)]


class Copied(Taps):
    """Taps of tensors on a GPU."""

    def __call__(self, name: str, value: torch.Tensor) -> None:
        super().__call__(name, value.detach().cpu())


class OnHost:
    """A model on a GPU whose logits come back."""

    def __init__(self, model: TextModel) -> None:
        self.model = model

    def prefill(self, ids, tap=None, pad: int = 0) -> np.ndarray:
        return self.model.prefill(ids, tap=tap, pad=pad).cpu().numpy()

    def decode(self, token: int, tap=None) -> np.ndarray:
        return self.model.decode(token, tap=tap).cpu().numpy()


@EVERY
@pytest.mark.parametrize("mla", ["absorbed", "expanded"])
def test_float32_agrees_with_exact_arithmetic(checkpoint, geometry, export, mla):
    opened = open_checkpoint(checkpoint(geometry, export))
    ids = tokens(1, 77, opened.config.text.vocab_size)
    model = TextModel(checkpoint(geometry, export), device="cuda", dtype=torch.float32, mla=mla)
    found, expected = Copied(), Taps()
    logits = feed(OnHost(model), ids, [50, 13], found)
    assert distance(logits, feed(Oracle(opened), ids, [77], expected)) <= AGREEMENT
    a, b = found.arrays(), expected.arrays()
    assert a.keys() == b.keys()
    for name, value in b.items():
        if name.endswith((".selected", ".indices", "tokens")):
            assert np.array_equal(a[name], value), name
        else:
            assert distance(a[name], value) <= AGREEMENT, (name, distance(a[name], value))


@pytest.mark.parametrize("geometry", ["tiny", "odd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(checkpoint, geometry, dtype):
    model = TextModel(checkpoint(geometry, "nvidia"), device="cuda", dtype=dtype)
    ids = tokens(1, 30 + ROWS, model.config.text.vocab_size)
    model.prefill(ids[:30])
    before = model.state.snapshot()
    alone = [model.decode(int(token)) for token in ids[30:]]
    after = model.state.snapshot()
    for count in (2, 5, ROWS):
        model.state.restore(before)
        assert torch.equal(model.prefill(ids[30 : 30 + count]), torch.stack(alone[:count]))
    assert all(torch.equal(after[name], x) for name, x in model.state.snapshot().items())


@EVERY
def test_drafts_change_nothing(checkpoint, geometry, export):
    target = TextModel(checkpoint(geometry, export), device="cuda", mtp=True)
    block, prompt = Mtp(target), tokens(5, 27, target.config.text.vocab_size).tolist()
    runs = []
    for drafts in (0, 1, 4):
        text, _ = generate(target, prompt, 20, mtp=block, drafts=drafts)
        runs.append((text, target.state.snapshot() | block.state.snapshot()))
    for text, states in runs[1:]:
        assert text == runs[0][0]
        assert all(torch.equal(states[name], x) for name, x in runs[0][1].items())


@pytest.mark.parametrize(("tp", "ep"), MESHES)
@pytest.mark.parametrize("export", ["nvidia", "libertai"])
def test_ranks_over_nccl_agree_with_exact_arithmetic(checkpoint, export, tp, ep):
    directory = checkpoint("tiny", export)
    ids = tokens(1, 40, 512)
    job = Job(
        str(directory), ids.tolist(), "", prefill=[30, 4], tp=tp, ep=ep, device="cuda", arithmetic="fp32", taps=""
    )
    expected = Oracle(open_checkpoint(directory)).prefill(ids)
    for rank in launch(job):
        assert distance(rank["logits"].double().numpy(), expected) <= AGREEMENT
