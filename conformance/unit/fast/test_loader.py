"""Loading: every operand as the files have it, bytes moved once, nothing kept that was made over, lies refused."""

import itertools
import json
from typing import Any

import pytest
import torch

from conformance import lying_files
from conformance.checkpoints import edit
from conformance.checkpoints.shared import copy_of, shared
from fast import config as configs
from fast import errors as e
from fast import layout, loader, nvfp4, reader
from fast.ledger import Ledger
from fast.loader import bind, keep_after_load, load
from fast.sharding import Mesh, plan
from fast.shards import open_directory
from fast.store import Store

T = layout.PREFIX
EXPORTS = ("nvidia", "libertai")
BOTH = pytest.mark.parametrize("export", EXPORTS)
GEOMETRIES = pytest.mark.parametrize("geometry", ["tiny", "odd"])
FULL: Any = {"mtp": True, "vision": True}


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# --- values ----------------------------------------------------------------------------------------------------------


@GEOMETRIES
@BOTH
def test_every_operand_is_what_the_files_hold(export, geometry):
    """Against a naive reading: bytes as stored, BF16 widened or F32 rounded, BF16 experts by the oracle's encoder."""
    directory = shared(export, geometry)
    weights = load(directory, **FULL)
    assert lying_files.differences(weights, lying_files.read_files(directory)) == []
    tensors = edit.read_tensors(directory)
    assert set(weights.names()) == {
        name for name in tensors if not name.rsplit(".", 1)[-1].endswith(("scale", "_2")) or "hc_" in name
    }


@GEOMETRIES
@BOTH
def test_dtypes_of_operands(export, geometry):
    weights = load(shared(export, geometry), **FULL)
    for name in weights.names():
        leaf = name.rsplit(".", 1)[-1]
        wide = leaf in ("A_log", "dt_bias", "e_score_correction_bias") or leaf.endswith(("_base", "_scale"))
        for key, tensor in weights.operands(name).items():
            wanted = {"value": torch.float32 if wide else torch.bfloat16, "scale_2": torch.float32}
            assert tensor.dtype == wanted.get(key, torch.uint8), name


@GEOMETRIES
def test_both_exports_of_a_seed_differ_where_they_are_known_to(geometry):
    """exports.md 2.11: mHC base and scale (BF16 in one), dense MLP and MTP experts (packed in one), routed scales."""
    ours, theirs = (load(shared(export, geometry), **FULL) for export in EXPORTS)
    assert set(ours.names()) == set(theirs.names())
    differ = set()
    for name in ours.names():
        a, b = ours.operands(name), theirs.operands(name)
        if a.keys() != b.keys() or any(raw(a[k]) != raw(b[k]) for k in a):
            differ.add(name)
    families = {layout.find(ours.config, name)[0].role for name in differ}
    assert families <= {"mHC", "dense MLP", "routed experts, text", "routed experts, MTP"}
    hyper = {n for n in differ if ".hc_" in n}
    assert hyper
    assert all(n.endswith(("_base", "_scale")) for n in hyper)
    mhc = {n for n in ours.names() if n.endswith(("_base", "_scale"))}
    for name in mhc:
        assert torch.equal(theirs.tensor(name).bfloat16().float(), ours.tensor(name)), name
    dense = {n for n in ours.names() if layout.find(ours.config, n)[0].role == "dense MLP"}
    assert dense <= differ
    for name in dense:
        assert ours.is_packed(name)
        assert not theirs.is_packed(name)
    disk = [edit.read_tensors(shared(export, geometry)) for export in EXPORTS]
    mtp = f"{T}layers.{ours.config.text.num_hidden_layers}."
    for name in set(disk[0]) & set(disk[1]):
        left, right = (d[name] for d in disk)
        same = (left.dtype, left.shape, left.data) == (right.dtype, right.shape, right.data)
        known = "conv1d" in name or name in mhc or name in dense or ".mlp.experts." in name
        assert same or known, name
        assert same or left.dtype != right.dtype or ".mlp.experts." in name, name
    assert {n for n in differ if n.startswith(mtp)} <= {n for n in ours.names() if ".mlp.experts." in n}


@BOTH
def test_gate_and_up_keep_their_own_scale(export):
    weights = load(shared(export))
    tensors = edit.read_tensors(shared(export))
    bank = weights.experts(4)
    for e_ in range(bank.count):
        for side, packed in (("gate", bank.gate[e_]), ("up", bank.up[e_])):
            stored = tensors[f"{T}layers.4.mlp.experts.{e_}.{side}_proj.weight_scale_2"]
            assert raw(packed.scale_2) == stored.data
    distinct = sum(float(g.scale_2) != float(u.scale_2) for g, u in zip(bank.gate, bank.up, strict=True))
    assert (distinct > 0) == (export == "libertai")


