"""Reading, scanning, slabs and the books of the fast engine's store."""

import gc
import itertools
import json
import os
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.checkpoints import edit
from conformance.checkpoints.shared import copy_of, shared
from fast import errors as e
from fast import reader as reading
from fast.ledger import Ledger
from fast.reader import Reader, scan
from fast.sharding import Slice
from fast.shards import open_directory
from fast.store import ALIGN, INNER_ALIGN, Part, Store, pack

CPU = torch.device("cpu")
T = "model.language_model."


# --- slabs -----------------------------------------------------------------------------------------------------------


sizes = st.lists(st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=5), max_size=6), max_size=5)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes=sizes, limit=st.sampled_from([256, 4096, 1 << 20]))
def test_slots_tile_slabs(sizes, limit):
    """Disjoint, aligned, a block in one slab; slabs as large as their use, in order, none past the limit but for one
    block that is larger by itself."""
    sections = [
        [[Part((f"{i}.{j}", str(k)), n) for k, n in enumerate(block)] for j, block in enumerate(section)]
        for i, section in enumerate(sizes)
    ]
    packed = pack(sections, limit)
    held: dict[int, list[tuple[int, int]]] = {}
    for i, section in enumerate(sections):
        for block in section:
            slots = [packed.slots[part.key] for part in block]
            assert len({slot.slab for slot in slots}) == 1
            assert slots[0].offset % ALIGN == 0
            for slot, part, after in zip(slots, block, [*slots[1:], None], strict=True):
                assert slot.nbytes == part.nbytes
                assert slot.offset % INNER_ALIGN == 0
                end = slot.offset + slot.nbytes
                assert after is None or 0 <= after.offset - end < INNER_ALIGN
                held.setdefault(slot.slab, []).append((slot.offset, end))
            assert slots[0].slab < packed.section_slabs[i]
    assert sorted(held) == list(range(len(packed.slabs)))
    for slab, spans in held.items():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert packed.slabs[slab] == spans[-1][1]
        assert packed.slabs[slab] <= limit or sum(start % ALIGN == 0 for start, _ in spans) >= 1
    assert list(packed.section_slabs) == sorted(packed.section_slabs)


def test_a_block_above_the_limit_has_a_slab_of_its_own():
    blocks = [[Part(("a", ""), 100)], [Part(("b", ""), 5000)], [Part(("c", ""), 100)], [Part(("d", ""), 100)]]
    packed = pack([blocks], limit=1024)
    assert packed.slabs == (100, 5000, 356)
    assert [packed.slots[key, ""].slab for key in "abcd"] == [0, 1, 2, 2]


# --- the books -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_ledger_against_a_list(seed):
    rng = random.Random(seed)
    ledger, peak, peaks = Ledger(), 0, {"device": 0, "host": 0}
    live: dict[int, Any] = {}
    for step in range(400):
        move = rng.choice(["charge", "charge", "release", "move", "split"])
        if move == "charge" or not live:
            entry: Any = [
                rng.choice("abc"),
                rng.choice(["store", "weights"]),
                rng.randrange(1000),
                rng.choice(list(peaks)),
            ]
            live[ledger.charge(f"t{step}", *entry)] = entry
        else:
            ticket = rng.choice(list(live))
            if move == "release":
                ledger.release(ticket)
                del live[ticket]
            elif move == "move":
                ledger.move(ticket, "weights")
                live[ticket][1] = "weights"
            else:
                n = rng.randrange(live[ticket][2] + 1)
                live[ticket][2] -= n
                new = ledger.split(ticket, "part", "d", "staging", n)
                live[new] = ["d", "staging", n, live[ticket][3]]
        total = sum(n for _, _, n, _ in live.values())
        peak = max(peak, total)
        for place in peaks:
            now = sum(n for _, _, n, p in live.values() if p == place)
            peaks[place] = max(peaks[place], now)
            assert ledger.current(place) == now
        assert ledger.current() == total
    assert ledger.peak() == peak == sum(ledger.peak_roles.values())
    assert {place: ledger.peak(place) for place in peaks} == peaks
    for role in "abcd":
        assert ledger.by_role().get(role, 0) == sum(n for r, _, n, _ in live.values() if r == role)
    assert sum(ledger.by_owner().values()) == ledger.current()
    assert sorted(x.nbytes for x in ledger.entries()) == sorted(n for _, _, n, _ in live.values())


def test_ledger_refuses_what_cannot_be():
    ledger = Ledger()
    ticket = ledger.charge("a", "r", "store", 10)
    with pytest.raises(ValueError, match="11 bytes out of the 10"):
        ledger.split(ticket, "b", "r", "store", 11)
    with pytest.raises(ValueError, match="-1 bytes"):
        ledger.charge("a", "r", "store", -1)
    with pytest.raises(ValueError, match="moon"):
        ledger.charge("a", "r", "store", 1, "moon")
    ledger.release(ticket)
    with pytest.raises(KeyError):
        ledger.release(ticket)


