"""A wrong constant in one layer makes the conformance run fail and name that layer and tap."""

import subprocess
import sys

import pytest

from conformance import suite
from conformance.checkpoints.shared import shared
from conformance.judge import Rebase
from conformance.unit.judge import broken
from reference.checkpoint import open_checkpoint

PLACES = (
    broken.LowerBound,
    broken.SinkhornIterations,
    broken.RoutedScaling,
    broken.LatentEpsilon,
    broken.PoolWidth,
)
CASE = suite.CASES[-1]


@pytest.fixture(scope="module")
def bench():
    directory = shared("nvidia", "odd")
    checkpoint = open_checkpoint(directory)
    return directory, checkpoint, Rebase(checkpoint, remember=True)


@pytest.mark.parametrize("engine", PLACES, ids=lambda engine: engine.__name__)
def test_layer_and_tap_are_named(engine, bench):
    directory, checkpoint, judge = bench
    runner = engine()
    runner.open(directory)
    ids = suite.prompt(checkpoint)
    result = suite.run(runner, checkpoint, ids, CASE, judge=judge, with_operands=False, stop=True)
    assert not result.passed
    assert result.first_divergence is not None
    assert result.first_divergence.tap == f"layers.{engine.layer}.{engine.tap}"
    assert result.first_divergence.layer == engine.layer
    assert result.first_divergence.line.startswith(f"first divergence: TAP layers.{engine.layer}.{engine.tap} (")


def test_the_conformance_run_fails_and_says_where(tmp_path):
    engine = broken.RoutedScaling
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "conformance/test_conformance.py", "-q", "-p", "no:cacheprovider"),
            *("--engine", f"{engine.__module__}:{engine.__name__}", "--export", "nvidia"),
            *("-k", f"odd and {CASE.name}", "--report", str(tmp_path / "report.html")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"first divergence: TAP layers.{engine.layer}.{engine.tap} (" in done.stdout
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"layers.{engine.layer}.{engine.tap}" in page
