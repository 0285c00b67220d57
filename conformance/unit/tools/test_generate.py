"""`glm53 generate` continues an input as the engine's own decoding does, and names what it cannot use."""

from __future__ import annotations

import json

import numpy as np
import pytest

from conformance import checkpoints
from conformance.checkpoints.shared import shared
from conformance.unit.tools.command import glm53
from conformance.unit.tools.words import copy_with_tokenizer
from fast.model import TextModel as FastModel
from reference.checkpoint import open_checkpoint
from reference.model import TextModel as ReferenceModel
from tools import generate

TEXT = "Höfn, 1911"
ENGINES = ("fast", "reference")
NEW = 7


def run(*arguments, directory=None):
    """Exit status of `glm53 generate`, by default on the `odd` checkpoint."""
    return glm53("generate", directory or shared("nvidia", "odd"), *arguments)


def plain(engine, prompt=TEXT, directory=None):
    """Greedy tokens by the model's own verbs."""
    directory = directory or shared("nvidia", "odd")
    model = FastModel(directory) if engine == "fast" else ReferenceModel(open_checkpoint(directory))
    rows = model.prefill(list(prompt.encode()))
    tokens = [int(rows[-1].argmax())]
    while len(tokens) < NEW:
        tokens.append(int(model.decode(tokens[-1]).argmax()))
    return tokens


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_text_is_that_of_plain_decoding(engine, drafts, tmp_path, capsys):
    file = tmp_path / "g.json"
    asked = ("--engine", engine, "--prompt", TEXT, "--max-new", NEW, "--mtp", drafts, "--json", file)
    assert run(*asked) == 0
    told, out = json.loads(file.read_text()), capsys.readouterr()
    assert told["tokens"] == plain(engine)
    assert out.out.split() == [str(token) for token in told["tokens"]]
    assert f"{NEW} tokens, the first after " in out.err
    assert (told["engine"], told["mtp"], told["prompt_tokens"]) == (engine, drafts, len(TEXT.encode()))
    assert told["tokens_per_second"] == pytest.approx((NEW - 1) / told["seconds"], rel=1e-5)
    assert "text" not in told
    assert len(told["drafts_tried"]) == len(told["drafts_accepted"]) == len(told["acceptance"]) == drafts
    if drafts:
        assert told["rounds"] + sum(told["drafts_accepted"]) == NEW - 1
        assert "accepted at position 1: " in out.err
    else:
        assert told["rounds"] == NEW - 1


def test_acceptance_is_counted_by_position():
    made = generate.Continuation(tokens=[1, 2, 3, 4, 5, 6], seconds=2.0)
    for tried, kept in ((2, 1), (2, 2), (1, 0)):
        made.statistics.count(tried, kept)
    told = made.json()
    assert (told["rounds"], told["drafts_tried"], told["drafts_accepted"]) == (3, [3, 2], [2, 1])
    assert told["acceptance"] == [2 / 3, 1 / 2]
    assert told["tokens_per_second"] == 2.5
    assert made.line().endswith("then 2.50 tokens/s; 3 rounds, accepted at position 1: 67%, 2: 50%")


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_token_ends_the_text(engine, drafts, tmp_path):
    file = tmp_path / "g.json"
    expected = plain(engine)
    stop = expected[3]
    asked = ("--engine", engine, "--prompt", TEXT, "--max-new", NEW, "--mtp", drafts, "--stop", stop)
    assert run(*asked, "--json", file, "--quiet") == 0
    assert json.loads(file.read_text())["tokens"] == expected[: expected.index(stop) + 1]


@pytest.mark.parametrize("engine", ENGINES)
def test_sampling_has_a_seed(engine, tmp_path):
    found = []
    for seed in (1, 1, 2):
        asked = ("--engine", engine, "--prompt", TEXT, "--max-new", 5, "--mtp", 1, "--temperature", 1, "--seed", seed)
        assert run(*asked, "--json", tmp_path / "g.json", "--quiet") == 0
        found.append(json.loads((tmp_path / "g.json").read_text())["tokens"])
    assert found[0] == found[1] != found[2]


def test_a_tokenizer_gives_text(tmp_path, capsys):
    directory = copy_with_tokenizer(tmp_path)
    file = tmp_path / "g.json"
    asked = ("--prompt", "w9 w7 w250", "--max-new", 3, "--json", file, "--quiet")
    assert run(*asked, directory=directory) == 0
    told = json.loads(file.read_text())
    assert told["prompt_tokens"] == 3
    assert told["text"] == " ".join(f"w{token}" for token in told["tokens"])
    assert capsys.readouterr().out.strip() == told["text"]


