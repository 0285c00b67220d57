"""Sharding plans: parts join to the whole byte for byte, every expert has one owner, what cannot be cut is refused."""

import functools
import json

import numpy as np
import pytest

from conformance.checkpoints import geometry
from conformance.checkpoints.configs import config_json
from conformance.checkpoints.shared import shared
from fast import config as fast_config
from fast import layout as fast_layout
from fast import sharding as fast_sharding
from reference import config, layout, sharding
from reference.checkpoint import open_checkpoint
from reference.errors import DivisionError, MeshError
from reference.sharding import Mesh

T = layout.TEXT
SIZES = [(tp, ep) for tp in (1, 2, 4, 8) for ep in (1, 2, 4, 8)]
BOTH = pytest.mark.parametrize("export", layout.EXPORTS)


def meshes(tp, ep):
    return [Mesh(tp, ep, rank) for rank in range(max(tp, ep))]


def stored_arrays(directory):
    opened = open_checkpoint(directory)
    widths = {"BF16": "<u2", "F32": "<u4", "U8": "u1", "F8_E4M3": "u1"}
    arrays = {}
    for name in opened.names():
        dtype, shape, data = opened.raw(name)
        arrays[name] = np.frombuffer(data, widths[dtype]).reshape(shape)
    return opened.config.text, opened.specs, arrays


@pytest.mark.parametrize(
    ("tp", "ep"), [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 4), (4, 4), (1, 16)]
)
@BOTH
def test_parts_join_to_the_whole(export, tp, ep):
    """Over the ranks of one TP group, or the ranks of one expert range, in rank order."""
    text, specs, arrays = stored_arrays(shared(export))
    plans = [sharding.plan(specs.values(), text, mesh) for mesh in meshes(tp, ep)]
    for name, spec in specs.items():
        held = [part for plan in plans if (part := plan[name]) is not None]
        per_copy = max(tp, ep) // ep if spec.expert is not None else tp
        assert len(held) == (per_copy if spec.expert is not None else max(tp, ep)), name
        for first in range(0, len(held), per_copy):
            group = held[first : first + per_copy]
            whole = sharding.join([part.of(arrays[name]) for part in group], group[0].axis)
            np.testing.assert_array_equal(whole, arrays[name], err_msg=name)
        sizes = {part.of(arrays[name]).nbytes for part in held}
        assert len(sizes) == 1


@BOTH
def test_each_rule_at_tp_2(export):
    """Every rule of the table spelled out for one tensor of each kind, second rank of two, `tiny`."""
    text, specs, _ = stored_arrays(shared(export))
    plan = sharding.plan(specs.values(), text, Mesh(2, 1, 1))
    expected = {
        "layers.0.self_attn.q_proj.weight": ("channel rows", 0, 64, 128, ()),
        "layers.0.self_attn.v_conv1d.weight": ("channel rows", 0, 64, 128, ()),
        "layers.0.self_attn.g_b_proj.weight": ("channel rows", 0, 64, 128, ()),
        "layers.0.self_attn.dt_bias": ("channel rows", 0, 64, 128, ()),
        "layers.0.self_attn.A_log": ("head rows", 0, 4, 8, ()),
        "layers.0.self_attn.b_proj.weight": ("head rows", 0, 4, 8, ()),
        "layers.0.self_attn.f_a_proj.weight": ("replicated", None, 0, 0, ()),
        "layers.0.self_attn.g_a_proj.weight": ("replicated", None, 0, 0, ()),
        "layers.0.self_attn.o_norm.weight": ("replicated", None, 0, 0, ()),
        "layers.0.self_attn.o_proj.weight": ("head columns", 1, 64, 128, (0, 1)),
        "layers.3.self_attn.q_b_proj.weight": ("query rows", 0, 64, 128, ()),
        "layers.3.self_attn.kv_b_proj.weight": ("key-value rows", 0, 128, 256, ()),
        "layers.3.self_attn.o_proj.weight": ("head columns", 1, 64, 128, (0, 1)),
        "layers.3.self_attn.q_a_proj.weight": ("replicated", None, 0, 0, ()),
        "layers.3.self_attn.kv_a_proj_with_mqa.weight": ("replicated", None, 0, 0, ()),
        "layers.3.self_attn.indexer.wq_b.weight": ("replicated", None, 0, 0, ()),
        "layers.3.self_attn.indexer.weights_proj.weight": ("replicated", None, 0, 0, ()),
        "layers.3.mlp.gate.weight": ("replicated", None, 0, 0, ()),
        "layers.3.mlp.gate.e_score_correction_bias": ("replicated", None, 0, 0, ()),
        "layers.3.mlp.shared_experts.up_proj.weight": ("width rows", 0, 32, 64, ()),
        "layers.3.mlp.shared_experts.down_proj.weight": ("width columns", 1, 32, 64, (0, 1)),
        "layers.3.mlp.experts.7.gate_proj.weight": ("width rows", 0, 32, 64, ()),
        "layers.3.mlp.experts.7.gate_proj.weight_scale": ("width rows", 0, 32, 64, ()),
        "layers.3.mlp.experts.7.gate_proj.weight_scale_2": ("width rows", None, 0, 0, ()),
        "layers.3.mlp.experts.7.down_proj.weight": ("width columns", 1, 16, 32, (0, 1)),
        "layers.3.mlp.experts.7.down_proj.weight_scale": ("width columns", 1, 2, 4, (0, 1)),
        "layers.3.mlp.experts.7.down_proj.weight_scale_2": ("width columns", None, 0, 0, (0, 1)),
        "layers.0.mlp.down_proj.weight": ("width columns", 1, 64, 128, (0, 1)),
        "layers.0.hc_attn_fn": ("replicated", None, 0, 0, ()),
        "layers.9.eh_proj.weight": ("replicated", None, 0, 0, ()),
        "embed_tokens.weight": ("replicated", None, 0, 0, ()),
    }
    if export == "libertai":
        expected["layers.0.mlp.down_proj.weight"] = ("width columns", 1, 128, 256, (0, 1))
    for leaf, fields in expected.items():
        assert plan[T + leaf] == sharding.Part(*fields), leaf
    assert plan["lm_head.weight"] == sharding.Part("replicated", None, 0, 0)


