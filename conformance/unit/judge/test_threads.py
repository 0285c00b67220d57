"""Ranks as threads draft as ranks that are processes do: their block is judged too."""

import numpy as np
import pytest

from conformance.checkpoints.shared import shared
from conformance.engines.threads import ThreadedEngine
from conformance.errors import EngineOptionError
from conformance.trace import Schedule

IDS = np.arange(3, 15)


def test_threads_draft():
    engine = ThreadedEngine()
    engine.open(shared("libertai", "odd"), ep=2, mtp=2)
    first, second = engine.run_ranks(IDS, Schedule((9,), 3), "mtp.*")
    assert first.metadata["mtp"] == second.metadata["mtp"] == "2"
    assert first.taps["mtp.logits"].shape[0] > len(IDS) - 1, "all rows but the last, then drafts"
    assert np.array_equal(first.taps["mtp.logits"], second.taps["mtp.logits"])
    assert not np.array_equal(first.taps["mtp.routed.out"], second.taps["mtp.routed.out"]), "partial sums"
    assert "mtp.shared.out" not in second.taps


def test_threads_refuse_more_drafts_than_rows():
    with pytest.raises(EngineOptionError, match="option mtp=8, expected 0 to 7"):
        ThreadedEngine().open(shared("libertai", "odd"), ep=2, mtp=8)
