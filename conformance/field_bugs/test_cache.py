"""Faults of what is remembered between calls."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.checkpoints.shared import shared
from conformance.field_bugs.sides import SIDES, Fast, Reference
from fast.state import StateError
from reference.state import StateLengthError

PROMPT = np.random.default_rng(120).integers(0, 257, 21)


def greedy(model, logits, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        tokens.append(int(np.asarray(logits).argmax()))
        logits = model.decode(tokens[-1])
    return tokens


@SIDES
@pytest.mark.parametrize("accepted", [1, 3])
def test_fb120_rejected_drafts_leave_no_mark(side, accepted):
    """3 drafts, some accepted, the rest forgotten: the next 20 greedy tokens are those of plain decoding."""
    model, plain = side.model(shared("nvidia", "odd")), side.model(shared("nvidia", "odd"))
    logits = plain.prefill(PROMPT)[-1]
    model.prefill(PROMPT)
    drafts = [int(np.asarray(logits).argmax())]
    for _ in range(2):
        logits = plain.decode(drafts[-1])
        drafts.append(int(np.asarray(logits).argmax()))
    drafts[accepted:] = [(token + 1) % 257 for token in drafts[accepted:]]
    kept = side.snapshot(model)
    for token in drafts[:accepted]:
        model.decode(token)
    accepted_state = side.snapshot(model)
    for token in drafts[accepted:]:
        model.decode(token)
    side.restore(model, accepted_state if accepted else kept)
    plain.reset()
    plain.prefill(PROMPT)
    for token in drafts[:accepted]:
        plain.decode(token)
    assert greedy(model, model.decode(3), 20) == greedy(plain, plain.decode(3), 20)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_fb120_a_rolled_back_transaction_leaves_no_mark(accepted):
    """The same through `begin` and `commit`, with the drafts verified in one call; every state bit for bit."""
    side = Fast()
    model, plain = side.model(shared("nvidia", "odd")), side.model(shared("nvidia", "odd"))
    drafts = [5, 6, 7]
    model.prefill(PROMPT)
    model.state.begin()
    model.prefill(drafts)
    model.state.commit(accepted)
    plain.prefill(PROMPT)
    for token in drafts[:accepted]:
        plain.decode(token)
    a, b = model.state.snapshot(), plain.state.snapshot()
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[name].numpy(), b[name].numpy()) for name in a)
    assert greedy(model, model.decode(3), 20) == greedy(plain, plain.decode(3), 20)


def test_fb122_only_a_length_at_which_every_layer_was_saved_can_be_resumed():
    """Attention cached to 21 tokens, recurrent state saved at 10: refused by both, not resumed at 21."""
    oracle, engine = (side.model(shared("nvidia", "odd")) for side in (Reference(), Fast()))
    oracle.prefill(PROMPT[:10])
    early = oracle.snapshot()
    oracle.prefill(PROMPT[10:])
    late = oracle.snapshot()
    late.layers[0] = early.layers[0]
    with pytest.raises(StateLengthError):
        oracle.restore(late)
    engine.prefill(PROMPT[:10])
    saved = engine.state.snapshot()
    engine.prefill(PROMPT[10:])
    kda = [f"layers.{layer}." for layer in engine.config.text.kda_layers]
    mixed = engine.state.snapshot() | {name: x for name, x in saved.items() if name.startswith(tuple(kda))}
    with pytest.raises(StateError, match=r"layers\.1 was saved after 21 tokens, layers\.0 after 10"):
        engine.state.restore(mixed)


@SIDES
def test_fb74_one_sequence_never_writes_into_another(side):
    """Two sequences over one set of weights, taken in turns: each is what it is alone."""
    model, alone = side.model(shared("nvidia", "odd")), side.model(shared("nvidia", "odd"))
    first, second = PROMPT[:12], PROMPT[::-1][:12].copy()
    states = [model.fresh(), model.fresh()]
    found: list[list[np.ndarray]] = [[], []]
    for t in range(12):
        for i, tokens in enumerate((first, second)):
            model.state = states[i]
            found[i].append(np.asarray(model.decode(int(tokens[t]))))
            states[i] = model.state
    for i, tokens in enumerate((first, second)):
        alone.reset()
        assert np.array_equal(np.stack(found[i]), np.stack([np.asarray(alone.decode(int(t))) for t in tokens]))
