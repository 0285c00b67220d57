"""The fast engine's plan: every byte on exactly the ranks that need it, refusals with their numbers."""

import functools
import json
import math

import pytest

from conformance.checkpoints import geometry
from conformance.checkpoints.configs import config_json
from fast import config, layout
from fast import errors as e
from fast.sharding import Mesh, plan

T = layout.PREFIX
SIZES = [(tp, ep) for tp in (1, 2, 4, 8) for ep in (1, 2, 4, 8)]
EXPORTS = ("nvidia", "libertai")
KDA, DSA, MOE = f"{T}layers.0.self_attn.", f"{T}layers.3.self_attn.", f"{T}layers.3.mlp."


@functools.cache
def released(export):
    """(config, tensors, matched weights) at the released widths: layers 0-3, 16 experts, the MTP block as layer 4."""
    raw = json.loads(config_json(geometry("full", layers=(0, 1, 2, 3), experts=16).config, export))
    parsed = config.parse(raw)
    tensors = layout.export_tensors(parsed, export, 128)
    return parsed, tensors, layout.match(parsed, tensors)


@functools.cache
def planned(export, tp, ep, rank, vocab="replicated"):
    parsed, _, stored = released(export)
    return plan(stored, Mesh(tp, ep, rank, vocab), parsed.text.n_routed_experts)


