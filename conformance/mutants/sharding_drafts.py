"""Faults of sharding in the draft block, whose layer is divided like any other, and is the one that gets forgotten."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.record import Mutant, Patch, around, family
from conformance.mutants.sharding import Cut, loaded, recut
from fast.loader import Weights
from fast.nvfp4 import decode, encode
from fast.sharding import Mesh

TP2: dict[str, Any] = {"options": {"tp": 2, "ep": 1, "mtp": 1}}
EP2: dict[str, Any] = {"options": {"tp": 1, "ep": 2, "mtp": 1}}
LAYER = "*.layers.9."
"""The draft block of the geometry `tiny`."""
RULE = "exports.md 4.1"
_m = family("sharding")


def _other_columns(w: Tensor, mesh: Mesh) -> Tensor:
    return w.chunk(mesh.tp, dim=1)[mesh.tp - 1 - mesh.tp_rank]


def _keys_then_values(w: Tensor, mesh: Mesh) -> Tensor:
    """kv_b_proj as all keys, then all values, which are divided one by one."""
    return torch.cat([half.chunk(mesh.tp)[mesh.tp_rank] for half in w.chunk(2)])


def _half_of_the_pair(w: Tensor, mesh: Mesh) -> Tensor:
    """eh_proj divided by columns, without a sum: one rank reads the embedding, the other the hidden."""
    out = torch.zeros_like(w)
    n = w.shape[1] // mesh.tp
    columns = slice(mesh.tp_rank * n, (mesh.tp_rank + 1) * n)
    out[:, columns] = w[:, columns]
    return out


def _undivided(weights: Weights, whole: Weights) -> None:
    """The block as on one rank, behind the sums of several."""
    weights._values.update({name: whole._values[name] for name in weights._values if LAYER[1:] in name})
    weights._packed.update({name: whole._packed[name] for name in weights._packed if LAYER[1:] in name})


def _packed_after_the_cut(weights: Weights, whole: Weights) -> None:
    """BF16 experts that are packed at load: every part as a tensor of its own, with a scale of its own."""
    for name in [name for name in weights._packed if f"{LAYER[1:]}mlp.experts." in name]:
        parts = decode(whole._packed[name]).chunk(weights.mesh.tp, dim=1 if name.endswith("down_proj") else 0)
        weights._packed[name] = encode(parts[weights.mesh.tp_rank].contiguous())


def _no_sum(at: str) -> Patch:
    def wrapper(join: Any, setting: Any, partial: Tensor, site: str, *, everyone: bool = False) -> Tensor:
        return partial.to(setting.dtype) if site == at else join(setting, partial, site, everyone=everyone)

    return around("fast.layers:Setting.join", wrapper)


def _block(change: Callable[[Any], None]) -> Patch:
    """`change(block)` once it is made."""

    def wrapper(original: Any, self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        change(self)

    return around("fast.mtp:Mtp.__init__", wrapper)


def _dispatched_late(block: Any) -> None:
    bank = block.mlp.bank
    block.mlp.bank = dataclasses.replace(bank, first=bank.first + block.mlp.setting.mesh.ep_rank)


def _own_experts(block: Any) -> None:
    """The router of a block that knows its own rank's experts alone: all others are out of reach."""
    own = block.mlp.setting.mesh.experts(block.mlp.bank.total)
    bias = torch.full_like(block.mlp.bias, -1e9)
    bias[own.start : own.stop] = block.mlp.bias[own.start : own.stop]
    block.mlp.bias = bias


def _cut(name: str, leaf: str, cut: Cut, tap: str) -> Mutant:
    """A weight of the block cut otherwise than the plan says."""
    return _m(f"shard-mtp-{name}", RULE, f"mtp.{tap}", recut(LAYER + leaf, cut), operand=LAYER + leaf, **TP2)


MUTANTS = (
    _cut("eh_proj-divided", "eh_proj.weight", _half_of_the_pair, "z"),
    _cut("kv_b-halves", "self_attn.kv_b_proj.weight", _keys_then_values, "attn.core"),
    _cut("o_proj-of-other-rank", "self_attn.o_proj.weight", _other_columns, "attn.out"),
    _m("shard-mtp-undivided", RULE, "mtp.attn.core", loaded(_undivided), operand=LAYER + "*", **TP2),
    _m(
        "shard-mtp-packed-after-the-cut",
        RULE,
        "mtp.routed.out",
        loaded(_packed_after_the_cut),
        operand=LAYER + "mlp.experts.*",
        **TP2,
    ),
    _m("shard-mtp-no-sum-after-mixer", RULE, "mtp.attn.out", _no_sum("mtp.attn"), **TP2),
    _m("shard-mtp-no-sum-after-experts", RULE, "mtp.mlp.out", _no_sum("mtp.mlp"), **EP2),
    _m("shard-mtp-dispatch-one-late", "FB61", "mtp.routed.out", _block(_dispatched_late), **EP2),
    _m("shard-mtp-router-of-own-experts", RULE, "mtp.router.indices", _block(_own_experts), **EP2),
)