def test_input_scale_is_accepted_and_not_read(tmp_path):
    """Any value, present or absent, for some experts or all: the operands and the bytes read are the same."""
    before = load(shared("nvidia"))
    directory = copy_of(tmp_path, "nvidia")
    tensors = edit.read_tensors(directory)
    changes = {}
    for i, name in enumerate(n for n in tensors if n.endswith("input_scale")):
        changes[name] = None if i % 3 == 0 else tensors[name].with_byte(3, 0x7F) if i % 3 == 1 else tensors[name]
    edit.change_tensors(directory, **changes)
    after = load(directory)
    assert after.log.bytes_read == before.log.bytes_read
    for name in before.names():
        for key, value in before.operands(name).items():
            assert raw(value) == raw(after.operands(name)[key])


def test_scalars_of_shape_one_are_scalars(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    tensors = edit.read_tensors(directory)
    scalars = {n: edit.replace(t, shape=(1,)) for n, t in tensors.items() if n.endswith("weight_scale_2")}
    edit.change_tensors(directory, **scalars)
    assert load(directory).experts(3).up[1].scale_2.shape == ()


# --- storage ---------------------------------------------------------------------------------------------------------


@BOTH
def test_experts_are_the_store_s_own_bytes(export):
    """Same storage, same address, and no second copy anywhere in the books."""
    weights = load(shared(export), **FULL)
    store = weights.store
    spans = sorted((s.data_ptr(), s.data_ptr() + s.numel()) for s in store.slabs)
    slabs = {s.untyped_storage().data_ptr() for s in store.slabs}
    bank = weights.experts(5)
    for side in ("gate", "up", "down"):
        for expert, packed in enumerate(getattr(bank, side)):
            stem = f"{T}layers.5.mlp.experts.{expert}.{side}_proj."
            parts = (("weight", packed.codes), ("weight_scale", packed.scale), ("weight_scale_2", packed.scale_2))
            for leaf, tensor in parts:
                assert tensor.data_ptr() == store.address(stem + leaf)
                assert tensor.untyped_storage().data_ptr() in slabs
                assert any(a <= tensor.data_ptr() < b for a, b in spans)
    charged = [x for x in weights.ledger.entries() if ".layers.5.mlp.experts.0.gate_proj" in x.name]
    assert sorted(x.nbytes for x in charged) == sorted(w.nbytes for w in weights.operands(stem_of(5, 0)).values())
    assert {x.owner for x in weights.ledger.entries()} == {"weights"}


def stem_of(layer, expert):
    return f"{T}layers.{layer}.mlp.experts.{expert}.gate_proj.weight"


@GEOMETRIES
@BOTH
def test_operands_share_no_byte(export, geometry):
    weights = load(shared(export, geometry), **FULL)
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.nbytes) for name in weights.names() for t in weights.operands(name).values()
    )
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert sum(b - a for a, b in spans) + weights.log.roles["alignment"] == weights.log.resident


@BOTH
def test_pointer_tables(export):
    bank = load(shared(export), ep=2, rank=1).experts(3)
    assert (bank.first, bank.count, bank.total) == (8, 8, 16)
    table, scales = bank.pointers(), bank.scale_2()
    assert table.dtype == torch.int64
    assert table.shape == (3, 8, 2)
    for i, side in enumerate((bank.gate, bank.up, bank.down)):
        for j, packed in enumerate(side):
            assert table[i, j].tolist() == [packed.codes.data_ptr(), packed.scale.data_ptr()]
            assert scales[i, j].data_ptr() == packed.scale_2.data_ptr()


@BOTH
def test_fused_rows(export):
    weights = load(shared(export))
    stem = f"{T}layers.0.self_attn."
    for leaves in (
        ["q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"],
        ["q_conv1d", "k_conv1d", "v_conv1d"],
    ):
        names = [f"{stem}{leaf}.weight" for leaf in leaves]
        fused = weights.fused(names)
        assert fused is not None
        assert torch.equal(fused, torch.cat([weights.tensor(n) for n in names]))
        assert fused.data_ptr() == weights.tensor(names[0]).data_ptr()
    dsa = f"{T}layers.3.self_attn."
    assert weights.fused([f"{dsa}q_a_proj.weight", f"{dsa}kv_a_proj_with_mqa.weight"]) is not None
    assert weights.fused([f"{stem}q_proj.weight", f"{stem}v_proj.weight"]) is None
    assert weights.fused([f"{stem}q_proj.weight", f"{stem}A_log"]) is None


