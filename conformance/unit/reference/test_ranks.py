"""All ranks in one process: the bits of the reduction's definition, bounds to one rank, refusals, disagreements."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from conformance.checkpoints.shared import shared
from conformance.unit.fast.runs import Taps, feed, tokens
from conformance.unit.reference.bounds import U, check, gamma
from conformance.unit.reference.split import SplitModel
from reference.arithmetic import get_arithmetic
from reference.checkpoint import Checkpoint, open_checkpoint
from reference.errors import DivisionError, MeshError
from reference.model import Moe, TextModel
from reference.rank_taps import RankDisagreementError, RankShapeError, join, ranks_with, rule_of
from reference.ranks import NotOnRankError, RankMoe, RankSource, ShardedLayer, ShardedModel, reduce
from reference.sharding import Mesh, part_of
from reference.state import KdaState

ROUNDING = {"exact": 2.0**-53, "bf16": 2.0**-8}
PARTIAL = {"exact": 2.0**-53, "bf16": 2.0**-24}
T = 38
RUNS = [
    ("tiny", "nvidia", 2, 1),
    ("tiny", "libertai", 2, 1),
    ("tiny", "nvidia", 1, 2),
    ("tiny", "libertai", 1, 2),
    ("tiny", "nvidia", 2, 2),
    ("tiny", "libertai", 2, 2),
    ("tiny", "libertai", 4, 1),
    ("tiny", "nvidia", 4, 2),
    ("tiny", "libertai", 2, 4),
    ("odd", "nvidia", 1, 3),
    ("odd", "libertai", 1, 3),
    ("odd", "libertai", 2, 2),
]
# One of each kind: a divided mixer, divided experts, both, ranks that share an expert, uneven ranges, TP under EP.
KINDS = [RUNS[i] for i in (0, 3, 4, 7, 9, 11)]


def label(value):
    return value if isinstance(value, str) else "{}-{}-tp{}-ep{}".format(*value)


def meshes(runs):
    return pytest.mark.parametrize(("geometry", "export", "tp", "ep"), runs, ids=[label(run) for run in runs])


@functools.cache
def opened(export: str, geometry: str) -> Checkpoint:
    return open_checkpoint(shared(export, geometry))


@functools.cache
def sharded(export: str, geometry: str, tp: int, ep: int, arithmetic: str) -> ShardedModel:
    """One model per mesh, so that a weight is decoded once; whoever runs it resets it first."""
    return ShardedModel(opened(export, geometry), tp, ep, arithmetic)


def ids_of(geometry: str, count: int = T) -> np.ndarray:
    return tokens(3, count, opened("libertai", geometry).config.text.vocab_size)


def run(model, ids, prefill):
    model.reset()
    tap = Taps()
    return feed(model, ids, prefill, tap), tap.arrays(), dict(model.state.arrays())


def same_bits(left, right):
    """Logits, every tap, every state."""
    for a, b in zip(left, right, strict=True):
        a, b = ({"logits": side} if isinstance(side, np.ndarray) else side for side in (a, b))
        assert list(a) == list(b)
        for name, value in a.items():
            assert np.array_equal(value, b[name]), name


@pytest.mark.parametrize(
    ("mesh", "arithmetic"),
    [*((mesh, "bf16") for mesh in RUNS), *((mesh, "exact") for mesh in KINDS)],
    ids=label,
)
def test_the_bits_of_the_definition(mesh, arithmetic):
    """Prefill, then decode: every tap, state and logit of the same sums taken on whole weights."""
    geometry, export, tp, ep = mesh
    ids = ids_of(geometry)
    prefill = [T - 1]
    expected = run(SplitModel(opened(export, geometry), tp, ep, arithmetic), ids, prefill)
    same_bits(run(sharded(export, geometry, tp, ep, arithmetic), ids, prefill), expected)


@pytest.mark.parametrize("arithmetic", ["exact", "bf16", "stochastic"])
def test_one_rank_is_the_text_model(arithmetic):
    ids = ids_of("odd")
    checkpoint = opened("nvidia", "odd")
    same_bits(
        run(ShardedModel(checkpoint, 1, 1, arithmetic, seed=5), ids, [T - 1]),
        run(TextModel(checkpoint, arithmetic, seed=5), ids, [T - 1]),
    )


def slot_sizes(moe, x, routing):
    """|contribution| of every chosen expert, summed over the slots, [.., T, D]."""
    slots = range(routing.indices.shape[-1])
    each = [moe.routed(x, routing.indices[..., [j]], routing.weights[..., [j]]) for j in slots]
    return sum(np.abs(one) for one in each)


@pytest.mark.parametrize(
    ("mesh", "arithmetic"), [*((mesh, "bf16") for mesh in KINDS), *((mesh, "exact") for mesh in KINDS[2::3])], ids=label
)
def test_each_step_is_one_ranks_step_but_for_the_sum(mesh, arithmetic):
    """From the taps of one rank: whatever no sum crosses has the same bits, the sums differ by their own rounding.

    A partial sum p and a running sum s err by u|p| and u|s|, the stored result y by r|y| (u, r: unit roundoffs of
    partial sums and of storage).
    """
    geometry, export, tp, ep = mesh
    u, r = PARTIAL[arithmetic], ROUNDING[arithmetic]
    whole = TextModel(opened(export, geometry), arithmetic)
    many = sharded(export, geometry, tp, ep, arithmetic)
    taps: dict[str, np.ndarray] = {}
    whole.prefill(ids_of(geometry), taps.__setitem__)
    sets = None
    for one, layer in zip(whole.layers, many.layers, strict=True):
        assert isinstance(layer, ShardedLayer)
        name = f"layers.{one.index}."
        x, expected, found = taps[f"{name}attn.in"], taps[f"{name}attn.out"], Taps()
        sets = taps.get(f"{name}indexer.selected", sets)
        selected = sets if one.kind == "dsa" else None
        y = layer.mixer(x, None, found, selected)
        for tap, value in found.arrays().items():
            assert np.array_equal(value, taps[tap]), tap
        if tp == 1:
            assert np.array_equal(y, expected)
        else:
            parts = [rank.mixer(x, None, None, selected) for rank in layer.ranks[:tp]]
            sums = sum(np.abs(np.cumsum(parts, axis=0)[1:])) * (1 + gamma(tp))
            error = u * (sum(map(np.abs, parts)) + sums)
            check(y, expected, error + r * (np.abs(y) + np.abs(expected)))
        x, expected, found = taps[f"{name}mlp.in"], taps[f"{name}mlp.out"], Taps()
        y = layer.mlp(x, found)
        if not isinstance(one.ffn, Moe):
            parts = [rank.mlp(x) for rank in layer.ranks[:tp]]
            error = u * 2 * tp * sum(map(np.abs, parts)) + r * (np.abs(y) + np.abs(expected))
            check(y, expected, error if tp > 1 else 0.0)
            continue
        for tap, value in found.arrays().items():
            assert ".router." not in tap or np.array_equal(value, taps[tap]), tap
        # Per rank: the down product, the weighted contribution, routed.out and routed + shared; then the sums.
        routing = one.ffn.route(x)
        experts = [rank.ffn for rank in layer.ranks if isinstance(rank.ffn, RankMoe)]
        assert len(experts) == max(tp, ep)
        held = sum(slot_sizes(moe, x, routing) + np.abs(moe.shared(x)) for moe in experts)
        error = (4 + len(experts)) * u * held * (1 + 2 * r)
        # One rank also stores routed.out, shared.out and, where ranks divide it, each expert's output.
        stored = np.abs(taps[f"{name}routed.out"]) + np.abs(taps[f"{name}shared.out"])
        stored = stored + (slot_sizes(one.ffn, x, routing) if max(tp, ep) > ep else 0.0)
        check(y, expected, error + r * (np.abs(y) + np.abs(expected) + (1 + 2 * r) * stored) + U * held)


@meshes(KINDS[2::3])
def test_ranks_choose_as_one_rank_does(geometry, export, tp, ep):
    """In exact arithmetic all of a run: same experts, same token sets, same greedy continuation."""
    ids = ids_of(geometry)
    one, one_taps, _ = run(TextModel(opened(export, geometry)), ids, [T])
    many, taps, _ = run(sharded(export, geometry, tp, ep, "exact"), ids, [T])
    assert np.array_equal(one.argmax(-1), many.argmax(-1))
    choices = [name for name in taps if name.endswith(("router.indices", "indexer.selected"))]
    assert len(choices) >= 3
    for name in choices:
        assert np.array_equal(taps[name], one_taps[name]), name


@pytest.mark.parametrize(("geometry", "export", "tp", "ep"), [("tiny", "nvidia", 2, 4), ("odd", "libertai", 2, 2)])
def test_taps_of_ranks_join_to_those_of_the_whole(geometry, export, tp, ep):
    """Every rank reports every tap, its own share of what is divided; `join` gives what the whole's tap heard."""
    model = sharded(export, geometry, tp, ep, "bf16")
    model.reset()
    text, world = model.config, max(tp, ep)
    whole: dict[str, np.ndarray] = {}
    ranks: list[dict[str, np.ndarray]] = [{} for _ in range(world)]
    model.prefill(ids_of(geometry)[:-1], whole.__setitem__, rank_taps=[taps.__setitem__ for taps in ranks])
    model.decode(int(ids_of(geometry)[-1]), whole.__setitem__, rank_taps=[taps.__setitem__ for taps in ranks])
    for rank, taps in enumerate(ranks):
        assert list(taps) == [name for name in whole if rank in ranks_with(name, Mesh(tp, ep))]
    rules = set()
    for name, value in whole.items():
        parts = [taps[name] for taps in ranks if name in taps]
        assert np.array_equal(join(name, [taps.get(name) for taps in ranks], Mesh(tp, ep)), value), name
        divided = rule_of(name) in ("heads", "channels")
        assert (parts[0].size * tp == value.size) if divided else (parts[0].shape == value.shape), name
        rules.add(rule_of(name))
    assert rules == {"heads", "channels", "sum", "replicated"}
    H, d = text.linear_num_heads // tp, text.linear_head_dim
    kda = next(layer.index for layer in model.layers if layer.kind == "kda")
    state = model.state.layers[kda]
    assert isinstance(state, KdaState)
    assert np.array_equal(ranks[1][f"layers.{kda}.attn.state"], state.matrix[H : 2 * H])
    columns = [which * tp * H * d + H * d + c for which in range(3) for c in range(H * d)]
    assert np.array_equal(ranks[1][f"layers.{kda}.attn.conv_state"], state.conv[:, columns])