# --- reading ---------------------------------------------------------------------------------------------------------


def opened(directory):
    return Reader(open_directory(directory), CPU, evict=False)


def read_all(reader, names, outs, cut=None):
    for name, out in zip(names, outs, strict=True):
        reader.read(name, out, cut)
    reader.flush()


@pytest.fixture
def reader():
    made = opened(shared("nvidia"))
    yield made
    made.close()


CASES = [
    (f"{T}embed_tokens.weight", None),
    (f"{T}layers.0.self_attn.q_proj.weight", Slice("", 0, 32, 96)),
    (f"{T}layers.0.self_attn.q_conv1d.weight", Slice("", 0, 5, 7)),
    (f"{T}layers.0.self_attn.o_proj.weight", Slice("", 1, 48, 112)),
    (f"{T}layers.0.mlp.down_proj.weight", Slice("", 1, 8, 16)),
    (f"{T}layers.0.mlp.down_proj.weight_scale", Slice("", 1, 3, 4)),
    (f"{T}layers.0.self_attn.A_log", Slice("", 0, 1, 2)),
    (f"{T}layers.0.mlp.down_proj.weight_scale_2", None),
    ("model.visual.patch_embed.proj.weight", None),
]


@pytest.mark.parametrize("piece", [1 << 20, 512, 100])
@pytest.mark.parametrize(("name", "cut"), CASES, ids=lambda x: x.rsplit(".", 2)[-2] if isinstance(x, str) else str(x))
def test_reads_the_slice_and_only_its_rows(reader, monkeypatch, name, cut, piece):
    """Whatever the piece, in threads or not; a cut by columns passes over all rows."""
    monkeypatch.setattr(reading, "PIECE", piece)
    monkeypatch.setattr(reading, "INLINE", 64)
    stored = edit.read_tensors(shared("nvidia"))[name]
    width = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}[stored.dtype]
    whole = np.frombuffer(stored.data, f"V{width}").reshape(stored.shape)
    index = [slice(None)] * whole.ndim
    if cut is not None:
        index[cut.axis] = slice(cut.start, cut.stop)
    wanted = whole[tuple(index)] if whole.ndim else whole
    dtype = {2: torch.bfloat16, 4: torch.float32, 1: torch.uint8}[width]
    out = torch.empty(wanted.shape, dtype=dtype)
    reader.read(name, out, cut)
    reader.flush()
    assert out.reshape(-1).view(torch.uint8).numpy().tobytes() == np.ascontiguousarray(wanted).tobytes()
    assert reader.bytes_read == (wanted.nbytes if cut is None or cut.axis == 0 else whole.nbytes)


BAD = {
    "BF16": [0x7F80, 0x7FC1, 0x7FFF, 0xFF80, 0xFFFF],
    "F32": [0x7F800000, 0x7FC00000, 0xFF800000, 0xFFFFFFFF],
    "F8_E4M3": [0x7F, 0x80, 0x81, 0xFF],
}
GOOD = {
    "BF16": [0x0000, 0x8000, 0x7F7F, 0xFF7F, 0x0001],
    "F32": [0, 0x80000000, 0x7F7FFFFF, 0xFF7FFFFF, 1],
    "F8_E4M3": [0x00, 0x01, 0x7E],
    "U8": [0x00, 0x7F, 0x80, 0xFF],
}


@pytest.mark.parametrize("dtype", BAD)
def test_scan_finds_each_kind_of_bad_value(dtype):
    word = {"BF16": "<u2", "F32": "<u4", "F8_E4M3": "u1"}[dtype]
    good = np.resize(np.array(GOOD[dtype], word), 1000)
    assert scan(good.view(np.uint8), dtype) is None
    for bad in BAD[dtype]:
        for at in (0, 1, 499, 999):
            data = good.copy()
            data[at] = bad
            data[999] = BAD[dtype][0]
            assert scan(data.view(np.uint8), dtype) == at * data.itemsize


def test_scan_of_every_half_precision_word():
    words = np.arange(1 << 16, dtype="<u2")
    bad = [w for w in range(1 << 16) if scan(words[w : w + 1].view(np.uint8), "BF16") is not None]
    assert bad == [w for w in range(1 << 16) if w & 0x7F80 == 0x7F80]
    assert scan(np.empty(0, np.uint8), "BF16") is None


def test_packed_codes_are_not_scanned():
    assert scan(np.array(GOOD["U8"], np.uint8), "U8") is None