def test_operands_outlive_the_files(tmp_path):
    directory = copy_of(tmp_path, "nvidia")
    weights = load(directory, **FULL)
    files = lying_files.read_files(directory)
    for path in directory.glob("*.safetensors"):
        with path.open("r+b") as handle:
            handle.write(b"\xff" * path.stat().st_size)
    assert lying_files.differences(weights, files) == []


# --- BF16 experts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [False, True], ids=["from disk", "some resident"])
@pytest.mark.parametrize("at", [1, 9, 60, 200])
def test_a_load_that_fails_half_way_leaves_nothing_in_a_ledger_it_shares(monkeypatch, at, resident):
    directory = shared("nvidia")
    config, ledger = configs.load(directory), Ledger()
    ledger.charge("another model", "KDA", "weights", 1000)
    store = Store(open_directory(directory), "cpu", ledger)
    if resident:
        for name in ("lm_head.weight", stem_of(config.text.mtp_layers[0], 0)):
            store.upload(name, "some role")
    fill, calls = reader._fill, itertools.count(1)

    def failing(*place: Any) -> None:
        if next(calls) == at:
            raise e.FileChangedError("gone")
        fill(*place)

    monkeypatch.setattr(reader, "_fill", failing)
    with pytest.raises(e.FileChangedError, match="gone"):
        bind(config, store, Mesh(), mtp=True)
    store.close()
    assert next(calls) > at
    assert [(entry.name, entry.nbytes) for entry in ledger.entries()] == [("another model", 1000)]
    assert (store.slabs, store.resident) == ([], {})


def test_a_closed_store_is_closed_once_and_reads_no_more():
    weights = load(shared("libertai"), progress=False)
    host = weights.ledger.current("host")
    weights.store.close()
    assert weights.ledger.current("host") == host == 0
    with pytest.raises(ValueError, match=r"lm_head\.weight: .* has been closed"):
        weights.store.reader.read("lm_head.weight", torch.empty(1))


def test_deferred_experts_are_never_resident_as_bf16():
    """What is held for MTP experts never exceeds their NVFP4 size; one projection at a time is in host staging."""
    weights = load(shared("nvidia"), mtp=True)
    text = weights.config.text
    D, wide, n = text.hidden_size, text.moe_intermediate_size, text.n_routed_experts
    packed = 3 * n * (D * wide // 2 + D * wide // 16 + 4)
    assert weights.log.roles["routed experts, MTP"] == packed
    assert all("layers.9.mlp.experts" not in name for name in weights.store.resident)
    projection = 2 * D * wide + nvfp4.encode_workspace(wide, D)
    window = reader.window(weights.store.directory.tensors)
    assert weights.ledger.peak("host") <= projection + window
    assert weights.ledger.peak() <= weights.log.resident + projection + window
    assert weights.ledger.peak("device") == weights.log.resident


def filled(directory, select):
    """A store that has been filled by something without deferral."""
    config = configs.load(directory)
    store = Store(open_directory(directory, lambda name: loader.void(layout.find(config, name))))
    for name in store.directory.tensors:
        if select(name):
            store.upload(name, "as on disk")
    return config, store


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2, 1, 1), Mesh(1, 2, 1), Mesh(4, 2, 3)], ids=str)
@BOTH
def test_resident_sources_give_the_same_operands(export, mesh):
    """Everything resident, then bound: what needs no change is the very bytes, what is made over is freed."""
    directory = shared(export)
    wanted = load(directory, tp=mesh.tp, ep=mesh.ep, rank=mesh.rank, **FULL)
    config, store = filled(directory, lambda name: True)
    held = store.ledger.by_owner()["store"]
    weights = bind(config, store, mesh, **FULL)
    store.close()
    assert set(weights.names()) == set(wanted.names())
    for name in wanted.names():
        for key, value in wanted.operands(name).items():
            assert raw(weights.operands(name)[key]) == raw(value), (name, key)
    kept = sum(item.tensor.nbytes for item in store.resident.values())
    assert weights.log.pruned == held - kept
    left = set(store.resident)
    if mesh.world == 1:
        for name in ("lm_head.weight", f"{T}layers.0.self_attn.q_proj.weight", stem_of(4, 0)):
            assert name in left
        assert weights.packed(stem_of(4, 0).removesuffix(".weight")).codes.data_ptr() == store.address(stem_of(4, 0))
    made_over = [n for n, t in store.directory.tensors.items() if "conv1d" in n and t.dtype == "F32"]
    made_over += [n for n, t in store.directory.tensors.items() if ".mlp.experts." in n and t.dtype == "BF16"]
    assert (len(made_over) > 0) == (export == "nvidia")
    assert not left & set(made_over)
    assert store.ledger.by_owner()["weights"] + store.ledger.by_owner().get("store", 0) == store.ledger.current()


