"""The engine on a CUDA device: the whole suite, and that how a call is made changes no bit of it.

    python -m pytest conformance/test_kernels.py -m gpu -n 8

`tiny` and `odd` take torch operations; `narrow` and `narrow-odd` (`conformance.narrow`) take the kernels for every call
of at most eight tokens, and are judged tap by tap like everything else. `real` has the released widths.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance import real, suite
from conformance.cases.runs import random_tokens
from conformance.checkpoints import make
from conformance.conftest import NOTE, RESULT
from conformance.engines import registry
from conformance.engines.fast import FastEngine
from conformance.judge import Rebase, compare
from conformance.judge.together import together
from conformance.narrow import NARROW, narrow
from fast.generate import generate
from fast.linear import ROWS
from fast.model import TextModel
from fast.mtp import Mtp
from reference.checkpoint import open_checkpoint

pytestmark = pytest.mark.gpu

EXPORTS = ("nvidia", "libertai")
PLACES = [(name, export) for name in (*NARROW, "tiny", "odd") for export in EXPORTS]
KERNELS = [place for place in PLACES if place[0] in NARROW]
PROMPT = 45
"""More tokens than a selection of the narrow models takes."""

WATCHED = (0, 3)
"""KDA and a packed dense block, DSA and experts: every kernel, in few launches, for each is slow under a sanitizer."""

SCRIPT = [sys.executable, "-m", "conformance.sanitized"]
EXCLUDED = ["--kernel-regex-exclude", "kns=at6native"]
"""torch's own kernels, which take most of the time and are not what is tested."""

SUMMARIES = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazard"}

Made = Callable[[str, str], Path]


def ids(places: list[tuple[str, str]]) -> list[str]:
    return ["-".join(place) for place in places]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, synthetic: Made) -> Made:
    """(geometry, export) -> checkpoint directory."""
    found: dict[tuple[str, str], Path] = {}

    def directory(name: str, export: str) -> Path:
        if name not in NARROW:
            return synthetic(name, export)
        if (name, export) not in found:
            place = tmp_path_factory.mktemp("narrow") / f"{name}-{export}"
            found[name, export] = make(place, export, narrow(name), 0)
        return found[name, export]

    return directory


@pytest.mark.parametrize("case", suite.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("place", PLACES, ids=ids(PLACES))
def test_the_engine_on_a_gpu_agrees_with_the_reference(place, case, made, record_property):
    checkpoint, engine = open_checkpoint(made(*place)), registry.create("fast")
    engine.open(made(*place), device="cuda")
    prompt = suite.prompt(checkpoint)
    result = suite.run(engine, checkpoint, prompt, case, judge=Rebase(checkpoint))
    record_property(RESULT, result.to_json())
    assert result.passed, result.first_divergence and result.first_divergence.line
    assert not result.coverage.taps_missing
    assert not result.coverage.tensors_missing
    assert isinstance(engine, FastEngine)
    assert (engine.model.kernels is not None) == (place[0] in NARROW), engine.model.without_kernels


def test_real_widths_agree_with_the_reference(tmp_path, capfd, record_property):
    with real.telling(lambda line: record_property(NOTE, line), capfd.disabled) as say:
        checkpoint, engine = real.checkpoint(tmp_path / "one-layer", say), registry.create("fast")
        engine.open(checkpoint.directory, device="cuda")
        tokens = real.ids(checkpoint)
        trace = engine.run(tokens, real.CUTS)
        say(f"ran, kernels {trace.metadata['kernels']}")
        assert trace.metadata["kernels"].startswith("sm_"), trace.metadata["kernels"]
        with together(checkpoint, real.judges(), samples=real.SAMPLES) as judge:
            result = compare(trace, checkpoint, expected_tokens=tokens, judge=judge)
        record_property(RESULT, result.to_json())
        say(real.told(result))
    assert result.passed, result.first_divergence and result.first_divergence.line
    assert not result.coverage.taps_missing


def forget(name: str, value: Any) -> None:
    """A tap: with it a step is launched kernel by kernel, without it replayed as a graph."""


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], x) for name, x in b.items())


@pytest.mark.parametrize("place", KERNELS, ids=ids(KERNELS))
def test_replays_and_single_launches_and_runs_have_the_same_bits(place, made):
    model = TextModel(made(*place), device="cuda")
    tokens = random_tokens(7, model.config.text.vocab_size, PROMPT + 12)
    runs: list[tuple[Tensor, dict[str, Tensor]]] = []
    for taps in ([None] * 12, [forget] * 12, [None, forget] * 6, [None] * 12):
        model.reset()
        model.prefill(tokens[:PROMPT])
        rows = [model.decode(int(token), tap) for token, tap in zip(tokens[PROMPT:], taps, strict=True)]
        runs.append((torch.stack(rows), model.state.snapshot()))
    for logits, states in runs[1:]:
        assert torch.equal(logits, runs[0][0])
        assert same(states, runs[0][1])


