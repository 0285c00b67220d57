"""The draft block on several ranks: the block of one rank but for the sums, packed before it is cut."""

import numpy as np
import pytest

from conformance import rank_traces
from conformance.checkpoints.shared import shared
from conformance.engines.reference import ReferenceEngine
from conformance.judge import compare
from conformance.suite import operands_of
from conformance.trace import Schedule
from reference import nvfp4
from reference.checkpoint import open_checkpoint
from reference.model import TextModel
from reference.mtp import Block, PackedExperts, Speculation
from reference.rank_taps import RankDisagreementError, ranks_with
from reference.ranked_mtp import PackedRankSource, ShardedBlock
from reference.ranks import NotOnRankError, ShardedModel
from reference.sharding import Mesh, part_of

IDS = np.arange(11) * 23 % 257
CUTS = Schedule((6, 2), 3)
MESHES = [("libertai", 2, 2), ("nvidia", 1, 2)]


@pytest.mark.parametrize(("export", "tp", "ep"), MESHES, ids=str)
def test_ranks_draft_as_one_does_and_are_judged(export, tp, ep):
    directory = shared(export, "odd")
    engine, alone = ReferenceEngine(), ReferenceEngine()
    engine.open(directory, tp=tp, ep=ep, mtp=3, arithmetic="bf16")
    alone.open(directory, mtp=3, arithmetic="bf16")
    parts, whole = engine.run_ranks(IDS, CUTS), alone.run(IDS, CUTS)
    made = rank_traces.joined(parts)
    own = {name for name in whole.taps if name.startswith("mtp.")}
    assert own
    for rank, part in enumerate(parts):
        here = {name for name in own if rank in ranks_with(name, engine.mesh)}
        assert {name for name in part.taps if name.startswith("mtp.")} == here
    assert {name: made.taps[name].shape for name in own} == {name: whole.taps[name].shape for name in own}
    result = compare(made, open_checkpoint(directory), operands=operands_of(engine))
    assert result.passed, result.first_divergence
    assert result.coverage.tensors_missing == ()


@pytest.mark.parametrize(("export", "tp", "ep"), MESHES, ids=str)
def test_the_same_text_in_the_same_rounds(export, tp, ep):
    """In the exact arithmetic, where only the order of the sums over ranks differs."""
    checkpoint = open_checkpoint(shared(export, "odd"))
    one, ranks = (Speculation(block) for block in (Block(TextModel(checkpoint)), sharded_block(export, tp, ep)))
    assert one.generate([5, 9, 2, 7, 1, 8], 6, 3) == ranks.generate([5, 9, 2, 7, 1, 8], 6, 3)


def sharded_block(export, tp, ep):
    return ShardedBlock(ShardedModel(open_checkpoint(shared(export, "odd")), tp, ep))


def test_bf16_experts_are_packed_before_they_are_cut():
    """A rank's part of the whole projection's codes; packing the part alone would find another scale_2."""
    checkpoint = open_checkpoint(shared("nvidia", "tiny"))
    scope = "model.language_model.layers.9.mlp.experts."
    name = f"{scope}3.gate_proj.weight"
    values = checkpoint.weight(name)
    whole = nvfp4.decode(*nvfp4.encode(values))
    for rank in range(2):
        mesh = Mesh(2, 1, rank)
        part = part_of(checkpoint.specs[name], checkpoint.config.text, mesh)
        assert part is not None
        found = PackedRankSource(PackedExperts(checkpoint, scope), mesh, scope).weight(name)
        np.testing.assert_array_equal(found, part.of(whole))
        alone = nvfp4.decode(*nvfp4.encode(np.ascontiguousarray(part.of(values))))
        assert np.array_equal(found, alone) == (np.abs(part.of(values)).max() == np.abs(values).max())
    absent = PackedRankSource(PackedExperts(checkpoint, scope), Mesh(1, 2, 1), scope)
    with pytest.raises(NotOnRankError, match=r"experts\.3\.gate_proj"):
        absent.weight(name)


def test_ranks_that_select_apart_are_named():
    block = sharded_block("libertai", 2, 2)
    choose = block.attn.ranks[1].select
    block.attn.ranks[1].select = lambda scores, seen: np.flip(choose(scores, seen), -1)
    with pytest.raises(RankDisagreementError, match=r"mtp\.|ranks 0 and 1"):
        Speculation(block).start([5, 9, 2, 7, 1, 8])
