"""Operands of ranks: each binds the plan's part of the file, and every departure is named."""

import functools

import numpy as np
import pytest

from conformance.checkpoints.shared import shared
from conformance.engines.threads import ThreadedEngine
from conformance.judge import bits, rank_bits
from conformance.judge.rank_bits import RankOperands
from conformance.suite import operands_of
from reference.checkpoint import open_checkpoint
from reference.sharding import Mesh

MESHES = [
    ("tiny", "nvidia", 2, 1, "replicated"),
    ("tiny", "libertai", 4, 2, "replicated"),
    ("tiny", "nvidia", 2, 4, "head"),
    ("tiny", "libertai", 2, 2, "split"),
    ("odd", "libertai", 2, 2, "replicated"),
    ("odd", "nvidia", 1, 3, "replicated"),
]
LAYER = "model.language_model.layers.3."
EXPERT = LAYER + "mlp.experts.9.down_proj.weight"
ROWS = LAYER + "self_attn.kv_b_proj.weight"
SHARED = LAYER + "self_attn.q_a_proj.weight"


@functools.cache
def engine(geometry, export, tp, ep, vocab):
    made = ThreadedEngine()
    made.open(shared(export, geometry), tp=tp, ep=ep, vocab=vocab)
    return made


@pytest.mark.parametrize(
    ("geometry", "export", "tp", "ep", "vocab"), MESHES, ids=["-".join(map(str, mesh)) for mesh in MESHES]
)
def test_every_part_of_every_weight_on_every_rank(geometry, export, tp, ep, vocab):
    checkpoint = open_checkpoint(shared(export, geometry))
    operands = operands_of(engine(geometry, export, tp, ep, vocab))
    assert isinstance(operands, RankOperands)
    rows = list(rank_bits.compare(checkpoint, operands))
    assert all(row.passed for row in rows), [(row.name, row.part, row.message) for row in rows if not row.passed][:5]
    assert {row.name for row in rows} == set(bits.weights(checkpoint))
    world = max(tp, ep)
    for name in bits.weights(checkpoint):
        ranks = {row.part.rpartition("rank ")[2] for row in rows if row.name == name}
        assert len(ranks) == (world // ep if ".experts." in name else world), name
    sizes = {row.name: row.compared for row in rows}
    assert sizes["lm_head.weight"] * (1 if vocab == "replicated" else tp) == checkpoint.weight("lm_head.weight").size


def compared(changes, name=EXPERT):
    """Failing rows as (name, part, message) when rank r holds changes[r](name, what it holds)."""
    sound = engine("tiny", "nvidia", 2, 2, "replicated")

    def of(rank, asked):
        return changes.get(rank, lambda _, held: held)(asked, sound.rank_operands(rank, asked))

    operands = RankOperands(Mesh(2, 2), of)
    checkpoint = open_checkpoint(shared("nvidia", "tiny"))
    return [
        (row.name, row.part, row.message)
        for row in rank_bits.compare(checkpoint, operands, [name] if isinstance(name, str) else name)
        if not row.passed
    ]


def flipped(part):
    def change(_, held):
        changed = {key: np.array(value) for key, value in held.items()}
        changed[part].reshape(-1).view(np.uint8)[-1] ^= 1
        return changed

    return change


@pytest.mark.parametrize("part", ["codes", "scale", "scale_2"])
def test_one_bit_of_one_rank_is_named(part):
    (found,) = compared({1: flipped(part)})
    size = {"codes": 128 * 32, "scale": 128 * 4, "scale_2": 1}[part]
    assert found == (EXPERT, f"{part}, rank 1", f"1 of {size} differ")


def test_the_part_of_another_rank_is_named():
    sound = engine("tiny", "nvidia", 2, 2, "replicated")
    found = compared({0: lambda name, _: sound.rank_operands(1, name)}, ROWS)
    assert [(name, part) for name, part, _ in found] == [(ROWS, "value, rank 0")]
    assert compared({0: lambda name, _: sound.rank_operands(1, name)}, SHARED) == []


def test_a_whole_tensor_for_a_part_is_named():
    whole = open_checkpoint(shared("nvidia", "tiny")).weight(ROWS)
    assert compared({1: lambda *_: {"value": whole}}, ROWS) == [
        (ROWS, "value, rank 1", "shape [256, 32], expected [128, 32]")
    ]


def test_an_expert_on_two_ranks_or_on_the_wrong_one_is_named():
    sound = engine("tiny", "nvidia", 2, 2, "replicated")
    twice = compared({0: lambda name, _: sound.rank_operands(1, name)})
    assert twice == [(EXPERT, "whole, rank 0", "held, though its expert is another rank's")]
    moved = compared({0: lambda name, _: sound.rank_operands(1, name), 1: lambda *_: None})
    assert moved == [*twice, (EXPERT, "whole, rank 1", "not held, expected U8 [128, 32]")]


def test_a_weight_on_no_rank_is_named_where_others_of_its_role_are_shown():
    """An engine that shows no operand of some role is not compared there; one that shows some must show all."""
    lost = {rank: lambda name, held: None if name == EXPERT else held for rank in range(2)}
    assert compared(lost) == []
    other = EXPERT.replace("experts.9", "experts.8")
    assert compared(lost, [EXPERT, other]) == [(EXPERT, "whole", "held by no rank")]


def test_an_engine_that_shows_nothing_is_not_compared():
    checkpoint = open_checkpoint(shared("nvidia", "tiny"))
    assert list(rank_bits.compare(checkpoint, RankOperands(Mesh(2), lambda *_: None))) == []
