"""Ranks on two GPUs over NCCL: against the reference, and against one GPU; left out where there are fewer than two.

    python -m pytest conformance/test_two_gpus.py -m gpu -rA       some minutes; `-k tiny` and `-k real` in parts

`tiny` is judged like everything else. `real` has the released widths, one layer of each kind and few experts: a run on
both GPUs is judged step by step, and in float32 every mesh is held to one GPU, tap by tap over the whole input. Each of
these is within `pairwise.PROMISED` of exact arithmetic, so no two are farther apart than twice that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conformance import pairwise, suite
from conformance.cases.runs import random_tokens
from conformance.checkpoints import geometry, make
from conformance.conftest import NOTE, RESULT
from conformance.engines import registry
from conformance.judge import Rebase, compare
from conformance.trace import Schedule, Trace
from reference.checkpoint import Checkpoint, open_checkpoint

pytestmark = pytest.mark.gpu

MESHES = ((2, 1), (1, 2), (2, 2))
TINY = [("nvidia", *mesh) for mesh in MESHES] + [("libertai", 2, 2)]
CASE = suite.Case("one-go+decode", 61)
EXPERTS, VOCAB = 16, 2048
TOKENS, CUTS = 24, Schedule((18,), 6)
SAMPLES = 8
SHOWN = ("attn.out", "mlp.out", "logits")
"""Sums over ranks, and what comes of them."""


@pytest.mark.parametrize(("export", "tp", "ep"), TINY, ids=[f"{e}-tp{tp}-ep{ep}" for e, tp, ep in TINY])
def test_tiny_on_two_gpus_agrees_with_the_reference(export, tp, ep, synthetic, record_property):
    directory = synthetic("tiny", export)
    checkpoint, engine = open_checkpoint(directory), registry.create("fast")
    engine.open(directory, tp=tp, ep=ep, device="cuda", timeout=60)
    result = suite.run(engine, checkpoint, suite.prompt(checkpoint), CASE, judge=Rebase(checkpoint))
    record_property(RESULT, result.to_json())
    assert result.passed, result.first_divergence and result.first_divergence.line
    assert not result.coverage.taps_missing
    assert not result.coverage.tensors_missing


def test_real_widths_on_two_gpus(tmp_path, record_property):
    shape = geometry("one-layer", experts=EXPERTS, vocab=VOCAB)
    directory = make(tmp_path / "one-layer", "nvidia", shape, 0)
    checkpoint = open_checkpoint(directory)
    for line in real_widths(checkpoint, "cuda", lambda result: record_property(RESULT, result)):
        record_property(NOTE, line)


def real_widths(checkpoint: Checkpoint, device: str, tell: Callable[[str], object]) -> list[str]:
    """Judges the largest mesh in bf16, holds all meshes to one rank in fp32 -> lines of numbers."""
    ids = random_tokens(6, checkpoint.config.text.vocab_size, TOKENS)
    judged = run(checkpoint, ids, *MESHES[-1], device=device)
    result = compare(judged, checkpoint, expected_tokens=ids, samples=SAMPLES)
    tell(result.to_json())
    assert result.passed, result.first_divergence and result.first_divergence.line
    alone = run(checkpoint, ids, 1, 1, device=device, arithmetic="fp32")
    lines = []
    for tp, ep in MESHES:
        pairs = pairwise.compare(alone, run(checkpoint, ids, tp, ep, device=device, arithmetic="fp32"))
        assert {pair.tap for pair in pairs} == set(alone.taps)
        apart = [pair for pair in pairs if pair.fault or not pair.relative_l2 <= 2 * pairwise.PROMISED]
        assert not apart, (apart[0].tap, apart[0].fault, apart[0].relative_l2)
        sums = [pair for pair in pairs if pair.tap.endswith(SHOWN)]
        shown = ", ".join(f"{pair.tap} {pair.relative_l2:.1e}" for pair in sums)
        lines.append(f"tp{tp} ep{ep} against one rank, fp32, relative L2: {shown}")
    return lines


def run(checkpoint: Checkpoint, ids: np.ndarray, tp: int, ep: int, **options: Any) -> Trace:
    engine = registry.create("fast")
    engine.open(checkpoint.directory, tp=tp, ep=ep, timeout=120, **options)
    return engine.run(ids, CUTS)
