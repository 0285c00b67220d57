"""`glm53 plan`: exit 0 when it fits, 1 when it does not, 2 and one line when it cannot be."""

import json

import pytest

from conformance.checkpoints.shared import copy_of, shared
from conformance.unit.tools.command import glm53
from fast.loader import load

TINY = ["plan", "--export", "nvidia", "--geometry", "tiny", "--context", "4096", "--prefill-rows", "16"]


def box(path, free):
    path.write_text(json.dumps({"name": "box", "visible_gib": 1, "free_gib": free, "unified": True}))
    return str(path)


def test_report_and_json(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert glm53(*TINY, "--tp", "2", "--ep", "2", "--mtp", "2", "--json", out) == 0
    text = capsys.readouterr().out
    for words in ("nvidia tiny, tp 2, ep 2, context 4,096: rank 0 of 2", "routed experts, MTP", "headroom", "rank 1:"):
        assert words in text
    found = json.loads(out.read_text())
    assert found["fits"] is True
    assert [rank["mesh"]["rank"] for rank in found["ranks"]] == [0, 1]
    rank = found["ranks"][1]
    loaded = load(shared("nvidia"), tp=2, ep=2, rank=1, mtp=True)
    assert rank["weights"]["resident"] == loaded.ledger.current()
    assert rank["serving"] == sum((rank["weights"]["resident"], *rank["state"].values(), *rank["workspaces"].values()))


def test_a_directory_plans_as_its_shapes_do(tmp_path, capsys):
    found = []
    for source in (["--checkpoint", str(shared("nvidia"))], ["--export", "nvidia", "--geometry", "tiny"]):
        out = tmp_path / "plan.json"
        assert glm53("plan", *source, "--context", "64", "--json", out, "--quiet") == 0
        found.append(json.loads(out.read_text())["ranks"])
    assert found[0] == found[1]
    assert capsys.readouterr().out == ""


def test_what_does_not_fit_exits_1(tmp_path, capsys):
    assert glm53(*TINY, "--hardware", box(tmp_path / "box.json", 0.001)) == 1
    assert "does not fit; longest context 0" in capsys.readouterr().out
    assert glm53(*TINY, "--hardware", box(tmp_path / "box.json", 1), "--quiet") == 0


BAD = {
    "export": (["plan", "--export", "zai"], "--export: found zai, expected nvidia or libertai"),
    "heads": ([*TINY, "--tp", "3"], "8 KDA heads do not divide among 3 ranks"),
    "mesh": ([*TINY, "--tp", "2", "--ep", "3"], "tp 2 and ep 3"),
    "hardware": ([*TINY, "--hardware", "abacus"], "hardware 'abacus'"),
    "geometry": (["plan", "--export", "nvidia", "--geometry", "huge"], "huge"),
    "context": ([*TINY, "--context", "0"], "--context 0"),
    "vocab": ([*TINY, "--vocab", "half"], "half"),
    "directory": (["plan", "--checkpoint", "/nowhere"], "config.json"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
def test_bad_input_exits_2_with_one_line(arguments, words, capsys):
    assert glm53(*arguments) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config.json", lambda raw: raw["text_config"].pop("index_kpool"), "text_config.index_kpool: absent"),
        ("config.json", lambda raw: raw.update(model_type="glm4"), "model_type: found 'glm4'"),
        ("config.json", "{", "not JSON"),
        ("config.json", "[1]", "the file: found a list, expected an object"),
        ("hf_quant_config.json", lambda raw: raw["quantization"].update(group_size=32), "quantization.group_size"),
        ("hf_quant_config.json", "{", "not JSON"),
    ],
    ids=["absent", "value", "text", "list", "quantization", "quantization text"],
)
def test_a_refused_config_is_named_with_its_path(tmp_path, capsys, file, change, words):
    path = copy_of(tmp_path, "nvidia") / file
    if isinstance(change, str):
        path.write_text(change)
    else:
        raw = json.loads(path.read_text())
        change(raw)
        path.write_text(json.dumps(raw))
    assert glm53("plan", "--checkpoint", path.parent) == 2
    line = capsys.readouterr().err.strip()
    assert f"{path}: {words}" in line
    assert "\n" not in line