@pytest.mark.parametrize(
    ("geometry", "export", "tp", "ep", "arithmetic"),
    [("tiny", "libertai", 2, 2, "exact"), ("odd", "libertai", 2, 2, "bf16"), ("odd", "nvidia", 1, 3, "exact")],
)
def test_every_schedule_and_padding_give_the_same_bits(geometry, export, tp, ep, arithmetic):
    ids = ids_of(geometry)
    model = sharded(export, geometry, tp, ep, arithmetic)
    whole = run(model, ids, [T])
    same_bits(run(model, ids, [1, 12, T - 15]), whole)
    model.reset()
    padded = Taps()
    assert np.array_equal(feed(model, ids, [T - 1], padded, pad=3), whole[0])
    for name, value in padded.arrays().items():
        assert np.array_equal(value, whole[1][name]), name
    same_bits([dict(model.state.arrays())], [whole[2]])


def test_snapshots_and_samples_on_a_leading_axis():
    model = sharded("libertai", "tiny", 2, 1, "bf16")
    model.reset()
    ids = ids_of("tiny")
    model.prefill(ids[:9])
    held = model.snapshot()
    after = model.prefill(ids[9:])
    model.restore(held)
    assert np.array_equal(model.prefill(ids[9:]), after)
    model.reset()
    pair = model.prefill(np.stack([ids[:9], ids[9:18]]))
    for row, part in zip(pair, (ids[:9], ids[9:18]), strict=True):
        model.reset()
        assert np.array_equal(model.prefill(part), row)


