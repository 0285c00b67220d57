"""Faults of what is carried from call to call: chunks, decode, padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.record import ODD, Patch, argument, around, family, output

K, S = "fast.ops.kda", "fast.state"
CONV, CORE = "layers.*.attn.q", "layers.*.attn.core"
ATTENTION, X = "layers.3.attn.core", "layers.*.indexer."
PAD = {"case": "pad"}
_m = family("cache")
_k = family("chunking")


def _entry(change: Any) -> Patch:
    """The KDA matrix that a call starts from."""
    return argument(f"{K}:recurrent", 5, change) + argument(f"{K}:chunked", 6, change)


def _exit(change: Any, *forms: str) -> Patch:
    """The KDA matrix that a call leaves behind."""
    parts = [output(f"{K}:{form}", lambda pair: (pair[0], change(pair[1]))) for form in forms]
    return sum(parts[1:], parts[0])


def _history(change: Any) -> Patch:
    return output(f"{K}:conv", lambda pair: (pair[0], change(pair[1])))


def _after_silu(original: Any, x: Tensor, weight: Tensor, history: Tensor) -> Any:
    """Outputs kept as the next call's inputs."""
    y, kept = original(x, weight, history)
    n = min(len(y), len(kept))
    return y, torch.cat([kept[: len(kept) - n], y[len(y) - n :]])


def _stale_decode(original: Any, x: Tensor, weight: Tensor, history: Tensor) -> Any:
    """Decoding leaves the history as the prompt left it."""
    y, kept = original(x, weight, history)
    return y, history if len(x) == 1 else kept


def _pad_seen(original: Any, self: Any, tokens: Any, tap: Any = None, pad: int = 0) -> Tensor:
    """Padding goes through the layers; only its taps are dropped."""
    if not pad:
        return original(self, tokens, tap)
    original(self, tokens[:pad])
    return original(self, tokens[pad:], tap)


def _pad_state(kind: str) -> Patch:
    """Padding leaves traces in one kind of state only."""

    def prefill(original: Any, self: Any, tokens: Any, tap: Any = None, pad: int = 0) -> Tensor:
        if pad:
            fresh = self.fresh()
            original(self, tokens[:pad])
            for name, state in self.state.layers.items():
                if type(state).__name__ == kind:
                    fresh.layers[name] = state
            self.state = fresh
        return original(self, tokens[pad:], tap)

    return around("fast.model:TextModel.prefill", prefill)


def _no_tail(original: Any, self: Any, latents: Tensor, keys: Any, gates: Any) -> Any:
    """Keys of an incomplete pool are forgotten when a call ends."""
    if keys is not None:
        self.keys.zero_()
        self.gates.zero_()
    return original(self, latents, keys, gates)


def _ring_shifted(original: Any, self: Any, start: int, end: int) -> Tensor:
    return original(self, start + 1, end + 1) if end - start < self.slots else original(self, start, end)


def _overwritten(original: Any, self: Any, rows: Tensor) -> None:
    """A call's rows replace the last row before it."""
    original(self, rows)
    if len(rows) and self.length > len(rows):
        self.data[self.length - len(rows) - 1] = rows[0]


def _recomputed_tail(original: Any, self: Any, latents: Tensor, keys: Any, gates: Any) -> Any:
    """A pool that spans two calls takes its keys from the wrong side: the call's own, from its first token."""
    found = original(self, latents, keys, gates)
    if found is None or not len(found[0]) or self.length == len(latents):
        return found
    k, g = found
    n = min(self.slots, len(keys))
    k = k.clone()
    k[0, :n] = keys[:n]
    return k, g


def _visible_from_call(original: Any, q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, *rest: Any) -> Tensor:
    """Tokens counted from the start of the call."""
    start = int(visible[0]) - 1
    return original(q, weights, keys, visible - start, *rest)


def _stale_pools(original: Any, q: Tensor, weights: Tensor, keys: Tensor, *rest: Any) -> Tensor:
    """Decoding scores the pools without the newest."""
    kept = keys.clone()
    if len(q) == 1 and len(kept):
        kept[-1] = 0
    return original(q, weights, kept, *rest)


