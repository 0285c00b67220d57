"""Sharded models, all ranks as threads: sums, taps and texts against the oracle and against each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conformance.engines.threads import Thread, on_ranks
from conformance.unit.fast import bounds
from conformance.unit.fast.runs import AGREEMENT, Taps, distance, exact, feed, tokens
from fast.errors import IndivisibleError, MeshError
from fast.generate import Generator
from fast.linear import linear
from fast.loader import load
from fast.model import TextModel
from fast.mtp import Mtp
from fast.nvfp4 import decode
from fast.ops import mlp
from reference.rank_taps import join
from reference.sharding import Mesh

CASES = [
    *(
        ("tiny", export, *mesh)
        for export in ("nvidia", "libertai")
        for mesh in [(2, 1), (4, 1), (1, 2), (2, 2), (2, 4)]
    ),
    ("tiny", "nvidia", 4, 2),
    ("odd", "nvidia", 1, 2),
    ("odd", "nvidia", 1, 4),
    ("odd", "libertai", 2, 2),
]
EVERY = pytest.mark.parametrize(
    ("geometry", "export", "tp", "ep"), CASES, ids=[f"{g}-{e}-tp{tp}-ep{ep}" for g, e, tp, ep in CASES]
)
T = 44


@pytest.fixture(scope="module")
def oracle(checkpoint):
    """oracle(geometry, export) -> logits and taps of one rank in exact arithmetic."""
    return lambda geometry, export: exact(checkpoint(geometry, export), T, T - 3)


def model(directory, ranks: Thread, *, mtp: bool = False, dtype: torch.dtype = torch.float32) -> TextModel:
    mesh = ranks.mesh
    weights = load(directory, tp=mesh.tp, ep=mesh.ep, rank=mesh.rank, vocab=mesh.vocab, mtp=mtp, progress=False)
    return TextModel(weights, dtype=dtype, communicator=ranks)


@EVERY
def test_joined_ranks_agree_with_exact_arithmetic(checkpoint, oracle, geometry, export, tp, ep):
    """Every tap, put together by the oracle's rules; each reduction once per site, over the group that divides it."""

    directory = checkpoint(geometry, export)

    def run(ranks: Thread):
        one, taps = model(directory, ranks), Taps()
        logits = feed(one, tokens(1, T, one.config.text.vocab_size), [T - 3], taps)
        return logits, taps.arrays(), ranks.calls, one.config.text

    found = on_ranks(tp, ep, run)
    expected, taps = oracle(geometry, export)
    assert all(np.array_equal(logits, found[0][0]) for logits, *_ in found)
    assert distance(found[0][0], expected) <= AGREEMENT
    mesh, text = Mesh(tp, ep), found[0][3]
    for name, value in taps.items():
        rows = [heard.get(name) for _, heard, _, _ in found]
        whole = join(name, [np.zeros_like(rows[0]) if row is None else row for row in rows], mesh)
        if name.endswith((".selected", ".indices", "tokens")):
            assert np.array_equal(whole, value), name
        else:
            assert distance(whole, value) <= AGREEMENT, (name, distance(whole, value))
    sites = []
    for layer in range(text.num_hidden_layers):
        sites += [(f"layers.{layer}.attn", False)] if tp > 1 else []
        sites += [(f"layers.{layer}.mlp", text.is_sparse(layer))] if tp > 1 or text.is_sparse(layer) else []
    for _, _, calls, _ in found:
        assert [(site, everyone) for site, shape, _, everyone in calls if shape[0] == T - 3] == sites
        assert {(shape[1], dtype) for _, shape, dtype, _ in calls} == {(text.hidden_size, torch.float32)}


@pytest.mark.parametrize(("geometry", "tp", "ep"), [("tiny", 2, 2), ("odd", 2, 2)])
def test_in_bf16_all_ranks_hold_the_same_streams(checkpoint, geometry, tp, ep):
    """What follows a reduction is replicated: no rank may round it differently, in prefill or in decoding."""

    directory = checkpoint(geometry, "libertai")

    def run(ranks: Thread):
        one, taps = model(directory, ranks, dtype=torch.bfloat16), Taps()
        feed(one, tokens(1, 30, one.config.text.vocab_size), [20], taps)
        assert {dtype for _, _, dtype, _ in ranks.calls} == {torch.float32}, "partial sums are reduced unrounded"
        return {name: x for name, x in taps.arrays().items() if name.endswith(("attn.out", "mlp.out", ".out", "norm"))}

    found = on_ranks(tp, ep, run)
    names = [name for name in found[0] if not name.endswith(("routed.out", "shared.out"))]
    assert all(np.array_equal(found[0][name], other[name]) for name in names for other in found[1:])


