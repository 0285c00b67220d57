"""Loading onto a GPU: the same operands, the same books, and the allocator's own count beside them."""

import gc
from typing import Any

import pytest
import torch

from conformance.checkpoints import edit
from conformance.checkpoints.shared import copy_of, shared
from fast import config as configs
from fast import errors as e
from fast import layout, reader
from fast.loader import bind, load
from fast.memory import weights_plan
from fast.sharding import Mesh
from fast.shards import open_directory
from fast.store import Store

pytestmark = pytest.mark.gpu

FULL: Any = {"mtp": True, "vision": True}
EXPORTS = pytest.mark.parametrize("export", ["nvidia", "libertai"])


def assert_same(ours, theirs):
    assert set(ours.names()) == set(theirs.names())
    for name in ours.names():
        for key, value in ours.operands(name).items():
            assert value.is_cuda, name
            a, b = (x.reshape(-1).view(torch.uint8).cpu() for x in (value, theirs.operands(name)[key]))
            assert torch.equal(a, b), (name, key)


@EXPORTS
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(4, 2, 3), Mesh(1, 3, 2)], ids=str)
def test_same_operands_and_books_as_on_a_cpu(export, mesh):
    directory = shared(export)
    options = {"tp": mesh.tp, "ep": mesh.ep, "rank": mesh.rank} | FULL
    gc.collect()  # nothing of an earlier test is freed meanwhile
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ours = load(directory, device="cuda", **options)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert_same(ours, load(directory, **options))
    planned = weights_plan(ours.config, ours.store.directory.tensors, mesh, on_host=False, **FULL)
    assert ours.ledger.current() == planned.resident
    assert (ours.ledger.peak(), ours.ledger.peak("host")) == (planned.peak, planned.peak_host)
    assert ours.ledger.peak("device") == planned.peak_device == planned.resident
    grain = 512 * len(ours.store.slabs)
    assert planned.resident <= held <= planned.resident + grain
    assert peak <= planned.resident + grain + (1 << 20)


@EXPORTS
def test_resident_sources_are_made_over_on_the_device(export):
    """BF16 experts quantised by the GPU have the bytes of those quantised by the CPU."""
    directory = shared(export)
    config = configs.load(directory)
    store = Store(open_directory(directory), "cuda")
    for name in store.directory.tensors:
        store.upload(name, "as on disk")
    weights = bind(config, store, Mesh(), **FULL)
    store.close()
    assert_same(weights, load(directory, **FULL))
    name = f"{layout.PREFIX}layers.4.mlp.experts.3.up_proj.weight"
    assert weights.operands(name)["codes"].data_ptr() == store.address(name)


def test_pages_can_be_dropped_behind_the_reader():
    """What a machine with one memory does: read pages leave the page cache, the operands stay."""
    directory = shared("nvidia")
    config = configs.load(directory)
    store = Store(open_directory(directory), "cuda", evict=True)
    weights = bind(config, store, Mesh(), **FULL)
    store.close()
    assert_same(weights, load(directory, **FULL))


def test_small_windows(monkeypatch):
    monkeypatch.setattr(reader, "PIECE", 256)
    monkeypatch.setattr(reader, "INLINE", 0)
    weights = load(shared("nvidia"), device="cuda", tp=4, rank=1, **FULL)
    monkeypatch.undo()
    assert_same(weights, load(shared("nvidia"), tp=4, rank=1, **FULL))


def test_refusals(tmp_path):
    directory = copy_of(tmp_path, "libertai")
    name = f"{layout.PREFIX}layers.3.mlp.experts.5.up_proj.weight_scale"
    edit.change_tensors(directory, **{name: edit.read_tensors(directory)[name].with_byte(9, 0x7F)})
    with pytest.raises(e.ScaleNaNError, match=r"\[1, 1\]"):
        load(directory, device="cuda")


def test_pointer_table_lies_beside_the_experts():
    bank = load(shared("nvidia"), device="cuda", ep=2, rank=1).experts(3)
    table = bank.pointers()
    assert table.device == bank.gate[0].codes.device
    assert table[2, 7].tolist() == [bank.down[7].codes.data_ptr(), bank.down[7].scale.data_ptr()]
