"""Directories made to harm: every command answers in one line that names the file, at once, and leaves nothing."""

import json
import os
import shutil

import pytest

from conformance.checkpoints.shared import copy_of
from conformance.unit.tools.command import glm53

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def loop(path):
    path.unlink()
    path.symlink_to(path.name)


def stray(directory):
    shutil.copy(directory / SHARD, directory / "extra.safetensors")


def unknown(directory):
    path = directory / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["model.x"] = SHARD
    path.write_text(json.dumps(index))


HARM = {
    "a pipe for a shard": (lambda d: pipe(d / SHARD), SHARD),
    "a pipe for the config": (lambda d: pipe(d / "config.json"), "config.json"),
    "a pipe for the index": (lambda d: pipe(d / INDEX), INDEX),
    "a link to itself": (lambda d: loop(d / SHARD), SHARD),
    "a shard in no index": (stray, "extra.safetensors"),
    "a name of no tensor": (unknown, "model.x"),
    "a config without end": (lambda d: os.truncate(d / "config.json", 1 << 33), "config.json"),
}


@pytest.mark.parametrize(("harm", "named"), HARM.values(), ids=HARM)
def test_every_command_refuses_it_by_name(tmp_path, capsys, harm, named):
    directory = copy_of(tmp_path, "libertai")
    harm(directory)
    (tmp_path / "tokens").write_text("1 2 3")
    for engine in ("fast", "reference"):
        out = tmp_path / "out.safetensors"
        status = glm53("trace", directory, "--engine", engine, "--tokens", tmp_path / "tokens", "--out", out, "--quiet")
        told = capsys.readouterr().err
        assert (status, told.count("\n"), out.exists()) == (2, 1, False), told
        assert str(directory) in told
        assert named in told
    for words in (("plan", "--checkpoint"), ("bench", "load")):
        assert glm53(*words, directory) == 2
        assert named in capsys.readouterr().err
    assert glm53("inspect", directory) == 1
    assert named in capsys.readouterr().out
    assert glm53("quantize", directory, tmp_path / "made", "--export", "nvidia", "--quiet") == 2
    assert str(directory) in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {directory.name, "tokens"}
