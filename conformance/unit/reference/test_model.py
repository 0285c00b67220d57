"""reference.model: the stack whole, in chunks and token by token; padding; state; taps; bad input."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.checkpoints import geometry, make
from conformance.taps import expected as expected_taps
from conformance.unit.fast.runs import Taps, feed
from conformance.unit.reference.bounds import check
from reference.arithmetic import round_bf16, round_f32
from reference.checkpoint import open_checkpoint
from reference.config import KDA
from reference.errors import InputError
from reference.model import Options, PaddingError, SelectionError, TextModel, TokenIdError
from reference.state import DsaState, KdaState, State, StateLengthError

GEOMETRIES = ("tiny", "odd")
T = 37


def _ids(model: TextModel, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, count)


def _run(model: TextModel, ids: np.ndarray, prefill: list[int], pad: int = 0):
    tap = Taps()
    logits = feed(model, ids, prefill, tap, pad)
    return logits, tap.arrays(), dict(model.state.arrays())


def _same(left, right) -> None:
    """Equal to the last bit: logits, every tap, every state."""
    for a, b in zip(left, right, strict=True):
        a, b = ({"logits": side} if isinstance(side, np.ndarray) else side for side in (a, b))
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert np.array_equal(value, b[name]), name


@pytest.mark.parametrize("arithmetic", ["exact", "bf16"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_schedule_gives_the_same_bits(model, geometry, arithmetic):
    """In chunks of awkward lengths with decoding after them, and from the first token one at a time."""
    ids = _ids(model(geometry), T)
    whole = _run(model(geometry, arithmetic=arithmetic), ids, [T])
    for prefill in ([2, 1, 3, 4, 13, 9], []):
        _same(_run(model(geometry, arithmetic=arithmetic), ids, prefill), whole)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_absorbed_is_as_independent_of_the_schedule(model, geometry):
    ids = _ids(model(geometry), T)
    whole = _run(model(geometry, mla="absorbed"), ids, [T])
    _same(_run(model(geometry, mla="absorbed"), ids, [5, 26]), whole)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_one_shot_is_token_by_token_at_every_length(model, geometry):
    """Lengths 1 to past two pools of 8: every position of a pool boundary and of a tail."""
    one, ids, rows = model(geometry), _ids(model(geometry), 18), []
    for length in range(1, 19):
        rows.append(one.decode(ids[length - 1]))
        whole = model(geometry)
        _same((whole.prefill(ids[:length]), dict(whole.state.arrays())), (np.stack(rows), dict(one.state.arrays())))


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("pad", [1, 4, 9])
@pytest.mark.parametrize("first", [1, 22])
def test_left_padding_changes_no_bit(model, geometry, pad, first):
    ids = _ids(model(geometry), 22, seed=pad)
    plain = _run(model(geometry), ids, [22])
    _same(_run(model(geometry), ids, [first, 22 - first], pad), plain)


def test_padding_may_come_in_several_calls(model):
    one = model("tiny")
    ids = _ids(one, 9)
    plain = _run(model("tiny"), ids, [9])
    assert one.prefill([7, 7], pad=2).shape == (0, one.config.vocab_size)
    one.prefill([5, 6, 7, 8], pad=4)
    tap = Taps()
    logits = one.prefill(np.concatenate([[3, 3], ids]), tap, pad=2)
    _same((logits, tap.arrays(), dict(one.state.arrays())), plain)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("forms", [{"mla": "absorbed"}, {"kda": "chunked"}, {"kda": "chunked", "kda_chunk": 5}])
def test_the_other_forms_agree(model, geometry, forms):
    """Forms differ by float64 roundings only; bf16 roundings are 2^45 times larger and give the scale of growth.

    The distance between `exact` and `bf16` is what perturbing every step by 2^-9 does to the logits. Perturbing by
    2^-53 times the longest sum (below 2^12 terms) does at most 2^-32 of that, if no choice flips, which is checked.
    """
    ids = _ids(model(geometry), T)
    logits, taps, _ = _run(model(geometry), ids, [T])
    rounded, _, _ = _run(model(geometry, arithmetic="bf16"), ids, [T])
    other, other_taps, _ = _run(model(geometry, **forms), ids, [T])
    for name in taps:
        if name.endswith((".selected", ".indices")):
            assert np.array_equal(taps[name], other_taps[name]), name
    assert not np.array_equal(logits, other)
    check(other, logits, np.abs(rounded - logits).max() * 2.0**-32)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_taps_are_those_of_the_format(model, geometry):
    one = model(geometry)
    _, taps, _ = _run(one, _ids(one, T), [T])
    table = {name: spec for name, spec in expected_taps(one.checkpoint.config, T).items() if "vision" not in name}
    table = {name: spec for name, spec in table.items() if not name.startswith("mtp.")}
    assert set(taps) == set(table)
    for name, spec in table.items():
        assert taps[name].shape == spec.shape, name


def _storage(name: str) -> str:
    leaf = name.split(".", 2)[-1] if name.startswith("layers.") else name
    if leaf in ("tokens", "indexer.selected", "router.indices"):
        return "integer"
    single = ("attn.g", "attn.beta", "attn.state", "indexer.weights", "indexer.pool_keys", "indexer.scores", "logits")
    if leaf in single or "_hc." in leaf or leaf in ("router.logits", "router.weights"):
        return "fp32"
    return "bf16"


@pytest.mark.parametrize("arithmetic", ["bf16", "stochastic"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_taps_lie_on_the_grids_of_the_storage_contract(model, geometry, arithmetic):
    """bf16 taps are bf16 values; fp32 taps are fp32 values and not all bf16 ones.

    Excepted are the further points, and indexer weights, which are bf16 values times a half where there are 4 heads.
    """
    further: tuple[str, ...] = ("attn.beta", "indexer.pool_keys") if arithmetic == "stochastic" else ()
    further += ("indexer.weights",) if geometry == "tiny" else ()
    one = model(geometry, arithmetic=arithmetic)
    _, taps, _ = _run(one, _ids(one, 18), [18])
    for name, value in taps.items():
        value, kind = np.where(np.isfinite(value), value, 0.0), _storage(name)
        assert np.array_equal(round_f32(value), value), name
        if kind == "bf16":
            assert np.array_equal(round_bf16(value), value), name
        if kind == "fp32" and not name.endswith(further):
            assert not np.array_equal(round_bf16(value), value), name


def test_exact_rounds_nothing(model):
    one = model("tiny")
    _, taps, _ = _run(one, _ids(one, 18), [18])
    for name, value in taps.items():
        if _storage(name) != "integer" and not name.endswith(("embed", "layers.0.in", "indexer.scores")):
            assert not np.array_equal(round_f32(value), value), name


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_stochastic_rows_are_samples(model, geometry):
    """A leading axis of equal inputs: all differ, all near the nearest-rounding run; one seed gives one result."""
    ids = np.broadcast_to(_ids(model(geometry), 9), (6, 9))
    first = model(geometry, arithmetic="stochastic", seed=1).prefill(ids)
    assert first.shape[:2] == (6, 9)
    assert len({row.tobytes() for row in first}) == 6
    assert np.array_equal(model(geometry, arithmetic="stochastic", seed=1).prefill(ids), first)
    assert not np.array_equal(model(geometry, arithmetic="stochastic", seed=2).prefill(ids), first)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_leading_axes_are_independent_sequences(model, geometry):
    one = model(geometry)
    ids = np.stack([_ids(one, 11, seed) for seed in (1, 2)])
    whole = np.concatenate(
        [one.prefill(ids[:, :7]), one.prefill(ids[:, 7:10]), one.decode(ids[:, 10])[:, None]], axis=1
    )
    for row, logits in zip(ids, whole, strict=True):
        assert np.array_equal(model(geometry).prefill(row), logits)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_layers_replayed_on_their_own_taps_give_their_taps(model, geometry):
    """What the judge does: each step alone, from fresh state, with the recorded choices."""
    one = model(geometry)
    _, taps, _ = _run(one, _ids(one, 21), [21])
    for layer in one.layers:
        tap = {
            name.split(".", 2)[2]: value for name, value in taps.items() if name.startswith(f"layers.{layer.index}.")
        }
        hc = layer.hc("attn", tap["in"])
        for name in hc._fields:
            assert np.array_equal(getattr(hc, name), tap[f"attn_hc.{name}"])
        assert np.array_equal(layer.mixer_input(tap["in"], hc.pre), tap["attn.in"])
        selected, indices = tap.get("indexer.selected"), tap.get("router.indices")
        selected = None if selected is None else selected.astype(np.int32)
        indices = None if indices is None else indices.astype(np.int32)
        assert np.array_equal(layer.mixer(tap["attn.in"], selected=selected), tap["attn.out"])
        assert np.array_equal(layer.combine(tap["in"], tap["attn.out"], hc), tap["mid"])
        hc = layer.hc("ffn", tap["mid"])
        assert np.array_equal(layer.mlp_input(tap["mid"], hc.pre), tap["mlp.in"])
        assert np.array_equal(layer.mlp(tap["mlp.in"], indices=indices), tap["mlp.out"])
        assert np.array_equal(layer.combine(tap["mid"], tap["mlp.out"], hc), tap["out"])
        assert np.array_equal(layer(tap["in"], selected=selected, indices=indices), tap["out"])


def test_replayed_choices_are_used(model):
    one = model("tiny")
    _, taps, _ = _run(one, _ids(one, 21), [21])
    x = taps["layers.3.attn.in"]
    few = np.full((21, 3), -1, np.int32)
    few[:, 0] = np.arange(21)
    assert not np.array_equal(one.layers[3].mixer(x, selected=few), taps["layers.3.attn.out"])
    x, indices = taps["layers.3.mlp.in"], (taps["layers.3.router.indices"].astype(np.int32) + 1) % 16
    assert not np.array_equal(one.layers[3].mlp(x, indices=indices), taps["layers.3.mlp.out"])


def test_a_shared_layer_takes_the_set_of_the_last_full_layer(model):
    one = model("odd")
    assert [layer.indexer for layer in one.layers] == [None, "full", None, None, "full", "shared", None]
    _, taps, _ = _run(one, _ids(one, T), [17, 20])
    assert np.array_equal(taps["layers.5.indexer.selected"], taps["layers.4.indexer.selected"])
    assert not np.array_equal(taps["layers.5.indexer.selected"], taps["layers.1.indexer.selected"])
    assert "layers.5.indexer.q" not in taps
    with pytest.raises(SelectionError, match="indexer_types"):
        one.layers[5].mixer(taps["layers.5.attn.in"])


def test_two_shared_layers_in_a_row_and_across_a_kda_layer(tmp_path):
    """Layers 1 full, 4 and 5 shared: both take layer 1's sets, over the KDA layers 2 and 3."""
    types = geometry("odd").config["text_config"]["indexer_types"]
    types = [
        ("shared" if index in (4, 5) else "full") if kind is not None else None for index, kind in enumerate(types)
    ]
    directory = make(tmp_path / "shared", "nvidia", "odd", config={"indexer_types": types})
    one = TextModel(open_checkpoint(directory))
    _, taps, _ = _run(one, _ids(one, 30), [30])
    for index in (4, 5):
        assert np.array_equal(taps[f"layers.{index}.indexer.selected"], taps["layers.1.indexer.selected"])


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_first_divergence_of_a_changed_token_is_causal(model, geometry):
    """A later token changes nothing before it, an earlier one everything after it."""
    ids = _ids(model(geometry), T)
    changed = ids.copy()
    changed[20] = (changed[20] + 1) % model(geometry).config.vocab_size
    before, after = model(geometry).prefill(ids), model(geometry).prefill(changed)
    assert np.array_equal(before[:20], after[:20])
    assert not (before[20:] == after[20:]).all(axis=-1).any()


