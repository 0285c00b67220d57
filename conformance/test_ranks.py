"""The fast engine on several ranks, as processes that meet over gloo, against the reference.

Heads divided, experts divided, and both, on both exports: every tap joined from the ranks' own, every operand of every
rank against the part that the plan gives it, prefill and decode. `pytest conformance --tp N --ep N` runs the cases of
`test_conformance` on any other mesh; this file is left out then.
"""

from conformance import suite
from conformance.conftest import RESULT
from conformance.engines import registry
from conformance.judge import Rebase
from reference.checkpoint import open_checkpoint
from reference.sharding import Mesh

EXPORTS = ("nvidia", "libertai")
MESHES = ((2, 1), (1, 2), (2, 2))
CASES = [("tiny", export, *mesh) for export in EXPORTS for mesh in MESHES] + [("odd", "libertai", 2, 2)]
CASE = suite.Case("one-go+decode", 45)
"""More pools than a token may select, and every token after the prefill alone."""


def pytest_generate_tests(metafunc):
    """One test per checkpoint and mesh, with `--export` of that export only."""
    chosen = metafunc.config.getoption("--export")
    cases = [case for case in CASES if chosen in (None, case[1])]
    ids = [f"{geometry}-{export}-seed0-tp{tp}-ep{ep}" for geometry, export, tp, ep in cases]
    metafunc.parametrize(("geometry", "export", "tp", "ep"), cases, ids=ids)


def test_ranks_agree_with_the_reference(geometry, export, tp, ep, synthetic, record_property):
    directory = synthetic(geometry, export)
    checkpoint = open_checkpoint(directory)
    engine = registry.create("fast")
    engine.open(directory, tp=tp, ep=ep, timeout=60)
    result = suite.run(engine, checkpoint, suite.prompt(checkpoint), CASE, judge=Rebase(checkpoint))
    record_property(RESULT, result.to_json())
    assert result.passed, result.first_divergence and result.first_divergence.line
    assert not result.coverage.taps_missing
    assert not result.coverage.tensors_missing
    held = {row.part.rpartition("rank ")[2] for row in result.tensors}
    assert held == {str(rank) for rank in range(Mesh(tp, ep).world)}
