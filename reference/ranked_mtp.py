"""The draft block of a sharded model: its mixer and its experts on all ranks (model.md section 5).

The block divides as a text layer does, and is reduced at the same two points; see `reference.ranks`. Its BF16 experts
are packed before they are cut: one scale_2 for the whole of a projection, as an engine finds it that loads a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from reference.arithmetic import Arithmetic
from reference.model import Dsa, Tap
from reference.mtp import Block, PackedExperts
from reference.rank_taps import join_state
from reference.ranks import (
    Fan,
    NotOnRankError,
    RankMoe,
    RankSource,
    ShardedModel,
    each,
    reduce,
    reduce_over_tp,
)
from reference.sharding import Mesh, part_of
from reference.state import DsaState
from reference.weights import Weights


class PackedRankSource(RankSource):
    """As `RankSource`; BF16 experts under `experts` have this rank's part of the values that packing gives them."""

    def __init__(self, whole: PackedExperts, mesh: Mesh, experts: str) -> None:
        super().__init__(whole.checkpoint, mesh)
        self.whole, self.experts = whole, experts

    def weight(self, name: str) -> np.ndarray:
        if not name.startswith(self.experts) or self.checkpoint.dtype(name) != "BF16":
            return super().weight(name)
        part = part_of(self.checkpoint.specs[name], self.text, self.mesh)
        if part is None:
            raise NotOnRankError(f"{name}: not on rank {self.mesh.rank} of {self.mesh}")
        return part.of(self.whole.weight(name))


class RankedDsa:
    """The block's mixer on all ranks, called as a `Dsa` is; the state is the whole one, which every rank keeps."""

    def __init__(self, ar: Arithmetic, mesh: Mesh, ranks: list[Dsa]) -> None:
        self.ar, self.mesh, self.ranks = ar, mesh, ranks

    def fresh(self, batch: tuple[int, ...] = ()) -> DsaState:
        return self.ranks[0].fresh(batch)

    def __call__(self, x: np.ndarray, state: DsaState, tap: Tap, *rest: Any, **named: Any) -> np.ndarray:
        """As `Dsa`, after the all-reduce. Raises `RankDisagreementError`."""
        states = [replace(state) for _ in self.ranks]
        parts = each(self.mesh, tap, lambda rank, tap: self.ranks[rank](x, states[rank], _heard(tap), *rest, **named))
        for item, value in vars(join_state("mtp", states, self.mesh)).items():
            setattr(state, item, value)
        return reduce_over_tp(self.ar, parts, self.mesh, "mtp", "attn.out")


class RankedMoe:
    """The block's experts on all ranks, called as a `Moe` is."""

    def __init__(self, ar: Arithmetic, mesh: Mesh, ranks: list[RankMoe]) -> None:
        self.ar, self.mesh, self.ranks = ar, mesh, ranks

    def __call__(self, x: np.ndarray, tap: Tap, indices: np.ndarray | None = None) -> np.ndarray:
        """As `Moe`, after the all-reduce. Raises `RankDisagreementError`."""
        parts = each(self.mesh, tap, lambda rank, tap: self.ranks[rank](x, _heard(tap), indices))
        return reduce(self.ar, parts, "mlp.out")


class ShardedBlock(Block):
    """The draft block beside a `ShardedModel`. A tap that is a `Fan` is heard by every rank too."""

    def __init__(self, target: ShardedModel, experts: str = "packed") -> None:
        super().__init__(target, experts)
        mixers, moes = list[Dsa](), list[RankMoe]()
        for rank, layers in enumerate(target.ranks):
            mesh, first = replace(target.mesh, rank=rank), layers[0]
            source = RankSource(target.checkpoint, mesh)
            if isinstance(self.source, PackedExperts):
                source = PackedRankSource(self.source, mesh, f"{self.scope}mlp.experts.")
            w = Weights(source, self.scope)
            mixers.append(Dsa(first.ar, first.config, w.at("self_attn."), target.options))
            moes.append(RankMoe(mesh, first.ar, first.config, w.at("mlp."), target.options))
        self.attn = RankedDsa(self.ar, target.mesh, mixers)
        self.ffn = RankedMoe(self.ar, target.mesh, moes)

    def reporter(self, tap: Tap | None) -> Tap:
        return _fanned(tap, super().reporter)

    def without_indexer(self, tap: Tap | None) -> Tap | None:
        return None if tap is None else _fanned(tap, super().without_indexer)


def _fanned(tap: Tap | None, change: Callable[[Tap | None], Tap | None]) -> Fan:
    """`change` of the whole's tap and of each rank's."""
    if not isinstance(tap, Fan):
        return Fan(change(tap), None)
    return Fan(change(tap.whole), None if tap.ranks is None else [_heard(change(one)) for one in tap.ranks])


def _heard(tap: Tap | None) -> Tap:
    return tap or (lambda name, value: None)