@pytest.mark.parametrize(("tp", "ep"), SIZES)
def test_slices_tile_every_tensor_of_the_released_model(tp, ep):
    """Over one TP group, and over the ranks of one expert range: parts in rank order, no gap, no overlap."""
    parsed, tensors, _ = released("nvidia")
    world, experts = max(tp, ep), parsed.text.n_routed_experts
    plans = [planned("nvidia", tp, ep, rank) for rank in range(world)]
    for name, info in tensors.items():
        held = [p[name] for p in plans if p[name] is not None]
        routed = ".mlp.experts." in name
        copies = world // ep if routed else tp
        assert len(held) == (copies if routed else world), name
        for first in range(0, len(held), copies):
            group = held[first : first + copies]
            if group[0].axis is None:
                assert all(part == group[0] for part in group), name
                continue
            edges = [group[0].start, *(part.stop for part in group)]
            assert edges == sorted(set(edges)), name
            assert [part.start for part in group] == edges[:-1], name
            assert (edges[0], edges[-1]) == (0, info.shape[group[0].axis]), name
    owned = [set(Mesh(tp, ep, rank).experts(experts)) for rank in range(0, world, world // ep)]
    assert sum(map(len, owned)) == experts == len(set.union(*owned))


RULES = {
    KDA + "q_proj.weight": ("channel rows", 0, 8192, 128),
    KDA + "v_conv1d.weight": ("channel rows", 0, 8192, 128),
    KDA + "f_b_proj.weight": ("channel rows", 0, 8192, 128),
    KDA + "dt_bias": ("channel rows", 0, 8192, 128),
    KDA + "A_log": ("head rows", 0, 64, 1),
    KDA + "b_proj.weight": ("head rows", 0, 64, 1),
    KDA + "o_proj.weight": ("input columns", 1, 8192, 128),
    KDA + "f_a_proj.weight": ("replicated", None, 0, 1),
    KDA + "g_a_proj.weight": ("replicated", None, 0, 1),
    KDA + "o_norm.weight": ("replicated", None, 0, 1),
    DSA + "q_b_proj.weight": ("head rows", 0, 16384, 256),
    DSA + "kv_b_proj.weight": ("kv head rows", 0, 32768, 512),
    DSA + "o_proj.weight": ("input columns", 1, 16384, 256),
    DSA + "q_a_proj.weight": ("replicated", None, 0, 1),
    DSA + "kv_a_proj_with_mqa.weight": ("replicated", None, 0, 1),
    DSA + "indexer.wq_b.weight": ("replicated", None, 0, 1),
    DSA + "indexer.weights_proj.weight": ("replicated", None, 0, 1),
    MOE + "gate.weight": ("replicated", None, 0, 1),
    MOE + "gate.e_score_correction_bias": ("replicated", None, 0, 1),
    MOE + "shared_experts.gate_proj.weight": ("width rows", 0, 2048, 1),
    MOE + "shared_experts.down_proj.weight": ("input columns", 1, 2048, 1),
    MOE + "experts.0.up_proj.weight": ("expert rows", 0, 2048, 1),
    MOE + "experts.0.up_proj.weight_scale": ("expert rows", 0, 2048, 1),
    MOE + "experts.0.down_proj.weight": ("expert columns", 1, 1024, 8),
    MOE + "experts.0.down_proj.weight_scale": ("expert columns", 1, 128, 1),
    MOE + "experts.0.down_proj.weight_scale_2": ("expert columns", None, 0, 1),
    f"{T}layers.0.mlp.down_proj.weight": ("input columns", 1, 6144, 8),
    f"{T}layers.0.hc_attn_fn": ("replicated", None, 0, 1),
    f"{T}layers.4.eh_proj.weight": ("replicated", None, 0, 1),
    f"{T}embed_tokens.weight": ("vocabulary rows", None, 0, 1),
    "model.visual.blocks.0.attn.qkv.weight": ("replicated", None, 0, 1),
}


@pytest.mark.parametrize(("name", "rule"), RULES.items(), ids=[name.removeprefix(T) for name in RULES])
def test_each_rule_on_rank_1_of_2(name, rule):
    label, axis, size, unit = rule
    part = planned("nvidia", 2, 1, 1)[name]
    assert (part.rule, part.axis) == (label, axis)
    if axis is not None:
        assert (part.start, part.stop) == (size // 2, size)
        assert part.start % unit == 0
    assert part.all_reduce == label.endswith("columns")


@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (2, 2), (4, 2)])
def test_experts_are_summed_over_all_ranks(tp, ep):
    """Also where a rank holds whole experts, and mixers only over their TP group."""
    part = planned("nvidia", tp, ep, 0)
    assert part[MOE + "experts.0.down_proj.weight"].all_reduce
    assert part[KDA + "o_proj.weight"].all_reduce == (tp > 1)
    assert not part[MOE + "experts.0.gate_proj.weight"].all_reduce


@pytest.mark.parametrize(
    ("total", "ep", "counts"),
    [(288, 5, [58, 58, 58, 57, 57]), (288, 7, [42] + [41] * 6), (10, 4, [3, 3, 2, 2]), (3, 3, [1, 1, 1])],
)
def test_uneven_experts(total, ep, counts):
    ranges = [Mesh(1, ep, rank).experts(total) for rank in range(ep)]
    assert [len(r) for r in ranges] == counts
    assert [i for r in ranges for i in r] == list(range(total))


def test_places_of_ranks():
    assert [(m.tp_rank, m.ep_rank, m.expert_tp_rank) for m in (Mesh(4, 2, r) for r in range(4))] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    wide = [Mesh(2, 4, r) for r in range(4)]
    assert [(m.tp_rank, m.ep_rank) for m in wide] == [(0, 0), (1, 1), (0, 2), (1, 3)]
    assert [list(m.tp_group) for m in wide] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [m.adds_shared for m in wide] == [True, True, False, False]


@pytest.mark.parametrize(("vocab", "embed", "head"), [("replicated", 0, 0), ("head", 0, 1), ("split", 1, 1)])
def test_vocabulary(vocab, embed, head):
    part = planned("libertai", 2, 1, 1, vocab)
    for name, cut in ((f"{T}embed_tokens.weight", embed), ("lm_head.weight", head)):
        assert (part[name].axis, part[name].start, part[name].stop) == ((0, 77440, 154880) if cut else (None, 0, 0))
        assert not part[name].all_reduce


@pytest.mark.parametrize(
    ("tp", "ep", "rank", "vocab", "error"),
    [
        (0, 1, 0, "replicated", e.RankRangeError),
        (1, -1, 0, "replicated", e.RankRangeError),
        (2, 1, 2, "replicated", e.RankRangeError),
        (2, 2, -1, "replicated", e.RankRangeError),
        (2, 3, 0, "replicated", e.MeshError),
        (4, 6, 0, "replicated", e.MeshError),
        (2, 1, 0, "all", e.MeshError),
    ],
)
def test_meshes_that_do_not_exist(tp, ep, rank, vocab, error):
    with pytest.raises(error):
        Mesh(tp, ep, rank, vocab)


def odd(export, mesh, **changes):
    raw = json.loads(config_json(geometry("odd").config, export))
    raw["text_config"] |= changes
    parsed = config.parse(raw)
    return plan(layout.match(parsed, layout.export_tensors(parsed, export, 12)), mesh, parsed.text.n_routed_experts)


WIDE = {"moe_intermediate_size": 64, "intermediate_size": 96}
REFUSED = {
    "KDA heads": ("libertai", Mesh(4), {}, "q_proj.weight: 6 KDA heads do not divide among 4 ranks"),
    "DSA heads": (
        "libertai",
        Mesh(3),
        {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96},
        "4 attention heads",
    ),
    "width": ("libertai", Mesh(3), {"intermediate_size": 80}, "80 intermediate columns do not divide among 3 ranks"),
    "dense blocks": ("nvidia", Mesh(2), {}, "down_proj.weight: 80 columns among 2 ranks are 40 each"),
    "expert blocks": ("libertai", Mesh(2), {}, "experts.0.down_proj.weight: 48 columns among 2 ranks are 24 each"),
    "vocabulary": ("libertai", Mesh(2, vocab="head"), WIDE, "lm_head.weight: 257 vocabulary rows"),
}


@pytest.mark.parametrize(("export", "mesh", "changes", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_with_the_numbers(export, mesh, changes, words):
    with pytest.raises(e.IndivisibleError, match=words):
        odd(export, mesh, **changes)


@pytest.mark.parametrize("export", EXPORTS)
def test_wider_experts_divide(export):
    assert odd(export, Mesh(2, 1, 1), **WIDE)


def test_more_ranges_than_experts():
    with pytest.raises(e.TooManyRanksError, match="ep 11: more ranges than the 10"):
        odd("libertai", Mesh(1, 11))


def test_bytes_of_ranks_add_up():
    """Over TP8: what is cut is there once, what is replicated eight times."""
    _, tensors, _ = released("libertai")
    plans = [planned("libertai", 8, 1, rank) for rank in range(8)]
    for name, info in tensors.items():
        local = [math.prod(p[name].shape(info.shape)) for p in plans]
        whole = math.prod(info.shape)
        assert sum(local) == (whole if plans[0][name].axis is not None else 8 * whole), name
