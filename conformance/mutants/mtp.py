"""Faults of the draft block, and of undoing what a verification rejected.

Those of the block's arithmetic show in a trace with drafts; those of its bookkeeping only in states after a rejection.
A hidden before its norm is emulated by taking the norm's weight off again: `hnorm` removes the scale that is left.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.record import Patch, around, family, packed, replace
from fast.ops import norm

M, S, G = "fast.mtp", "fast.state", "fast.generate"
TRACED: dict[str, Any] = {"options": {"mtp": 4}}
ONE: dict[str, Any] = {"options": {"mtp": 1}}
"""Without later drafts, whose rows begin with a y that is no tap of its own: the sums are seen where they enter."""
DRAFTED: dict[str, Any] = {"probe": "drafts", "geometry": "odd"}
RULE = "model.md 3"
_m = family("MTP")


def _block(change: Callable[[Any], None]) -> Patch:
    """`change(block)` once it is made."""

    def wrapper(original: Any, self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        change(self)

    return around(f"{M}:Mtp.__init__", wrapper)


def _swapped(first: str, second: str) -> Patch:
    def change(block: Any) -> None:
        a, b = getattr(block, first), getattr(block, second)
        setattr(block, first, b)
        setattr(block, second, a)

    return _block(change)


def _set(name: str, value: Callable[[Any], Any]) -> Patch:
    return _block(lambda block: setattr(block, name, value(block)))


def _halves(block: Any) -> Tensor:
    D = block.eh_proj.shape[1] // 2
    return torch.cat([block.eh_proj[:, D:], block.eh_proj[:, :D]], dim=1)


def _half_of_the_experts(block: Any) -> None:
    block.mlp.bank = dataclasses.replace(block.mlp.bank, count=block.mlp.bank.count // 2)


def _unnormed(original: Any, self: Any, hidden: Tensor, *rest: Any, **named: Any) -> Any:
    """The target's hidden before model.norm, also for later drafts."""
    return original(self, hidden / self.target.norm, *rest, **named)


def _first_stream() -> Patch:
    """Hidden from stream 0 in place of the mean. What `final` saw is kept with the model until it is reset."""

    def final(original: Any, self: Any, streams: Tensor, tap: Any = None) -> Tensor:
        one = norm.rms(streams[:, 0].contiguous(), self.norm, self.config.text.rms_norm_eps)
        self.__dict__.setdefault("first_stream", []).append(one)
        return original(self, streams, tap)

    def reset(original: Any, self: Any, room: int = 0) -> None:
        self.__dict__.pop("first_stream", None)
        original(self, room)

    def run(original: Any, self: Any, hidden: Tensor, *rest: Any, **named: Any) -> Any:
        kept, start = torch.cat(self.target.first_stream), self.state.length
        if start + len(hidden) <= len(kept):
            hidden = kept[start : start + len(hidden)]
        return original(self, hidden, *rest, **named)

    return (
        around("fast.model:TextModel.final", final)
        + around("fast.model:TextModel.reset", reset)
        + around(f"{M}:Mtp.run", run)
    )


def _masked(original: Any, self: Any, h: Tensor, ids: Tensor, *rest: Any) -> Any:
    """Position 0 has no embedding."""
    target = self.target
    if self.state.layers["mtp"].length:
        return original(self, h, ids, *rest)

    def embed(tokens: Tensor) -> Tensor:
        e = type(target).embed(target, tokens).clone()
        e[0] = 0
        return e

    target.embed = embed
    try:
        return original(self, h, ids, *rest)
    finally:
        del target.embed


def _chooses_again(original: Any, self: Any, y: Tensor, token: Tensor, selected: Tensor, tap: Any = None) -> Any:
    """Later drafts run the indexer, and say nothing of it."""

    def quiet(name: str, value: Any) -> None:
        if tap is not None and not name.startswith("mtp.indexer."):
            tap(name, value)

    return self.run(y, token, quiet)


def _drafts_unseen(original: Any, self: Any, y: Tensor, token: Tensor, selected: Tensor, tap: Any = None) -> Any:
    """Later drafts attend to the shared set without the rows drafted since."""

    def quiet(name: str, value: Any) -> None:
        if tap is not None and not name.startswith("mtp.indexer."):
            tap(name, value)

    return self.run(y, token, quiet, selected)


def _true_hidden() -> Patch:
    """Later drafts take the target's last hidden again, not y."""

    def run(original: Any, self: Any, hidden: Tensor, tokens: Tensor, *rest: Any, **named: Any) -> Any:
        if "recycled" not in self.__dict__:
            self.last_hidden = hidden[-1:]
        return original(self, hidden, tokens, *rest, **named)

    def later(original: Any, self: Any, y: Tensor, *rest: Any, **named: Any) -> Any:
        self.recycled = True
        try:
            return original(self, self.last_hidden, *rest, **named)
        finally:
            del self.recycled

    return around(f"{M}:Mtp.run", run) + around(f"{M}:Mtp.later", later)


