"""fast.model.TextModel: float32 against the oracle, and what has to hold bit for bit."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from conformance.checkpoints.shared import shared
from conformance.taps import expected as expected_taps
from conformance.unit.fast.runs import AGREEMENT, Taps, distance, exact, feed, tokens
from fast.errors import InputError
from fast.linear import ROWS
from fast.loader import load
from fast.model import PaddingError, TextModel, TokenError
from reference.checkpoint import open_checkpoint

CASES = [(g, e) for g in ("tiny", "odd") for e in ("nvidia", "libertai")]
EVERY = pytest.mark.parametrize(("geometry", "export"), CASES, ids=["-".join(case) for case in CASES])
BOTH = pytest.mark.parametrize("geometry", ["tiny", "odd"])
T = 77


@pytest.fixture(scope="module")
def oracle(checkpoint):
    """oracle(geometry, export) -> logits and taps of T tokens in exact arithmetic, whose bits no schedule changes."""
    return lambda geometry, export: exact(checkpoint(geometry, export), T, T)


@pytest.fixture(scope="module")
def weights(checkpoint):
    return cache(lambda geometry, export="nvidia": load(checkpoint(geometry, export), progress=False))


def prompt(model: TextModel, count: int = T) -> np.ndarray:
    return tokens(1, count, model.config.text.vocab_size)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def agrees(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Every tap, selections and experts exactly."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name.endswith((".selected", ".indices", "tokens")):
            assert np.array_equal(found[name], value), name
        else:
            assert distance(found[name], value) <= AGREEMENT, (name, distance(found[name], value))


@EVERY
@pytest.mark.parametrize("prefill", [[T], [T - 16], [1, 13, 3, 40]], ids=str)
def test_float32_agrees_with_exact_arithmetic(weights, oracle, geometry, export, prefill):
    model = TextModel(weights(geometry, export), dtype=torch.float32)
    taps = Taps()
    logits = feed(model, prompt(model), prefill, taps)
    expected, expected_taps_ = oracle(geometry, export)
    agrees(taps.arrays(), expected_taps_)
    assert distance(logits, expected) <= AGREEMENT


@BOTH
@pytest.mark.parametrize(
    "options", [{"kda_chunk": 1}, {"kda_chunk": 16}, {"kda_chunk": 37}, {"mla": "expanded"}, {"window": 10}], ids=str
)
def test_every_form_agrees(weights, oracle, geometry, options):
    model = TextModel(weights(geometry), dtype=torch.float32, **options)
    taps = Taps()
    feed(model, prompt(model), [T], taps)
    agrees(taps.arrays(), oracle(geometry, "nvidia")[1])


@BOTH
def test_token_by_token_agrees(weights, oracle, geometry):
    model = TextModel(weights(geometry), dtype=torch.float32)
    taps = Taps()
    feed(model, prompt(model), [], taps)
    agrees(taps.arrays(), oracle(geometry, "nvidia")[1])


@BOTH
@pytest.mark.parametrize("pad", [1, 4, 11])
@pytest.mark.parametrize("prefill", [[20, 17], [1, 36]], ids=str)
def test_left_padding_changes_no_bit(weights, geometry, pad, prefill):
    plain, padded = (TextModel(weights(geometry)) for _ in range(2))
    expected, found = Taps(), Taps()
    logits = feed(plain, prompt(plain, 39), prefill, expected)
    assert np.array_equal(feed(padded, prompt(plain, 39), prefill, found, pad), logits)
    assert equal(found.arrays(), expected.arrays())
    assert same(plain.state.arrays(), padded.state.arrays())


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("start", [0, 30])
def test_a_row_does_not_depend_on_the_rows_beside_it(weights, geometry, dtype, start):
    """2 to 8 rows in one call: logits, taps and states are those of decoding the same tokens one by one."""
    model = TextModel(weights(geometry), dtype=dtype)
    ids = prompt(model, start + ROWS)
    model.prefill(ids[:start])
    before = model.state.snapshot()
    alone = []
    for token in ids[start:]:
        taps = Taps()
        alone.append((model.decode(int(token), taps).numpy(), taps, model.state.snapshot()))
    for count in (2, 3, 5, ROWS):
        model.state.restore(before)
        beside = Taps()
        logits = model.prefill(ids[start : start + count], beside).numpy()
        assert np.array_equal(logits, np.stack([row for row, _, _ in alone[:count]]))
        one_by_one = Taps()
        for _, taps, _ in alone[:count]:
            for name, parts in taps.parts.items():
                one_by_one.parts.setdefault(name, []).extend(parts)
        assert equal(beside.arrays(), one_by_one.arrays())
        assert same(model.state.snapshot(), alone[count - 1][2])


@pytest.mark.parametrize(("geometry", "start"), [("odd", 5), ("odd", 31), ("odd", 32), ("tiny", 30)])
def test_rejected_rows_leave_no_trace(weights, geometry, start):
    """After `commit(kept)` states and the next tokens are those of a run that saw only the kept rows, bit for bit."""
    model = TextModel(weights(geometry))
    V = model.config.text.vocab_size
    drafts, after = tokens(2, 5, V), tokens(3, 3, V)
    model.prefill(prompt(model, start))
    before = model.state.snapshot()
    for kept in range(len(drafts) + 1):
        model.state.restore(before)
        for token in drafts[:kept]:
            model.decode(int(token))
        plain = model.state.snapshot()
        logits, end = feed(model, after, []), model.state.snapshot()
        model.state.restore(before)
        model.state.begin()
        model.prefill(drafts)
        model.state.commit(kept)
        assert same(model.state.snapshot(), plain)
        assert np.array_equal(feed(model, after, []), logits)
        assert same(model.state.snapshot(), end)


def test_a_snapshot_brings_everything_back(weights):
    model = TextModel(weights("tiny"))
    ids = prompt(model)
    model.prefill(ids[:30])
    kept = model.state.snapshot()
    first = feed(model, ids[30:40], [7])
    model.state.restore(kept)
    assert np.array_equal(feed(model, ids[30:40], [7]), first)


@BOTH
@pytest.mark.parametrize("prefill", [[50, 1, 9], [60]], ids=str)
def test_taps_are_the_documented_ones_and_cost_no_bit(weights, checkpoint, geometry, prefill):
    """Names, shapes and kinds of the public table; without a callback the same numbers come out."""
    model = TextModel(weights(geometry))
    seen: dict[str, list[torch.Tensor]] = {}
    logits = feed(model, prompt(model, 60), prefill, lambda name, x: seen.setdefault(name, []).append(x))
    config = open_checkpoint(checkpoint(geometry, "nvidia")).config
    table = {name: spec for name, spec in expected_taps(config, 60).items() if not name.startswith(("mtp.", "vision."))}
    assert seen.keys() == table.keys()
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32"}
    for name, parts in seen.items():
        assert {names[part.dtype] for part in parts} <= set(table[name].dtypes), name
        last = parts[-1] if name.endswith("state") else None
        rows = len(last) if last is not None else sum(len(part) for part in parts)
        assert (rows, *parts[-1].shape[1:]) == table[name].shape, name
    model.reset()
    assert np.array_equal(feed(model, prompt(model, 60), prefill), logits)


@BOTH
def test_unwritten_memory_is_never_read(weights, geometry):
    """Every torch.empty is filled with NaN or a huge integer first."""
    model = TextModel(weights(geometry))
    ids = prompt(model)
    plain = feed(model, ids, [40, 30])
    model.reset()
    torch.use_deterministic_algorithms(True)
    try:
        assert getattr(torch.utils.deterministic, "fill_uninitialized_memory")  # noqa: B009
        poisoned = feed(model, ids, [40, 30])
    finally:
        torch.use_deterministic_algorithms(False)
    assert np.array_equal(plain, poisoned)


def test_a_window_is_a_chunk(weights):
    ids = prompt(TextModel(weights("odd")))
    one = feed(TextModel(weights("odd"), window=30), ids, [T])
    assert np.array_equal(one, feed(TextModel(weights("odd")), ids, [30, 30, 17]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, V: m.prefill([1, V]), TokenError, "id {V} at position 1, expected 0 to {last}"),
        (lambda m, V: m.decode(-1), TokenError, "id -1 at position 0"),
        (lambda m, V: m.prefill([1, 2], pad=3), PaddingError, "pad: 3 of 2 tokens after 0"),
        (lambda m, V: (m.prefill([1]), m.prefill([1, 2], pad=1)), PaddingError, "pad: 1 of 2 tokens after 1"),
    ],
    ids=["past", "negative", "pad-too-long", "pad-late"],
)
def test_bad_calls_are_refused(weights, call, error, message):
    model = TextModel(weights("odd"))
    V = model.config.text.vocab_size
    with pytest.raises(error, match=message.format(V=V, last=V - 1)):
        call(model, V)


@pytest.mark.parametrize("options", [{"mla": "dense"}, {"kda_chunk": 0}, {"window": 0}], ids=str)
def test_unknown_forms_are_refused(weights, options):
    with pytest.raises(InputError, match=next(iter(options))):
        TextModel(weights("odd"), **options)


def test_padding_alone_leaves_a_fresh_state(weights):
    model = TextModel(weights("odd"))
    assert model.prefill([3, 4], pad=2).shape == (0, model.config.text.vocab_size)
    assert same(model.state.arrays(), model.fresh().arrays())


@pytest.mark.parametrize("tokens", [[1.5], [[1, 2]], [True], "ab", None], ids=str)
def test_what_is_no_list_of_integers_is_refused(tokens):
    model = TextModel(shared("nvidia", "odd"))
    with pytest.raises(TokenError, match="integers"):
        model.prefill(tokens)
