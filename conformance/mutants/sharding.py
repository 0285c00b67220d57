"""Faults of sharding: a part cut elsewhere, a sum left out or taken twice, a choice that ranks do not share.

All on ranks as threads. `recut` binds another part of the whole tensor than the plan's, so that shapes stay right and
nothing crashes; what then is computed is what half-applied sharding computes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.record import ODD, Mutant, Patch, around, family, layers, replace
from fast.loader import Weights, load
from fast.nvfp4 import Packed, decode
from fast.sharding import Mesh

Cut = Callable[[Tensor, Mesh], Tensor]
TP2: dict[str, Any] = {"options": {"tp": 2, "ep": 1}}
EP2: dict[str, Any] = {"options": {"tp": 1, "ep": 2}}
BOTH: dict[str, Any] = {"options": {"tp": 2, "ep": 2}}
GROUPS: dict[str, Any] = {"options": {"tp": 2, "ep": 4}}
UNEVEN: dict[str, Any] = {"options": {"tp": 1, "ep": 4}}
_m = family("sharding")


@functools.cache
def _whole(directory: str) -> Weights:
    return load(directory, progress=False, mtp=True)


def loaded(change: Callable[[Weights, Weights], None]) -> Patch:
    """`change(weights of the rank, weights of one rank)` after loading."""

    def wrapper(original: Any, directory: Any, **named: Any) -> Weights:
        weights = original(directory, **named)
        if weights.mesh.world > 1:
            change(weights, _whole(str(directory)))
        return weights

    return around("fast.model:load", wrapper)


def recut(glob: str, cut: Cut) -> Patch:
    """What a rank binds for unpacked weights becomes `cut(whole, mesh)`."""

    def change(weights: Weights, whole: Weights) -> None:
        for name in weights._values:
            if fnmatchcase(name, glob):
                weights._values[name] = cut(whole._values[name], weights.mesh).contiguous()

    return loaded(change)


def recut_packed(glob: str, **cuts: Cut) -> Patch:
    """As `recut`, for the parts of packed weights: codes, scale or scale_2."""

    def change(weights: Weights, whole: Weights) -> None:
        for name, held in weights._packed.items():
            if fnmatchcase(name, glob):
                source = whole._packed[name]
                parts = {part: cut(getattr(source, part), weights.mesh).contiguous() for part, cut in cuts.items()}
                weights._packed[name] = dataclasses.replace(held, **parts)

    return loaded(change)


def _rows(w: Tensor, mesh: Mesh, part: int | None = None) -> Tensor:
    """Contiguous rows of one part; this rank's by default."""
    return w.chunk(mesh.tp)[mesh.tp_rank if part is None else part]


def _first_rows(w: Tensor, mesh: Mesh) -> Tensor:
    return _rows(w, mesh, 0)


def _other_rows(w: Tensor, mesh: Mesh) -> Tensor:
    return _rows(w, mesh, mesh.tp - 1 - mesh.tp_rank)


def _strided_rows(w: Tensor, mesh: Mesh) -> Tensor:
    return w[mesh.tp_rank :: mesh.tp]


def _everything(w: Tensor, mesh: Mesh) -> Tensor:
    return w


def _other_columns(w: Tensor, mesh: Mesh) -> Tensor:
    return w.chunk(mesh.tp, dim=1)[mesh.tp - 1 - mesh.tp_rank]


def _rows_for_columns(w: Tensor, mesh: Mesh) -> Tensor:
    """The bytes of this rank's rows, read as if they were its columns."""
    return _rows(w, mesh).reshape(w.shape[0], -1)


