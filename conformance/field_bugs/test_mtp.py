"""Faults of drafting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from conformance.checkpoints.edit import read_tensors, write_tensors
from conformance.checkpoints.shared import copy_of, shared
from conformance.speculation import ReferenceRunner, Runner, fast_runner, wrong_at
from conformance.unit.fast.runs import Taps
from fast.generate import Generator
from fast.model import TextModel
from fast.mtp import Mtp
from reference.checkpoint import open_checkpoint
from reference.model import TextModel as Oracle
from reference.mtp import Block, Speculation

PROMPT = [3, 141, 59, 26, 53, 58, 97]
FACTOR = 3.0

Seen = tuple[list[np.ndarray], np.ndarray]


def overheard(block: Any, method: str) -> list[np.ndarray]:
    """What `block.method` is given as hidden rows, call by call, from now on."""
    seen: list[np.ndarray] = []
    act = getattr(block, method)

    def listen(hidden: Any, *rest: Any, **more: Any) -> Any:
        seen.append(np.array(hidden.numpy() if isinstance(hidden, torch.Tensor) else hidden))
        return act(hidden, *rest, **more)

    setattr(block, method, listen)
    return seen


def by_reference(directory: Path) -> Seen:
    """The hidden rows that enter the block, call by call, and the target's final.norm of the prompt."""
    block = Block(Oracle(open_checkpoint(directory)))
    seen, taps = overheard(block, "rows"), Taps()
    speculation = Speculation(block)
    speculation.start(PROMPT, taps)
    speculation.draft(3)
    return seen, taps.arrays()["final.norm"]


def by_engine(directory: Path) -> Seen:
    """The same of the engine."""
    target = TextModel(directory, dtype=torch.float32, mtp=True)
    block = Mtp(target)
    seen, taps = overheard(block, "run"), Taps()
    generator = Generator(target, mtp=block, drafts=3)
    generator.prefill(PROMPT, taps)
    generator.propose(3)
    return seen, taps.arrays()["final.norm"]


@pytest.mark.parametrize("side", [by_reference, by_engine], ids=["reference", "fast"])
def test_fb113_drafts_pass_on_what_the_norm_gave(tmp_path, side: Callable[[Path], Seen]):
    """shared_head.norm all 3: every recycled hidden has a root mean square of 3, the first is the target's own.

    sqrt(mean(y^2)) = 3 sqrt(m / (m + eps)) for a row of mean square m before the norm: below 3, and by less than
    eps / 2m relative. m is at least 1/100 here, so a row before the norm cannot pass for it.
    """
    directory = copy_of(tmp_path, "libertai", "odd")
    tensors = read_tensors(directory)
    name = "model.language_model.layers.7.shared_head.norm.weight"
    width = int(np.prod(tensors[name].shape))
    three = np.full(width, FACTOR, ml_dtypes.bfloat16).tobytes()
    write_tensors(directory, tensors | {name: type(tensors[name])("BF16", (width,), three, tensors[name].shard)})
    (first, *later), final = side(directory)
    assert np.array_equal(first, final)
    assert len(later) == 2
    eps = open_checkpoint(directory).config.text.rms_norm_eps
    for hidden in later:
        size = float(np.sqrt((np.asarray(hidden, np.float64) ** 2).mean()))
        assert FACTOR / np.sqrt(1 + 100 * eps) <= size <= FACTOR * (1 + width * 2.0**-24)


RUNNERS: dict[str, Callable[[Path], Runner]] = {
    "reference": lambda directory: ReferenceRunner(open_checkpoint(directory)),
    "fast": fast_runner,
}


@pytest.mark.parametrize("engine", RUNNERS)
def test_fb120_three_drafts_of_which_one_is_right(engine):
    """By rounds of verification: 20 tokens and every state are those of plain decoding."""
    runner = RUNNERS[engine](shared("nvidia", "odd"))
    prompt = np.random.default_rng(120).integers(0, runner.vocab, 21).tolist()
    plain = runner.plain(prompt, 20)
    found = runner.drafted(prompt, plain.tokens, 3, wrong_at(1, runner.vocab))
    assert {one.accepted for one in found.rounds if one.tried == 3} == {1}
    assert found.tokens == plain.tokens
    assert found.same_states(plain) == []


@pytest.mark.parametrize("engine", RUNNERS)
@pytest.mark.parametrize("wrong", [0, 2])
def test_fb94_a_pool_of_rejected_drafts_is_not_kept(engine, wrong):
    """The last token of a pool's eight is drafted and rejected in turn: pool keys and tails are those of the text."""
    runner = RUNNERS[engine](shared("libertai", "odd"))
    prompt = np.random.default_rng(94).integers(0, runner.vocab, 6).tolist()
    plain = runner.plain(prompt, 7)
    found = runner.drafted(prompt, plain.tokens, 4, wrong_at(wrong, runner.vocab))
    pooled = [name for name in found.states if "pool" in name or "tail" in name]
    assert pooled
    assert any(len(found.states[name]) for name in pooled if "pool" in name)
    assert found.tokens == plain.tokens
    assert found.same_states(plain) == []
