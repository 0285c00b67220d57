"""A judge of several processes gives the verdicts of one, to the last bit."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from conformance.cases.runs import SCHEDULES, text_tokens
from conformance.checkpoints import make
from conformance.engines.reference import ReferenceEngine
from conformance.judge import Rebase, compare
from conformance.judge.together import together
from conformance.trace import Trace
from reference.checkpoint import open_checkpoint

TOKENS, SAMPLES, SEED = 18, 4, 3


def changed(trace, name):
    taps = dict(trace.taps)
    if name == "one value off":
        taps["layers.2.mlp.out"] = taps["layers.2.mlp.out"].copy()
        taps["layers.2.mlp.out"][5, 7] *= 4
    elif name == "taps left out":
        for gone in ("layers.0.attn.core", "layers.1.indexer.scores", "layers.2.router.logits"):
            del taps[gone]
    elif name == "choices left out":
        del taps["layers.1.indexer.selected"], taps["layers.2.router.indices"]
    elif name == "untrue":
        taps["layers.1.mid"] = taps["layers.1.mid"].astype(np.int32)
    said = {"untrue": {"arithmetic": "none"}, "ranks": {"tp": "2", "ep": "2"}}
    return Trace(trace.metadata | said.get(name, {}), taps)


CHANGES = ("nothing", "one value off", "taps left out", "choices left out", "untrue", "ranks")


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """change -> the result of one process, and that of several, all changes at once."""
    directory = make(tmp_path_factory.mktemp("made") / "odd", "libertai", "odd", layers=(0, 1, 2))
    checkpoint, engine = open_checkpoint(directory), ReferenceEngine()
    engine.open(directory, arithmetic="bf16")
    trace = engine.run(text_tokens()[:TOKENS], SCHEDULES["one-go+decode"](TOKENS))
    traces = {name: changed(trace, name) for name in CHANGES}
    alone = Rebase(checkpoint, samples=SAMPLES, seed=SEED)
    found = {name: [compare(traces[name], checkpoint, judge=alone)] for name in CHANGES}
    with together(checkpoint, 2, samples=SAMPLES, seed=SEED) as judge, ThreadPoolExecutor(len(CHANGES)) as threads:
        for name, result in zip(
            CHANGES, threads.map(lambda name: compare(traces[name], checkpoint, judge=judge), CHANGES), strict=True
        ):
            found[name].append(result)
        found["stop"] = [compare(traces["one value off"], checkpoint, judge=one, stop=True) for one in (alone, judge)]
    return found


@pytest.mark.parametrize("name", [*CHANGES, "stop"])
def test_several_processes_give_the_verdict_of_one(name, verdicts):
    alone, several = verdicts[name]
    assert several.to_json() == alone.to_json()
    assert alone.passed == (name in ("nothing", "taps left out", "choices left out", "ranks"))
    assert alone.taps
