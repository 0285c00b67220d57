"""Options of `pytest conformance`, checkpoints made once per session, and the report of the conformance runs.

Results travel from xdist's workers to the controller as JSON in the reports' user properties; the controller writes
them into one page and one file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Workers side by side share the cores: each library that would start a thread per core reads this when it is imported.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _share = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_name, str(_share))

import pytest

from conformance.judge.result import Result

RESULT = "glm53-result"
NOTE = "glm53-note"
HERE = Path(__file__).parent
OWN_RANKS = {"--engine": "fast", "--checkpoint": None, "--device": None, "--tp": 1, "--ep": 1}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--engine", default="fast", help="engine under test: a shipped name or package.module:Class")
    group.addoption("--export", choices=("nvidia", "libertai"), help="only checkpoints of this export")
    group.addoption("--checkpoint", type=Path, metavar="DIR", help="judge this directory, not synthetic checkpoints")
    group.addoption("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    group.addoption("--ep", type=int, default=1, metavar="N", help="expert-parallel ranks")
    group.addoption("--device", metavar="NAME", help="cpu or cuda")
    group.addoption("--report", type=Path, metavar="FILE", help="write FILE (.html) and the same results as .json")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whoever chooses an engine, a checkpoint, a device or ranks gets `test_conformance` with that choice alone.

    Tests of two GPUs are left out where there are fewer.
    """
    if collection_path == HERE / "test_ranks.py":
        return any(config.getoption(option) != default for option, default in OWN_RANKS.items()) or None
    if collection_path == HERE / "test_two_gpus.py":
        import torch

        return torch.cuda.device_count() < 2 or None
    return None


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(geometry, export) -> directory of a synthetic checkpoint, made when first asked for."""
    from conformance import checkpoints

    made: dict[tuple[str, str], Path] = {}

    def directory(geometry: str, export: str) -> Path:
        key = geometry, export
        if key not in made:
            place = tmp_path_factory.mktemp("synthetic") / f"{geometry}-{export}"
            made[key] = checkpoints.make(place, export, geometry, seed=0)
        return made[key]

    return directory


class Collected:
    """Gathers the results of all workers and reports them when the session ends."""

    def __init__(self) -> None:
        self.results: list[tuple[str, str]] = []
        self.notes: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call":  # the teardown's report has the call's properties too
            return
        for name, value in report.user_properties:
            if name == RESULT:
                self.results.append((report.nodeid, value))
            elif name == NOTE:
                self.notes.append(value)

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        results = [Result.from_json(text) for _, text in sorted(self.results, key=lambda pair: pair[0])]
        if not results:
            return
        terminalreporter.section("conformance")
        for result in results:
            worst = max((row.max_ratio for row in result.taps if row.kind == "bounded"), default=0.0)
            terminalreporter.write_line(
                f"{'pass' if result.passed else 'FAIL'} {result.engine} on {result.checkpoint}, {result.schedule}: "
                f"{result.coverage.taps_compared} taps, {result.coverage.elements} values, largest error/allowed "
                f"{worst:.2f}, flips {result.excused} of {result.flips} excused"
            )
            if result.first_divergence is not None:
                terminalreporter.write_line(result.first_divergence.line)
        for note in self.notes:
            terminalreporter.write_line(note)
        path = config.getoption("--report")
        if path is not None:
            from conformance.report import html, machine

            html.write(results, path.with_suffix(".html"))
            machine.write(results, path.with_suffix(".json"))
            terminalreporter.write_line(f"report: {path.with_suffix('.html')}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Collected(), "glm53-collected")