@pytest.mark.parametrize(("total", "ep"), [(288, 5), (288, 7), (288, 8), (10, 3), (16, 16), (289, 288)])
def test_expert_ranges(total, ep):
    """Contiguous, each expert once, the first (total mod ep) ranges one longer."""
    ranges = [mesh.experts(total) for mesh in meshes(1, ep)]
    assert [expert for one in ranges for expert in one] == list(range(total))
    assert [len(one) for one in ranges] == [total // ep + (rank < total % ep) for rank in range(ep)]


def test_expert_ranges_over_tp_groups():
    """tp 4, ep 2: ranks 0 and 1 divide the first half of the experts by width, ranks 2 and 3 the second."""
    assert [mesh.experts(10) for mesh in meshes(4, 2)] == [range(5), range(5), range(5, 10), range(5, 10)]
    assert [mesh.place(routed=True) for mesh in meshes(4, 2)] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [mesh.place(routed=False) for mesh in meshes(4, 2)] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [list(mesh.tp_ranks()) for mesh in meshes(2, 4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [mesh.adds_shared_expert() for mesh in meshes(2, 4)] == [True, True, False, False]
    assert [mesh.adds_shared_expert() for mesh in meshes(4, 2)] == [True] * 4


def test_partial_sums_are_added_over_the_right_ranks():
    text, specs, _ = stored_arrays(shared("libertai"))
    for tp, ep, mixer, routed in (
        (1, 1, (), ()),
        (1, 2, (), (0, 1)),
        (2, 4, (2, 3), (0, 1, 2, 3)),
        (2, 2, (0, 1), (0, 1)),
    ):
        plan = sharding.plan(specs.values(), text, Mesh(tp, ep, max(tp, ep) - 1))
        last = f"{T}layers.5.mlp.experts.15.down_proj.weight"
        reduced = {name: part.reduced for name, part in plan.items() if part is not None}
        assert reduced[f"{T}layers.5.self_attn.o_proj.weight"] == mixer
        assert reduced[f"{T}layers.5.mlp.shared_experts.down_proj.weight"] == mixer
        assert reduced[last] == routed


REFUSED = [
    ("odd", "libertai", Mesh(4, 1), "q_proj.weight: 6 heads do not divide among 4 ranks"),
    ("odd", "nvidia", Mesh(2, 1), "down_proj.weight: 80 columns among 2 ranks are 40 each, not a multiple of the 16"),
    ("odd", "libertai", Mesh(2, 1), "down_proj.weight: 48 columns among 2 ranks are 24 each"),
    ("odd", "libertai", Mesh(1, 11), "10 routed experts do not fill ep 11 ranges"),
    ("tiny", "nvidia", Mesh(16, 1), "q_proj.weight: 8 heads do not divide among 16 ranks"),
    ("tiny", "libertai", Mesh(8, 1), "down_proj.weight: 64 columns among 8 ranks are 8 each"),
]


@pytest.mark.parametrize(("name", "export", "mesh", "words"), REFUSED, ids=str)
def test_refused_with_the_numbers(name, export, mesh, words):
    chosen = geometry(name)
    parsed = config.parse(chosen.config)
    with pytest.raises(DivisionError) as caught:
        sharding.plan(layout.tensors(parsed, export, chosen.gate_rank), parsed.text, mesh)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("tp", "ep", "rank"), [(0, 1, 0), (1, 0, 0), (-1, 1, 0), (2, 3, 0), (4, 6, 0), (2, 2, 2), (2, 1, -1)]
)
def test_meshes_that_do_not_exist(tp, ep, rank):
    with pytest.raises(MeshError):
        Mesh(tp, ep, rank)


@functools.cache
def both_tables(export, experts):
    """The released model, or its first experts only, as each of the two packages describes it."""
    raw = json.loads(config_json(geometry("full", experts=experts).config, export))
    parsed, other = config.parse(raw), fast_config.parse(raw)
    stored = fast_layout.match(other, fast_layout.export_tensors(other, export, 128))
    return parsed.text, list(layout.tensors(parsed, export, 128)), stored


# Experts differ in their range alone, so sixteen of them stand for all at most sizes.
@pytest.mark.parametrize(("tp", "ep", "experts"), [*((tp, ep, 16) for tp, ep in SIZES), (4, 8, 288), (8, 2, 288)])
@BOTH
def test_agrees_with_the_fast_plan_at_the_released_geometry(export, tp, ep, experts):
    """Two plans written apart: the same part of every tensor on the first and the last rank."""
    text, specs, stored = both_tables(export, experts)
    for rank in sorted({0, max(tp, ep) - 1}):
        mine = sharding.plan(specs, text, Mesh(tp, ep, rank))
        theirs = fast_sharding.plan(stored, fast_sharding.Mesh(tp, ep, rank), experts)
        assert mine.keys() == theirs.keys()
        for name, part in mine.items():
            found = theirs[name]
            if part is None or found is None:
                assert part is None, name
                assert found is None, name
                continue
            assert (part.axis, part.start, part.stop) == (found.axis, found.start, found.stop), name
            assert bool(part.reduced) == found.all_reduce, name
