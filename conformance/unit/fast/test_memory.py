"""The plan: equal to the ledger to the byte, to published figures or their explanation, to the state it counts."""

import functools
import json
from typing import Any

import numpy as np
import pytest

from conformance.checkpoints import geometry
from conformance.checkpoints.configs import config_json
from conformance.checkpoints.shared import shared
from fast import config, layout, memory
from fast import errors as e
from fast.generate import Generator
from fast.loader import load
from fast.memory import GIB, HARDWARE, cache_bytes, state_bytes, weights_plan, workspace_bytes, workspace_layout
from fast.model import TextModel
from fast.mtp import Mtp
from fast.nvfp4 import encode_workspace
from fast.sharding import Mesh
from fast.state import DsaState, KdaState
from tools.errors import UsageError
from tools.plan import plan as plans
from tools.plan import source

EXPORTS = ("nvidia", "libertai")
MESHES = [(1, 1), (4, 1), (1, 2), (1, 3), (2, 2), (4, 2), (2, 4)]


@functools.cache
def released(export):
    parsed = config.parse(json.loads(config_json(geometry("full").config, export)))
    return parsed, layout.export_tensors(parsed, export, 128)


@functools.cache
def weights_of(export, mesh, mtp=False, vision=False):
    parsed, tensors = released(export)
    return weights_plan(parsed, tensors, mesh, mtp=mtp, vision=vision, on_host=False)


# --- plan and ledger -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "ep"), MESHES)
@pytest.mark.parametrize("export", EXPORTS)
def test_ledger_equals_the_plan_to_the_byte(export, tp, ep):
    """By role, in sum, at the peak, on both places, and in bytes read; from shapes alone against a real load."""
    extra: Any
    for extra in ({"mtp": False, "vision": False}, {"mtp": True, "vision": True}):
        for rank in {0, max(tp, ep) - 1}:
            weights = load(shared(export), tp=tp, ep=ep, rank=rank, **extra)
            shapes = layout.export_tensors(weights.config, export, geometry("tiny").gate_rank)
            wanted = weights_plan(weights.config, shapes, Mesh(tp, ep, rank), **extra)
            roles = weights.ledger.by_role("weights")
            assert roles.pop("alignment") == wanted.alignment
            assert roles == wanted.roles
            assert weights.ledger.current() == wanted.resident == sum(s.numel() for s in weights.store.slabs)
            assert weights.ledger.peak() == wanted.peak
            assert (weights.ledger.peak("host"), weights.ledger.peak("device")) == (
                wanted.peak_host,
                wanted.peak_device,
            )
            assert weights.log.bytes_read == wanted.bytes_read
            assert len(weights.ledger.entries()) - len(weights.store.slabs) == wanted.tensors


@pytest.mark.parametrize("export", EXPORTS)
def test_odd_ledger_equals_the_plan(export):
    weights = load(shared(export, "odd"), ep=3, rank=2, mtp=True)
    wanted = weights_plan(weights.config, weights.store.directory.tensors, Mesh(1, 3, 2), mtp=True, vision=False)
    assert (weights.ledger.current(), weights.ledger.peak()) == (wanted.resident, wanted.peak)


# --- published figures (exports.md 4.2) ------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_atlas_ep2(rank):
    """LibertAI, text stack only: mixers, embeddings, router and shared experts whole, half of the routed experts."""
    planned = weights_of("libertai", Mesh(1, 2, rank))
    assert sum(planned.roles.values()) == 103_456_806_008
    assert planned.tensors == 55_678
    assert planned.bytes_read == 103_456_806_008
    assert planned.alignment < 64 << 10


def test_tensorfold_tp2():
    """nvidia, text stack, lm_head split, embedding whole; 24 bytes more for each of its 36,297 packed linears."""
    planned = weights_of("nvidia", Mesh(2, 1, 0, "head"))
    packed = 3 * 42 * 288 + 3 * 3
    assert packed == 36_297
    assert sum(planned.roles.values()) + 24 * packed == 95_140_735_476
    assert abs(planned.roles["routed experts, text"] / GIB - 79.734) < 0.001


@pytest.mark.parametrize(("export", "published", "excess"), [("libertai", 88.57, 0.26), ("nvidia", 88.27, 0.26)])
def test_vllm_tp2(export, published, excess):
    """Both vocabulary matrices split, no MTP block: vLLM reports a quarter of a GiB more for either export."""
    planned = sum(weights_of(export, Mesh(2, 1, 0, "split")).roles.values()) / GIB
    assert 0 < published - planned < excess


