"""`glm53 diff`: status, first line, reports; and `--check`, which says what a trace lacks."""

import importlib
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from conformance import advice, pairwise
from conformance.cases.runs import random_tokens
from conformance.checkpoints.shared import shared
from conformance.engines import registry
from conformance.report import machine
from conformance.taps import expected
from conformance.trace import REQUIRED_METADATA, Schedule, Trace, validate
from conformance.unit.tools.command import glm53, traced
from fast.model import TextModel
from reference.checkpoint import open_checkpoint

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
COUNT = 12
CHUNKS = Schedule((5, 4), 3)


def run(*arguments, command="diff"):
    """Exit status of a `glm53` command."""
    return glm53(command, *arguments)


@pytest.fixture(scope="module")
def directory():
    return shared("libertai", "odd")


@pytest.fixture(scope="module")
def made(directory):
    return traced(directory, random_tokens(2, 257, COUNT), CHUNKS)


@pytest.fixture
def saved(made, tmp_path):
    made.save(tmp_path / "a.trace")
    return tmp_path / "a.trace"


def changed(made, path, name, change):
    taps = dict(made.taps)
    taps[name] = change(np.array(taps[name]))
    Trace(made.metadata, taps).save(path)
    return path


def scaled(made, path, name, factor):
    return changed(made, path, name, lambda tap: (tap.astype(np.float32) * factor).astype(tap.dtype))


def test_a_sound_trace_passes_and_its_reports_are_written(saved, directory, tmp_path, capsys):
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    assert run(saved, "--checkpoint", directory, "--html", page, "--json", data) == 0
    assert capsys.readouterr().out.startswith("PASS ")
    assert "<title>PASS" in page.read_text(encoding="utf-8")
    (result,) = machine.read(data)
    assert result.passed
    assert result.coverage.taps_missing == ()


@pytest.mark.parametrize("name", ["layers.3.routed.out", "layers.4.attn.core", "final.norm", "layers.0.attn.g"])
def test_a_wrong_tap_fails_and_is_the_first_line(made, directory, tmp_path, capsys, name):
    file = scaled(made, tmp_path / "b.trace", name, 1.05)
    assert run(file, "--checkpoint", directory, "--json", tmp_path / "r.json") == 1
    assert capsys.readouterr().out.startswith(f"first divergence: TAP {name}")
    first = machine.read(tmp_path / "r.json")[0].first_divergence
    assert first is not None
    assert first.tap == name


def test_two_traces_are_also_held_against_each_other(made, saved, directory, tmp_path, capsys):
    other = scaled(made, tmp_path / "b.trace", "layers.2.mlp.out", 1.05)
    page = tmp_path / "r.html"
    assert run(saved, other, "--checkpoint", directory, "--json", tmp_path / "r.json", "--html", page) == 1
    told = capsys.readouterr().out
    assert f"the two traces: 1 of {len(made.taps)} taps differ, first layers.2.mlp.out" in told
    assert "The two traces against each other" in page.read_text(encoding="utf-8")
    pairs = {pair["tap"]: pair for pair in json.loads((tmp_path / "r.json").read_text())["pairs"]}
    assert pairs["layers.2.mlp.out"]["relative_l2"] == pytest.approx(0.05, rel=0.1)
    assert pairs["layers.2.mlp.in"]["relative_l2"] == 0


