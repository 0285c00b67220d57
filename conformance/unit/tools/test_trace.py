"""`glm53 trace` writes what was asked for, and names what it cannot use."""

import json

import numpy as np
import pytest

from conformance.checkpoints.shared import shared
from conformance.trace import Schedule, Trace
from conformance.unit.tools.command import glm53
from conformance.unit.tools.words import copy_with_tokenizer

TEXT = "Höfn, 1911"


def run(*arguments, directory=None):
    """Exit status of `glm53 trace`, by default on the `odd` checkpoint."""
    return glm53("trace", directory or shared("nvidia", "odd"), *arguments)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "a.trace"


def test_a_prompt_without_a_tokenizer_is_its_bytes(out, tmp_path):
    assert run("--engine", "fast", "--prompt", TEXT, "--out", out, "--json", tmp_path / "s.json") == 0
    made = Trace.load(out)
    assert made.tokens.tolist() == list(TEXT.encode())
    assert made.schedule == Schedule((len(TEXT.encode()),))
    told = json.loads((tmp_path / "s.json").read_text())
    assert told["metadata"] == made.metadata
    assert told["tokens"] == len(made.tokens)
    assert {name: tap["shape"] for name, tap in told["taps"].items()} == {
        name: list(tap.shape) for name, tap in made.taps.items()
    }


def test_a_tokenizer_of_the_checkpoint_is_used(tmp_path, out):
    directory = copy_with_tokenizer(tmp_path)
    options = ("--engine", "fast", "--prompt", "w4 w200 w5 none", "--quiet")
    assert run(*options, "--out", out, directory=directory) == 0
    assert Trace.load(out).tokens.tolist() == [4, 200, 5, 0]


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path, out, capsys):
    directory = copy_with_tokenizer(tmp_path)
    (directory / "tokenizer.json").write_text("{}")
    assert run("--engine", "fast", "--prompt", TEXT, "--out", out, directory=directory) == 2
    assert "tokenizer.json: not a tokenizer (" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["text", "npy"])
def test_tokens_come_from_a_file(out, tmp_path, form):
    ids = [3, 250, 0, 256, 17]
    file = tmp_path / ("t.npy" if form == "npy" else "t.txt")
    if form == "npy":
        np.save(file, np.array(ids, np.uint16))
    else:
        file.write_text(" 3\t250\n\n0 256\n17\n")
    assert run("--engine", "fast", "--tokens", file, "--out", out, "--quiet") == 0
    assert Trace.load(out).tokens.tolist() == ids


@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        ((), Schedule((11,))),
        (("--decode", 4), Schedule((7,), 4)),
        (("--decode", 11), Schedule((), 11)),
        (("--prefill-chunk", 4), Schedule((4, 4, 3))),
        (("--prefill-chunk", 3, "--decode", 2, "--pad", 5), Schedule((3, 3, 3), 2, 5)),
    ],
)
def test_the_input_is_fed_as_asked_and_always_whole(out, options, schedule):
    assert run("--engine", "fast", "--prompt", TEXT, *options, "--out", out, "--quiet") == 0
    made = Trace.load(out)
    assert made.schedule == schedule
    assert made.tokens.tolist() == list(TEXT.encode())
    assert len(made.logits) == len(TEXT.encode())


def test_options_reach_the_engine(out):
    options = ("--arithmetic", "stochastic", "--seed", 5, "--option", "mla=absorbed", "--option", "kda_chunk=8")
    assert (
        run("--engine", "reference", "--prompt", TEXT, *options, "--out", out, "--quiet", "--taps", "embed,final.*")
        == 0
    )
    made = Trace.load(out)
    wanted = {"arithmetic": "stochastic", "seed": "5", "mla": "absorbed", "kda_chunk": "8"}
    assert {key: made.metadata[key] for key in wanted} == wanted
    assert set(made.taps) == {"tokens", "embed", "final.hidden", "final.norm", "logits"}


def test_the_file_engine_copies_a_trace(out, tmp_path):
    assert run("--engine", "fast", "--prompt", TEXT, "--out", out, "--quiet") == 0
    copy = tmp_path / "b.trace"
    assert run("--engine", "file", "--option", f"trace={out}", "--prompt", TEXT, "--out", copy, "--quiet") == 0
    assert Trace.load(copy).metadata == Trace.load(out).metadata


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", ""), "--prompt: gives no token"),
        ((), "give either --tokens FILE or --prompt TEXT"),
        (("--prompt", "x", "--tokens", "t"), "not both"),
        (("--tokens", "nowhere.txt"), "nowhere.txt: cannot be read"),
        (("--prompt", "x", "--decode", "2"), "decode 2 of 1 tokens"),
        (("--prompt", "x", "--prefill-chunk", "0"), "prefill chunk 0"),
        (("--prompt", "x", "--engine", "nope"), "engine nope: unknown"),
        (("--prompt", "x", "--engine", "fast", "--mtp", "1000000"), "mtp"),
        (("--prompt", "x", "--engine", "reference", "--device", "cuda"), "option device='cuda' is not offered"),
        (("--prompt", "x", "--taps", "logits,layers.0.attn.sin"), "--taps layers.0.attn.sin: matches no tap of this"),
        (("--prompt", "x", "--taps", "layers.7.*"), "--taps layers.7.*: matches no tap of this model"),
        (("--prompt", "x", "--option", "seed"), "--option seed: expected KEY=VALUE"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(out, capsys, arguments, message):
    assert run(*arguments, "--out", out) == 2
    told = capsys.readouterr().err.strip()
    assert message in told
    assert len(told.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2 x", "line 1: 'x' is not an integer"),
        ("1\n2.5", "line 2: '2.5' is not an integer"),
        ("", "holds no token"),
        ("1 99999999999999999999", "does not fit 64 bits"),
        ("1 2 257", "id 257 at position 2, expected 0 to 256"),
        ("-1", "id -1 at position 0"),
    ],
)
def test_bad_tokens_are_named(out, tmp_path, capsys, text, message):
    (tmp_path / "t.txt").write_text(text)
    assert run("--engine", "fast", "--tokens", tmp_path / "t.txt", "--out", out) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("array", [np.zeros((2, 2), int), np.zeros(3), np.zeros(0, int)])
def test_bad_arrays_are_named(out, tmp_path, capsys, array):
    np.save(tmp_path / "t.npy", array)
    assert run("--engine", "fast", "--tokens", tmp_path / "t.npy", "--out", out) == 2
    assert "t.npy: " in capsys.readouterr().err


def test_a_file_that_is_no_array_is_named(out, tmp_path, capsys):
    (tmp_path / "t.npy").write_bytes(b"1 2 3")
    assert run("--engine", "fast", "--tokens", tmp_path / "t.npy", "--out", out) == 2
    assert "t.npy: not a .npy array" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_named_before_anything_runs(tmp_path, capsys):
    assert run("--engine", "fast", "--prompt", TEXT, "--out", tmp_path / "no" / "a.trace") == 2
    assert "a.trace: cannot be written: No such file or directory" in capsys.readouterr().err
