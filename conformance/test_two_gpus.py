"""Ranks on two GPUs over NCCL: against the reference, and against one GPU; left out where there are fewer than two.

    python -m pytest conformance/test_two_gpus.py -m gpu -rA       some minutes; `-k tiny` and `-k real` in parts

`tiny` is judged like everything else. `real` has the released widths, one layer of each kind and few experts: every
mesh is judged step by step in bf16, and in float32 held to one GPU, tap by tap over the whole input. Each of these is
within `pairwise.PROMISED` of exact arithmetic, so no two are farther apart than twice that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest

from conformance import pairwise, real, suite
from conformance.conftest import NOTE, RESULT
from conformance.engines import registry
from conformance.engines.fast import FastEngine
from conformance.judge import Rebase, Result, compare
from conformance.judge.together import together
from conformance.trace import Trace
from reference.checkpoint import Checkpoint, open_checkpoint

pytestmark = pytest.mark.gpu

MESHES = ((2, 2), (2, 1), (1, 2))
TINY = [("nvidia", *mesh) for mesh in MESHES] + [("libertai", 2, 2)]
CASE = suite.Case("one-go+decode", 61)
SHOWN = ("attn.out", "mlp.out", "logits")
"""Sums over ranks, and what comes of them."""
TOLD_EVERY = 5.0

Mesh = tuple[int, int]


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


def test_real_widths_on_two_gpus(tmp_path, capfd, record_property):
    with real.telling(lambda line: record_property(NOTE, line), capfd.disabled) as say:
        checkpoint = real.checkpoint(tmp_path / "one-layer", say)
        real_widths(checkpoint, "cuda", say, lambda result: record_property(RESULT, result.to_json()))


def real_widths(
    checkpoint: Checkpoint,
    device: str,
    say: real.Say,
    tell: Callable[[Result], object],
    *,
    workers: int | None = None,
    at_once: int = 2 * len(MESHES),
) -> None:
    """Judges every mesh in bf16 while later runs go on; holds every mesh to one rank in fp32.

    `at_once`: sessions that may be open together, for their starts take longer than their work.
    """
    ids = real.ids(checkpoint)
    with (
        together(checkpoint, workers or real.judges(), samples=real.SAMPLES) as judge,
        ThreadPoolExecutor(len(MESHES)) as threads,
        sessions(checkpoint, device, at_once) as run,
    ):
        verdicts: dict[Mesh, Future[Result]] = {}
        steps: dict[Mesh, int] = dict.fromkeys(MESHES, 0)

        def judged(mesh: Mesh, trace: Trace) -> Result:
            def count(name: str) -> None:
                steps[mesh] += 1

            return compare(trace, checkpoint, expected_tokens=ids, judge=judge, progress=count)

        for mesh in MESHES:
            verdicts[mesh] = threads.submit(judged, mesh, run(mesh, "bf16", ids))
            say(f"tp{mesh[0]} ep{mesh[1]} ran in bf16")
        alone = run((1, 1), "fp32", ids)
        say("one rank ran in fp32")
        apart = [line for mesh in MESHES for line in held(mesh, alone, run(mesh, "fp32", ids), say)]
        while waiting := [mesh for mesh in MESHES if not verdicts[mesh].done()]:
            done = ", ".join(f"tp{tp} ep{ep} {steps[tp, ep]} steps" for tp, ep in waiting)
            say(f"being judged: {done} of {len(alone.taps)}")
            wait([verdicts[mesh] for mesh in waiting], TOLD_EVERY)
        results = {mesh: verdicts[mesh].result() for mesh in MESHES}
    for (tp, ep), result in results.items():
        tell(result)
        say(f"tp{tp} ep{ep} against the reference, bf16, {real.told(result)}")
    for result in results.values():
        assert result.passed, result.first_divergence and result.first_divergence.line
        assert not result.coverage.taps_missing
    assert not apart, apart[0]


def held(mesh: Mesh, alone: Trace, trace: Trace, say: real.Say) -> Iterator[str]:
    """Says how far ranks are from one rank; -> what is farther apart than it may be."""
    pairs, where = pairwise.compare(alone, trace), f"tp{mesh[0]} ep{mesh[1]} against one rank, fp32"
    worst = max(pairs, key=lambda pair: pair.relative_l2)
    sums = ", ".join(f"{pair.tap} {pair.relative_l2:.1e}" for pair in pairs if pair.tap.endswith(SHOWN))
    largest = f"largest of {len(pairs)} taps {worst.tap} {worst.relative_l2:.1e}"
    say(f"{where}, relative L2, allowed {2 * pairwise.PROMISED:.0e}: {sums}; {largest}")
    if {pair.tap for pair in pairs} != set(alone.taps) or set(trace.taps) != set(alone.taps):
        yield f"{where}: other taps"
    for pair in pairs:
        if pair.fault or not pair.relative_l2 <= 2 * pairwise.PROMISED:
            yield f"{where}: {pair.tap}: {pair.fault or pair.relative_l2}"


@contextmanager
def sessions(checkpoint: Checkpoint, device: str, at_once: int) -> Iterator[Callable[..., Trace]]:
    """-> run(mesh, arithmetic, ids), to be called in this order: MESHES in bf16, one rank, MESHES, both in fp32."""
    order = [(mesh, "bf16") for mesh in MESHES] + [((1, 1), "fp32")] + [(mesh, "fp32") for mesh in MESHES]
    opened: dict[tuple[Mesh, str], FastEngine] = {}

    def start(mesh: Mesh, arithmetic: str) -> None:
        engine = registry.create("fast")
        assert isinstance(engine, FastEngine)
        tp, ep = mesh
        ranks: dict[str, Any] = {"tp": tp, "ep": ep, "timeout": 180} if max(mesh) > 1 else {}
        engine.open(checkpoint.directory, device=device, arithmetic=arithmetic, **ranks)
        opened[mesh, arithmetic] = engine

    def close(engine: FastEngine) -> None:
        if engine.mesh.world > 1:
            engine.session.close()

    def run(mesh: Mesh, arithmetic: str, ids: Any) -> Trace:
        for key in order[: order.index((mesh, arithmetic)) + at_once]:
            if key not in opened and (max(key[0]) > 1 or key == (mesh, arithmetic)):
                start(*key)
        trace = opened[mesh, arithmetic].run(ids, real.CUTS)
        if at_once == 1:
            close(opened[mesh, arithmetic])
        return trace

    try:
        yield run
    finally:
        with ThreadPoolExecutor(max(1, len(opened))) as threads:
            list(threads.map(close, opened.values()))