def test_state_is_what_the_format_says(model):
    one = model("odd")
    one.prefill(_ids(one, 21))
    c = one.config
    for layer, state in zip(one.layers, one.state.layers, strict=True):
        assert state.length == 21
        if layer.kind == KDA:
            assert isinstance(state, KdaState)
            assert state.matrix.shape == (c.linear_num_heads, c.linear_head_dim, c.linear_head_dim)
            assert state.conv.shape == (3, 3 * c.linear_num_heads * c.linear_head_dim)
            continue
        assert isinstance(state, DsaState)
        pools, tail = (0, 0) if layer.indexer == "shared" else divmod(21, c.index_kpool)
        assert state.latent.shape == (21, c.kv_lora_rank)
        assert state.pool_keys.shape == (pools, c.index_head_dim)
        assert state.tail_k.shape == state.tail_gate.shape == (tail, c.index_head_dim)


def test_a_snapshot_survives_what_follows(model):
    one = model("odd")
    ids = _ids(one, 30)
    one.prefill(ids[:13])
    snapshot = one.snapshot()
    kept = {name: value.copy() for name, value in snapshot.arrays()}
    first = one.prefill(ids[13:])
    assert all(np.array_equal(value, kept[name]) for name, value in snapshot.arrays())
    one.restore(snapshot)
    one.prefill(ids[::-1][:11])
    one.restore(snapshot)
    assert np.array_equal(one.prefill(ids[13:]), first)
    one.reset()
    assert one.state.length == 0
    assert np.array_equal(one.prefill(ids)[13:], first)