def _before_its_norm(original: Any, self: Any, y: Tensor, *rest: Any, **named: Any) -> Any:
    return original(self, y / self.head_norm, *rest, **named)


def _own_token(original: Any, self: Any, hidden: Tensor, tokens: Tensor, *rest: Any, **named: Any) -> Any:
    """Row i takes token i; the first row of a call, for want of it, its successor."""
    return original(self, hidden, torch.cat([tokens[:1], tokens[:-1]]), *rest, **named)


def _residual_twice(original: Any, z: Tensor, out: Tensor) -> Tensor:
    return original(original(z, out), z)


def _in_turn(first: Any, second: Any) -> Any:
    """Calls alternate between two functions."""
    calls = [0]

    def act(*args: Any) -> Any:
        calls[0] += 1
        return (first if calls[0] % 2 else second)(*args)

    return act


def _no_second_residual() -> Patch:
    return Patch(((f"{M}:_add", lambda add: _in_turn(add, lambda z, out: out)),))


def _without_shared(original: Any, self: Any, x: Tensor, tap: Any, indices: Any = None) -> Tensor:
    """The block's shared expert is left out of the sum."""
    if self.name != "mtp":
        return original(self, x, tap, indices)
    found: dict[str, Tensor] = {}

    def listen(name: str, value: Any) -> None:
        found[name] = value
        if tap is not None:
            tap(name, value)

    original(self, x, listen, indices)
    return found["mtp.routed.out"].to(x.dtype)


def _low_halves(codes: Tensor) -> Tensor:
    """Bytes of BF16 numbers, as many as there are codes."""
    numbers = (codes.float() - 127.5).bfloat16().contiguous()
    return numbers.view(torch.uint8)[:, : codes.shape[1]].contiguous()


def _target_latents() -> Patch:
    """The block's rows go into the cache of the target's first DSA layer."""

    def fresh(original: Any, self: Any) -> Any:
        state = original(self)
        layers = self.target.state.layers
        state.layers["mtp"] = next(layers[name] for name in layers if type(layers[name]).__name__ == "DsaState")
        return state

    return around(f"{M}:Mtp.fresh", fresh)


def _committed(change: Callable[[int, int], int]) -> Patch:
    """How many steps a KDA layer replays of those it saw; its history stays that of the right number."""
    return _replaying("matrix", change)


def _history(change: Callable[[int, int], int]) -> Patch:
    """Which step's conv history stands after a commit; 0 is the entry's."""
    return _replaying("history", change)


def _replaying(name: str, change: Callable[[int, int], int]) -> Patch:
    """One of the tensors of a KDA layer is what a commit of change(kept, seen) steps gives; a step is a token here."""

    def commit(original: Any, self: Any, kept: int) -> None:
        other, seen = copy.copy(self), len(self._steps)
        original(self, kept)
        if kept < seen:
            original(other, change(kept, seen))
            setattr(self, name, getattr(other, name))

    return around(f"{S}:KdaState.commit", commit)


def _small_ring(original: Any, self: Any, latent: int, index: Any, slots: int, *rest: Any) -> None:
    """Room for one pool only: rejected tokens overwrite the tail."""
    original(self, latent, index, slots, *rest)
    self.keys, self.gates = self.keys[:slots].clone(), self.gates[:slots].clone()


def _stale_pools(original: Any, self: Any, kept: int) -> None:
    """Pool keys that rejected tokens completed stay."""
    cut = self.pools.cut
    self.pools.cut = lambda length: None
    try:
        original(self, kept)
    finally:
        self.pools.cut = cut


def _block_not_undone(original: Any, self: Any, kept: int) -> None:
    """Rows of drafts stay in the block's state."""
    original(self, self.length - self._entry if set(self.layers) == {"mtp"} else kept)


def _one_more(original: Any, self: Any, kept: int) -> None:
    """The target keeps one rejected token."""
    seen = self.length - self._entry
    original(self, kept if set(self.layers) == {"mtp"} else min(kept + 1, seen))


def _rejected_rows(original: Any, self: Any, limit: int, stop: Any = ()) -> list[int]:
    """The block sees the first rejected row too, as a pair with the token that took its place."""
    seen: list[Tensor] = []
    verify, see = self.target.verify, self._see

    def verified(ids: Tensor) -> Any:
        logits, hidden = verify(ids)
        seen.append(hidden)
        return logits, hidden

    def saw(hidden: Tensor, after: list[int], tap: Any = None) -> None:
        more = seen[0][len(hidden) : len(hidden) + 1]
        see(torch.cat([hidden, more]), [*after, *after[-1:] * len(more)], tap)

    self.target.verify, self._see = verified, saw
    try:
        return original(self, limit, stop)
    finally:
        del self.target.verify, self._see


def _prompt_unseen(original: Any, self: Any, tokens: Any, tap: Any = None, room: int = 0) -> int:
    """The block starts with the newest token: it has not read the prompt."""
    see = self._see
    self._see = lambda hidden, after, tap=None: see(hidden[-1:], after[-1:], tap)
    try:
        return original(self, tokens, tap, room)
    finally:
        del self._see


