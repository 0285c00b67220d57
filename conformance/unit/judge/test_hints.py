"""The sentences under a first divergence: which tokens fail, held against the calls, and which taps would tell more."""

import re

import numpy as np
import pytest

from conformance.cases.runs import text_tokens
from conformance.checkpoints.shared import shared
from conformance.engines.fast import FastEngine
from conformance.judge import Rebase, compare
from conformance.report.hints import _finer, hints
from conformance.trace import Schedule, Trace
from reference.checkpoint import open_checkpoint

TOKENS = 16
CHUNKS = Schedule((6, 7), 3)
BOUNDARY = re.compile(
    r"layers\.\d+\.(in|out|attn\.in|attn\.out|mid|mlp\.in|mlp\.out|indexer\.selected|router\.indices)"
)
ENDS = re.compile(r"layers\.\d+\.(in|out|indexer\.selected|router\.indices)")


class Bench:
    """`layers.1` is a DSA layer, `layers.2` a KDA layer with experts."""

    def __init__(self):
        directory = shared("libertai", "odd")
        self.judge = Rebase(open_checkpoint(directory), samples=8, remember=True)
        self.engine = FastEngine()
        self.engine.open(directory)

    def judged(self, tap, rows, schedule=CHUNKS, keep=None):
        """`tap` was made wrong at `rows` of a trace with the taps that match `keep`."""
        trace = self.engine.run(text_tokens()[:TOKENS], schedule)
        taps = {n: t for n, t in trace.taps.items() if keep is None or n in ("tokens", "logits") or keep.fullmatch(n)}
        wrong = taps[tap] = np.array(taps[tap])
        wrong[rows] = wrong[rows] * 2 + 1
        result = compare(Trace(trace.metadata, taps), self.judge.checkpoint, judge=self.judge, stop=True)
        assert result.first_divergence is not None
        assert result.first_divergence.tap == tap
        return result

    def told(self, *args, **named):
        return hints(self.judged(*args, **named))


@pytest.fixture(scope="module")
def bench():
    return Bench()


OUT = "layers.2.attn.out"
TOKEN_CASES = {
    "every token": (slice(None), CHUNKS, None),
    "one in the middle": (slice(4, 5), CHUNKS, "tokens 0 to 3 pass here; 4 is the first that fails"),
    "the second": (slice(1, 3), CHUNKS, "token 0 passes here; 1 is the first that fails"),
    "a chunk": (
        slice(6, 8),
        CHUNKS,
        "tokens 0 to 5 pass here; 6 is the first of prefill chunk 2: look at what one call hands to the next",
    ),
    "decoding": (
        slice(13, 16),
        CHUNKS,
        "tokens 0 to 12 pass here; 13 is the first that was fed alone: look at what prefill hands to decoding",
    ),
    "beside padding": (
        slice(0, 3),
        Schedule((6, 7), 3, 5),
        "only tokens 0 to 2 fail, those nearest to the 5 of padding: look at what padding leaves behind",
    ),
}


@pytest.mark.parametrize(("rows", "schedule", "words"), TOKEN_CASES.values(), ids=TOKEN_CASES)
def test_which_tokens_fail(bench, rows, schedule, words):
    assert bench.told(OUT, rows, schedule) == ([] if words is None else [words])


FINER_CASES = {
    "layers alone": (
        "layers.2.out",
        ENDS,
        "from in to out: store attn.in, attn.out, mid, mlp.in, mlp.out of layers.2",
    ),
    "a mixer": (
        OUT,
        BOUNDARY,
        "from attn.in to attn.out: store attn.q, attn.k, attn.v, attn.g, attn.beta, attn.core of",
    ),
    "experts": (
        "layers.2.mlp.out",
        BOUNDARY,
        "from mlp.in to mlp.out: store router.logits, router.weights, routed.out, shared.out of layers.2",
    ),
}


@pytest.mark.parametrize(("tap", "keep", "words"), FINER_CASES.values(), ids=FINER_CASES)
def test_which_taps_would_tell_more(bench, tap, keep, words):
    (hint,) = bench.told(tap, slice(None), keep=keep)
    assert f"the step runs {words}" in hint


def test_a_choice_is_told_apart_by_what_is_made_before_it(bench):
    result = bench.judged("layers.2.mlp.out", slice(None), keep=BOUNDARY)
    rows = {row.tap: row for row in result.taps}
    words = {tap: _finer(result, rows[tap]) for tap in ("layers.1.indexer.selected", "layers.2.router.indices")}
    assert (
        "store indexer.q, indexer.k, indexer.gate, indexer.weights, indexer.pool_keys, indexer.scores of layers.1"
        in (words["layers.1.indexer.selected"])
    )
    assert "from mlp.in to router.indices: store router.logits of layers.2" in words["layers.2.router.indices"]


def test_nothing_is_said_of_a_step_between_neighbours_or_of_a_run_that_passes(bench):
    assert bench.told(OUT, slice(None)) == []
    trace = bench.engine.run(text_tokens()[:TOKENS], CHUNKS)
    assert hints(compare(trace, bench.judge.checkpoint, judge=bench.judge)) == []