@pytest.mark.parametrize("form", [{"kda": "chunked", "kda_chunk": 7}, {"mla": "absorbed"}], ids=["chunked", "absorbed"])
def test_forms_on_ranks(form):
    ids = ids_of("tiny")
    checkpoint = opened("libertai", "tiny")
    same_bits(
        run(ShardedModel(checkpoint, 2, 2, **form), ids, [T - 3]),
        run(SplitModel(checkpoint, 2, 2, **form), ids, [T - 3]),
    )


def test_stochastic_ranks_agree_on_what_all_of_them_compute():
    """Replicated steps draw alike on every rank, or the run ends; later draws differ, the same seed repeats them."""
    ids = ids_of("tiny", 12)
    model = ShardedModel(opened("nvidia", "tiny"), 2, 4, "stochastic", seed=1)
    logits = model.prefill(ids)
    model.reset()
    assert not np.array_equal(model.prefill(ids), logits)
    again = ShardedModel(opened("nvidia", "tiny"), 2, 4, "stochastic", seed=1).prefill(ids)
    assert np.array_equal(logits, again)


@pytest.mark.parametrize(("export", "tp", "ep"), [("nvidia", 2, 1), ("libertai", 4, 2), ("libertai", 2, 4)])
def test_a_rank_reads_its_parts_and_no_more(export, tp, ep):
    """Values of all ranks' parts join to the values of the whole; nobody reads an expert of somebody else."""
    checkpoint = opened(export, "tiny")
    text = checkpoint.config.text
    sources = [RankSource(checkpoint, Mesh(tp, ep, rank)) for rank in range(max(tp, ep))]
    foreign = 0
    for name, spec in checkpoint.specs.items():
        if not name.endswith(".weight") or name.startswith("model.visual") or spec.layer not in (0, 3, 9):
            continue
        held = []
        for source in sources:
            part = part_of(spec, text, source.mesh)
            if part is None:
                foreign += 1
                with pytest.raises(NotOnRankError, match=rf"{name}: expert {spec.expert} is not on rank"):
                    source.weight(name)
                continue
            value = source.weight(name)
            assert value.shape == source.shape(name)
            assert np.array_equal(source.rows(name, 1, 3), value[1:3])
            held.append((part.axis, value))
        whole, axis = checkpoint.weight(name), held[0][0]
        if axis is None:
            assert all(np.array_equal(value, whole) for _, value in held), name
            continue
        copies = whole.shape[axis] // held[0][1].shape[axis]
        for first in range(0, len(held), copies):
            assert np.array_equal(np.concatenate([v for _, v in held[first : first + copies]], axis), whole), name
    assert (foreign > 0) == (ep > 1)


