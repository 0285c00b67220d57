"""Ranks that add in bf16: correct ones pass, faults of the sum do not, and who promises fp32 is held to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import reference.ranks
from conformance.cases.runs import random_tokens
from conformance.checkpoints import make
from conformance.checkpoints.geometry import geometry
from conformance.engines import registry
from conformance.judge import Rebase, Result, compare, ranks
from conformance.judge.ranks import partial_sums, rounding
from conformance.judge.rebase import Run, choices
from conformance.judge.together import Part
from conformance.trace import PARTIAL_SUMS, Schedule, Trace
from reference.arithmetic import Arithmetic
from reference.checkpoint import Checkpoint, open_checkpoint
from reference.model import TextModel
from reference.sharding import Mesh

LAYERS = (2, 3, 4)
"""KDA and dense; DSA and experts; KDA and experts."""
MESHES = [(2, 1), (1, 2), (2, 2), (4, 2), (1, 3)]
TOKENS = 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    place = tmp_path_factory.mktemp("sums") / "tiny"
    return open_checkpoint(make(place, "libertai", geometry("tiny", layers=LAYERS), 0))


@pytest.fixture(scope="module")
def judge(checkpoint: Checkpoint) -> Rebase:
    return Rebase(checkpoint, remember=True)


def traced(checkpoint: Checkpoint, mesh: tuple[int, int], **options: Any) -> Trace:
    engine = registry.create("reference")
    engine.open(checkpoint.directory, tp=mesh[0], ep=mesh[1], **options)
    tokens = random_tokens(5, checkpoint.config.text.vocab_size, TOKENS)
    return engine.run(tokens, Schedule((TOKENS - 2,), 2))


def saying(trace: Trace, sums: str | None) -> Trace:
    kept = {key: value for key, value in trace.metadata.items() if key != PARTIAL_SUMS}
    return Trace(kept | ({} if sums is None else {PARTIAL_SUMS: sums}), trace.taps)


def verdict(checkpoint: Checkpoint, trace: Trace, judge: Rebase) -> Result:
    return compare(trace, checkpoint, expected_tokens=trace.taps["tokens"], judge=judge)


def nearest(parts: Sequence[np.ndarray], ar: Arithmetic) -> np.ndarray:
    """Partial and running sums rounded to the nearest bf16, as a ring of ranks does."""
    held = [ar.store(part, "partial") for part in parts]
    out = held[0]
    for part in held[1:]:
        out = ar.store(out + part, "running")
    return out


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_sums_in_bf16_pass_unless_fp32_was_promised(mesh, checkpoint, judge, monkeypatch):
    monkeypatch.setattr(reference.ranks, "reduce", lambda ar, parts, point: nearest(parts, ar))
    trace = traced(checkpoint, mesh, arithmetic="bf16")
    assert trace.metadata[PARTIAL_SUMS] == "fp32"
    for sums in ("bf16", None):
        found = verdict(checkpoint, saying(trace, sums), judge)
        assert found.passed, found.first_divergence
    found = verdict(checkpoint, trace, judge)
    assert found.first_divergence is not None
    assert found.first_divergence.line.split()[3].endswith((".attn.out", ".mlp.out"))


@pytest.mark.parametrize("mesh", [(2, 2), (1, 2)], ids=str)
def test_the_oracle_of_all_roundings_passes(mesh, checkpoint, judge):
    trace = traced(checkpoint, mesh, arithmetic="stochastic", seed=6)
    assert trace.metadata[PARTIAL_SUMS] == "bf16"
    found = verdict(checkpoint, trace, judge)
    assert found.passed, found.first_divergence


FAULTS = {
    "a part is missing": lambda parts: parts[:-1],
    "a part counts twice": lambda parts: [*parts, parts[-1]],
    "every rank keeps its own part": lambda parts: parts[:1],
}


@pytest.mark.parametrize("point", ["attn.out", "mlp.out"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_sum_in_bf16_are_named_where_they_are(fault, point, checkpoint, judge, monkeypatch):
    def broken(ar: Arithmetic, parts: Sequence[np.ndarray], at: str) -> np.ndarray:
        return nearest(FAULTS[fault](parts) if at == point else parts, ar)

    monkeypatch.setattr(reference.ranks, "reduce", broken)
    found = verdict(checkpoint, saying(traced(checkpoint, (2, 2), arithmetic="bf16"), None), judge)
    assert found.first_divergence is not None
    assert found.first_divergence.line.split()[3] == f"layers.0.{point}"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_ranks_add_is_what_one_rank_has(mesh, checkpoint):
    model, g = TextModel(checkpoint), np.random.default_rng(7)
    c = model.config
    x = g.standard_normal((4, c.hidden_size))
    indices = np.sort(np.argsort(g.random((4, c.n_routed_experts)))[:, : c.num_experts_per_tok]).astype(np.int32)
    weights = g.random((4, c.num_experts_per_tok))
    moe: Any = model.layers[1].ffn
    parts = partial_sums(moe, Mesh(*mesh), x, indices, weights)
    whole = moe.sum(moe.routed(x, indices, weights), moe.shared(x))
    assert len(parts) == max(mesh)
    assert all(np.abs(part).max() > 0 for part in parts)
    terms = sum(np.abs(part) for part in parts)
    assert np.all(np.abs(sum(parts) - whole) <= 2.0**-40 * terms.max())


def test_the_sampled_half_of_a_run_computes_the_exact_one_once(checkpoint, monkeypatch):
    judge, calls = Rebase(checkpoint, samples=2), list[bool]()
    trace, embed = saying(traced(checkpoint, (2, 2), arithmetic="bf16"), None), TextModel.embed

    def counted(model: TextModel, tokens: np.ndarray) -> np.ndarray:
        calls.append(model is judge.model)
        return embed(model, tokens)

    monkeypatch.setattr(TextModel, "embed", counted)
    half = Part(judge, choices(trace)).half(exact=False)
    assert sorted(calls) == [False, True], "experts in two layers, one embedding for their exact parts"
    assert np.array_equal(half, judge.free_run(trace, 2)[1])


def test_the_plan_of_a_mesh_is_made_once(checkpoint, monkeypatch):
    judge, made = Rebase(checkpoint), list[Mesh]()
    monkeypatch.setattr(ranks, "plan", lambda specs, text, mesh: made.append(mesh))
    trace = traced(checkpoint, (2, 2), arithmetic="stochastic")
    assert {Run(judge, trace).mesh for _ in range(3)} == {Mesh(2, 2)}
    assert Run(judge, saying(trace, "fp32")).mesh == Mesh()
    assert made == [Mesh(2, 2)]


def test_a_lie_about_ranks_widens_nothing(checkpoint):
    for tp, ep, sums in (
        ("3", "1", None),
        ("999999", "1", "bf16"),
        ("2", "3", None),
        ("2", "2", "fp32"),
        ("1", "1", None),
    ):
        said = {"tp": tp, "ep": ep} | ({} if sums is None else {PARTIAL_SUMS: sums})
        assert rounding(said, checkpoint) == Mesh(), said
    assert rounding({"tp": "2", "ep": "2"}, checkpoint) == Mesh(2, 2)


def test_an_unknown_kind_of_sum_is_a_problem(checkpoint, judge):
    trace = saying(traced(checkpoint, (2, 1), arithmetic="bf16"), "fp16")
    found = verdict(checkpoint, trace, judge)
    assert [problem.name for problem in found.problems if problem.fatal] == [PARTIAL_SUMS]
    assert not found.passed