@pytest.mark.parametrize("place", KERNELS, ids=ids(KERNELS))
def test_a_row_of_the_kernels_does_not_depend_on_the_rows_beside_it(place, made):
    model = TextModel(made(*place), device="cuda")
    tokens = random_tokens(8, model.config.text.vocab_size, PROMPT + ROWS)
    model.prefill(tokens[:PROMPT])
    before = model.state.snapshot()
    alone = [model.decode(int(token)) for token in tokens[PROMPT:]]
    after = model.state.snapshot()
    for count in range(2, ROWS + 1):
        model.state.restore(before)
        assert torch.equal(model.prefill(tokens[PROMPT : PROMPT + count]), torch.stack(alone[:count]))
    assert same(model.state.snapshot(), after)


@pytest.mark.parametrize("place", KERNELS, ids=ids(KERNELS))
def test_drafts_through_the_kernels_change_nothing(place, made):
    target = TextModel(made(*place), device="cuda", mtp=True)
    block, prompt = Mtp(target), random_tokens(9, target.config.text.vocab_size, PROMPT).tolist()
    runs = []
    for drafts in (0, 1, 4, ROWS - 1):
        text, _ = generate(target, prompt, 24, mtp=block, drafts=drafts)
        runs.append((text, target.state.snapshot() | block.state.snapshot()))
    for text, states in runs[1:]:
        assert text == runs[0][0]
        assert same(states, runs[0][1])


def test_what_is_undone_leaves_the_state_as_it_was(made):
    model = TextModel(made("narrow", "nvidia"), device="cuda")
    tokens = random_tokens(10, model.config.text.vocab_size, PROMPT + ROWS)
    model.prefill(tokens[:PROMPT])
    before = model.state.snapshot()
    for kept in range(ROWS + 1):
        model.state.restore(before)
        for token in tokens[PROMPT : PROMPT + kept]:
            model.decode(int(token))
        expected = model.state.snapshot()
        model.state.restore(before)
        model.verify(model.ids(tokens[PROMPT:]))
        model.state.commit(kept)
        assert same(model.state.snapshot(), expected), kept


def test_a_state_that_is_laid_aside_is_kept(made):
    """One sequence after the other in the same room, also when it has become too small."""
    model = TextModel(made("narrow", "nvidia"), device="cuda")
    tokens = random_tokens(11, model.config.text.vocab_size, 60)
    model.prefill(tokens[:50])
    model.decode(int(tokens[50]))
    first, saved = model.state, model.state.snapshot()
    model.reset()
    model.prefill(random_tokens(12, model.config.text.vocab_size, 2100))
    model.decode(3)
    assert same(first.snapshot(), saved)
    expected = []
    for state in (first, None):
        if state is None:
            model.reset()
            model.prefill(tokens[:50])
            model.decode(int(tokens[50]))
        else:
            model.state = state
        expected.append(torch.stack([model.decode(int(token)) for token in tokens[51:]]))
    assert torch.equal(*expected)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("tiny", {}, "KDA head width 16"),
        ("odd", {}, "KDA head width 16"),
        ("narrow", {"dtype": torch.float32}, "float32"),
        ("narrow", {"mla": "expanded"}, "expanded MLA"),
        ("narrow", {"kernels": False}, "not asked for"),
    ],
)
def test_why_there_are_no_kernels_is_told(name, options, reason, made):
    model = TextModel(made(name, "nvidia"), device="cuda", **options)
    assert model.kernels is None
    assert reason in str(model.without_kernels)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A checkpoint for a sanitizer to watch, after one run without it: the kernels are compiled, and the run works."""
    directory = make(tmp_path_factory.mktemp("watched") / "narrow", "nvidia", narrow("narrow", layers=WATCHED), 0)
    done = subprocess.run([*SCRIPT, str(directory)], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return directory


@pytest.mark.parametrize(
    ("tool", "options", "own"),
    [("memcheck", [], False), ("memcheck", ["--single"], True), ("racecheck", ["--single"], False)],
    ids=["memcheck", "memcheck-own-allocations", "racecheck"],
)
def test_the_sanitizer_finds_nothing(tool, options, own, watched, capfd):
    """Every launch of a few steps under compute-sanitizer, which tells what it is at. `own`: torch asks the driver for
    each tensor, so that reading past the end of one is seen even where another one follows."""
    path = shutil.which("compute-sanitizer")
    assert path is not None, "compute-sanitizer is not on PATH; it comes with the CUDA toolkit"
    command = [path, "--tool", tool, "--error-exitcode", "3", "--print-limit", "20"]
    asked = subprocess.run([path, "--help"], capture_output=True, text=True).stdout
    if EXCLUDED[0] in asked:
        command += EXCLUDED
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if own else {})
    said = []
    with subprocess.Popen(
        [*command, *SCRIPT, str(watched), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            said.append(line)
            with capfd.disabled():
                print(f"{tool}: {line}", end="", file=sys.stderr, flush=True)
    assert running.returncode == 0, "".join(said)[-6000:]
    assert "kinds of steps" in "".join(said)
    assert SUMMARIES[tool] in "".join(said)
