"""fast.decoder without a GPU: launches do nothing, everything around them is checked.

What the kernels compute is the business of `conformance/test_kernels.py`. Here: which taps a call has and of which
shape, and how states are moved, counted, cut back and laid aside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance import taps
from conformance.checkpoints import geometry, make
from conformance.checkpoints.shared import shared
from conformance.narrow import narrow
from conformance.unit.fast.runs import tokens
from fast import decoder, layout, memory
from fast.config import parse
from fast.graph import DecodeStep
from fast.kernels import driver, gemv, layers, mla
from fast.linear import ROWS
from fast.model import TextModel
from fast.sharding import Mesh
from fast.state import DsaState
from reference.checkpoint import open_checkpoint

LAYERS = (0, 3, 4)
"""KDA and dense, DSA and experts, KDA and experts."""
LAUNCHED: list[str] = []


class Silent:
    """A kernel that does nothing but ask for no more shared memory than there is."""

    def __init__(self, variant: Any, name: str, device: int) -> None:
        self.name = f"{variant.name}:{name}"

    def __call__(self, grid: Any, threads: int, parameters: Any, *, shared: int = 0, pdl: bool = False) -> None:
        assert shared <= driver.shared_limit(0), (self.name, shared)
        LAUNCHED.append(self.name)


class Pretended(TextModel):
    """A model on the CPU that is taken for one on a GPU."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, kernels=False)
        self.kernels = decoder.Decoder(self)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("narrow") / "narrow", "nvidia", narrow("narrow", LAYERS), 0)