def test_a_trace_against_itself_says_that_they_agree(saved, directory, capsys):
    assert run(saved, saved, "--checkpoint", directory) == 0
    assert "agree bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one or two traces, found 0"),
        (("a", "b", "c"), "give one or two traces, found 3"),
        (("a",), "--checkpoint DIR is missing"),
        (("nowhere.trace", "--checkpoint", "DIR"), "nowhere.trace: cannot be read"),
        (("a", "--check", "b"), "--check b: takes no further trace"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(directory, capsys, arguments, message):
    assert run(*(directory if word == "DIR" else word for word in arguments)) == 2
    told = capsys.readouterr().err.strip()
    assert message in told
    assert len(told.splitlines()) == 1


def test_a_truncated_trace_is_bad_input(saved, directory, capsys):
    saved.write_bytes(saved.read_bytes()[:-3])
    assert run(saved, "--checkpoint", directory) == 2
    assert "a.trace: " in capsys.readouterr().err


@pytest.mark.parametrize("leaf", ["router.indices", "router.weights"])
@pytest.mark.parametrize("change", [lambda a: a[0, 0], lambda a: a[:5], lambda a: a[:0], lambda a: a[None]])
def test_choices_of_other_axes_are_told_of_two_traces(made, leaf, change):
    name = f"layers.2.{leaf}"
    other = Trace(made.metadata, made.taps | {name: change(made.taps[name])})
    (pair,) = (pair for pair in pairwise.compare(made, other) if pair.tap == name)
    assert pair.fault == f"{list(made.taps[name].shape)} against {list(other.taps[name].shape)}"


def test_two_traces_of_other_tokens_are_bad_input(made, saved, directory, tmp_path, capsys):
    other = changed(made, tmp_path / "b.trace", "tokens", lambda tokens: tokens[::-1].copy())
    assert run(saved, other, "--checkpoint", directory) == 2
    assert "other tokens" in capsys.readouterr().err


# --- --check ---------------------------------------------------------------------------------------------------------


def kept(made, path, *names):
    taps = {name: tap for name, tap in made.taps.items() if name in ("tokens", "logits", *names)}
    Trace(made.metadata, taps).save(path)
    return path


def boundaries(made, *leaves):
    return [name for name in made.taps if advice.leaf(name) in leaves and name.startswith("layers.")]


@pytest.mark.parametrize(
    ("leaves", "place"),
    [
        (("router.indices", "indexer.selected"), "the logits"),
        (("in", "out"), "a layer"),
        (("in", "out", "mid", "attn.in", "attn.out", "mlp.in", "mlp.out"), "a sublayer"),
        (None, "an operation"),
    ],
)
def test_check_tells_how_far_a_fault_can_be_localised(made, directory, tmp_path, capsys, leaves, place):
    names = list(made.taps) if leaves is None else boundaries(made, *leaves)
    file = kept(made, tmp_path / "c.trace", *names)
    assert run("--check", file, "--checkpoint", directory) == 0
    assert f"{file}: sound; a fault can be named to {place}" in capsys.readouterr().out.splitlines()


def test_tokens_and_logits_alone_tell_what_they_lack(made, directory, tmp_path, capsys):
    """A correct engine may choose other experts than the reference, so nothing about such a trace can be wrong."""
    file = kept(made, tmp_path / "c.trace")
    assert run("--check", file, "--checkpoint", directory) == 0
    assert "with every router.indices and indexer.selected to all of them" in capsys.readouterr().out
    assert run(file, "--checkpoint", directory) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("first divergence: EMPTY taps: nothing was compared: every step rests on choices")
    assert "layers.i.router.indices and layers.i.indexer.selected" in line
    told = kept(made, file, *boundaries(made, "router.indices", "indexer.selected"))
    assert run(told, "--checkpoint", directory) == 0


def test_a_trace_of_layer_boundaries_localises_to_the_layer(made, directory, tmp_path, capsys):
    """The promise behind that line: with in, out and logits alone, a fault in a layer is named by its out."""
    few = Trace.load(kept(made, tmp_path / "c.trace", *boundaries(made, "in", "out")))
    file = scaled(few, tmp_path / "d.trace", "layers.3.out", 1.05)
    assert run(file, "--checkpoint", directory) == 1
    assert capsys.readouterr().out.startswith("first divergence: TAP layers.3.out")


def test_check_lists_every_missing_tap_with_its_axes(made, directory, tmp_path, capsys):
    file = kept(made, tmp_path / "c.trace")
    assert run("--check", file, "--checkpoint", directory) == 0
    told = capsys.readouterr().out
    for name in expected(open_checkpoint(directory).config, COUNT):
        pattern = re.sub(r"^(layers|vision\.blocks)\.\d+\.", r"\1.i.", name)
        assert name in ("tokens", "logits") or f"    {pattern} [" in told, name
    assert "comb[i, j] goes from stream i to stream j" in told


def test_every_tap_belongs_to_one_group(made, directory):
    config = open_checkpoint(directory).config
    counted = sum(state.known or 0 for state in advice.advise(made, config).groups)
    assert counted == len(expected(config, COUNT)) - len(("tokens", "logits"))


def test_check_finds_what_makes_a_trace_unusable(made, directory, tmp_path, capsys):
    taps = dict(made.taps) | {"layers.0.attn.sin": made.taps["embed"], "zebra": made.taps["embed"]}
    taps["layers.2.mid"] = taps["layers.2.mid"][:, 0]
    Trace(made.metadata, taps).save(tmp_path / "c.trace")
    assert run("--check", tmp_path / "c.trace", "--checkpoint", directory, "--json", tmp_path / "c.json") == 1
    told = capsys.readouterr().out
    assert "fault: tap layers.2.mid has 2 axes" in told
    assert "unknown: layers.0.attn.sin: did you mean layers.0.attn.in?" in told
    assert "unknown: zebra: no name of the format is close" in told
    assert "not usable as it is" in told
    data = json.loads((tmp_path / "c.json").read_text())
    assert data["usable"] is False
    assert set(data["unknown"]) == {"layers.0.attn.sin", "zebra"}


def test_check_without_a_checkpoint_reads_names_only(saved, capsys):
    assert run("--check", saved) == 0
    told = capsys.readouterr().out
    assert "readable; give --checkpoint DIR" in told
    assert "layer boundaries: 14 taps" in told


# --- the examples of docs/your-engine.md -----------------------------------------------------------------------------


def test_the_plain_python_writer_makes_the_same_trace(made, directory, tmp_path, capsys):
    """Fed piece by piece, as an engine would, and judged."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        writer = importlib.import_module("write_trace").TraceWriter(directory, "libertai", "mine", "0.1")
    finally:
        sys.path.remove(str(EXAMPLES))
    model = TextModel(directory)
    writer.add("tokens", made.tokens)

    def tap(name, value):
        if name not in ("tokens", "logits"):
            value = value.detach().float().numpy() if value.is_floating_point() else value.numpy().astype(np.int32)
            writer.add(name, value, bf16=made.taps[name].dtype.kind == "V")

    start = 0
    for length in CHUNKS.prefill:
        writer.add("logits", model.prefill(made.tokens[start : start + length], tap=tap).numpy())
        start += length
    for token in made.tokens[start:]:
        writer.add("logits", model.decode(int(token), tap=tap).numpy()[None])
    writer.save(tmp_path / "w.trace", CHUNKS.prefill, CHUNKS.decode)
    back = Trace.load(tmp_path / "w.trace")
    assert set(back.taps) == set(made.taps)
    assert [name for name, array in made.taps.items() if back.taps[name].tobytes() != array.tobytes()] == []
    validate(back, open_checkpoint(directory).config)
    assert run(tmp_path / "w.trace", "--checkpoint", directory) == 0
    assert capsys.readouterr().out.startswith("PASS ")


def test_the_plain_python_program_turns_dumped_arrays_into_a_trace(made, directory, tmp_path, monkeypatch):
    arrays = {name: tap.astype(np.float32) if tap.dtype.kind == "V" else tap for name, tap in made.taps.items()}
    np.savez(tmp_path / "dump.npz", prefill=np.array(CHUNKS.prefill), **arrays)
    script = EXAMPLES / "write_trace.py"
    monkeypatch.setattr(
        sys, "argv", [str(script), str(directory), "libertai", str(tmp_path / "dump.npz"), str(tmp_path / "p.trace")]
    )
    runpy.run_path(str(script), run_name="__main__")
    back = Trace.load(tmp_path / "p.trace")
    assert back.schedule == CHUNKS
    assert all(np.array_equal(back.taps[name], array) for name, array in arrays.items())
    validate(back, open_checkpoint(directory).config)


def test_the_writer_imports_nothing_of_this_project():
    modules = re.findall(r"^(?:import|from) (\w+)", (EXAMPLES / "write_trace.py").read_text(), re.MULTILINE)
    assert set(modules) <= {"numpy", *sys.stdlib_module_names}


def test_the_adapter_is_short_and_works(made, directory, tmp_path, monkeypatch):
    assert len((EXAMPLES / "adapter.py").read_text().splitlines()) < 60
    monkeypatch.syspath_prepend(str(EXAMPLES))
    (tmp_path / "t.txt").write_text(" ".join(str(token) for token in made.tokens))
    options = ("--engine", "adapter:Adapter", "--tokens", tmp_path / "t.txt", "--decode", 3, "--quiet")
    assert run(directory, *options, "--out", tmp_path / "a.trace", command="trace") == 0
    back = Trace.load(tmp_path / "a.trace")
    assert set(back.taps) == set(made.taps)
    assert run(tmp_path / "a.trace", "--checkpoint", directory) == 0
    engine = registry.create("adapter:Adapter")
    engine.open(directory)
    assert set(engine.operands("lm_head.weight") or {}) == {"value"}
    assert engine.operands("no.such.weight") is None


def test_the_guide_names_every_tap_every_metadata_key_and_files_that_exist(directory):
    """Every name of the format is spelled out in the guide, those of the MTP block and the tower by reference."""
    guide = (EXAMPLES.parent / "your-engine.md").read_text(encoding="utf-8")
    for name in expected(open_checkpoint(directory).config, COUNT):
        if not name.startswith(("mtp.", "vision.")):
            assert f"`{name}`" in guide or f".{advice.leaf(name).rpartition('.')[2]}`" in guide, name
    for key in REQUIRED_METADATA:
        assert f"`{key}`" in guide, key
    links = re.findall(r"\]\(([^)#]+)\)", guide)
    assert links
    assert [link for link in links if not (EXAMPLES.parent / link).exists()] == []