REFUSED = [
    ("nvidia", "tiny", 3, 1, DivisionError, "q_proj.weight: 8 heads do not divide among 3 ranks"),
    ("libertai", "odd", 4, 1, DivisionError, "q_proj.weight: 6 heads do not divide among 4 ranks"),
    ("nvidia", "odd", 2, 1, DivisionError, "down_proj.weight: 80 columns among 2 ranks are 40 each, not a multiple of"),
    ("libertai", "odd", 2, 1, DivisionError, "down_proj.weight: 48 columns among 2 ranks are 24 each"),
    ("libertai", "odd", 3, 1, DivisionError, "80 rows do not divide among 3 ranks"),
    ("libertai", "odd", 1, 11, DivisionError, "10 routed experts do not fill ep 11 ranges"),
    ("nvidia", "tiny", 2, 3, MeshError, "tp 2, ep 3"),
    ("nvidia", "tiny", 0, 1, MeshError, "tp 0, ep 1"),
]


@pytest.mark.parametrize(("export", "geometry", "tp", "ep", "error", "words"), REFUSED)
def test_refused_with_the_numbers(export, geometry, tp, ep, error, words):
    with pytest.raises(error, match=words):
        ShardedModel(opened(export, geometry), tp, ep)


class Altered(RankSource):
    """A rank whose copy of some weights differs from everybody else's in the last bit of its first value."""

    name = ""

    def stored(self, name):
        stored = super().stored(name)
        if name.endswith(self.name):
            stored = stored.copy()
            stored.flat[0] ^= 1
        return stored