def _last_latent_missing(original: Any, q: Tensor, latents: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Decoding attends before the new latent was written."""
    if len(q) == 1:
        latents = latents.clone()
        latents[-1] = 0
    return original(q, latents, *rest, **named)


def _decode_only(change: Any) -> Any:
    return lambda x: change(x) if len(x) == 1 else x


def _chunk_start(original: Any, inputs: list[Tensor], state: Tensor) -> Any:
    """Every chunk of a call starts from the state that the call started from."""
    parts = [original([x[n : n + 1] for x in inputs], state) for n in range(len(inputs[0]))]
    return torch.cat([core for core, _ in parts]), parts[-1][1]


def _chunk_transposed(original: Any, inputs: list[Tensor], state: Tensor) -> Any:
    cores = []
    for n in range(len(inputs[0])):
        core, state = original([x[n : n + 1] for x in inputs], state if n == 0 else state.transpose(1, 2))
        cores.append(core)
    return torch.cat(cores), state


def _last_chunk_padded(original: Any, x: Tensor, w: int) -> Tensor:
    """The last chunk is filled up with its last token."""
    rest = -len(x) % w
    return original(torch.cat([x, x[-1:].expand(rest, *x.shape[1:])]), w)


MUTANTS = (
    _m("cache-kda-state-not-carried", "FB120", CORE, _entry(torch.zeros_like), fast=True),
    _m(
        "cache-kda-state-transposed",
        "FB68",
        CORE,
        _exit(lambda m: m.transpose(1, 2).contiguous(), "chunked"),
    ),
    _m(
        "cache-kda-state-transposed-in-decode", "FB68", CORE, argument(f"{K}:recurrent", 5, lambda m: m.transpose(1, 2))
    ),
    _m("cache-kda-decode-keeps-old-state", "FB120", CORE, _exit(lambda m: m * 0.5, "recurrent")),
    _m("cache-kda-heads-shifted", "FB74", CORE, _exit(lambda m: m.roll(1, 0), "chunked")),
    _m("cache-conv-history-lost", "FB75", CONV, argument(f"{K}:conv", 2, torch.zeros_like)),
    _m("cache-conv-history-reversed", "FB75", CONV, _history(lambda h: h.flip(0))),
    _m("cache-conv-history-shifted", "FB75", CONV, _history(lambda h: h.roll(1, 0))),
    _m("cache-conv-history-after-silu", "model.md 2.2", CONV, around(f"{K}:conv", _after_silu)),
    _m("cache-conv-history-stale-in-decode", "FB120", CONV, around(f"{K}:conv", _stale_decode)),
    _m("cache-latents-overwritten", "FB122", f"{X}scores", around(f"{S}:Rows.append", _overwritten)),
    _m("cache-newest-latent-missing", "FB120", ATTENTION, around("fast.ops.mla:attend", _last_latent_missing)),
    _m(
        "cache-latents-shifted-in-decode", "FB80", ATTENTION, argument("fast.ops.mla:attend", 1, lambda c: c.roll(1, 0))
    ),
    _m("cache-index-tail-lost", "FB83", f"{X}pool_keys", around(f"{S}:DsaState.append", _no_tail), fast=True),
    _m("cache-index-ring-shifted", "FB83", f"{X}pool_keys", around(f"{S}:DsaState._places", _ring_shifted)),
    _m("cache-pool-from-call-start", "FB83", f"{X}pool_keys", around(f"{S}:DsaState.append", _recomputed_tail)),
    _m(
        "cache-visible-from-call-start",
        "FB80",
        f"{X}scores",
        around("fast.ops.indexer:masked", _visible_from_call),
    ),
    _m("cache-newest-pool-empty-in-decode", "FB94", f"{X}scores", around("fast.ops.indexer:scores", _stale_pools)),
    _m("cache-pad-seen-by-all", "FB75", CONV, around("fast.model:TextModel.prefill", _pad_seen), **PAD),
    _m("cache-pad-seen-by-kda", "FB75", CONV, _pad_state("KdaState"), **PAD),
    _m("cache-pad-pooled", "FB75", f"{X}pool_keys", _pad_state("DsaState"), **PAD),
    _k("chunk-state-of-call-start", "model.md 2.2", CORE, around(f"{K}:_segment", _chunk_start), fast=True),
    _k("chunk-state-transposed", "FB68", CORE, around(f"{K}:_segment", _chunk_transposed)),
    _k(
        "chunk-filled-with-last-token",
        "model.md 2.2",
        CORE,
        around(f"{K}:_split", _last_chunk_padded),
    ),
    _k(
        "chunk-filled-with-last-token-odd",
        "model.md 2.2",
        CORE,
        around(f"{K}:_split", _last_chunk_padded),
        **ODD,
    ),
    _k("chunk-core-shifted", "model.md 2.2", CORE, output(f"{K}:chunked", lambda pair: (pair[0].roll(1, 0), pair[1]))),
    _k("chunk-decode-unscaled", "model.md 2.2", CORE, argument(f"{K}:recurrent", 0, lambda q: q * 4)),
    _k(
        "chunk-decode-router-bias-lost",
        "model.md 2.4",
        "layers.*.router.indices",
        argument("fast.ops.router:choose", 0, _decode_only(lambda s: 1 - s)),
    ),
    _k(
        "chunk-last-token-dropped-from-state",
        "model.md 2.2",
        CORE,
        argument(f"{K}:chunked", 5, lambda b: torch.cat([b[:-1], b[-1:] * 0])),
    ),
)