@pytest.mark.parametrize("export", ["nvidia", "libertai"])
def test_parts_of_an_expert_are_added_before_they_are_rounded(checkpoint, export):
    """bf16, two ranks with half of every expert's width: their routed.out add up to the experts' fp32 outputs.

    The SwiGLU products are the same bf16 numbers on both sides, so only the order of fp32 sums differs.
    """
    directory, name = checkpoint("tiny", export), "layers.3"

    def run(ranks: Thread):
        one = model(directory, ranks, dtype=torch.bfloat16)
        heard: dict[str, torch.Tensor] = {}
        one.prefill(tokens(1, 20, one.config.text.vocab_size), tap=heard.__setitem__)
        return [heard[f"{name}.{leaf}"] for leaf in ("mlp.in", "router.indices", "router.weights", "routed.out")]

    (x, indices, weights, first), (*_, second) = on_ranks(2, 1, run)
    held = load(directory, progress=False)
    bank, limit = held.experts(3), held.config.text.swiglu_limit
    expected, size = torch.zeros(first.shape).double(), torch.zeros(first.shape).double()
    for t in range(len(x)):
        for slot in range(indices.shape[1]):
            expert = int(indices[t, slot])
            row = x[t : t + 1]
            product = mlp.swiglu(linear(row, bank.gate[expert]), linear(row, bank.up[expert]), limit).double()
            down = decode(bank.down[expert]).double()
            expected[t] += float(weights[t, slot]) * (product @ down.T)[0]
            size[t] += float(weights[t, slot]) * (product.abs() @ down.abs().T)[0]
    total = first + second
    bounds.check(total, expected, bounds.gamma(held.config.text.moe_intermediate_size + 8) * size)


@pytest.mark.parametrize("vocab", ["head", "split"])
def test_a_divided_vocabulary_is_put_together(checkpoint, oracle, vocab):
    directory = checkpoint("tiny", "nvidia")

    def run(ranks: Thread):
        one, taps = model(directory, ranks), Taps()
        logits = feed(one, tokens(1, T, one.config.text.vocab_size), [T - 3], taps)
        return logits, taps.arrays()["embed"], one.lm_head.shape[0], one.embed_tokens.shape[0]

    found = on_ranks(2, 1, run, vocab)
    expected, taps = oracle("tiny", "nvidia")
    for logits, embed, head_rows, embed_rows in found:
        assert np.array_equal(embed, taps["embed"])
        assert distance(logits, expected) <= AGREEMENT
        assert (head_rows, embed_rows) == (256, 256 if vocab == "split" else 512)


@pytest.mark.parametrize(("geometry", "tp", "ep"), [("tiny", 2, 2), ("odd", 1, 2)])
def test_drafts_change_nothing_on_any_rank(checkpoint, geometry, tp, ep):
    """Tokens and final states with 3 drafts a round are those without, on every rank; ranks agree on the text."""

    directory = checkpoint(geometry, "libertai")

    def run(ranks: Thread):
        target = model(directory, ranks, mtp=True, dtype=torch.bfloat16)
        block, results = Mtp(target), []
        prompt = tokens(2, 21, target.config.text.vocab_size).tolist()
        for drafts in (0, 3):
            text = list(Generator(target, mtp=block, drafts=drafts).tokens(prompt, 10))
            results.append((text, target.state.snapshot() | block.state.snapshot()))
        return results

    found = on_ranks(tp, ep, run)
    for (plain, states), (drafted, after) in found:
        assert plain == drafted == found[0][0][0]
        assert states.keys() == after.keys()
        assert all(torch.equal(states[name], after[name]) for name in states)


def test_what_does_not_divide_is_refused_with_the_numbers(checkpoint):
    with pytest.raises(IndivisibleError, match=r"layers\.0\.self_attn\..*: 6 .* do not divide among 4 ranks"):
        load(checkpoint("odd", "nvidia"), tp=4, progress=False)
    with pytest.raises(IndivisibleError, match="80 columns among 2 ranks are 40 each"):
        load(checkpoint("odd", "nvidia"), tp=2, progress=False)


def test_weights_of_another_mesh_are_refused(checkpoint):
    with pytest.raises(MeshError, match="tp=2"):
        TextModel(load(checkpoint("tiny", "nvidia"), tp=2, rank=1, progress=False))
