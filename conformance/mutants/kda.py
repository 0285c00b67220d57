"""Faults of the KDA mixer: decay, normalisation, convolution, delta rule, output gate."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.record import ODD, argument, around, attribute, configured, family, output, replace, swap

K = "fast.ops.kda"
G, BETA, CORE, OUT = "layers.*.attn.g", "layers.*.attn.beta", "layers.*.attn.core", "layers.*.attn.out"
CONV = "layers.*.attn.q"
_m = family("KDA")


def _softplus(f: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float) -> Tensor:
    pre = (f.float() + dt_bias).view(len(f), len(A_log), -1)
    return -torch.exp(A_log)[:, None] * torch.nn.functional.softplus(pre)


def _clamped(f: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float) -> Tensor:
    return _softplus(f, A_log, dt_bias, bound).clamp(min=bound)


def _bias_outside(f: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float) -> Tensor:
    H = len(A_log)
    return bound * torch.sigmoid(torch.exp(A_log)[:, None] * f.float().view(len(f), H, -1) + dt_bias.view(H, -1))


def _convolved(x: Tensor, weight: Tensor, history: Tensor, *, act: bool = True, ahead: int = 0) -> Any:
    padded = torch.cat([history, x, x.new_zeros(ahead, x.shape[1])])
    T, n = len(x), weight.shape[-1]
    total = sum(padded[j + ahead : j + ahead + T].float() * weight.float()[:, 0, j] for j in range(n))
    assert isinstance(total, Tensor)
    y = total * torch.sigmoid(total) if act else total
    return y.to(x.dtype), padded[T : T + n - 1].clone()


def _update(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, how: str) -> Tensor:
    old, state = state, state * torch.exp(g)[:, :, None]
    recalled = torch.matmul(k[:, None, :], old if how == "recall first" else state)
    scale = beta[:, None, None]
    if how == "beta on v":
        change = scale * v[:, None, :] - recalled
    elif how == "no delta":
        change = scale * v[:, None, :]
    else:
        change = scale * (v[:, None, :] - recalled)
    product = k[:, :, None] * change
    return state + (product.transpose(1, 2) if how == "v outer k" else product)


def _by_token(original: Any, w: int, *inputs: Tensor) -> Any:
    """The chunked form left aside, so that a fault of the update shows from the first token on."""
    import fast.ops.kda

    return fast.ops.kda.recurrent(*inputs)


def _gated(core: Tensor, gate: Tensor, o_norm: Tensor, eps: float, *, how: str) -> Tensor:
    T, H, d = core.shape
    x, s = core.float(), torch.sigmoid(gate.float())
    if how == "silu":
        s = s * gate.float()
    if how == "gate first":
        x, s = x * s, torch.ones_like(s)
    flat = x.reshape(T, H * d).square().mean(-1).view(T, 1, 1)
    square = flat if how == "all heads" else x.square().mean(-1, keepdim=True)
    x = x / torch.sqrt(square + eps)
    if how != "no weight":
        x = x * o_norm.float()
    return (x * s).reshape(T, H * d).to(core.dtype)


def _chunk_update(how: str) -> Any:
    return replace(f"{K}:update", partial(_update, how=how)) + around(f"{K}:chunked", _by_token)


def _norm(how: str) -> Any:
    return replace(f"{K}:gated_norm", partial(_gated, how=how))


def _mean_square(x: Tensor) -> Tensor:
    x = x.float()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _eps(value: float) -> Any:
    return lambda x: x.float() / torch.sqrt(x.float().square().sum(-1, keepdim=True) + value)


def _both(position: int, change: Any) -> Any:
    """One argument of both forms of the core; the chunked one has the width in front."""
    return argument(f"{K}:recurrent", position, change) + argument(f"{K}:chunked", position + 1, change)


def _thirds(order: tuple[int, int, int]) -> Any:
    return lambda w: torch.cat([w.chunk(3)[i] for i in order])


MUTANTS = (
    _m("kda-decay-softplus", "FB65", G, replace(f"{K}:decay", _softplus), fast=True),
    _m("kda-decay-clamped", "FB65", G, replace(f"{K}:decay", _clamped)),
    _m("kda-decay-bias-outside", "model.md 2.2", G, replace(f"{K}:decay", _bias_outside)),
    _m("kda-decay-no-bias", "model.md 2.2", G, argument(f"{K}:decay", 2, torch.zeros_like)),
    _m(
        "kda-decay-A-not-exponentiated",
        "model.md 2.2",
        G,
        argument(f"{K}:decay", 1, lambda a: a.abs().clamp(min=1e-9).log()),
    ),
    _m("kda-decay-heads-shifted", "model.md 2.2", G, argument(f"{K}:decay", 1, lambda a: a.roll(1))),
    _m("kda-decay-bias-per-head", "model.md 2.2", G, argument(f"{K}:decay", 2, lambda b: b.roll(16))),
    _m("kda-decay-bound-defaulted", "model.md 1", G, configured(gate_lower_bound=-5.0), **ODD),
    _m("kda-decay-half-percent", "issue 4: bias", G, output(f"{K}:decay", lambda g: g * 1.005)),
    _m("kda-f-g-swapped", "model.md 2.2", G, swap("kda", "f_a", "g_a")),
    _m("kda-beta-doubled-weight", "model.md 2.2", "layers.*.attn.beta", attribute("kda", "b", lambda w: w * 2)),
    _m("kda-beta-heads-shifted", "model.md 2.2", "layers.*.attn.beta", attribute("kda", "b", lambda w: w.roll(1, 0))),
    _m("kda-beta-not-applied", "model.md 2.2", CORE, _both(4, torch.ones_like)),
    _m("kda-q-not-scaled", "model.md 2.2", CORE, _both(0, lambda q: q * q.shape[-1] ** 0.5)),
    _m("kda-qk-not-normalised", "model.md 2.2", CORE, replace(f"{K}:unit", lambda x: x.float())),
    _m("kda-qk-mean-square", "model.md 2.2", CORE, replace(f"{K}:unit", _mean_square)),
    _m("kda-qk-eps-from-config", "model.md 2.2", CORE, replace(f"{K}:unit", _eps(1e-2)), **ODD),
    _m("kda-exp-base-two", "model.md 2.2", CORE, _both(3, lambda g: g * 0.6931472)),
    _m("kda-no-decay", "model.md 2.2", CORE, _both(3, torch.zeros_like)),
    _m("kda-recall-before-decay", "model.md 2.2", CORE, _chunk_update("recall first")),
    _m("kda-beta-on-v-only", "model.md 2.2", CORE, _chunk_update("beta on v")),
    _m("kda-no-delta", "model.md 2.2", CORE, _chunk_update("no delta")),
    _m("kda-v-outer-k", "FB68", CORE, _chunk_update("v outer k")),
    _m("kda-conv-reversed", "model.md 2.2", CONV, argument(f"{K}:conv", 1, lambda w: w.flip(-1)), fast=True),
    _m("kda-conv-no-silu", "model.md 2.2", CONV, replace(f"{K}:conv", partial(_convolved, act=False))),
    _m("kda-conv-looks-ahead", "model.md 2.2", CONV, replace(f"{K}:conv", partial(_convolved, ahead=1))),
    _m("kda-conv-k-v-swapped", "model.md 2.2", "layers.*.attn.k", attribute("kda", "conv", _thirds((0, 2, 1)))),
    _m("kda-q-k-projections-swapped", "FB48", CONV, attribute("kda", "projections", lambda p: [p[1], p[0], p[2]])),
    _m("kda-gate-silu", "model.md 2.2", OUT, _norm("silu")),
    _m("kda-gate-before-norm", "model.md 2.2", OUT, _norm("gate first")),
    _m("kda-norm-over-all-heads", "model.md 2.2", OUT, _norm("all heads")),
    _m("kda-norm-no-weight", "model.md 2.2", OUT, _norm("no weight")),
    _m("kda-norm-eps", "model.md 2.2", OUT, argument(f"{K}:gated_norm", 3, lambda e: 1e-6), **ODD),
    _m(
        "kda-chunk-own-token-left-out",
        "model.md 2.2",
        CORE,
        output(f"{K}:_decayed", lambda ab: (ab[0], ab[1].tril(-1))),
    ),
    _m("kda-chunk-no-substitution", "FB67", CORE, output(f"{K}:_decayed", lambda ab: (torch.zeros_like(ab[0]), ab[1]))),
)
