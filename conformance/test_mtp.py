"""Drafts change nothing: tokens and every final state of speculative decoding are those of plain decoding, bit for bit.

A part of the matrix here; all of it, 200 tokens long, with `-m slow` (`tox -e mtp`). There every cell is one text in
which rounds of the block's own drafts alternate with rounds whose drafts are wrong at each position in turn.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest

from conformance import pairwise
from conformance.checkpoints.shared import shared
from conformance.engines import registry
from conformance.engines.base import as_numpy
from conformance.engines.threads import Thread, on_ranks
from conformance.speculation import (
    FastRunner,
    Outcome,
    ReferenceRunner,
    Runner,
    every_other,
    fast_runner,
    sometimes_right,
    wrong_in_turn,
)
from conformance.trace import Schedule
from fast.loader import load
from fast.session import Session
from fast.worker import Job
from reference.checkpoint import open_checkpoint

GEOMETRIES, EXPORTS = ("tiny", "odd"), ("nvidia", "libertai")
SCRIPTS = ("own", "right-0.6", "wrong-in-turn")
BOTH = "taking-turns"
PROMPT = 27
SHORT, LONG = 20, 200


@dataclass(frozen=True)
class Place:
    """An engine, a checkpoint, and the ranks it is on. The reference computes exactly on one rank, in bf16 on more."""

    engine: str
    geometry: str
    export: str
    tp: int = 1
    ep: int = 1
    device: str = "cpu"

    def __str__(self) -> str:
        ranks = f"-tp{self.tp}-ep{self.ep}" if self.tp * self.ep > 1 else ""
        return f"{self.engine}-{self.geometry}-{self.export}{ranks}" + ("-cuda" if self.device == "cuda" else "")


class Ranks:
    """The fast engine on tp x ep ranks, threads of this process; outcomes are those of all ranks together."""

    def __init__(self, place: Place) -> None:
        self.place, self.directory = place, shared(place.export, place.geometry)
        self.vocab = open_checkpoint(self.directory).config.text.vocab_size
        self.weights = [
            load(self.directory, tp=place.tp, ep=place.ep, rank=rank, mtp=True, progress=False)
            for rank in range(max(place.tp, place.ep))
        ]

    def plain(self, prompt, count):
        return self._joined(lambda runner: runner.plain(prompt, count))

    def drafted(self, prompt, truth, K, script):
        return self._joined(lambda runner: runner.drafted(prompt, truth, K, script))

    def _joined(self, run):
        def one(ranks: Thread) -> Outcome:
            return run(FastRunner(self.weights[ranks.mesh.rank], communicator=ranks))

        found = on_ranks(self.place.tp, self.place.ep, one)
        assert all(outcome.tokens == found[0].tokens for outcome in found)
        assert all(outcome.rounds == found[0].rounds for outcome in found)
        states = {f"rank {rank} {name}": x for rank, one in enumerate(found) for name, x in one.states.items()}
        return Outcome(found[0].tokens, states, found[0].rounds)


@functools.cache
def runner(place: Place) -> Runner:
    directory = shared(place.export, place.geometry)
    if place.engine == "reference":
        arithmetic = "exact" if place.tp * place.ep == 1 else "bf16"
        return ReferenceRunner(open_checkpoint(directory), arithmetic, place.tp, place.ep)
    return fast_runner(directory, place.device) if place.tp * place.ep == 1 else Ranks(place)


@functools.cache
def plain(place: Place, count: int) -> tuple[list[int], Outcome]:
    """The prompt, and what decoding one token at a time leaves."""
    prompt = np.random.default_rng(5).integers(0, runner(place).vocab, PROMPT).tolist()
    return prompt, runner(place).plain(prompt, count)


def check(place: Place, K: int, script: str, count: int) -> None:
    """The verdict; and that the rounds were what the script meant them to be."""
    prompt, expected = plain(place, count)
    vocab = runner(place).vocab
    scripts = {
        "own": None,
        "right-0.6": sometimes_right(0.6, K, vocab),
        "wrong-in-turn": wrong_in_turn(vocab),
        "taking-turns": every_other(wrong_in_turn(vocab)),
    }
    found = runner(place).drafted(prompt, expected.tokens, K, scripts[script])
    print(place, f"K={K}", script, f"{len(found.rounds)} rounds, (tried, accepted)", found.acceptance())
    assert found.tokens == expected.tokens
    assert found.same_states(expected) == []
    assert any("mtp" in name for name in found.states)
    assert sum(one.accepted + 1 for one in found.rounds) == count - 1
    assert all(one.accepted == one.right for one in found.rounds)
    assert max(one.tried for one in found.rounds) == K
    if script in ("wrong-in-turn", "taking-turns"):
        forced = found.rounds[1::2] if script == "taking-turns" else found.rounds
        whole = [one for one in forced if one.tried == K]
        assert len(whole) > K or count == SHORT
        assert [one.accepted for one in whole] == [number % (K + 1) for number in range(len(whole))]
    if script == "right-0.6":
        assert 0 < sum(one.accepted for one in found.rounds) < sum(one.tried for one in found.rounds)


def cases(rows):
    """Parametrisation by (place, K, script). What one place decodes plainly is used by one worker."""
    params = [
        pytest.param(
            *(place, K, script),
            id=f"{place}-K{K}-{script}",
            marks=[pytest.mark.xdist_group(str(place))] + [pytest.mark.gpu] * (place.device == "cuda"),
        )
        for place, K, script in rows
    ]
    return pytest.mark.parametrize(("place", "K", "script"), params)


PART = [
    *((Place("fast", "odd", "nvidia"), 4, script) for script in SCRIPTS),
    (Place("fast", "tiny", "libertai"), 2, BOTH),
    (Place("fast", "odd", "libertai", tp=2, ep=2), 3, BOTH),
    (Place("reference", "odd", "libertai"), 3, BOTH),
]
# The packed dense MLP of odd-nvidia has 80 columns, which two ranks cannot divide at block boundaries.
WHOLE = [
    (Place(engine, geometry, export, *mesh), K, BOTH)
    for engine in ("reference", "fast")
    for ranks in ("several", "one")
    for geometry in GEOMETRIES
    for export in EXPORTS
    for mesh in ((1, 1) if ranks == "one" else (1, 3) if (geometry, export) == ("odd", "nvidia") else (2, 2),)
    for K in (1, 2, 3, 4)
]
CUDA = [
    (Place("fast", geometry, "nvidia", device="cuda"), K, script)
    for geometry in GEOMETRIES
    for K, script in (*((K, BOTH) for K in (1, 2, 3, 4)), (4, "right-0.6"))
]


@cases(PART)
def test_drafts_change_nothing(place, K, script):
    check(place, K, script, SHORT)


@pytest.mark.slow
@cases(WHOLE)
def test_drafts_change_nothing_in_a_long_text(place, K, script):
    check(place, K, script, LONG)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "count", "numbers"),
    [
        pytest.param(place, count, numbers, marks=pytest.mark.xdist_group(str(place)), id=f"{place}-{count}")
        for place, count, numbers in (
            (Place("fast", "tiny", "nvidia", tp=2, ep=2), SHORT, (1, 2, 3, 4)),
            (Place("fast", "odd", "libertai", tp=2, ep=2), LONG, (2,)),
        )
    ],
)
def test_drafts_change_nothing_on_ranks_that_are_processes(place, count, numbers):
    """The block's own drafts over torch.distributed (gloo): what plain decoding on ranks that are threads leaves."""
    prompt, expected = plain(place, count)
    common = Job(str(shared(place.export, place.geometry)), [], "", tp=place.tp, ep=place.ep, taps="", drafts=1)
    with Session(common) as session:
        for K in numbers:
            found = session.ask(tokens=prompt, new=count, drafts=K)
            assert [ranks.pop("tokens").tolist() for ranks in found] == [expected.tokens] * max(place.tp, place.ep)
            states = {
                f"rank {rank} {name.removeprefix('state.')}": as_numpy(x)
                for rank, held in enumerate(found)
                for name, x in held.items()
            }
            assert Outcome([], states).same_states(expected) == [], K


