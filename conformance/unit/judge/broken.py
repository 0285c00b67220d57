"""The fast engine with one wrong constant in one layer, five times over: each must be named by layer and tap."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from conformance.engines.fast import FastEngine


class Broken(FastEngine):
    """A fast engine whose model a subclass damages after loading. `layer` and `tap` are where it must be found."""

    layer: ClassVar[int]
    tap: ClassVar[str]

    def _open(self, directory: Path) -> None:
        super()._open(directory)
        self.damage(self.model.layers[self.layer])

    @abstractmethod
    def damage(self, layer: Any) -> None: ...


class LowerBound(Broken):
    """KDA: the decay's lower bound is a tenth too small."""

    layer, tap = 2, "attn.g"

    def damage(self, layer: Any) -> None:
        layer.attn.lower_bound *= 0.9


class SinkhornIterations(Broken):
    """mHC: one Sinkhorn iteration instead of all."""

    layer, tap = 3, "attn_hc.comb"

    def damage(self, layer: Any) -> None:
        layer.text = replace(layer.text, hc_sinkhorn_iters=1)


class RoutedScaling(Broken):
    """Router: the scaling factor is 2 % off."""

    layer, tap = 4, "router.weights"

    def damage(self, layer: Any) -> None:
        text = layer.mlp.text
        layer.mlp.text = replace(text, routed_scaling_factor=text.routed_scaling_factor * 1.02)


class LatentEpsilon(Broken):
    """MLA: the latent norm takes the epsilon of the indexer's LayerNorm."""

    layer, tap = 1, "attn.q_resid"

    def damage(self, layer: Any) -> None:
        layer.attn.eps = 1e-6


class PoolWidth(Broken):
    """Indexer: one pool fewer than the budget allows."""

    layer, tap = 4, "indexer.selected"

    def damage(self, layer: Any) -> None:
        layer.attn.indexer.topk -= layer.attn.indexer.slots