@pytest.mark.parametrize(
    ("weight", "tp", "ep", "words"),
    [
        ("indexer.wk.weight", 2, 1, r"layers\.3\.indexer\.k.*: ranks 0 and 1 differ at \["),
        ("q_a_proj.weight", 2, 1, r"layers\.3\.(attn\.q_resid|indexer\.q).*: ranks 0 and 1 differ"),
        ("layers.4.mlp.gate.weight", 1, 2, r"layers\.4\.router\.logits: ranks 0 and 1 differ"),
        ("layers.0.mlp.down_proj.weight", 1, 2, r"layers\.0\.mlp\.out before the all-reduce: ranks 0 and 1 differ"),
        ("layers.1.self_attn.o_proj.weight", 2, 4, r"layers\.1\.attn\.out before the all-reduce: ranks 1 and 3 differ"),
    ],
)
def test_ranks_that_disagree_end_the_run(monkeypatch, weight, tp, ep, words):
    altered = type("Altered", (Altered,), {"name": weight})
    last = max(tp, ep) - 1
    monkeypatch.setattr(
        "reference.ranks.RankSource", lambda ckpt, mesh: (altered if mesh.rank == last else RankSource)(ckpt, mesh)
    )
    model = ShardedModel(opened("libertai", "tiny"), tp, ep)
    with pytest.raises(RankDisagreementError, match=words):
        model.prefill(ids_of("tiny", 9), lambda name, value: None)


def test_a_state_that_ranks_share_is_compared_without_taps(monkeypatch):
    altered = type("Altered", (Altered,), {"name": "layers.3.self_attn.indexer.wk.weight"})
    monkeypatch.setattr(
        "reference.ranks.RankSource", lambda ckpt, mesh: (altered if mesh.rank else RankSource)(ckpt, mesh)
    )
    model = ShardedModel(opened("libertai", "tiny"), 2, 1)
    with pytest.raises(RankDisagreementError, match=r"layers\.3\.(pool_keys|tail_k): ranks 0 and 1 differ"):
        model.prefill(ids_of("tiny", 9))


def test_the_order_and_the_roundings_of_the_sum():
    big, small = np.array([2.0**60]), np.array([1.0])
    exact, bf16 = get_arithmetic("exact"), get_arithmetic("bf16")
    assert reduce(exact, [big, -big, small], "attn.out") == 1
    assert reduce(exact, [big, small, -big], "attn.out") == 0
    # 2^24 + 1 is no fp32 number: the running sum loses it, and one bf16 rounding follows.
    parts = [np.array([2.0**24]), small, np.array([-(2.0**24)])]
    assert reduce(bf16, parts, "attn.out") == 0
    assert reduce(exact, parts, "attn.out") == 1
    assert reduce(bf16, [np.array([1.0]), np.array([2.0**-8]), np.array([2.0**-8])], "attn.out") == 1 + 2.0**-7
    stochastic = get_arithmetic("stochastic", 3)
    draws = reduce(stochastic, [np.full(4000, 1.0), np.full(4000, 2.0**-10)], "attn.out")
    assert set(np.unique(draws)) == {1.0, 1 + 2.0**-7}