@pytest.mark.parametrize(
    ("leaf", "cut", "where"),
    [
        ("self_attn.q_proj.weight", Slice("", 0, 64, 128), r"\[70, 3\]"),
        ("self_attn.o_proj.weight", Slice("", 1, 64, 128), r"\[5, 66\]"),
        ("self_attn.A_log", None, r"\[7\]"),
    ],
)
def test_refusals_name_the_place_in_the_whole_tensor(tmp_path, leaf, cut, where):
    directory = copy_of(tmp_path, "libertai")
    name = f"{T}layers.0.{leaf}"
    tensors = edit.read_tensors(directory)
    width = 4 if leaf.endswith("A_log") else 2
    shape = tensors[name].shape
    index = [int(i) for i in where.strip(r"\[]").replace("\\", "").split(", ")]
    flat = int(np.ravel_multi_index(index, shape))
    edit.change_tensors(
        directory,
        **{name: tensors[name].with_byte(flat * width + width - 1, 0xFF).with_byte(flat * width + width - 2, 0xFF)},
    )
    made = opened(directory)
    out = torch.empty(shape if cut is None else cut.shape(shape), dtype=torch.float32 if width == 4 else torch.bfloat16)
    with pytest.raises(e.NonFiniteWeightError, match=f"{name}: not finite at {where}"):
        read_all(made, [name], [out], cut)
    made.close()


def test_first_refusal_in_call_order_is_raised(tmp_path, monkeypatch):
    """Two bad tensors read by threads: the one asked for first is named, and the reader is quiet afterwards."""
    monkeypatch.setattr(reading, "INLINE", 0)
    directory = copy_of(tmp_path, "libertai")
    names = [f"{T}layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    tensors = edit.read_tensors(directory)
    edit.change_tensors(directory, **{name: tensors[name].with_byte(-1, 0x7F).with_byte(-2, 0xFF) for name in names})
    made = opened(directory)
    out = [torch.empty(tensors[name].shape, dtype=torch.bfloat16) for name in names]
    with pytest.raises(e.NonFiniteWeightError, match=r"layers\.1"):
        read_all(made, names[::-1], out)
    made.flush()
    made.close()


def test_a_file_that_shrinks_is_refused(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    made = opened(directory)
    shard = made.directory.shards[made.directory.tensors["lm_head.weight"].shard].path
    os.truncate(shard, shard.stat().st_size - 4096)
    with pytest.raises(e.FileChangedError, match=shard.name):
        read_all(made, ["lm_head.weight"], [torch.empty(512, 128, dtype=torch.bfloat16)])
    made.close()


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_nothing_stays_open(tmp_path):
    before, threads = descriptors(), threading.active_count()
    store = Store(open_directory(shared("nvidia")))
    store.upload("lm_head.weight", "lm_head")
    store.close()
    assert (descriptors(), threading.active_count()) == (before, threads)
    directory = copy_of(tmp_path, "nvidia")
    index = edit.read_json(directory / edit.INDEX)
    index["weight_map"]["extra"] = "model-00003-of-00003.safetensors"
    (directory / edit.INDEX).write_text(json.dumps(index))
    for _ in range(3):
        with pytest.raises(e.IndexMissingTensorError):
            open_directory(directory)
    assert descriptors() == before


# --- tensors of a store ----------------------------------------------------------------------------------------------


def test_upload_bind_supersede_prune():
    """Bytes change hands without moving; only what nobody needs is freed, and the books say so at every step."""
    store = Store(open_directory(shared("nvidia")))
    names = ["lm_head.weight", f"{T}norm.weight", f"{T}layers.0.self_attn.q_conv1d.weight", f"{T}layers.9.enorm.weight"]
    for name in names:
        store.upload(name, "role")
    sizes = {name: store.resident[name].tensor.nbytes for name in names}
    window = store.ledger.current("host")
    assert store.ledger.by_owner() == {"staging": window, "store": sum(sizes.values())}
    address = store.address("lm_head.weight")
    assert store.bind("lm_head.weight").data_ptr() == address
    assert store.ledger.by_owner()["weights"] == sizes["lm_head.weight"]
    store.supersede(names[2])
    freed = store.prune(lambda name: name == names[3])
    assert freed == sizes[names[1]] + sizes[names[2]]
    assert set(store.resident) == {names[0], names[3]}
    assert store.ledger.by_owner() == {"staging": window, "store": sizes[names[3]], "weights": sizes[names[0]]}
    store.close()
    assert store.ledger.current("host") == 0
    assert store.ledger.peak() == window + sum(sizes.values())


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99"])
def test_devices_that_are_not_there(device):
    directory = open_directory(shared("nvidia"))
    with pytest.raises(e.HardwareError, match="device"):
        Store(directory, device)
    directory.close()
