"""Faults of arithmetic that English prompts do not show."""

from __future__ import annotations

import numpy as np

from conformance.checkpoints.shared import shared
from conformance.field_bugs.sides import Fast, Reference

KOREAN = "한국어 문장과 이모지 🙂🚀, 그리고 조금 더: 가나다라마바사아자차카타파하."


def test_fb146_fragments_of_characters_get_the_same_next_token():
    """Bytes of Hangul and emoji as ids: the engine's best token is the oracle's at every one of them."""
    ids = np.frombuffer(KOREAN.encode(), np.uint8).astype(np.int64)
    assert np.frombuffer(ids.astype(np.uint8).tobytes(), np.uint8).tobytes().decode() == KOREAN
    expected, found = (np.asarray(side.model(shared("nvidia", "odd")).prefill(ids)) for side in (Reference(), Fast()))
    assert np.array_equal(found.argmax(-1), expected.argmax(-1))