def test_mtp_experts_in_bf16():
    """14.5 GB on disk, half a rank at EP2 (432 tensors), none of it resident; 3.6 times less as NVFP4."""
    whole = weights_of("nvidia", Mesh(), mtp=True)
    assert whole.deferred == 14_495_514_624
    assert whole.roles["routed experts, MTP"] == 4_076_866_944
    half = weights_of("nvidia", Mesh(1, 2, 1), mtp=True, vision=True)
    assert half.deferred == 7_247_757_312 == 432 * 2048 * 4096 * 2
    assert half.staging == 2048 * 4096 * 2 + encode_workspace(2048, 4096) + 2048 * 4096 * 9 // 16 + 4
    assert 3.5 < whole.deferred / whole.roles["routed experts, MTP"] < 3.6
    assert weights_of("libertai", Mesh(), mtp=True).deferred == 0


def test_vllm_mtp_block_at_tp2():
    """6.75 to 6.9 GiB: the halves of the BF16 experts alone are 6.75, with everything else of the block 6.94."""
    planned = weights_of("nvidia", Mesh(2, vocab="split"), mtp=True)
    rest = sum(planned.roles.values()) - planned.roles["routed experts, MTP"]
    rest -= sum(weights_of("nvidia", Mesh(2, 1, 0, "split")).roles.values())
    assert planned.deferred / GIB == 6.75
    assert 6.9 < (planned.deferred + rest) / GIB < 7.0


def test_vision():
    planned = weights_of("nvidia", Mesh(1, 2, 1), mtp=True, vision=True)
    assert planned.roles["vision"] == 1_127_254_016
    assert round(planned.roles["vision"] / GIB, 2) == 1.05
    assert "vision" not in weights_of("libertai", Mesh(1, 2, 1)).roles


def test_tp4():
    """49.17 GiB a GPU for nvidia: with the BF16 MTP block and the vision tower, within a third of a GiB."""
    planned = weights_of("nvidia", Mesh(4, vocab="split"), mtp=True, vision=True)
    as_bf16 = sum(planned.roles.values()) - planned.roles["routed experts, MTP"] + planned.deferred
    assert abs(as_bf16 / GIB - 49.17) < 1 / 3


# --- state and workspaces --------------------------------------------------------------------------------------------


def nbytes(state):
    if isinstance(state, KdaState):
        return {"KDA state": state.matrix.nbytes, "KDA convolution": state.history.nbytes}
    assert isinstance(state, DsaState)
    rows = {"latent cache": state.latents.view().nbytes, "pool keys": state.pools.view().nbytes}
    return rows | {"index tails": state.keys.nbytes + state.gates.nbytes}


@pytest.mark.parametrize("geometry_name", ["tiny", "odd"])
def test_state_is_what_the_model_holds(geometry_name):
    """Bytes in use after 37 tokens, summed over the layers of a real model."""
    model = TextModel(shared("libertai", geometry_name))
    model.prefill([i % 250 for i in range(37)])
    held: dict[str, int] = {}
    for state in model.state.layers.values():
        for name, n in nbytes(state).items():
            held[name] = held.get(name, 0) + n
    assert state_bytes(model.config, Mesh(), 37) == held


def test_cache_slots_are_ordinals():
    """11 latent caches, not 45 and not 12; the MTP block's own is apart."""
    parsed, _ = released("nvidia")
    assert memory.kv_slots(parsed.text) == {layer: i for i, layer in enumerate(range(3, 44, 4))}
    one = state_bytes(parsed, Mesh(), 1024)
    assert one["latent cache"] == 11 * 1024 * 512 * 2
    assert one["pool keys"] == 11 * 256 * 128 * 2
    assert "MTP cache" not in one
    with_mtp = state_bytes(parsed, Mesh(), 1024, drafts=3, mtp=True)
    assert with_mtp["latent cache"] == one["latent cache"]
    assert with_mtp["MTP cache"] * 11 == sum(one[key] for key in ("latent cache", "pool keys", "index tails"))
    assert one["KDA state"] == 34 * 64 * 128 * 128 * 4
    assert state_bytes(parsed, Mesh(2), 1024)["KDA state"] * 2 == one["KDA state"]


def test_planned_workspaces_do_not_depend_on_depth():
    """Sized by the larger of a window and a verification."""
    deep, shallow = (config.parse(geometry("full", layers=layers).config) for layers in (None, (0, 3)))
    sizes = [workspace_bytes(workspace_layout(c, Mesh(), 64, 128)) for c in (deep, shallow)]
    assert sizes[0] == sizes[1]
    parsed, tensors = config.parse(geometry("tiny").config), source(None, "libertai", "tiny")[1]
    for drafts, window, rows in ((3, 2, 4), (7, 2, 8), (3, 64, 64)):
        planned = memory.plan(
            parsed, tensors, Mesh(), HARDWARE["h200"], gate_rank=16, context=4096, drafts=drafts, prefill_rows=window
        )
        wanted = workspace_bytes(workspace_layout(parsed, Mesh(), rows, 16, mtp=True))
        rest = {"logits": 4 * rows * parsed.text.vocab_size, "temporaries": memory.TEMPORARIES}
        assert planned.workspaces == wanted | rest


