"""Faults that ranks make while they run: from call to call, in what is summed and when, in whose scales are whose.

Most leave every operand as it should be, so that taps alone tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.record import Mutant, Patch, around, family, replace
from conformance.mutants.sharding import loaded
from fast.loader import Weights
from fast.ops import mlp
from fast.sharding import Mesh

TP2: dict[str, Any] = {"options": {"tp": 2, "ep": 1}}
EP2: dict[str, Any] = {"options": {"tp": 1, "ep": 2}}
SPLIT: dict[str, Any] = {"options": {"tp": 4, "ep": 2}}
KDA, MOE, EXPERTS = "layers.0.attn.", "layers.3.", "*.mlp.experts.*"
_m = family("sharding")


def _join(wrapper: Any) -> Patch:
    return around("fast.layers:Setting.join", wrapper)


def _not_in_decode(join: Any, setting: Any, partial: Tensor, site: str, *, everyone: bool = False) -> Tensor:
    """A decode path of its own, that was forgotten."""
    if len(partial) == 1 and site.endswith(".attn"):
        return partial.to(setting.dtype)
    return join(setting, partial, site, everyone=everyone)


def _on_the_first_rank(join: Any, setting: Any, partial: Tensor, site: str, *, everyone: bool = False) -> Tensor:
    """A reduction where an all-reduce has to be: one rank has the sum, the others go on with their parts."""
    whole = join(setting, partial, site, everyone=everyone)
    return whole if setting.mesh.rank == 0 else partial.to(setting.dtype)


def _factor_again(join: Any, setting: Any, partial: Tensor, site: str, *, everyone: bool = False) -> Tensor:
    """routed_scaling_factor of `tiny` once by the router and once more over the sum, shared expert included."""
    whole = join(setting, partial, site, everyone=everyone)
    return whole * 2.5 if everyone else whole


def _over_one_range(join: Any, setting: Any, partial: Tensor, site: str, *, everyone: bool = False) -> Tensor:
    """Experts summed over the ranks that divide them, and not over the ranges."""
    if not everyone:
        return join(setting, partial, site)
    mesh, found = setting.mesh, setting.communicator._swap(site, partial)
    first = mesh.rank - mesh.expert_tp_rank
    return torch.stack(found[first : first + mesh.expert_tp]).sum(0).to(setting.dtype)


def _streams_of_every_rank(combine: Any, streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The sum of two ranks taken after the mHC combine: the mixed streams are in it twice."""
    mixed = combine(streams, torch.zeros_like(out), post, comb)
    return (combine(streams, out, post, comb).float() + mixed.float()).to(streams.dtype)


def _shared_after_the_sum(original: Any, self: Any, x: Tensor, tap: Any, indices: Tensor | None = None) -> Tensor:
    """Every rank adds its part of the shared expert to the sum, instead of to its part of it."""
    limit, setting, mesh = self.text.swiglu_limit, self.setting, self.setting.mesh
    found, weights = self.route(x, tap, indices)
    routed = mlp.routed(x, self.bank, found, weights, limit, setting.partial(mesh.expert_tp))
    routed = routed.to(setting.partial(mesh.world))
    shared = mlp.dense(x, self.shared, limit, setting.partial(mesh.world))
    if tap is not None:
        tap(f"{self.name}.routed.out", routed)
        tap(f"{self.name}.shared.out", shared)
    whole = setting.join(routed, f"{self.name}.mlp", everyone=True)
    return (whole.float() + shared.float()).to(setting.dtype)


def _history_lost(original: Any, self: Any, x: Tensor, state: Any, tap: Any) -> Tensor:
    """One rank begins every call with an empty window of its convolution."""
    if self.setting.mesh.rank == 1:
        state.history = torch.zeros_like(state.history)
    return original(self, x, state, tap)