def _per_head(heads: int) -> Cut:
    """A vector of channels taken for one of heads: the rank's first numbers, each for a whole head."""

    def cut(v: Tensor, mesh: Mesh) -> Tensor:
        local = heads // mesh.tp
        return v[mesh.tp_rank * local :][:local].repeat_interleave(v.numel() // heads)

    return cut


def _half_tiled(v: Tensor, mesh: Mesh) -> Tensor:
    """A vector that all heads share, divided among ranks and repeated to its length."""
    return _rows(v, mesh).repeat(mesh.tp)


def _own_rank_rows(w: Tensor, mesh: Mesh) -> Tensor:
    """A low-rank factor divided: only this rank's rows, nothing for the others."""
    out = torch.zeros_like(w)
    n = len(w) // mesh.tp
    out[mesh.tp_rank * n : (mesh.tp_rank + 1) * n] = _rows(w, mesh)
    return out


def _halves(w: Tensor, mesh: Mesh) -> Tensor:
    """kv_b_proj as all keys, then all values, which are divided one by one."""
    keys, values = w.view(2, -1, w.shape[1])
    return torch.cat([_rows(keys, mesh), _rows(values, mesh)])


def _keys_of_the_other(heads: int) -> Cut:
    def cut(w: Tensor, mesh: Mesh) -> Tensor:
        split = w.view(heads, 2, -1, w.shape[1])
        return torch.stack([_other_rows(split[:, 0], mesh), _rows(split[:, 1], mesh)], 1).reshape(-1, w.shape[1])

    return cut


def _columns_from(shift: int) -> Cut:
    """Columns of codes or scales that begin `shift` items too late, on every rank but the first too early."""

    def cut(w: Tensor, mesh: Mesh) -> Tensor:
        n = w.shape[1] // mesh.tp
        start = mesh.tp_rank * n + (shift if mesh.tp_rank == 0 else -shift)
        return w[:, start : start + n]

    return cut


def _fused_halves(weights: Weights, whole: Weights) -> None:
    """gate and up stacked, then divided: rank 0 gets all of gate, rank 1 all of up."""
    for name in [name for name in weights._packed if fnmatchcase(name, "*.mlp.gate_proj")]:
        stem, mesh = name.removesuffix("gate_proj"), weights.mesh
        source = whole._packed[stem + ("up_proj" if mesh.tp_rank else "gate_proj")]
        for half, leaf in enumerate(("gate_proj", "up_proj")):
            parts = {part: _rows(getattr(source, part), mesh, half) for part in ("codes", "scale")}
            weights._packed[stem + leaf] = dataclasses.replace(weights._packed[stem + leaf], **parts)


def _scale_2_of_the_part(weights: Weights, whole: Weights) -> None:
    """The tensor's scale as the quantiser would set it for the rank's part alone."""
    for name, held in weights._packed.items():
        if name.endswith(".mlp.down_proj"):
            amax = decode(Packed(held.codes, held.scale, held.scale_2)).abs().amax()
            weights._packed[name] = dataclasses.replace(held, scale_2=(amax / 2688).view(held.scale_2.shape))


def _whole_block(*globs: str) -> Patch:
    """Weights that were never divided, behind an all-reduce."""

    def change(weights: Weights, whole: Weights) -> None:
        for name in weights._values:
            if any(fnmatchcase(name, glob) for glob in globs):
                weights._values[name] = whole._values[name]
        for name in weights._packed:
            if any(fnmatchcase(name, glob) for glob in globs):
                weights._packed[name] = whole._packed[name]

    return loaded(change)


def _joined(wrapper: Callable[..., Tensor]) -> Patch:
    """`wrapper(join, setting, partial, site, everyone)` in place of the one reduction of a site."""

    def around_join(original: Any, setting: Any, partial: Tensor, site: str, *, everyone: bool = False) -> Tensor:
        return wrapper(original, setting, partial, site, everyone)

    return around("fast.layers:Setting.join", around_join)


def _no_sum(at: str) -> Patch:
    def wrapper(join: Any, setting: Any, partial: Tensor, site: str, everyone: bool) -> Tensor:
        return partial.to(setting.dtype) if site.endswith(at) else join(setting, partial, site, everyone=everyone)

    return _joined(wrapper)


def _summed_again(at: str) -> Patch:
    def wrapper(join: Any, setting: Any, partial: Tensor, site: str, everyone: bool) -> Tensor:
        once = join(setting, partial, site, everyone=everyone)
        return join(setting, once.float(), site, everyone=everyone) if site.endswith(at) else once

    return _joined(wrapper)


def _mean(join: Any, setting: Any, partial: Tensor, site: str, everyone: bool) -> Tensor:
    size = setting.mesh.world if everyone else setting.mesh.tp
    return join(setting, partial / size, site, everyone=everyone)


def _mixers_over_all(join: Any, setting: Any, partial: Tensor, site: str, everyone: bool) -> Tensor:
    return join(setting, partial, site, everyone=everyone or site.endswith(".attn"))


def _experts_over_tp(join: Any, setting: Any, partial: Tensor, site: str, everyone: bool) -> Tensor:
    return join(setting, partial, site, everyone=False)


def _bank(change: Callable[[Any, Mesh], dict[str, Any]]) -> Patch:
    """Fields of every layer's expert bank that a rank has otherwise."""

    def edit(moe: Any) -> None:
        moe.bank = dataclasses.replace(moe.bank, **change(moe.bank, moe.setting.mesh))

    return layers("moe", edit)


def _dispatched_late(bank: Any, mesh: Mesh) -> dict[str, Any]:
    return {"first": bank.first + mesh.ep_rank}


def _ranges(experts: Callable[[Mesh, int], range]) -> Patch:
    return replace("fast.sharding:Mesh.experts", experts)


def _one_later(mesh: Mesh, total: int) -> range:
    """The first rank's range begins and ends one expert late."""
    n = total // mesh.ep
    first = mesh.ep_rank * n + (mesh.ep_rank == 0)
    return range(first, first + n)


def _remainder_lost(mesh: Mesh, total: int) -> range:
    """total // ep experts on each rank; what does not divide is on none."""
    n = total // mesh.ep
    return range(mesh.ep_rank * n, (mesh.ep_rank + 1) * n)


def _remainder_last(mesh: Mesh, total: int) -> range:
    n = total // mesh.ep
    last = mesh.ep_rank == mesh.ep - 1
    return range(mesh.ep_rank * n, total if last else (mesh.ep_rank + 1) * n)


def _own_experts(moe: Any) -> None:
    """Every rank picks among its experts only."""
    mine = torch.full_like(moe.bias, -1e9)
    own = moe.setting.mesh.experts(moe.bank.total)
    mine[own.start : own.stop] = moe.bias[own.start : own.stop]
    moe.bias = mine


def _own_weights(moe: Any) -> None:
    """Weights normalised over the rank's own share of the chosen experts."""
    route = moe.route

    def wrong(x: Tensor, tap: Any, indices: Tensor | None) -> tuple[Tensor, Tensor]:
        found, weights = route(x, None, indices)
        own = moe.setting.mesh.experts(moe.bank.total)
        here = (found >= own.start) & (found < own.stop)
        local = weights * here
        weights = local / (local.sum(-1, keepdim=True) + 1e-20) * moe.text.routed_scaling_factor
        if tap is not None:
            from fast.ops import router

            for leaf, value in (("logits", router.logits(x, moe.gate)), ("indices", found), ("weights", weights)):
                tap(f"{moe.name}.router.{leaf}", value)
        return found, weights

    moe.route = wrong


def _round_robin(mesh: Mesh) -> int:
    """Neighbours take different ranges, while they divide experts as if they shared one."""
    return mesh.rank % mesh.ep


class _Untold:
    """An MLP whose shared expert is heard from the ranks that should have it."""

    def __init__(self, moe: Any) -> None:
        self.moe = moe

    def __call__(self, x: Tensor, tap: Any, indices: Tensor | None = None) -> Tensor:
        mesh = self.moe.setting.mesh

        def told(name: str, value: Tensor) -> None:
            if tap is not None and not (name.endswith("shared.out") and mesh.rank >= mesh.tp):
                tap(name, value)

        return self.moe(x, told, indices)


def _untold(layer: Any) -> None:
    if layer.sparse:
        layer.mlp = _Untold(layer.mlp)


def _unmasked(original: Any, model: Any, ids: Tensor, tap: Any = None) -> Tensor:
    """A divided embedding that looks up some row for every token, its own or not."""
    rows, text = model.embed_tokens.shape[0], model.config.text
    if rows == text.vocab_size:
        return original(model, ids, tap)
    local = (ids - rows * model.setting.mesh.tp_rank).clamp(0, rows - 1)
    x = model.setting.join(model.embed_tokens[local].float(), "embed")
    if tap is not None:
        tap("embed", x)
    return x


def _adds_shared(answer: bool) -> Patch:
    return replace("fast.sharding:Mesh.adds_shared", property(lambda mesh: answer))


KDA, DSA, MOE = "layers.0.attn.", "layers.3.", "layers.3."
DENSE = "layers.0.mlp.out"
DOWN = "*.layers.0.mlp.down_proj"


def _kda(name: str, leaf: str, cut: Cut, tap: str, **rest: Any) -> Mutant:
    """A KDA weight cut otherwise than the plan says."""
    patch = recut(f"*.self_attn.{leaf}", cut)
    return _m(f"shard-{name}", "model.md 5", KDA + tap, patch, operand=f"*.{leaf}", **TP2 | rest)


def _dsa(name: str, leaf: str, cut: Cut, tap: str, **rest: Any) -> Mutant:
    patch = recut(f"*.layers.3.self_attn.{leaf}", cut)
    return _m(f"shard-{name}", "model.md 5", DSA + tap, patch, operand=f"*.3.*.{leaf}", **TP2 | rest)


def _packed(name: str, glob: str, tap: str, **cuts: Cut) -> Mutant:
    return _m(f"shard-{name}", "model.md 5", tap, recut_packed(glob, **cuts), operand=f"{glob}.weight", **TP2)


MUTANTS = (
    _kda("dt_bias-by-head", "dt_bias", _per_head(8), "g"),
    _kda("dt_bias-of-first-rank", "dt_bias", _first_rows, "g"),
    _kda("A_log-of-other-rank", "A_log", _other_rows, "g"),
    _kda("f_a-divided", "f_a_proj.weight", _own_rank_rows, "g"),
    _kda("f_b-strided", "f_b_proj.weight", _strided_rows, "g"),
    _kda("b_proj-of-first-rank", "b_proj.weight", _first_rows, "beta"),
    _kda("q-strided", "q_proj.weight", _strided_rows, "q"),
    _kda("conv-of-first-rank", "k_conv1d.weight", _first_rows, "k"),
    _kda("o_norm-divided", "o_norm.weight", _half_tiled, "out"),
    _kda("g_a-divided", "g_a_proj.weight", _own_rank_rows, "out"),
    _kda("g_b-of-other-rank", "g_b_proj.weight", _other_rows, "out"),
    _kda("o_proj-by-rows", "o_proj.weight", _rows_for_columns, "out", fast=True),
    _kda("o_proj-of-other-rank", "o_proj.weight", _other_columns, "out"),
    _m(
        "shard-whole-kda-on-each-rank",
        "issue 6",
        KDA + "q",
        _whole_block("*.layers.0.self_attn.*"),
        operand="*.0.self_attn.*",
        **TP2,
    ),
    _m(
        "shard-whole-dsa-on-each-rank",
        "issue 6",
        DSA + "attn.core",
        _whole_block("*.layers.3.self_attn.*"),
        operand="*.3.self_attn.*",
        **TP2,
    ),
    _dsa("kv_b-halves", "kv_b_proj.weight", _halves, "attn.core", fast=True),
    _dsa("kv_b-keys-of-other-rank", "kv_b_proj.weight", _keys_of_the_other(8), "attn.core"),
    _dsa("q_b-of-other-rank", "q_b_proj.weight", _other_rows, "attn.core"),
    _dsa("dsa-o_proj-of-other-rank", "o_proj.weight", _other_columns, "attn.out"),
    _dsa("q_a-divided", "q_a_proj.weight", _own_rank_rows, "attn.q_resid"),
    _dsa("kv_a-divided", "kv_a_proj_with_mqa.weight", _own_rank_rows, "attn.latent"),
    _m(
        "shard-indexer-by-head",
        "issue 6",
        DSA + "indexer.q",
        recut("*.indexer.wq_b.weight", _rows) + recut("*.indexer.weights_proj.weight", _rows),
        operand="*.indexer.w*",
        **TP2,
    ),
    _packed("scales-one-block-late", DOWN, DENSE, scale=_columns_from(1)),
    _packed("scales-of-first-rank", DOWN, DENSE, scale=lambda w, mesh: w.chunk(mesh.tp, 1)[0]),
    _packed("codes-one-byte-late", DOWN, DENSE, codes=_columns_from(1)),
    _packed("expert-scales-late", "*.mlp.experts.*.down_proj", MOE + "routed.out", scale=_columns_from(1)),
    _m(
        "shard-scale_2-of-the-part",
        "model.md 5",
        DENSE,
        loaded(_scale_2_of_the_part),
        operand="*.mlp.down_proj.weight",
        **TP2,
    ),
    _m(
        "shard-gate-and-up-as-one",
        "exports.md 4.1",
        DENSE,
        loaded(_fused_halves),
        operand="*.mlp.[gu]*_proj.weight",
        **TP2,
    ),
    _m(
        "shard-experts-whole-on-each-rank",
        "issue 6",
        MOE + "routed.out",
        _whole_block("*.mlp.experts.*"),
        operand="*.mlp.experts.*",
        **TP2,
    ),
    _m(
        "shard-shared-whole-on-each-rank",
        "model.md 5",
        MOE + "shared.out",
        _whole_block("*.mlp.shared_experts.*"),
        operand="*.mlp.shared_experts.*",
        **TP2,
    ),
    _m("shard-shared-on-every-rank", "model.md 5", MOE + "shared.out", _adds_shared(True), **EP2),
    _m(
        "shard-shared-on-every-rank-untold",
        "model.md 5",
        MOE + "mlp.out",
        _adds_shared(True) + layers("layer", _untold),
        where="fast.sharding:Mesh.adds_shared",
        fast=True,
        **EP2,
    ),
    _m("shard-shared-on-no-rank", "model.md 5", MOE + "mlp.out", _adds_shared(False), **EP2),
    _m("shard-no-sum-after-mixer", "issue 6", KDA + "out", _no_sum(".attn"), fast=True, **TP2),
    _m("shard-no-sum-after-mlp", "issue 6", DENSE, _no_sum(".mlp"), **TP2),
    _m("shard-no-sum-after-experts", "issue 6", MOE + "mlp.out", _no_sum(".mlp"), **EP2),
    _m("shard-summed-twice-after-mixer", "issue 6", KDA + "out", _summed_again(".attn"), **TP2),
    _m("shard-summed-twice-after-experts", "issue 6", MOE + "mlp.out", _summed_again(".mlp"), **EP2),
    _m("shard-mean-for-sum", "issue 6", KDA + "out", _joined(_mean), **BOTH),
    _m("shard-mixers-over-all-ranks", "model.md 5", KDA + "out", _joined(_mixers_over_all), **GROUPS),
    _m("shard-experts-over-tp-group", "model.md 5", MOE + "mlp.out", _joined(_experts_over_tp), **GROUPS),
    _m(
        "shard-range-one-late",
        "FB61",
        MOE + "routed.out",
        _ranges(_one_later),
        operand="*.mlp.experts.[08].*",
        fast=True,
        **EP2,
    ),
    _m("shard-dispatch-one-late", "FB61", MOE + "routed.out", _bank(_dispatched_late), **EP2),
    _m("shard-dispatch-by-local-id", "FB61", MOE + "routed.out", _bank(lambda b, m: {"first": 0}), **EP2),
    _m(
        "shard-remainder-lost",
        "FB61",
        "layers.*.routed.out",
        _ranges(_remainder_lost),
        operand="*.mlp.experts.*",
        **ODD | UNEVEN,
    ),
    _m(
        "shard-remainder-last",
        "FB61",
        "*.2.mlp.experts.2.gate_proj.weight",
        _ranges(_remainder_last),
        operand="*.mlp.experts.*",
        **ODD | UNEVEN,
    ),
    _m(
        "shard-neighbours-of-other-ranges",
        "model.md 5",
        MOE + "routed.out",
        replace("fast.sharding:Mesh.ep_rank", property(_round_robin)),
        operand="*.mlp.experts.*",
        options={"tp": 4, "ep": 2},
    ),
    _m("shard-router-of-own-experts", "model.md 5", MOE + "router.indices", layers("moe", _own_experts), **EP2),
    _m("shard-weights-of-own-experts", "model.md 5", MOE + "router.weights", layers("moe", _own_weights), **EP2),
    _m(
        "shard-head-of-other-rank",
        "model.md 5",
        "logits",
        recut("lm_head.weight", _other_rows),
        operand="lm_head.weight",
        options={"tp": 2, "vocab": "head"},
    ),
    _m("shard-embedding-not-summed", "model.md 5", "embed", _no_sum("embed"), options={"tp": 2, "vocab": "split"}),
    _m(
        "shard-embedding-not-masked",
        "model.md 5",
        "embed",
        around("fast.model:TextModel.embed", _unmasked),
        options={"tp": 2, "vocab": "split"},
    ),
)
