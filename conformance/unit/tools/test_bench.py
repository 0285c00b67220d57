"""`glm53 bench decode` and `kernels` where nothing can be measured, and what they make of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.unit.tools.command import glm53
from tools import bench_peers
from tools.bench_decode import numbers, told
from tools.errors import UsageError


@pytest.mark.parametrize("command", ["decode", "kernels"])
def test_without_a_gpu_one_line_says_so(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "found.json"
    assert glm53("bench", command, "--json", path) == 2
    told_so = capsys.readouterr().err.splitlines()
    assert len(told_so) == 1
    assert "needs a CUDA device" in told_so[0]
    assert not path.exists()


@pytest.mark.parametrize(
    ("value", "expected"), [("1", [1]), ("1,2,4-8", [1, 2, 4, 5, 6, 7, 8]), ("3-3", [3]), ("8", [8])]
)
def test_lists_of_numbers(value: str, expected: list[int]) -> None:
    assert numbers("--rows", value, 8) == expected


@pytest.mark.parametrize("value", ["", "x", "1-", "-3", "0", "9", "4-2", "1,,2", "1.5"])
def test_what_is_no_list_of_numbers(value: str) -> None:
    with pytest.raises(UsageError, match="--rows"):
        numbers("--rows", value, 8)


def test_a_peer_that_is_not_there_or_fails_is_told_and_no_number_given() -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("of another\nproject")

    assert told(bench_peers.attempt("p", "no_such_package_here", broken)) == "p: not installed"
    assert told(bench_peers.attempt("p", "json", broken)) == "p: failed: RuntimeError: of another project"
    assert told(bench_peers.attempt("p", "json", lambda: {"us": 2.5, "version": "1"})) == "p: us 2.500"