def part(*shape, start=0.0):
    return (np.arange(np.prod(shape)) + float(start)).reshape(shape)


def test_join():
    two, four = Mesh(2, 1), Mesh(2, 4)
    a, b = part(3, 2, 5), part(3, 2, 5, start=100)
    assert np.array_equal(join("layers.0.attn.q", [a, b], two), np.concatenate([a, b], axis=1))
    assert np.array_equal(join("attn.core", [a, b, a, b], four), np.concatenate([a, b], axis=1))
    assert np.array_equal(join("layers.11.attn.beta", [a[..., 0], b[..., 0]], two), np.hstack([a[..., 0], b[..., 0]]))
    assert join("layers.0.attn.state", [part(2, 4, 4)] * 2, two).shape == (4, 4, 4)
    conv = join("layers.0.attn.conv_state", [part(1, 6), part(1, 6, start=10)], two)
    assert conv.tolist() == [[0, 1, 10, 11, 2, 3, 12, 13, 4, 5, 14, 15]]
    big, small = np.full(2, 2.0**60), np.ones(2)
    assert np.array_equal(join("layers.3.routed.out", [big, -big, small, small], four), [2, 2])
    assert np.array_equal(join("mtp.shared.out", [small, small, None, None], four), [2, 2])
    assert join("layers.3.attn.out", [a.astype(np.float32)] * 2, two).dtype == np.float32
    nan = np.array([np.nan, -0.0])
    assert np.array_equal(join("logits", [nan, nan.copy()], two), nan, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "parts", "error", "words"),
    [
        ("logits", [part(2)], RankShapeError, "1 ranks, expected 2 of tp 2, ep 1"),
        ("logits", [None, part(2)], RankShapeError, "absent on rank 0"),
        ("layers.3.shared.out", [part(2), None], RankShapeError, "absent on rank 1"),
        ("logits", [part(2), part(3)], RankShapeError, r"float64 \[3\] on rank 1, float64 \[2\] on 0"),
        ("logits", [part(2), part(2).astype(np.float32)], RankShapeError, r"float32 \[2\] on rank 1"),
        (
            "layers.3.attn.out",
            [part(2, 3), part(2, 3, start=1)],
            RankDisagreementError,
            r"differ at \[0, 0\]: 0.0 and 1.0",
        ),
        (
            "layers.3.in",
            [np.array([1.0, 0.0]), np.array([1.0, -0.0])],
            RankDisagreementError,
            r"differ at \[1\]: 0.0 and -0.0",
        ),
    ],
)
def test_parts_that_do_not_join(name, parts, error, words):
    with pytest.raises(error, match=words):
        join(name, parts, Mesh(2, 1))


def test_one_tap_for_each_rank():
    model = sharded("libertai", "tiny", 2, 1, "bf16")
    with pytest.raises(ValueError, match="1 taps for 2 ranks"):
        model.prefill([1], rank_taps=[lambda name, value: None])


def test_a_layer_takes_the_choices_it_is_given():
    """Token sets and experts of somebody else, as a judge replays them."""
    model = sharded("libertai", "tiny", 2, 2, "exact")
    whole = TextModel(opened("libertai", "tiny"))
    x = np.random.default_rng(7).standard_normal((6, model.config.hidden_size))
    layer, one = model.layers[3], whole.layers[3]
    width = model.config.index_topk + model.config.index_kpool - 1
    chosen = np.full((6, width), -1, np.int32)
    chosen[:, 0] = np.arange(6) // 2
    experts = np.tile(np.array([0, 7, 8, 15], np.int32), (6, 1))
    for found, expected in (
        (layer.mixer(x, selected=chosen), one.mixer(x, selected=chosen)),
        (layer.mlp(x, indices=experts), one.mlp(x, indices=experts)),
    ):
        check(found, expected, gamma(64) * np.abs(expected).max())
    assert not np.array_equal(layer.mlp(x), layer.mlp(x, indices=experts))
