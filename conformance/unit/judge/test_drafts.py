"""The draft block's taps: correct traces pass, a fault is found at its tap, also where only later drafts have it."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from conformance.cases.runs import text_tokens
from conformance.checkpoints import make
from conformance.checkpoints.shared import shared
from conformance.engines import registry
from conformance.engines.base import as_numpy
from conformance.judge import Rebase, bits, compare, drafts, rank_bits
from conformance.judge.graph import followed
from conformance.judge.rank_bits import RankOperands
from conformance.trace import Schedule, Trace
from fast.loader import load
from reference.checkpoint import open_checkpoint
from reference.sharding import Mesh

TOKENS, DRAFTS = 45, 4
ROWS = TOKENS + DRAFTS - 1
KEPT = ("tokens", "logits", "final.norm", "mtp.*", "*.router.indices", "*.indexer.selected")


class Bench:
    """A checkpoint, its judge, and a trace of an engine with the taps that the block needs."""

    def __init__(self, directory, engine, **options):
        self.checkpoint, self.engine = open_checkpoint(directory), registry.create(engine)
        self.judge = Rebase(self.checkpoint)
        self.engine.open(directory, mtp=DRAFTS, **options)
        self.trace = self.engine.run(text_tokens()[:TOKENS], Schedule((30, 9), 6), ",".join(KEPT))

    def rows(self, **taps):
        named = {name.replace("_", "."): tap for name, tap in taps.items()}
        return list(drafts.rows(self.judge, Trace(self.trace.metadata, self.trace.taps | named)))

    def changed(self, name, change):
        """The first failing row after `change(array)` in float64, stored as float32."""
        tap = self.trace.taps[name]
        array = tap.copy() if tap.dtype.kind == "i" else tap.astype(np.float64)
        found = change(array)
        array = array if found is None else found
        array = array if tap.dtype.kind == "i" else array.astype(np.float32)
        rows = drafts.rows(self.judge, Trace(self.trace.metadata, self.trace.taps | {name: array}))
        return next((row for row in rows if not row.passed), None)

    def without(self, *names):
        taps = {name: tap for name, tap in self.trace.taps.items() if not name.startswith(names)}
        return list(drafts.rows(self.judge, Trace(self.trace.metadata, taps)))


@functools.cache
def bench(geometry="odd", export="nvidia", engine="fast", **options):
    return Bench(shared(export, geometry), engine, **dict(options))


@pytest.mark.parametrize(
    ("geometry", "export", "engine"),
    [
        ("odd", "nvidia", "fast"),
        ("odd", "libertai", "fast"),
        ("tiny", "nvidia", "fast"),
        ("odd", "nvidia", "reference"),
    ],
)
def test_every_tap_is_judged_and_a_correct_trace_passes(geometry, export, engine):
    options = {"arithmetic": "bf16"} if engine == "reference" else {}
    one = bench(geometry, export, engine, **options)
    rows = one.rows()
    assert [(row.tap, row.message) for row in rows if not row.passed] == []
    assert [row.tap for row in rows] == drafts.order(one.judge.config)
    assert {row.tap for row in rows} == {name for name in one.trace.taps if name.startswith("mtp.")}
    assert all(row.compared == one.trace.taps[row.tap].size for row in rows if not row.tap.endswith(".scores"))
    assert [row.order for row in rows] == sorted(row.order for row in rows)
    assert rows[0].order > max(one.judge.order.values())
    assert len(one.trace.taps["mtp.z"]) == ROWS


def test_half_a_percent_on_any_tap_is_found_at_that_tap():
    one, missed = bench(), {}
    for row in one.rows():
        if row.kind == "bounded":
            first = one.changed(row.tap, lambda array: array * 1.005)
            if first is None or first.tap != row.tap:
                missed[row.tap] = first and first.tap
    assert missed == {}


@pytest.mark.parametrize("row", [0, 20, TOKENS - 1, TOKENS, ROWS - 1])
def test_one_wrong_row_is_found(row):
    """A row of the text, the one with the token after it, and rows of later drafts."""

    def bend(array):
        array[row] = array[row][::-1].copy()

    first = bench().changed("mtp.z", bend)
    assert first.tap == "mtp.z"
    assert np.flatnonzero(np.array(first.by_token) > 1)[0] == row


@pytest.mark.parametrize("fault", ["hidden before the norm", "token of the row before", "halves exchanged"])
def test_a_later_draft_made_of_the_wrong_things_is_found(fault):
    """z of rows past the text, recomputed with one of its inputs wrong."""
    one = bench()
    model = one.judge.blocks.get("packed") or next(iter([one.rows(), one.judge.blocks["packed"]][1:]))
    block = model.layers[one.judge.config.mtp_layer]
    taps = {name: one.trace.taps[name].astype(np.float64) for name in ("mtp.z", "mtp.attn.out", "mtp.mlp.out")}
    before = taps["mtp.z"] + taps["mtp.attn.out"] + taps["mtp.mlp.out"]
    tokens, y = drafts.following(one.trace, ROWS), block.output(before)
    at = slice(TOKENS - 1, ROWS - 1)
    wrong = {
        "hidden before the norm": lambda: block.z(before[at], tokens[TOKENS:]),
        "token of the row before": lambda: block.z(y[at], tokens[TOKENS - 1 : -1]),
        "halves exchanged": lambda: block.z(model.embed(tokens[TOKENS:]), tokens[TOKENS:]),
    }[fault]()

    def bend(array):
        array[TOKENS:] = wrong

    first = one.changed("mtp.z", bend)
    assert first.tap == "mtp.z"
    assert int(np.flatnonzero(np.array(first.by_token) > 1)[0]) >= TOKENS
    assert one.changed("mtp.z", lambda array: array) is None


def test_later_drafts_that_choose_again_are_found():
    """Their attention over the sets that the indexer would choose, where those are others than the shared ones."""
    one = bench("tiny", "nvidia", "fast")
    sets = one.trace.taps["mtp.indexer.selected"]
    shared_sets, others = followed(sets, ROWS), followed(sets[: TOKENS - 5], ROWS)
    model = one.judge.blocks["packed"] if one.judge.blocks else (one.rows(), one.judge.blocks["packed"])[1]
    attn = model.layers[one.judge.config.mtp_layer].attn
    r, c = (one.trace.taps[f"mtp.attn.{name}"].astype(np.float64) for name in ("q_resid", "latent"))
    right, wrong = attn.core(r, c, shared_sets), attn.core(r, c, others)
    assert not np.allclose(right[TOKENS:], wrong[TOKENS:])

    def bend(array):
        array[TOKENS:] = wrong[TOKENS:]

    assert one.changed("mtp.attn.core", bend).tap == "mtp.attn.core"
    after = one.changed("mtp.attn.core", lambda array: array.__setitem__(slice(TOKENS, None), right[TOKENS:]))
    assert after is None or after.tap != "mtp.attn.core"


def test_a_wrong_choice_of_the_block_is_found():
    def bend(array):
        array[30, 0] = 44

    assert bench().changed("mtp.indexer.selected", bend).tap == "mtp.indexer.selected"


def test_without_what_later_drafts_are_made_of_the_text_is_still_judged():
    one = bench()
    for lacking in drafts.ROOTS:
        rows = one.without(lacking)
        assert all(row.passed for row in rows)
        sizes = {row.tap: row.compared for row in rows}
        width = one.trace.taps["mtp.attn.in"].shape[1]
        assert sizes["mtp.attn.in"] == TOKENS * width
    told = list(drafts.problems(Trace(one.trace.metadata, {"tokens": one.trace.tokens, "mtp.z": np.zeros((ROWS, 1))}),
                                one.checkpoint.config))  # fmt: skip
    assert [(problem.name, problem.fatal) for problem in told] == [(name, False) for name in drafts.ROOTS[1:]]


def test_missing_taps_make_steps_coarser_and_a_fault_still_shows():
    one = bench()
    lacking = ("mtp.attn.in", "mtp.attn.q", "mtp.attn.l", "mtp.attn.c", "mtp.indexer.", "mtp.mlp.in", "mtp.router.",
               "mtp.routed.", "mtp.shared.")  # fmt: skip
    steps = {row.tap: row for row in one.without(*lacking)}
    assert {tap: row.inputs for tap, row in steps.items()} == {
        "mtp.z": ("tokens", "final.norm", "mtp.z", "mtp.attn.out", "mtp.mlp.out"),
        "mtp.attn.out": ("mtp.z",),
        "mtp.mlp.out": ("mtp.z", "mtp.attn.out"),
        "mtp.logits": ("mtp.z", "mtp.attn.out", "mtp.mlp.out"),
    }
    assert all(row.passed for row in steps.values())


def test_the_hidden_may_be_missing_too():
    """Then it is what the whole text computes, with the errors of all that."""
    one = bench()
    few = Rebase(one.checkpoint, samples=4)
    choices = {name: tap for name, tap in one.trace.taps.items() if name.startswith("layers.")}
    taps = choices | {name: one.trace.taps[name] for name in ("tokens", "logits", "mtp.z")}
    (row,) = drafts.rows(few, Trace(one.trace.metadata, taps))
    assert row.passed
    assert row.inputs == ("tokens",)
    (row,) = drafts.rows(few, Trace(one.trace.metadata, taps | {"mtp.z": taps["mtp.z"][:, ::-1]}))
    assert not row.passed


def test_rows_that_do_not_fit_are_refused():
    one = bench()
    for name, cut in (("mtp.logits", 3), ("mtp.indexer.scores", 1), ("mtp.indexer.pool_keys", 1)):
        taps = one.trace.taps | {name: one.trace.taps[name][:-cut]}
        assert set(drafts.unfit(Trace(one.trace.metadata, taps), one.checkpoint.config)) == {name}
    again = np.concatenate([one.trace.taps["mtp.indexer.selected"]] * 2)[:ROWS]
    taps = one.trace.taps | {"mtp.indexer.selected": again}
    assert (
        "expected [45, " in drafts.unfit(Trace(one.trace.metadata, taps), one.checkpoint.config)["mtp.indexer.selected"]
    )


@pytest.mark.parametrize("told", ["1", "0", "four"])
def test_a_wrong_number_of_drafts_is_a_problem(told):
    one = bench()
    (problem,) = drafts.problems(Trace(one.trace.metadata | {"mtp": told}, one.trace.taps), one.checkpoint.config)
    assert (problem.name, problem.fatal) == ("mtp", True)
    assert problem.message == f"metadata mtp is {told}, but tap mtp.z has rows for {DRAFTS} drafts"
    assert list(drafts.problems(one.trace, one.checkpoint.config)) == []


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    """Whether later drafts share the selection -> a bench."""
    directory = tmp_path_factory.mktemp("made") / "c"
    make(directory, "nvidia", "odd", config={"index_share_for_mtp_iteration": False})
    apart = Bench(directory, "fast")
    return lambda shared: bench() if shared else apart


def test_without_sharing_every_row_has_an_indexer(sharing):
    one = sharing(False)
    assert len(one.trace.taps["mtp.indexer.selected"]) == ROWS
    assert drafts.unfit(one.trace, one.checkpoint.config) == {}
    assert [(row.tap, row.message) for row in one.rows() if not row.passed] == []


@pytest.mark.parametrize("tap", ["mtp.indexer.q", "mtp.indexer.pool_keys", "mtp.indexer.selected"])
@pytest.mark.parametrize("shared", [True, False])
def test_taps_of_the_indexer_alone_are_no_contradiction(tap, shared, sharing):
    one = sharing(shared)
    taps = {name: one.trace.taps[name] for name in ("tokens", "logits", "final.norm", tap)}
    trace = Trace(one.trace.metadata, taps)
    assert drafts.unfit(trace, one.checkpoint.config) == {}
    assert [problem for problem in drafts.problems(trace, one.checkpoint.config) if problem.fatal] == []
    assert all(row.passed for row in drafts.rows(one.judge, trace))


@pytest.mark.parametrize("told", ["", "0", "9" * 5000, "four"])
def test_a_number_of_drafts_that_is_none_is_that_of_no_row(told):
    one = bench()
    taps = {name: one.trace.taps[name] for name in ("tokens", "logits", "mtp.indexer.selected")}
    assert drafts.sizes(Trace(one.trace.metadata | {"mtp": told}, taps), one.checkpoint.config)["M"] == TOKENS


def test_stored_experts_are_judged_as_the_trace_says():
    """The oracle's own two readings of BF16 experts, each under both names, by one judge with a memory."""
    one = bench("odd", "nvidia", "reference", arithmetic="bf16")
    judge = Rebase(one.checkpoint, remember=True)
    for word, passes in (("packed", True), ("stored", False)):
        trace = Trace(one.trace.metadata | {drafts.EXPERTS: word}, one.trace.taps)
        failing = [row.tap for row in drafts.rows(judge, trace) if not row.passed]
        assert failing == ([] if passes else ["mtp.routed.out"])
    (problem,) = drafts.problems(
        Trace(one.trace.metadata | {drafts.EXPERTS: "fp8"}, one.trace.taps), one.checkpoint.config
    )
    assert (problem.name, problem.fatal) == (drafts.EXPERTS, True)


