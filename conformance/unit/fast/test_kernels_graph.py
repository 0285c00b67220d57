"""The captured decode step: the model it computes, and that nothing about running it changes a bit."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.checkpoints.geometry import geometry
from conformance.unit.fast import kernel_cases as cases
from conformance.unit.fast.kernel_cases import CUDA
from fast import config as configs
from fast.graph import DecodeStep, GraphGeometryError, GraphRowsError
from fast.kernels import layers
from fast.ledger import Ledger
from fast.loader import Weights
from fast.model import TextModel
from fast.nvfp4 import Packed
from fast.recording import recording
from fast.sharding import Mesh
from reference import config as reference_configs
from reference import layout

pytestmark = pytest.mark.gpu

LAYERS = (0, 3, 4, 7)
"""KDA and dense; DSA and experts; KDA and experts; DSA and experts: at full width."""

PROMPT = 2100
"""More tokens than a selection takes."""

FLOATS = ("A_log", "dt_bias", "e_score_correction_bias", "hc_attn_base", "hc_attn_scale", "hc_ffn_base", "hc_ffn_scale")
SPREAD = {"conv1d.weight": 0.5, "k_norm.bias": 0.1, "e_score_correction_bias": 0.02, "embed_tokens.weight": 1.0}


def value(spec: layout.TensorSpec, g: torch.Generator) -> Tensor:
    """A random tensor that keeps activations of order 1."""
    leaf = spec.name.removeprefix("model.language_model.")
    x = torch.randn(spec.shape, generator=g, device=CUDA)
    if leaf.endswith("norm.weight"):
        x = 1.0 + 0.3 * x
    elif leaf.endswith("_scale"):
        x = 1.0 + 0.1 * x
    else:
        columns = spec.shape[-1] if len(spec.shape) == 2 else 1
        x = x * next((s for end, s in SPREAD.items() if leaf.endswith(end)), columns**-0.5)
    return x if leaf.endswith(FLOATS) else x.to(torch.bfloat16)


def weights(export: str, *, experts: int = 16, vocab: int = 512, seed: int = 90) -> Weights:
    """Random weights of the full widths, as a load would bind them, made on the device."""
    shape = geometry("full", layers=LAYERS, experts=experts, vocab=vocab)
    g, plain = cases.generator(seed), {}
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for spec in layout.tensors(reference_configs.parse(shape.config), export, shape.gate_rank):
        if spec.family == "vision" or (spec.layer is not None and spec.layer >= len(LAYERS)):
            continue
        if spec.packed is None:
            plain[spec.name] = value(spec, g)
        else:
            parts.setdefault(spec.packed.removesuffix(".weight"), {})[spec.dtype] = spec.shape
    packed = {}
    for name, found in parts.items():
        codes = torch.randint(0, 256, found["U8"], generator=g, device=CUDA, dtype=torch.uint8)
        scale = torch.randint(0x30, 0x40, found["F8_E4M3"], generator=g, device=CUDA, dtype=torch.uint8)
        packed[name] = Packed(codes, scale, torch.tensor(0.3 * (2 * codes.shape[1]) ** -0.5, device=CUDA))
    nothing: Any = None
    config = configs.parse(shape.config)
    return Weights(config, Mesh(), Ledger(), nothing, nothing, "", plain, packed)


@pytest.fixture(scope="module", params=["nvidia", "libertai"])
def bound(request: pytest.FixtureRequest) -> Weights:
    return weights(request.param)


def prepared(bound: Weights, *, sequences: int, tokens: int = 1, lengths: tuple[int, ...] = ()) -> DecodeStep:
    """A step whose sequences hold random states of some length."""
    model = layers.from_model(TextModel(bound, device="cuda"))
    step = DecodeStep(model, sequences=sequences, tokens=tokens, capacity=max(lengths) + 16)
    g = cases.generator(91)
    for state in step.states:
        for name in state.__slots__:
            x = getattr(state, name)
            if x.dtype.is_floating_point:
                x.copy_(torch.randn(x.shape, generator=g, device=CUDA))
    step.position.copy_(torch.tensor(lengths, dtype=torch.int32))
    step.token.copy_(torch.randint(0, 512, step.token.shape, generator=g, device=CUDA))
    return step


def everything(step: DecodeStep) -> list[Tensor]:
    kept = [step.token, step.position, step.buffers.logits]
    return kept + [getattr(state, name) for state in step.states for name in state.__slots__]


@pytest.mark.parametrize(
    "lengths", [(0,), (2047,), (5000,), (2046, 3, 9001, 2100), (7, 2050, 2051, 1, 0, 4095, 2048, 6)]
)
def test_a_replay_has_the_bits_of_eager_launches(bound: Weights, lengths: tuple[int, ...]) -> None:
    step = prepared(bound, sequences=len(lengths), lengths=lengths)
    start = [x.clone() for x in everything(step)]
    step.capture()

    def after(act: Any, steps: int) -> list[Tensor]:
        for x, saved in zip(everything(step), start, strict=True):
            x.copy_(saved)
        for _ in range(steps):
            act()
        return [x.clone() for x in everything(step)]

    eager = after(lambda: step.run(pdl=False), 3)
    assert eager[2].isfinite().all()
    assert torch.equal(eager[1] - start[1], torch.full_like(start[1], 3))
    for act in (step.replay, step.run, step.replay):
        assert all(torch.equal(a, b) for a, b in zip(after(act, 3), eager, strict=True))


def test_a_recording_outlives_garbage_that_holds_another_graph() -> None:
    x = torch.zeros(4, device=CUDA)
    with recording(x.device) as other:
        x.add_(1.0)
    others = [other]
    del other
    with recording(x.device) as graph:
        circle: list[Any] = [others.pop()]
        circle.append(circle)
        del circle
        kept: list[list[int]] = [[] for _ in range(100_000)]  # the collector would run many times
        x.add_(1.0)
    graph.replay()
    assert (x.tolist(), len(kept)) == ([1.0] * 4, 100_000)


def test_a_recording_that_breaks_off_leaves_the_stream_as_it_was() -> None:
    before, x = torch.cuda.current_stream(), torch.zeros(4, device=CUDA)

    def broken_off() -> None:
        with recording(x.device):
            x.add_(1.0)
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        broken_off()
    assert (torch.cuda.current_stream(), gc.isenabled()) == (before, True)
    with recording(x.device) as graph:
        x.add_(1.0)
    graph.replay()
    assert x.tolist() == [1.0] * 4


def test_other_threads_may_use_the_device_during_a_recording() -> None:
    x, found = torch.zeros(4, device=CUDA), []
    with recording(x.device) as graph:
        thread = threading.Thread(target=lambda: found.append(torch.ones(1 << 22).pin_memory().to(CUDA).sum().item()))
        thread.start()
        thread.join()
        x.add_(1.0)
    graph.replay()
    assert (x.tolist(), found) == ([1.0] * 4, [float(1 << 22)])


def test_a_row_has_the_same_bits_alone(bound: Weights) -> None:
    lengths = (2046, 3, 9001)
    together = prepared(bound, sequences=3, lengths=lengths)
    alone = []
    for s, length in enumerate(lengths):
        one = prepared(bound, sequences=1, lengths=(length,))
        for own, all_ in zip(one.states, together.states, strict=True):
            for name in own.__slots__:
                x, source = getattr(own, name), getattr(all_, name)[s]
                if x.ndim > 1:
                    x[0] = source[tuple(slice(0, n) for n in x.shape[1:])]
        one.token.copy_(together.token[s : s + 1])
        alone.append(one)
    for one in (together, *alone):
        one.run()
        one.run()
    for s, one in enumerate(alone):
        assert torch.equal(one.buffers.logits[0], together.buffers.logits[s])
        assert torch.equal(one.token[0], together.token[s])
        for own, all_ in zip(one.states, together.states, strict=True):
            for name in own.__slots__:
                x, source = getattr(own, name), getattr(all_, name)[s]
                if x.ndim > 1:
                    assert torch.equal(x[0], source[tuple(slice(0, n) for n in x.shape[1:])])


@pytest.mark.parametrize("length", [9, 2049])
def test_rows_of_a_window_have_the_bits_of_single_steps(bound: Weights, length: int) -> None:
    """Drafts cost nothing in exactness: T tokens at once, or one after the other."""
    T = 5
    window = prepared(bound, sequences=1, tokens=T, lengths=(length,))
    single = prepared(bound, sequences=1, lengths=(length,))
    for own, other in zip(single.states, window.states, strict=True):
        for name in own.__slots__:
            getattr(own, name).copy_(getattr(other, name))
    tokens = window.token.clone()
    window.run()
    for t in range(T):
        single.token.copy_(tokens[t : t + 1])
        single.run()
        assert torch.equal(single.buffers.logits[0], window.buffers.logits[t])
        assert torch.equal(single.token[0], window.token[t])
    for own, other in zip(single.states, window.states, strict=True):
        for name in own.__slots__:
            if name != "position":
                assert torch.equal(getattr(own, name), getattr(other, name))


def test_the_step_computes_the_model(bound: Weights) -> None:
    """Logits after a prompt: as near to the model without storage rounding as torch operations in bf16 are."""
    g = cases.generator(92)
    tokens = torch.randint(0, 512, (PROMPT + 6,), generator=g, device=CUDA).tolist()
    engine = TextModel(bound, device="cuda", kernels=False)
    exact = TextModel(bound, device="cuda", dtype=torch.float32)
    step = DecodeStep(layers.from_model(engine), sequences=2, capacity=PROMPT + 8)
    for model in (engine, exact):
        model.prefill(tokens[:PROMPT])
    for sequence in range(2):
        step.load(sequence, engine.state)
    own, engines = [], []
    for token in tokens[PROMPT:]:
        step.token.fill_(token)
        step.run()
        truth = exact.decode(token)
        own.append((step.buffers.logits.double() - truth.double()).square().mean().item())
        engines.append((engine.decode(token).double() - truth.double()).square().mean().item())
        assert torch.equal(step.buffers.logits[0], step.buffers.logits[1])
        assert torch.equal(step.token, step.buffers.logits.argmax(-1).int())
    assert sum(own) <= 2.0 * sum(engines), (own, engines)


def test_what_has_no_kernel_is_refused(bound: Weights) -> None:
    model = layers.from_model(TextModel(bound, device="cuda"))
    with pytest.raises(GraphRowsError, match="9 sequences of 1 tokens"):
        DecodeStep(model, sequences=9, capacity=64)
    step = DecodeStep(model, sequences=1, capacity=64)
    state = TextModel(bound, device="cuda").state
    state.length = 64
    with pytest.raises(GraphRowsError, match="64 tokens and 1 more"):
        step.load(0, state)
    odd = configs.parse(geometry("odd").config).text
    with pytest.raises(GraphGeometryError, match="indexer_types"):
        DecodeStep(layers.Model(model.embed, (), model.norm, model.lm_head, odd), sequences=1, capacity=64)
