"""Checkpoints made by several processes: the same bytes, the same progress, and what happens when one fails."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from conformance import checkpoints
from conformance.checkpoints import export as export_writer
from conformance.checkpoints.shared import shared
from conformance.checkpoints.source import Synthetic
from reference.errors import NonFiniteWeightError, OutputError
from reference.layout import EXPORTS


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("export", EXPORTS)
def test_the_bytes_do_not_depend_on_how_many_make_them(export, tmp_path):
    seen: dict[str, int] = {}

    def progress(name, size):
        if name:
            assert name not in seen
            seen[name] = 0
        seen["all"] = seen.get("all", 0) + size

    made = checkpoints.make(tmp_path / "made", export, "odd", workers=2, progress=progress)
    assert contents(made) == contents(shared(export, "odd"))
    index = export_writer.json.loads((made / "model.safetensors.index.json").read_text())
    assert seen.keys() - {"all"} == index["weight_map"].keys()
    assert seen["all"] == index["metadata"]["total_size"]


class Bad(Synthetic):
    """One weight holds what cannot be encoded, or making it ends the process."""

    deadly = False

    def rows(self, spec, start, stop):
        values = super().rows(spec, start, stop)
        if spec.name.endswith("layers.1.mlp.experts.1.up_proj.weight"):
            if self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            values[3, 5] = np.inf
        return values


def written(directory: Path, *, deadly: bool) -> None:
    chosen = checkpoints.geometry("tiny", layers=(0, 3), experts=2)
    source = Bad(chosen.config, chosen.gate_rank, 0, chosen.layer_keys)
    source.deadly = deadly
    export_writer.write_export(source, chosen.config, directory, "nvidia", lambda name, size: None, workers=2)


def test_what_one_of_them_cannot_do_is_raised_and_leaves_nothing(tmp_path):
    with pytest.raises(NonFiniteWeightError, match=r"experts\.1\.up_proj\.weight: inf at row 3, column 5"):
        written(tmp_path / "made", deadly=False)
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_killed_is_told(tmp_path):
    with pytest.raises(OutputError, match="made: cannot be written: a process that makes it was ended"):
        written(tmp_path / "made", deadly=True)
    assert list(tmp_path.iterdir()) == []


def test_several_blocks_of_one_tensor_come_in_any_order(tmp_path, monkeypatch):
    """Rows of one weight are pieces of their own: each lands at its place."""
    monkeypatch.setattr(export_writer, "ROW_BLOCK", 1 << 12)
    made = checkpoints.make(tmp_path / "made", "libertai", "odd")
    assert contents(made) == contents(shared("libertai", "odd"))
    whole = Synthetic(*(lambda g: (g.config, g.gate_rank, 0, g.layer_keys))(checkpoints.geometry("odd")))
    work = export_writer.Work(whole, "libertai", whole.specs(), export_writer.Files({}))
    blocks = [piece for piece in work.pieces() if piece.specs[0].name.endswith("embed_tokens.weight")]
    assert len(blocks) > 2
    assert [piece.stop for piece in blocks[:-1]] == [piece.start for piece in blocks[1:]]
