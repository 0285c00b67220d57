"""The memory that layers share: one block per kind, as large as planned, and no result that outlives its frame."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

from conformance.checkpoints import make
from conformance.checkpoints.shared import shared
from fast import errors as e
from fast import scratch
from fast.generate import generate
from fast.layers import Moe
from fast.loader import Weights, load
from fast.memory import workspace_bytes, workspace_layout
from fast.model import TextModel
from fast.mtp import Mtp
from fast.scratch import Arena
from fast.sharding import Mesh

SEED = 5
ROWS = 16


@functools.cache
def weights(geometry: str) -> Weights:
    return load(shared("nvidia", geometry), mtp=True, progress=False)


def prompt(model: TextModel, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(0, model.config.text.vocab_size, (length,), generator=generator).tolist()


def story(model: TextModel) -> dict[str, torch.Tensor]:
    """Everything that a prompt in windows, single tokens, a verification and drafts leave behind."""
    ids = prompt(model, 36)
    seen: dict[str, torch.Tensor] = {}

    def tap(name: str, value: torch.Tensor) -> None:
        seen[f"{len(seen)} {name}"] = value

    seen["prefill"] = model.prefill(ids[:28], tap)
    seen["decode"] = torch.stack([model.decode(token, tap) for token in ids[28:30]])
    seen["verified"], _ = model.verify(model.ids(ids[30:34]))
    model.state.commit(2)
    seen |= model.state.snapshot()
    tokens, _ = generate(model, ids[:20], 4, mtp=Mtp(model), drafts=3)
    return seen | model.state.snapshot() | {"tokens": torch.tensor(tokens)}


def bits(story: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, x in story.items()}


@contextlib.contextmanager
def poisoned(self: Arena):
    """A frame that leaves NaN behind in all that was used."""
    outer, mark = scratch.current(), self.used
    scratch._local.arena = self
    try:
        yield
    finally:
        self.block[mark : self.high] = 0xFF
        scratch._local.arena, self.used = outer, mark


@pytest.mark.parametrize(
    ("geometry", "dtype"),
    [("tiny", torch.bfloat16), ("odd", torch.bfloat16), ("odd", torch.float32)],
    ids=["tiny-bf16", "odd-bf16", "odd-fp32"],
)
def test_bits_do_not_depend_on_where_results_lie(geometry, dtype, monkeypatch):
    """With a workspace, without any, and with one that forgets at once whatever a frame held."""
    model = TextModel(weights(geometry), dtype=dtype, window=ROWS)
    wanted = bits(story(model))
    for layer in model.layers:
        assert layer.setting is model.setting
    object.__setattr__(model.setting, "arenas", {})
    model.reset()
    assert bits(story(model)) == wanted
    monkeypatch.setattr(Arena, "frame", poisoned)
    assert bits(story(TextModel(weights(geometry), dtype=dtype, window=ROWS))) == wanted


@pytest.mark.parametrize("geometry", ["tiny", "odd"])
def test_a_layer_fills_its_workspace_to_the_byte(geometry):
    """Ledger, plan and the high mark of a call of `window` rows are one number for each kind.

    Where the experts' rows are concerned, that is so when all rows choose the same experts.
    """
    fresh = load(shared("nvidia", geometry), mtp=True, progress=False)
    model = TextModel(fresh, window=64)
    text = model.config.text
    rank = fresh.tensor("model.language_model.layers.0.self_attn.f_a_proj.weight").shape[0]
    planned = workspace_bytes(workspace_layout(model.config, Mesh(), 64, rank, mtp=True))
    assert fresh.ledger.by_role("workspace") == planned
    ids = prompt(model, 64)
    model.prefill(ids)
    assert {kind: arena.high <= planned[kind] for kind, arena in model.setting.arenas.items()} == dict.fromkeys(
        planned, True
    )
    for layer in model.layers:
        if isinstance(layer.mlp, Moe):
            layer.mlp.bias = torch.zeros_like(layer.mlp.bias)
            layer.mlp.bias[: text.num_experts_per_tok] = 100.0
    model.reset()
    model.prefill(ids)
    assert {kind: arena.high for kind, arena in model.setting.arenas.items()} == planned
    assert all(arena.used == 0 for arena in model.setting.arenas.values())
    held = fresh.ledger.current()
    del model
    assert held - fresh.ledger.current() == sum(planned.values())


def addresses(model: TextModel, monkeypatch, count: int) -> dict[str, set[int]]:
    """Where everything that `count` layers make lies, by kind."""
    found: dict[str, set[int]] = {}
    take = Arena.take

    def watched(self, shape, dtype):
        tensor = take(self, shape, dtype)
        found.setdefault(self.kind, set()).add(tensor.data_ptr())
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "take", watched)
        patch.setattr(model, "layers", model.layers[:count])
        model.reset()
        model.run(model.ids(prompt(model, 16)))
    return found


def test_all_layers_of_a_kind_use_the_same_bytes(monkeypatch):
    """Pointers: four layers (KDA and DSA, dense and MoE) touch all that nine do; a block for each kind, no more."""
    model = TextModel(weights("tiny"), window=16)
    blocks = {kind: arena.block.data_ptr() for kind, arena in model.setting.arenas.items()}
    assert [layer.kind for layer in model.layers[:4]] == ["kda"] * 3 + ["dsa"]
    bank = weights("tiny").experts(3)
    for layer in model.layers:
        if isinstance(layer.mlp, Moe):
            layer.mlp.bank = bank
            layer.mlp.bias = torch.zeros_like(layer.mlp.bias)
            layer.mlp.bias[:4] = 100.0
    few, many = (addresses(model, monkeypatch, count) for count in (4, 9))
    assert few == many
    assert set(few) == {"stack", "KDA", "DSA", "dense", "MoE"}
    for kind, places in few.items():
        arena = model.setting.arenas[kind]
        assert min(places) == blocks[kind] == arena.block.data_ptr()
        assert max(places) < blocks[kind] + arena.block.numel()


def test_depth_costs_no_workspace(tmp_path):
    """A checkpoint of two layers and one of nine: the same ledger entries."""
    make(tmp_path / "two", "nvidia", "tiny", layers=(0, 3))
    sizes = []
    for directory in (tmp_path / "two", shared("nvidia")):
        loaded = load(directory, mtp=True, progress=False)
        before = loaded.ledger.current()
        model = TextModel(loaded, window=32)
        roles = loaded.ledger.by_role("workspace")
        assert loaded.ledger.current() - before == sum(roles.values())
        sizes.append(roles)
        del model
    assert sizes[0] == sizes[1]


def test_more_rows_than_planned_are_refused():
    model = TextModel(weights("odd"), window=9)
    with pytest.raises(e.DoesNotFitError, match=r"workspace (stack|KDA|DSA): [\d,]+ bytes for \[10, 3, 112\]"):
        model.run(model.ids(prompt(model, 10)))
    assert scratch.current() is None


def test_frames_nest_and_give_back():
    arena = Arena("test", 1024, "cpu")
    device = torch.device("cpu")
    with arena.frame():
        first = scratch.empty((3,), torch.float32, device)
        with scratch.frame():
            inner = scratch.empty((4,), torch.uint8, device)
        again = scratch.empty((2, 2), torch.uint8, device)
        assert inner.data_ptr() == again.data_ptr() == first.data_ptr() + scratch.ALIGN
        with scratch.outside():
            assert scratch.current() is None
            apart = scratch.empty((4,), torch.uint8, device)
        assert not arena.block.data_ptr() <= apart.data_ptr() < arena.block.data_ptr() + 1024
        with pytest.raises(e.DoesNotFitError, match="workspace test: 1,536 bytes"):
            scratch.empty((1024,), torch.uint8, device)
    assert (arena.used, scratch.current()) == (0, None)
    assert scratch.keep(first) is first


@pytest.mark.parametrize("rows", [0, 1, 7, 64])
def test_tiles_cover_every_row_once(rows, monkeypatch):
    monkeypatch.setattr(scratch, "TILE_BYTES", 100)
    for width in (0, 1, 33, 101):
        found = [i for part in scratch.tiles(rows, width) for i in range(part.start, part.stop)]
        assert found == list(range(rows))
        assert all((part.stop - part.start) * width <= max(100, width) for part in scratch.tiles(rows, width))


def reachable(thing: object, seen: dict[int, object]) -> dict[int, object]:
    """Tensors held by an object of the engine, by the address of their storage."""
    if isinstance(thing, torch.Tensor):
        seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage()
    elif isinstance(thing, dict):
        for part in thing.values():
            reachable(part, seen)
    elif isinstance(thing, list | tuple):
        for part in thing:
            reachable(part, seen)
    elif hasattr(thing, "__dict__") and type(thing).__module__ in ("fast.layers", "fast.mtp"):
        reachable({k: v for k, v in vars(thing).items() if k not in ("setting", "text", "target", "state")}, seen)
    elif hasattr(thing, "__slots__") and type(thing).__module__ in ("fast.loader", "fast.nvfp4"):
        reachable([getattr(thing, name) for name in type(thing).__slots__], seen)
    return seen


@pytest.mark.parametrize("geometry", ["tiny", "odd"])
@pytest.mark.parametrize("export", ["nvidia", "libertai"])
def test_the_model_holds_weights_in_slabs_and_nowhere_else(export, geometry):
    """No copy beside what was loaded, and nothing loaded that is dead: bytes, by storage."""
    loaded = load(shared(export, geometry), mtp=True, progress=False)
    model = TextModel(loaded)
    block = Mtp(model)
    held = reachable([model.layers, block, model.embed_tokens, model.norm, model.lm_head], {})
    slabs = {slab.untyped_storage().data_ptr(): slab.numel() for slab in loaded.store.slabs}
    assert held.keys() == slabs.keys()
    assert sum(slabs.values()) == sum(loaded.ledger.by_role("weights").values())
    bound = sum(x.nbytes for name in loaded.names() for x in loaded.operands(name).values())
    assert bound == sum(slabs.values()) - loaded.ledger.by_role("weights")["alignment"]
    assert loaded.ledger.by_owner().keys() == {"weights", "workspace"}
