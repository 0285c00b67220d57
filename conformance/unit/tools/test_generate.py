"""`glm53 generate` continues an input as the engine's own decoding does, and names what it cannot use."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from conformance import checkpoints
from conformance.checkpoints.shared import shared
from fast.model import TextModel as FastModel
from reference.checkpoint import open_checkpoint
from reference.model import TextModel as ReferenceModel
from tools import generate
from tools.cli import main

TEXT = "Höfn, 1911"
ENGINES = ("fast", "reference")
NEW = 7


def run(*arguments, directory=None):
    """Exit status of `glm53 generate`, by default on the `odd` checkpoint."""
    try:
        main(["generate", str(directory or shared("nvidia", "odd")), *map(str, arguments)])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


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
    tokenizers = pytest.importorskip("tokenizers")
    directory = tmp_path / "with-tokenizer"
    shutil.copytree(shared("nvidia", "odd"), directory)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(257)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(directory / "tokenizer.json"))
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


def test_a_token_outside_the_vocabulary_is_named(tmp_path, capsys):
    (tmp_path / "t.txt").write_text("1 2 257")
    assert run("--tokens", tmp_path / "t.txt", "--max-new", 2) == 2
    assert "id 257 at position 2, expected 0 to 256" in capsys.readouterr().err


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
    with pytest.raises(SystemExit) as stop:
        main(["trace", str(without_a_block), "--engine", engine, "--prompt", TEXT, "--mtp", "1", "--out", str(out)])
    assert stop.value.code == 2
    assert "num_nextn_predict_layers" in capsys.readouterr().err
    assert not out.exists()
