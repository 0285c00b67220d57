"""The draft block (model.md section 3): one DSA layer that guesses the token after the next.

T rows, D hidden, V vocabulary. Row i pairs h_i, what entered the target's lm_head at token i, with token i + 1. The
block has one latent cache and one indexer of its own; embedding and lm_head are the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fast import scratch
from fast.errors import InputError
from fast.layers import PREFIX, Dsa, Moe, Tap
from fast.linear import ROWS, linear
from fast.model import TextModel
from fast.ops import norm
from fast.state import DsaState, State

NAME = "mtp"


class NoDraftBlockError(InputError):
    """Drafts were asked of a checkpoint, or of a load, that has no draft block."""


class Mtp:
    """Drafts for one target. `target.weights` must have been loaded with `mtp=True`.

    Raises NoDraftBlockError when there is no block.
    """

    def __init__(self, target: TextModel) -> None:
        weights, text = target.weights, target.config.text
        if not text.mtp_layers:
            raise NoDraftBlockError("num_nextn_predict_layers: found 0, so this checkpoint drafts nothing")
        layer = text.mtp_layers[0]
        stem = f"{PREFIX}.layers.{layer}"
        if f"{stem}.eh_proj.weight" not in weights.names():
            raise NoDraftBlockError(f"{stem}: the draft block was not loaded (mtp=True)")
        self.target, self.eps = target, text.rms_norm_eps
        self.enorm, self.hnorm = (weights.tensor(f"{stem}.{name}.weight") for name in ("enorm", "hnorm"))
        self.eh_proj = weights.tensor(f"{stem}.eh_proj.weight")
        self.input_norm = weights.tensor(f"{stem}.input_layernorm.weight")
        self.mlp_norm = weights.tensor(f"{stem}.post_attention_layernorm.weight")
        self.head_norm = weights.tensor(f"{stem}.shared_head.norm.weight")
        self.attn = Dsa(weights, stem, NAME, text, target.setting, shared=False)
        self.mlp = Moe(weights, stem, NAME, layer, text, target.setting)
        self.shares = text.index_share_for_mtp_iteration
        self.state = self.fresh()

    def fresh(self) -> State:
        return State({NAME: self.attn.fresh(self.target.device)})

    def reset(self, room: int = 0) -> None:
        """Forget every row, and make caches for `room` of them."""
        self.state = self.fresh()
        self.state.reserve(room)

    @torch.inference_mode()
    def run(
        self, hidden: Tensor, tokens: Tensor, tap: Tap | None = None, selected: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, D], tokens [T] -> (y [T, D] after shared_head.norm, selection of the last row [1, W']).

        Rows are appended to the block's state; at most `ROWS` of them are computed one by one, as the target's are.
        `selected` replaces the indexer's choice (its keys and pools are kept all the same).
        """
        T, tap = hidden.shape[0], None if tap is None else scratch.copies(tap)
        assert tokens.shape == (T,), (tuple(hidden.shape), tuple(tokens.shape))
        step = 1 if T <= ROWS else self.target.window
        rows = []
        used = torch.empty(1, 0, dtype=torch.int32, device=hidden.device)
        with self.state.call(T):
            for h, ids in zip(hidden.split(step), tokens.split(step), strict=True):
                y, used = self._row(h.clone(), ids, tap, selected)
                rows.append(y)
        return torch.cat(rows) if rows else hidden, used[-1:]

    def _row(self, h: Tensor, ids: Tensor, tap: Tap | None, selected: Tensor | None) -> tuple[Tensor, Tensor]:
        state = self.state.layers[NAME]
        assert isinstance(state, DsaState)
        e = self.target.embed(ids)
        pair = torch.cat([norm.rms(e, self.enorm, self.eps), norm.rms(h, self.hnorm, self.eps)], dim=-1)
        z = linear(pair, self.eh_proj)
        if tap is not None:
            tap(f"{NAME}.z", z)
        with self.target.setting.frame("DSA"):
            x = norm.rms(z, self.input_norm, self.eps)
            if tap is not None:
                tap(f"{NAME}.attn.in", x)
            out, used = self.attn(x, state, tap, selected)
            z = _add(z, out)
            if tap is not None:
                tap(f"{NAME}.attn.out", out)
        with self.target.setting.frame("MoE"):
            x = norm.rms(z, self.mlp_norm, self.eps)
            if tap is not None:
                tap(f"{NAME}.mlp.in", x)
            out = self.mlp(x, tap)
            z = _add(z, out)
            if tap is not None:
                tap(f"{NAME}.mlp.out", out)
        return norm.rms(z, self.head_norm, self.eps), used

    def logits(self, y: Tensor, tap: Tap | None = None) -> Tensor:
        """y [T, D] -> draft logits [T, V] fp32 through the target's lm_head."""
        logits = self.target.logits(y)
        if tap is not None:
            tap(f"{NAME}.logits", logits)
        return logits

    def follow(self, hidden: Tensor, tokens: Tensor, tap: Tap | None = None) -> Tensor:
        """hidden [T, D] of the target, the token after each [T] -> draft logits [T, V]: true pairs throughout."""
        y, _ = self.run(hidden, tokens, tap)
        return self.logits(y, tap)

    def later(self, y: Tensor, token: Tensor, selected: Tensor, tap: Tap | None = None) -> tuple[Tensor, Tensor]:
        """A later draft step of a round: y [1, D] stands in for the hidden that the target has not computed yet.

        With index_share_for_mtp_iteration the round's first selection is used again, plus the rows drafted since;
        there are no `mtp.indexer.*` taps of such a row.
        """
        if not self.shares:
            return self.run(y, token, tap)
        own = torch.full((1, 1), self.state.length, dtype=selected.dtype, device=selected.device)
        return self.run(y, token, _without_indexer(tap), torch.cat([selected, own], dim=-1))


def _without_indexer(tap: Tap | None) -> Tap | None:
    if tap is None:
        return None
    return lambda name, value: None if name.startswith(f"{NAME}.indexer.") else tap(name, value)


def _add(z: Tensor, out: Tensor) -> Tensor:
    return (z.float() + out.float()).to(z.dtype)