@pytest.mark.parametrize(("geometry", "tp", "ep"), [("tiny", 2, 2), ("odd", 1, 3), ("tiny", 4, 2)])
def test_packed_experts_are_compared_on_every_rank(geometry, tp, ep):
    """Packed whole, then cut: bits of codes, block scales and the one scale_2; a flipped bit on one rank is found."""
    checkpoint = open_checkpoint(shared("nvidia", geometry))
    names = [name for name in bits.weights(checkpoint, drafts=True) if bits.packed_at_load(checkpoint, name)]
    assert len(names) == 3 * checkpoint.config.text.n_routed_experts
    mesh = Mesh(tp, ep)
    held = [load(checkpoint.directory, tp=tp, ep=ep, rank=rank, mtp=True, progress=False) for rank in range(mesh.world)]

    def operands(rank, name, bent=False):
        try:
            parts = {part: as_numpy(x).copy() for part, x in held[rank].operands(name).items()}
        except KeyError:
            return None
        if bent and rank == mesh.world - 1:
            parts["scale"][-1, -1] ^= 1
        return parts

    def compared(**how):
        shown = RankOperands(mesh, lambda rank, name: operands(rank, name, **how))
        return list(rank_bits.compare(checkpoint, shown, names))

    rows = compared()
    assert [(row.name, row.part, row.message) for row in rows if not row.passed] == []
    assert {row.rule for row in rows} == {"packed as NVFP4"}
    assert {row.name for row in rows} == set(names)
    failing = {(row.part, row.differing) for row in compared(bent=True) if not row.passed}
    assert failing == {(f"scale, rank {mesh.world - 1}", 1)}