@BOTH
def test_prune_keeps_the_mtp_block_for_later(export):
    """Loaded without the MTP block: its resident tensors stay, input scales, vision and everything made over go."""
    config, store = filled(shared(export), lambda name: True)
    weights = bind(config, store, Mesh())
    mtp = {n for n in store.directory.tensors if n.startswith(f"{T}layers.9.")}
    held = {n for n, item in store.resident.items() if item.state == "held"}
    assert held == mtp
    store.close()
    assert not [n for n in weights.names() if n in mtp]


NAMES = {
    f"{T}layers.9.enorm.weight": True,
    f"{T}layers.9.mlp.experts.15.down_proj.weight": True,
    f"{T}layers.9.mlp.gate.e_score_correction_bias": True,
    f"{T}layers.09.enorm.weight": False,
    f"{T}layers.9.enorm.weightx": False,
    f"{T}layers.9x.enorm.weight": False,
    f"{T}layers.90.enorm.weight": False,
    f"{T}layers.-9.enorm.weight": False,
    f"{T}layers.9": False,
    f"{T}layers.9.": False,
    f"{T}layers.9.mlp.experts.16.down_proj.weight": False,
    f"{T}layers.9.mlp.experts.01.down_proj.weight": False,
    f"{T}layers.9.mlp.experts.1.down_proj": False,
    f"{T}layers.9.hc_attn_fn": False,
    f"{T}layers.٩.enorm.weight": False,
    f"x{T}layers.9.enorm.weight": False,
    "model.layers.9.enorm.weight": False,
    f"{T}layers.8.input_layernorm.weight": False,
    "": False,
    ".": False,
}


@pytest.mark.parametrize(("name", "kept"), NAMES.items(), ids=lambda x: str(x) or "empty")
def test_prune_predicate_is_exact(name, kept):
    assert keep_after_load(configs.load(shared("nvidia")), name) == kept


# --- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "ep"), [(4, 1), (1, 3), (2, 2), (4, 2), (2, 4)])
@BOTH
def test_ranks_hold_the_slices_of_the_plan(export, tp, ep):
    """Concatenated in rank order they are the whole, byte for byte; each rank reads its rows and no more."""
    directory = shared(export)
    whole = load(directory, **FULL)
    tensors = whole.store.directory.tensors
    stored = layout.match(whole.config, tensors)
    ranks = [load(directory, tp=tp, ep=ep, rank=rank, **FULL) for rank in range(max(tp, ep))]
    plans = [plan(stored, r.mesh, whole.config.text.n_routed_experts) for r in ranks]
    for name in whole.names():
        holders = [(r, p) for r, p in zip(ranks, plans, strict=True) if p[name] is not None]
        assert all(name not in r.names() for r in ranks if r not in [h for h, _ in holders]) or len(holders) == len(
            ranks
        )
        copies = max(tp, ep) // ep if ".mlp.experts." in name else tp
        for key, value in whole.operands(name).items():
            part = holders[0][1][name]
            assert part is not None
            axis = part.axis
            parts = [r.operands(name)[key] for r, _ in holders[:copies]]
            joined = parts[0] if axis is None or key == "scale_2" else torch.cat(parts, axis)
            assert raw(joined) == raw(value), (name, key)
    deferred = {n for n in tensors if ".layers.9.mlp.experts." in n and tensors[n].dtype == "BF16"}
    for r, p in zip(ranks, plans, strict=True):
        rows = 0
        for name, part in p.items():
            if part is None or name.endswith("input_scale"):
                continue
            share = (part.stop - part.start) / tensors[name].shape[0] if part.axis == 0 and name not in deferred else 1
            rows += int(tensors[name].nbytes * share)
        assert r.log.bytes_read == rows
    assert len({r.fingerprint for r in ranks}) == 1


def test_fingerprint_tells_checkpoints_apart():
    prints = {load(shared(export, geometry)).fingerprint for export in EXPORTS for geometry in ("tiny", "odd")}
    assert len(prints) == 4


# --- the log ---------------------------------------------------------------------------------------------------------


def test_load_log():
    log = load(shared("nvidia"), **FULL).log
    assert [s.name for s in log.sections] == ["globals", *(f"layer {i}" for i in range(10)), "vision"]
    assert sum(s.nbytes for s in log.sections) == log.bytes_read
    assert all(min(s.read, s.mixer, s.mlp, s.other) >= 0 for s in log.sections)
    assert all(s.mixer > 0 and s.mlp > 0 for s in log.sections[1:-1])
    assert sum(s.read + s.mixer + s.mlp + s.other for s in log.sections) <= log.seconds
    text = "\n".join(log.lines())
    assert f"{log.bytes_read:,} bytes read" in text
    assert "routed experts, MTP" in text
    assert json.loads(json.dumps(log.as_dict()))["gb_per_s"] == log.rate