def test_a_state_of_two_lengths_is_refused(model):
    one = model("tiny")
    one.prefill([1, 2, 3])
    early = one.snapshot()
    one.prefill([4])
    mixed = State([*early.layers[:2], *one.snapshot().layers[2:]])
    with pytest.raises(StateLengthError, match=r"layers\.0: 3.*layers\.2: 4"):
        one.restore(mixed)


BAD_TOKENS = {
    "one past the end": ([3, 512], r"tokens\[1\]: id 512 is outside the vocabulary of 512"),
    "negative": ([-1], r"tokens\[0\]: id -1"),
    "first of several": ([0, 9000, 9001], r"tokens\[1\]: id 9000"),
    "in a batch": ([[1, 2], [3, 600]], r"tokens\[1\]\[1\]: id 600"),
    "not integers": ([1.0, 2.5], r"expected integers, found float64"),
    "text": (["a"], r"expected integers"),
}


@pytest.mark.parametrize("case", BAD_TOKENS)
def test_token_ids_outside_the_vocabulary_are_refused_before_anything_changes(model, case):
    one = model("tiny")
    tokens, message = BAD_TOKENS[case]
    with pytest.raises(TokenIdError, match=message) as caught:
        one.prefill(tokens)
    assert isinstance(caught.value, InputError)
    assert one.state.length == 0
    assert np.array_equal(one.prefill([511, 0]), model("tiny").prefill([511, 0]))


def test_padding_after_a_token_or_longer_than_the_call_is_refused(model):
    one = model("tiny")
    for pad in (3, -1):
        with pytest.raises(PaddingError, match=f"pad: {pad} of 2 tokens"):
            one.prefill([1, 2], pad=pad)
    one.prefill([1, 2])
    with pytest.raises(PaddingError, match="pad: 1 after 2 real tokens"):
        one.prefill([1, 2], pad=1)


def test_no_tokens_change_nothing(model):
    one = model("tiny")
    one.prefill([5, 6])
    before = dict(one.state.arrays())
    assert one.prefill([]).shape == (0, 512)
    assert all(np.array_equal(value, before[name]) for name, value in one.state.arrays())


@pytest.mark.parametrize("wrong", [{"kda": "fast"}, {"mla": "naive"}, {"kda_chunk": 0}])
def test_unknown_forms_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Options(**wrong)