# --- machines --------------------------------------------------------------------------------------------------------


def box(path, free, unified=True):
    path.write_text(json.dumps({"name": "box", "visible_gib": 200, "free_gib": free, "unified": unified}))
    return str(path)


def tiny_plan(hardware, **options):
    parsed, tensors, gate_rank, _ = source(None, "nvidia", "tiny")
    return plans(parsed, tensors, gate_rank, hardware=hardware, **options)[0]


def test_two_gb10_hold_the_model_and_one_does_not():
    parsed, tensors = released("nvidia")
    pair = plans(parsed, tensors, 128, tp=2, ep=2, drafts=3, context=32768)
    assert len(pair) == 2
    assert all(p.fits and p.peak == p.serving for p in pair)
    (alone,) = plans(parsed, tensors, 128, context=32768)
    assert not alone.fits
    assert alone.max_context == 0
    assert json.loads(json.dumps(alone.as_dict()))["fits"] is False


def test_max_context_is_the_edge(tmp_path):
    """One token more does not fit; with room for everything it is the model's own limit."""
    options = {"prefill_rows": 16, "logit_rows": 1}
    low, high = (tiny_plan("h200", context=n, **options).peak for n in (16, 4096))
    small = box(tmp_path / "small.json", (low + high) / 2 / GIB)
    longest = tiny_plan(small, context=16, **options).max_context
    assert 16 < longest < 4096
    assert tiny_plan(small, context=longest, **options).fits
    assert not tiny_plan(small, context=longest + 1, **options).fits
    assert tiny_plan("h200", context=16, **options).max_context == 4096


def test_unified_memory_counts_the_host_part(tmp_path):
    """Conversions while loading count where host and device are one, when they are more than serving needs."""
    shared_, apart = (
        tiny_plan(box(tmp_path / f"{u}.json", 1, u), context=1, drafts=1, prefill_rows=1) for u in (True, False)
    )
    assert shared_.weights == apart.weights
    assert apart.peak == apart.serving
    assert shared_.weights.peak == apart.weights.peak_device + apart.weights.peak_host
    assert shared_.peak == max(shared_.serving, shared_.weights.peak)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, e.HardwareError),
        ('{"name": "x", "visible_gib": 1, "free_gib": 2, "unified": true}', e.HardwareError),
        ('{"name": "x", "visible_gib": 1, "unified": true}', e.ConfigMissingKeyError),
        ('{"name": "x", "visible_gib": "1", "free_gib": 1, "unified": true}', e.ConfigTypeError),
        ('{"name": "x", "visible_gib": 1, "free_gib": 1, "unified": 1}', e.ConfigTypeError),
        ("{", e.ConfigSyntaxError),
    ],
)
def test_hardware_that_is_not_one(tmp_path, text, error):
    path = tmp_path / "box.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error):
        memory.hardware(str(path))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"context": 0}, "--context 0"), ({"context": 1 << 21}, "--context 2097152")],
    ids=["none", "past the limit"],
)
def test_contexts_outside_the_model(options, words):
    with pytest.raises(UsageError, match=words):
        tiny_plan("gb10", **options)


def test_source_of_a_plan():
    directory = shared("nvidia")
    from_files, from_shapes = source(directory, None, "full"), source(None, "nvidia", "tiny")
    assert from_files[2] == from_shapes[2] == geometry("tiny").gate_rank
    strip = {name: (t.dtype, t.shape) for name, t in from_files[1].items()}
    assert strip == {name: (t.dtype, t.shape) for name, t in from_shapes[1].items()}
    with pytest.raises(UsageError, match="--export: missing"):
        source(None, None, "full")


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("prompt", "new"), [(50, 13), (1, 8)])
def test_caches_that_are_reserved_are_those_of_the_plan(prompt, new, drafts):
    """In bytes, to the last token, whatever was drafted and rejected on the way."""
    target = TextModel(shared("nvidia", "odd"), mtp=True)
    block = Mtp(target)
    generator = Generator(target, mtp=block, drafts=drafts)
    ids = np.random.default_rng(prompt).integers(0, 257, prompt).tolist()
    assert len(list(generator.tokens(ids, new))) == new
    latent, pools, tails = cache_bytes(target.config.text, prompt + new)
    for model in (target, block):
        for name, state in model.state.layers.items():
            if isinstance(state, DsaState):
                assert state.latents.data.nbytes == latent, name
                assert state.pools.data.nbytes == pools * state.indexed, name
                assert state.keys.nbytes + state.gates.nbytes == tails * state.indexed, name