@cases(CUDA)
def test_drafts_change_nothing_on_a_gpu(place, K, script):
    check(place, K, script, LONG)


@pytest.mark.parametrize("name", ["latent", "state", "tail"])
def test_a_state_that_kept_a_rejected_token_is_seen(name):
    """One bit of one state of each kind is enough; so is a state too many."""
    _, expected = plain(Place("fast", "odd", "nvidia"), SHORT)
    victim = next(key for key, x in expected.states.items() if name in key and x.size)
    bent = expected.states[victim].copy()
    bent.view(np.uint8).reshape(-1)[-1] ^= 1
    assert Outcome([], expected.states | {victim: bent}).same_states(expected) == [victim]
    assert Outcome([], expected.states | {"extra": bent}).same_states(expected) == ["extra"]


@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_the_block_reads_along_however_the_text_is_fed(engine):
    """Chunks and single tokens give a trace of the same rows; the reference's to the bit."""
    ids = np.random.default_rng(6).integers(0, 257, 40)
    runs = []
    for schedule in (Schedule((40,)), Schedule((9, 1, 14), 16, 2)):
        opened = registry.create(engine)
        opened.open(shared("nvidia", "odd"), mtp=3)
        runs.append(opened.run(ids, schedule, "mtp.*"))
    whole, parts = (run.taps for run in runs)
    assert whole.keys() == parts.keys()
    assert len(whole["mtp.z"]) == len(whole["mtp.logits"]) == 40 + 3 - 1
    assert len(whole["mtp.indexer.scores"]) == len(whole["mtp.indexer.selected"]) == 40
    assert {name: tap.shape for name, tap in whole.items()} == {name: tap.shape for name, tap in parts.items()}
    if engine == "reference":
        assert [name for name in whole if whole[name].tobytes() != parts[name].tobytes()] == []


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_fast_block_in_float32_is_the_references_up_to_float32(geometry, export):
    """Every tap, the rows of later drafts included; relative L2, the promised bound of float32."""
    ids = np.random.default_rng(7).integers(0, 257, 44)
    traces = []
    for engine, arithmetic in (("reference", "exact"), ("fast", "fp32")):
        opened = registry.create(engine)
        opened.open(shared(export, geometry), mtp=4, arithmetic=arithmetic)
        traces.append(opened.run(ids, Schedule((41,), 3), "mtp.*"))
    pairs = [pair for pair in pairwise.compare(*traces) if pair.tap.startswith("mtp.")]
    assert len(pairs) == sum(name.startswith("mtp.") for name in traces[0].taps)
    assert [pair for pair in pairs if pair.fault or not pair.relative_l2 <= pairwise.PROMISED] == []