def test_tokens_come_from_a_file_and_one_token_has_no_rate(tmp_path, capsys):
    np.save(tmp_path / "t.npy", np.frombuffer(TEXT.encode(), np.uint8))
    assert run("--tokens", tmp_path / "t.npy", "--max-new", 1, "--json", tmp_path / "g.json") == 0
    told = json.loads((tmp_path / "g.json").read_text())
    assert told["tokens"] == plain("fast")[:1]
    assert told["tokens_per_second"] is None
    assert "tokens/s" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "x", "--max-new", 0), "--max-new 0: expected at least 1"),
        (("--prompt", "x", "--max-new", 2, "--mtp", -1), "--mtp -1"),
        (("--prompt", "x", "--max-new", 2, "--mtp", 8), "--mtp 8: expected 0 to 7"),
        (("--prompt", "x", "--max-new", 2, "--engine", "transformers"), "--engine transformers: generates no text"),
        (("--prompt", "x", "--max-new", 2, "--arithmetic", "exact"), "--arithmetic exact: expected bf16 or fp32"),
        (("--prompt", "x", "--max-new", 2, "--temperature", "-0.5"), "--temperature -0.5"),
        (("--prompt", "x", "--max-new", 2, "--temperature", "nan"), "--temperature nan"),
        (("--prompt", "x", "--max-new", 2, "--engine", "reference", "--device", "cuda"), "reference has no devices"),
        (("--prompt", "", "--max-new", 2), "--prompt: gives no token"),
        (("--prompt", "x", "--max-new", 2, "--mtp", "two"), "Invalid value for '--mtp'"),
        (("--max-new", 2), "give either --tokens FILE or --prompt TEXT"),
        (("--tokens", "nowhere.txt", "--max-new", 2), "nowhere.txt: cannot be read"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(capsys, arguments, message):
    assert run(*arguments) == 2
    out = capsys.readouterr()
    assert message in out.err
    assert len(out.err.strip().splitlines()) == 1
    assert out.out == ""


LIMITED = 16
"""Positions of a model that has few."""


@pytest.fixture(scope="module")
def short_context(tmp_path_factory):
    place = tmp_path_factory.mktemp("short") / "c"
    return checkpoints.make(place, "nvidia", "odd", config={"max_position_embeddings": LIMITED})


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("content", "new", "message"),
    [
        ("1 2 257", 2, "id 257 at position 2, expected 0 to 256"),
        ("1 -1", 2, "id -1 at position 1, expected 0 to 256"),
        ("", 2, "t.txt: holds no token"),
        ("1 2", 0, "--max-new 0: expected at least 1"),
        ("1 2", -3, "--max-new -3: expected at least 1"),
        ("7 " * LIMITED, 1, f"--max-new 1: the model has {LIMITED} positions, the input takes {LIMITED}"),
        ("7 " * (LIMITED + 9), 1, f"the model has {LIMITED} positions, the input takes {LIMITED + 9}"),
        ("7 " * 10, 7, f"--max-new 7: the model has {LIMITED} positions, the input takes 10"),
    ],
)
def test_bad_input_is_named_whatever_continues_it(
    short_context, tmp_path, capsys, engine, drafts, content, new, message
):
    (tmp_path / "t.txt").write_text(content)
    asked = ("--engine", engine, "--mtp", drafts, "--tokens", tmp_path / "t.txt", "--max-new", new)
    assert run(*asked, directory=short_context) == 2
    out = capsys.readouterr()
    assert message in out.err
    assert len(out.err.strip().splitlines()) == 1
    assert out.out == ""


@pytest.mark.parametrize("engine", ENGINES)
def test_more_drafts_than_tokens_are_wanted(short_context, tmp_path, engine):
    """A round never makes more tokens than are asked for, so the last position of the context can be reached."""
    file = tmp_path / "g.json"
    asked = ("--engine", engine, "--prompt", "0123456789", "--json", file, "--quiet")
    found = {}
    for drafts in (0, 7):
        for new in (2, 6):
            assert run(*asked, "--max-new", new, "--mtp", drafts, directory=short_context) == 0
            found[drafts, new] = json.loads(file.read_text())
    for new in (2, 6):
        assert len(found[7, new]["tokens"]) == new
        assert found[7, new]["tokens"] == found[0, new]["tokens"]
        assert len(found[7, new]["drafts_tried"]) == new - 2


@pytest.mark.parametrize(
    ("engine", "drafts", "message"),
    [
        ("fast", -1, "--mtp -1: expected 0 to 7"),
        ("fast", 9, "--mtp 9: expected 0 to 7"),
        ("reference", -1, "--mtp -1: expected 0 or more"),
    ],
)
def test_a_number_of_drafts_that_no_round_has(capsys, tmp_path, engine, drafts, message):
    """In `generate`, and in `trace` by the engine's own word."""
    assert run("--engine", engine, "--prompt", "x", "--max-new", 2, "--mtp", drafts) == 2
    assert message in capsys.readouterr().err
    out = tmp_path / "a.trace"
    asked = ["--engine", engine, "--prompt", TEXT, "--mtp", str(drafts), "--out", str(out)]
    assert glm53("trace", shared("nvidia", "odd"), *asked) == 2
    said = capsys.readouterr().err
    assert str(drafts) in said
    assert message.partition("expected ")[2] in said
    assert len(said.strip().splitlines()) == 1
    assert not out.exists()


@pytest.fixture(scope="module")
def without_a_block(tmp_path_factory):
    place = tmp_path_factory.mktemp("no-block") / "c"
    return checkpoints.make(place, "nvidia", "odd", config={"num_nextn_predict_layers": 0})


@pytest.mark.parametrize("engine", ENGINES)
def test_drafts_need_a_block(without_a_block, capsys, tmp_path, engine):
    """Asked for explicitly, refused clearly; without drafts the same checkpoint is fine."""
    asked = ("--engine", engine, "--prompt", TEXT, "--max-new", 2, "--quiet")
    assert run(*asked, directory=without_a_block) == 0
    assert run(*asked, "--mtp", 2, directory=without_a_block) == 2
    assert "num_nextn_predict_layers" in capsys.readouterr().err
    out = tmp_path / "a.trace"
    assert glm53("trace", without_a_block, "--engine", engine, "--prompt", TEXT, "--mtp", "1", "--out", out) == 2
    assert "num_nextn_predict_layers" in capsys.readouterr().err
    assert not out.exists()