@pytest.fixture
def model(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    words = torch.zeros(64, dtype=torch.int32)
    replaced: dict[str, Callable[..., Any]] = {
        "kernel": Silent,
        "processors": lambda device: 132,
        "shared_limit": lambda device: 227 * 1024,
        "scratch": lambda device: words,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(driver, name, value)
    monkeypatch.setattr(gemv, "supported", lambda x, weight: x.dtype == weight.dtype == torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(DecodeStep, "capture", lambda self, **options: setattr(self, "graph", object()))
    monkeypatch.setattr(DecodeStep, "replay", lambda self: self.run(head=False))
    LAUNCHED.clear()
    return Pretended(directory)


def lengths(model: TextModel) -> set[int]:
    return {model.state.length, *(layer.length for layer in model.state.layers.values())}


def test_every_tap_is_there_with_its_shape(model: Pretended, directory: Path) -> None:
    config = open_checkpoint(directory).config
    ids = tokens(1, 40, config.text.vocab_size)
    found: dict[str, list[torch.Tensor]] = {}

    def tap(name: str, value: Any) -> None:
        found.setdefault(name, []).append(value)

    model.prefill(ids[:20], tap)
    for start, end in ((20, 28), (28, 35), (35, 36), (36, 37), (37, 40)):
        model.prefill(ids[start:end], tap)
    own = {name: spec for name, spec in taps.expected(config, 40).items() if not name.startswith(("mtp.", "vision."))}
    assert set(found) == set(own)
    for name, spec in own.items():
        assert len({value.dtype for value in found[name]}) == 1, name
        if name.endswith(".scores"):
            found[name] = [torch.nn.functional.pad(x, (0, 40 // 4 - x.shape[1])) for x in found[name]]
        last = name.endswith((".state", ".conv_state"))
        whole = found[name][-1] if last else torch.cat(found[name])
        assert tuple(whole.shape) == spec.shape, (name, tuple(whole.shape), spec.shape)


def test_a_step_launches_every_kind_of_kernel(model: Pretended) -> None:
    model.decode(3)
    families = {name.split(":")[0].split("-")[0] for name in LAUNCHED}
    assert families == {"mhc", "gemv", "kda", "indexer", "mla", "experts"}


def test_states_are_counted_and_cut_back(model: Pretended) -> None:
    ids = tokens(2, 60, model.config.text.vocab_size)
    model.prefill(ids[:30])
    for kept in range(ROWS + 1):
        before = model.state.length
        model.verify(model.ids(ids[30 : 30 + ROWS]))
        model.state.commit(kept)
        assert lengths(model) == {before + kept}
    saved = model.state.snapshot()
    model.prefill(ids[:11])
    model.decode(5)
    model.state.restore(saved)
    assert all(torch.equal(model.state.snapshot()[name], x) for name, x in saved.items())


def test_room_grows_and_another_sequence_takes_its_own(model: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "LEAST", 32)
    assert model.kernels is not None
    ids = tokens(3, 40, model.config.text.vocab_size)
    model.prefill(ids[:21])
    model.decode(3)
    first, saved, room = model.state, model.state.snapshot(), model.kernels.capacity
    assert room == 32
    model.reset()
    model.prefill(ids)
    model.decode(3)
    assert model.kernels.capacity == 64
    assert all(torch.equal(first.snapshot()[name], x) for name, x in saved.items())
    model.state = first
    model.decode(7)
    assert lengths(model) == {23}


def test_why_there_are_no_kernels(directory: Path) -> None:
    model = TextModel(directory)
    assert model.kernels is None
    assert model.without_kernels == "no CUDA device"
    assert TextModel(shared("nvidia"), kernels=False).without_kernels == "not asked for"


def reachable(value: Any) -> dict[int, torch.Tensor]:
    """{address: tensor} of what a step's buffers and projections hold."""
    if isinstance(value, torch.Tensor):
        return {value.data_ptr(): value}
    found: dict[int, torch.Tensor] = {}
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    for one in value if isinstance(value, list | tuple) else ():
        found |= reachable(one)
    return found


def held(kernels: decoder.Decoder) -> int:
    """Bytes of all steps beside weights, states, and the scratch whose size is the device's."""
    total = 0
    for step in kernels.steps.values():
        tensors = reachable((step.buffers, step.raw, step.token))
        total += sum(x.nbytes for at, x in tensors.items() if at != step.buffers.best.data_ptr())
    return total


def caches(model: TextModel) -> dict[str, int]:
    """The allocations of a state, by their names in a plan."""
    found: dict[str, int] = {}
    for layer in model.state.layers.values():
        if isinstance(layer, DsaState):
            sizes = {"latent cache": layer.latents.data, "pool keys": layer.pools.data}
            named = {name: x.nbytes for name, x in sizes.items()}
            named["index tails"] = layer.keys.nbytes + layer.gates.nbytes
        else:
            named = {"KDA state": layer.matrix.nbytes, "KDA convolution": layer.history.nbytes}
        for name, n in named.items():
            found[name] = found.get(name, 0) + n
    return found


@pytest.mark.parametrize("tokens_", [50, 301])
@pytest.mark.parametrize(("name", "layers"), [("narrow", LAYERS), ("narrow-odd", (0, 1, 4))])
def test_the_room_that_is_reserved_is_that_of_the_plan(
    model: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, layers: tuple[int, ...], tokens_: int
) -> None:
    """Caches of the kernels and steps of every row count, to the byte; none of it grows until the last token."""
    monkeypatch.setattr(decoder, "LEAST", 32)
    monkeypatch.setattr(mla, "keys", lambda device: mla.LEAST_KEYS)
    if name != "narrow":
        model = Pretended(make(tmp_path / name, "nvidia", narrow(name, layers), 0))
    kernels, text = model.kernels, model.config.text
    assert kernels is not None
    planned = plan(model, tokens_)
    model.reset(tokens_)
    room = kernels.capacity
    assert tokens_ <= room < tokens_ + text.index_kpool
    assert caches(model) == planned.state
    for T in range(1, ROWS + 1):
        kernels._step(T)
    assert held(kernels) == planned.workspaces["decode steps"]
    first = kernels.steps[1]
    model.prefill(tokens(4, tokens_ - 9, text.vocab_size))
    model.prefill(tokens(5, 8, text.vocab_size))
    model.decode(3)
    assert model.state.length == tokens_
    assert caches(model) == planned.state
    assert kernels.steps[1] is first
    # A shorter text later finds its room there; one token more than was reserved makes it grow.
    model.reset(tokens_ - 20)
    assert kernels.steps[1] is first
    assert lengths(model) == {0}
    model.reset(room + 1)
    assert kernels.capacity == room + text.index_kpool


def plan(model: TextModel, context: int) -> memory.Plan:
    gate_rank = model.weights.tensor("model.language_model.layers.0.self_attn.f_a_proj.weight").shape[0]
    shapes = layout.export_tensors(model.config, "nvidia", gate_rank)
    return memory.plan(model.config, shapes, Mesh(), memory.HARDWARE["h200"], gate_rank=gate_rank, context=context)


def test_nothing_is_planned_for_kernels_that_do_not_run(model: Pretended) -> None:
    """Several ranks, or a geometry that they do not cover, take torch operations: their caches alone count."""
    gate_rank, config = 128, model.config
    shapes = layout.export_tensors(config, "nvidia", gate_rank)
    options: Any = {"gate_rank": gate_rank, "context": 50}
    ranks = memory.plan(config, shapes, Mesh(2), memory.HARDWARE["h200"], **options)
    assert "decode steps" not in ranks.workspaces
    assert ranks.state["latent cache"] == memory.cache_bytes(config.text, 50)[0]
    parsed = parse(geometry("tiny").config)
    shapes, options["gate_rank"] = layout.export_tensors(parsed, "nvidia", 16), 16
    assert "decode steps" not in memory.plan(parsed, shapes, Mesh(), memory.HARDWARE["h200"], **options).workspaces


def test_room_that_there_is_no_memory_for_is_not_asked_for_again(
    model: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "LEAST", 32)
    model.prefill(tokens(6, 40, 512))
    kernels, made_at_all = model.kernels, DecodeStep.__init__
    assert kernels is not None

    def full(self: DecodeStep, *arguments: Any, capacity: int, **options: Any) -> None:
        if capacity > 64:
            raise torch.OutOfMemoryError(f"{capacity} tokens")
        made_at_all(self, *arguments, capacity=capacity, **options)

    monkeypatch.setattr(DecodeStep, "__init__", full)
    with pytest.raises(torch.OutOfMemoryError, match="100 tokens"):
        model.reset(100)
    model.reset(8)
    model.prefill(tokens(7, 8, 512))
    assert model.state.length == 8
    assert kernels.capacity == 32


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"n_routed_experts": 576}, "router"),
        ({"n_group": 36}, "router"),
        ({"index_topk": 4096}, "index_topk"),
        ({"intermediate_size": 12304}, "intermediate_size"),
        ({"moe_intermediate_size": 2056}, "moe_intermediate_size"),
        ({"hc_mult": 5}, "hidden_size, hc_mult"),
        ({}, None),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_cover_is_said_before_they_are_launched(
    change: dict[str, Any], reason: str | None
) -> None:
    text = parse(geometry("full").config).text
    assert layers.unsupported(dataclasses.replace(text, **change)) == reason