def test_the_verdict_covers_the_block_only_where_it_ran():
    one = bench()
    bare = {name: tap for name, tap in one.trace.taps.items() if not name.startswith(("mtp.", "layers."))}
    few = Rebase(one.checkpoint, samples=4)
    result = compare(Trace(one.trace.metadata, bare), one.checkpoint, judge=few, operands=one.engine.operands)
    assert result.passed
    assert not any(name.startswith("mtp.") for name in result.coverage.taps_missing)
    whole = compare(one.trace, one.checkpoint, judge=few, operands=one.engine.operands)
    assert whole.passed
    assert not any(name.startswith("mtp.") for name in whole.coverage.taps_missing)
    block = f".layers.{one.judge.config.mtp_layer}."
    rules = {row.rule for row in whole.tensors if block in row.name}
    assert rules == {"identical", "packed as NVFP4"}
    assert len(whole.tensors) > len(result.tensors)
    assert not any(block in row.name for row in result.tensors)
    assert whole.coverage.tensors_missing == ()
    thin = Trace(one.trace.metadata, one.trace.taps | {"mtp.logits": one.trace.taps["mtp.logits"][:9]})
    broken = compare(thin, one.checkpoint, judge=few, stop=True)
    assert not broken.passed
    assert broken.first_divergence is not None
    assert broken.first_divergence.line.startswith("first divergence: TAP mtp.logits")
