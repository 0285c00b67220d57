"""The engine under test against the reference: every tap, every operand, every token, on synthetic checkpoints.

Both exports, both small geometries, one real text, prefilled in one go and in odd chunks, then decoded token by token.
`--engine`, `--checkpoint`, `--device`, `--tp`, `--ep` choose what is judged.
"""

import numpy as np
import pytest

from conformance import suite
from conformance.cases.runs import DECODED, text_tokens
from conformance.checkpoints import geometry
from conformance.conftest import RESULT
from conformance.engines import registry
from conformance.judge import Rebase
from reference import layout
from reference.checkpoint import open_checkpoint
from reference.config import parse
from reference.errors import DivisionError
from reference.sharding import Mesh, plan

GEOMETRIES = ("tiny", "odd")
EXPORTS = ("nvidia", "libertai")
PROMPT = 200
DRAFTING, DRAFTS = "odd-chunks+decode", 3
"""The case in which the fast engine's draft block reads along and drafts."""


def pytest_generate_tests(metafunc):
    """One test per checkpoint and case; a real checkpoint takes the place of the synthetic ones."""
    if "place" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    if option("--checkpoint") is not None:
        places = [pytest.param(("given", ""), id=option("--checkpoint").name)]
    else:
        exports = [option("--export")] if option("--export") else EXPORTS
        mesh = option("--tp"), option("--ep")
        places = [
            pytest.param((g, e), id=f"{g}-{e}-seed0") for g in GEOMETRIES for e in exports if divides(g, e, *mesh)
        ]
        assert places, f"no synthetic checkpoint divides among tp {mesh[0]}, ep {mesh[1]}"
    metafunc.parametrize("place", places)


def divides(name, export, tp, ep):
    """Whether a synthetic model can be sharded so; what cannot is refused, which tests of the plans show."""
    shape = geometry(name)
    config = parse(shape.config)
    try:
        plan(layout.tensors(config, export, shape.gate_rank), config.text, Mesh(tp, ep))
    except DivisionError:
        return False
    return True


@pytest.mark.parametrize("case", suite.CASES, ids=lambda case: case.name)
def test_the_engine_agrees_with_the_reference(place, case, synthetic, request, record_property):
    option = request.config.getoption
    directory = option("--checkpoint") if place[0] == "given" else synthetic(*place)
    checkpoint = open_checkpoint(directory)
    engine = registry.create(option("--engine"))
    drafting = option("--engine") == "fast" and case.name == DRAFTING and checkpoint.config.text.mtp_layer is not None
    settings = suite.engine_options(device=option("--device"), tp=option("--tp"), ep=option("--ep"))
    engine.open(directory, **settings, **({"mtp": DRAFTS} if drafting else {}))
    ids = suite.prompt(checkpoint)
    assert suite.fits(case, ids), f"{len(ids)} tokens are too few for {case.name}"
    result = suite.run(engine, checkpoint, ids, case, judge=Rebase(checkpoint), asked=settings)
    record_property(RESULT, result.to_json())
    assert result.passed, result.first_divergence and result.first_divergence.line
    if option("--engine") == "fast":
        assert not result.coverage.taps_missing
        assert not result.coverage.tensors_missing
        assert any(row.tap.startswith("mtp.") for row in result.taps) == drafting


def test_the_text_is_long_enough():
    assert len(text_tokens()) >= PROMPT + DECODED
    assert np.any(text_tokens() >= 128), "the text must hold bytes outside ASCII"