def _state_lost(original: Any, self: Any, x: Tensor, state: Any, tap: Any) -> Tensor:
    """The prefill's state stays on the first rank."""
    if self.setting.mesh.rank == 1 and len(x) == 1:
        state.matrix = torch.zeros_like(state.matrix)
    return original(self, x, state, tap)


def _stale_token(original: Any, self: Any, tokens: Sequence[int], tap: Any = None, pad: int = 0) -> Tensor:
    """One rank's last token is that of an earlier step."""
    if self.setting.mesh.rank == 1:
        tokens = [*tokens[:-1], tokens[0]]
    return original(self, tokens, tap, pad=pad)


def _cut_as_one(weights: Weights, whole: Weights) -> None:
    """q, k and v stacked, then divided: the first rank gets q and half of k."""
    names = [f"model.language_model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    mine = torch.cat([whole._values[name] for name in names]).chunk(weights.mesh.tp)[weights.mesh.tp_rank]
    weights._values.update(zip(names, (part.contiguous() for part in mine.chunk(3)), strict=True))


def _scale_2_by_local_id(weights: Weights, whole: Weights) -> None:
    """Scales of whole tensors kept in one array for all experts, read with the number an expert has on its rank."""
    first = weights.mesh.experts(16).start
    for name in [name for name in weights._packed if ".mlp.experts." in name]:
        stem, _, rest = name.partition(".experts.")
        expert, _, leaf = rest.partition(".")
        other = whole._packed[f"{stem}.experts.{int(expert) - first}.{leaf}"]
        weights._packed[name] = dataclasses.replace(weights._packed[name], scale_2=other.scale_2)


def _ranges_that_overlap(mesh: Mesh, total: int) -> range:
    """The last expert of a range is the first of the next one as well."""
    n = total // mesh.ep
    return range(mesh.ep_rank * n, min(total, (mesh.ep_rank + 1) * n + 1))


MUTANTS: tuple[Mutant, ...] = (
    _m("shard-no-sum-in-decode", "issue 6", KDA + "out", _join(_not_in_decode), **TP2),
    _m("shard-sum-on-first-rank-only", "issue 6", KDA + "out", _join(_on_the_first_rank), **TP2),
    _m("shard-factor-after-the-sum", "FB147", MOE + "mlp.out", _join(_factor_again), **EP2),
    _m("shard-experts-over-one-range", "model.md 5", MOE + "mlp.out", _join(_over_one_range), **SPLIT),
    _m(
        "shard-combined-before-the-sum",
        "model.md 5",
        "layers.0.mid",
        around("fast.ops.mhc:combine", _streams_of_every_rank),
        **TP2,
    ),
    _m(
        "shard-shared-after-the-sum",
        "model.md 5",
        MOE + "mlp.out",
        around("fast.layers:Moe.__call__", _shared_after_the_sum),
        **TP2,
    ),
    _m(
        "shard-history-lost-on-one-rank", "issue 6", KDA + "q", around("fast.layers:Kda.__call__", _history_lost), **TP2
    ),
    _m("shard-state-lost-on-one-rank", "issue 6", KDA + "core", around("fast.layers:Kda.__call__", _state_lost), **TP2),
    _m(
        "shard-token-of-an-earlier-step",
        "issue 6",
        "embed",
        around("fast.model:TextModel.prefill", _stale_token),
        **TP2,
    ),
    _m(
        "shard-qkv-cut-as-one",
        "exports.md 4.1",
        KDA + "q",
        loaded(_cut_as_one),
        operand="*.0.self_attn.[qkv]_proj.weight",
        **TP2,
    ),
    _m(
        "shard-scale_2-by-local-id",
        "exports.md 4.1",
        MOE + "routed.out",
        loaded(_scale_2_by_local_id),
        operand=EXPERTS,
        **EP2,
    ),
    _m(
        "shard-ranges-overlap",
        "FB61",
        MOE + "routed.out",
        replace("fast.sharding:Mesh.experts", _ranges_that_overlap),
        operand=EXPERTS,
        **EP2,
    ),
)
