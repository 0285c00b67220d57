"""Samples of what ranks that hand bf16 to the all-reduce may give: partial sums are rounded before they are added.

An engine on `tp` x `ep` ranks rounds each rank's part of o_proj, of down_proj and of the experts' sum to bf16, adds the
parts in some order, and may round every running sum (`reference.ranks`). Where parts cancel that is far more than one
rounding of their sum, and no less right. An engine that adds in fp32 says so in the metadata, `partial_sums: "fp32"`,
and is judged as one rank would be.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.judge.sampling import Sampler
from conformance.trace import PARTIAL_SUMS
from reference.arithmetic import Arithmetic, Sliced
from reference.checkpoint import Checkpoint
from reference.errors import DivisionError, MeshError
from reference.model import Moe
from reference.ranks import reduce
from reference.sharding import Mesh, plan

ALONE = Mesh()


def claimed(metadata: Mapping[str, str], checkpoint: Checkpoint) -> Mesh:
    """The ranks that a trace names. Raises ValueError, MeshError, and DivisionError where the weights do not divide."""
    mesh = Mesh(int(metadata.get("tp", "")), int(metadata.get("ep", "")))
    if mesh.world > 1:
        plan(checkpoint.specs.values(), checkpoint.config.text, mesh)
    return mesh


def rounding(metadata: Mapping[str, str], checkpoint: Checkpoint) -> Mesh:
    """The ranks whose partial sums may have been rounded to bf16; one rank where none were, or the sizes are a lie."""
    try:
        return ALONE if metadata.get(PARTIAL_SUMS) == "fp32" else claimed(metadata, checkpoint)
    except (ValueError, MeshError, DivisionError):
        return ALONE


def parts_of(point: str, mesh: Mesh) -> int:
    """Among how many ranks the columns of the product at `point` are divided."""
    if point == "expert.down":
        return mesh.ranks_per_expert
    return mesh.tp if point in ("kda.o_proj", "mla.o_proj", "mlp.down", "shared.down") else 1


def _divided(a: np.ndarray, b: np.ndarray | Sliced, parts: int) -> list[tuple[np.ndarray, np.ndarray]]:
    right = np.asarray(b.values if isinstance(b, Sliced) else b, np.float64)
    return list(zip(np.array_split(a, parts, axis=-1), np.array_split(right, parts, axis=-2), strict=True))


class RankSampler(Sampler):
    """Products over divided columns are sums of their parts, each a bf16 point, and so is every running sum."""

    def __init__(self, seed: int, mesh: Mesh) -> None:
        super().__init__(seed)
        self.mesh = mesh

    def dot(self, a: np.ndarray, b: np.ndarray | Sliced, point: str, out: str = "bf16") -> np.ndarray:
        parts = parts_of(point, self.mesh)
        if parts == 1:
            return super().dot(a, b, point, out)
        return reduce(
            self, [super(RankSampler, self).dot(x, w, point, "fp32") for x, w in _divided(a, b, parts)], point
        )


class _OneRank(Arithmetic):
    """What one rank adds to a sum, without any rounding."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def dot(self, a: np.ndarray, b: np.ndarray | Sliced, point: str, out: str = "bf16") -> np.ndarray:
        parts = parts_of(point, self.mesh)
        x, w = _divided(np.asarray(a, np.float64), b, parts)[self.mesh.rank % parts]
        return x @ w


def _own(indices: np.ndarray, experts: range) -> np.ndarray:
    return np.where((indices >= experts.start) & (indices < experts.stop), indices, -1)


def partial_sums(moe: Any, mesh: Mesh, x: np.ndarray, indices: np.ndarray, weights: np.ndarray) -> list[np.ndarray]:
    """mlp.in, router.indices, router.weights -> each rank's part of mlp.out, exact to a float64 product."""
    found = []
    for rank in range(mesh.world):
        one, at = copy.copy(moe), Mesh(mesh.tp, mesh.ep, rank)
        one.ar = _OneRank(at)
        part = one.routed(x, _own(indices, at.experts(moe.config.n_routed_experts)), weights)
        found.append(part + one.shared(x) if at.adds_shared_expert() else part)
    return found


class RankedMoe:
    """Samples of the experts of `moe`, whose arithmetic is a `RankSampler`: of routed.out, shared.out and mlp.out.

    `partials` gives what `partial_sums` does. The first rank's part is what the taps leave of the others', so that the
    parts add up to the engine's own taps.
    """

    def __init__(self, moe: Moe, mesh: Mesh, partials: Callable[[], Sequence[np.ndarray]]) -> None:
        self.moe, self.mesh, self.partials = moe, mesh, partials

    def __getattr__(self, name: str) -> Any:
        return getattr(self.moe, name)

    def routed(self, x: np.ndarray, indices: np.ndarray, weights: np.ndarray) -> np.ndarray:
        owners = range(0, self.mesh.world, self.mesh.ranks_per_expert)
        total = self.moe.config.n_routed_experts
        own = (Mesh(self.mesh.tp, self.mesh.ep, rank).experts(total) for rank in owners)
        return reduce(
            self.moe.ar, [self.moe.routed(x, _own(indices, experts), weights) for experts in own], "routed.out"
        )

    def sum(self, routed_out: np.ndarray, shared_out: np.ndarray) -> np.ndarray:
        whole, others = routed_out + shared_out, self.partials()[1:]
        return reduce(self.moe.ar, [whole - sum(others), *(np.broadcast_to(q, whole.shape) for q in others)], "mlp.out")