MUTANTS = (
    _m("mtp-halves-exchanged", RULE, "mtp.z", _set("eh_proj", _halves), **TRACED, fast=True),
    _m("mtp-enorm-for-hnorm", RULE, "mtp.z", _swapped("enorm", "hnorm"), **TRACED),
    _m("mtp-hidden-before-norm", RULE, "mtp.z", around(f"{M}:Mtp.run", _unnormed), **TRACED),
    _m("mtp-first-stream-for-mean", RULE, "mtp.z", _first_stream(), **TRACED),
    _m("mtp-embedding-masked-at-0", RULE, "mtp.z", around(f"{M}:Mtp._row", _masked), **TRACED),
    _m("mtp-own-token", RULE, "mtp.z", around(f"{M}:Mtp.run", _own_token), **TRACED),
    _m("mtp-recycled-before-norm", "FB113", "mtp.z", around(f"{M}:Mtp.later", _before_its_norm), **TRACED, fast=True),
    _m("mtp-recycled-target-hidden", "FB113", "mtp.z", _true_hidden(), **TRACED),
    _m("mtp-indexer-runs-again", RULE, "mtp.attn.core", around(f"{M}:Mtp.later", _chooses_again), **TRACED),
    _m("mtp-drafts-unseen", RULE, "mtp.attn.core", around(f"{M}:Mtp.later", _drafts_unseen), **TRACED),
    _m("mtp-norms-exchanged", RULE, "mtp.attn.in", _swapped("input_norm", "mlp_norm"), **TRACED),
    _m("mtp-residual-twice", RULE, "mtp.mlp.in", around(f"{M}:_add", _residual_twice), **ONE),
    _m("mtp-no-residual-around-experts", RULE, "mtp.logits", _no_second_residual(), **ONE),
    _m("mtp-no-residual-at-all", RULE, "mtp.mlp.in", around(f"{M}:_add", lambda add, z, out: out), **ONE),
    _m("mtp-one-ranks-experts", RULE, "mtp.routed.out", _block(_half_of_the_experts), **TRACED, fast=True),
    _m("mtp-shared-expert-missing", RULE, "mtp.mlp.out", around("fast.layers:Moe.__call__", _without_shared), **TRACED),
    _m(
        "mtp-head-norm-missing",
        RULE,
        "mtp.logits",
        around(f"{M}:Mtp.logits", lambda logits, self, y, tap=None: logits(self, y / self.head_norm, tap)),
        **TRACED,
    ),
    _m("mtp-head-norm-of-the-text", RULE, "mtp.z", _set("head_norm", lambda b: b.target.norm), **TRACED),
    _m(
        "mtp-bf16-experts-read-as-packed",
        "exports.md 2.7",
        "mtp.routed.out",
        packed("up_proj", "codes", _low_halves, layer=9),
        operand="*.layers.9.mlp.experts.*.up_proj.weight",
        **TRACED,
    ),
    _m("mtp-target-cache-touched", RULE, "tokens", _target_latents(), **DRAFTED),
    _m("mtp-prompt-unseen", RULE, "mtp.*", around(f"{G}:Generator.prefill", _prompt_unseen), **DRAFTED),
    _m("mtp-kda-one-step-short", "FB120", "layers.*.state", _committed(lambda k, n: k - 1), **DRAFTED, fast=True),
    _m("mtp-kda-one-step-far", "FB120", "layers.*.state", _committed(lambda k, n: k + 1), **DRAFTED),
    _m("mtp-kda-not-restored", "FB120", "layers.*.state", _committed(lambda k, n: n), **DRAFTED),
    _m("mtp-conv-not-restored", "FB120", "layers.*.conv_state", _history(lambda k, n: n), **DRAFTED),
    _m("mtp-conv-of-the-entry", "FB120", "layers.*.conv_state", _history(lambda k, n: 0), **DRAFTED),
    _m("mtp-tail-overwritten", "FB120", "layers.*.tail_*", around(f"{S}:DsaState.__init__", _small_ring), **DRAFTED),
    _m("mtp-stale-pools", "FB94", "*.pool_keys", around(f"{S}:DsaState.commit", _stale_pools), **DRAFTED),
    _m("mtp-drafts-not-undone", RULE, "mtp.*", around(f"{S}:State.commit", _block_not_undone), **DRAFTED),
    _m("mtp-rejected-row-seen", RULE, "mtp.*", around(f"{G}:Generator.round", _rejected_rows), **DRAFTED),
    _m("mtp-rejected-token-kept", "FB120", "layers.*", around(f"{S}:State.commit", _one_more), **DRAFTED),
    _m("mtp-every-draft-accepted", RULE, "tokens", replace(f"{G}:Chooser.accept", lambda *args: True), **DRAFTED),
    _m("mtp-rows-verified-together", RULE, "layers.*", replace("fast.model:ROWS", 0), **DRAFTED),
)
