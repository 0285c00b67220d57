"""The text stack: tokens in, logits out, one sequence at a time (model.md section 2).

T tokens, C streams, D hidden, V vocabulary. A call of at most `ROWS` tokens goes through every layer row by row, each
row in exactly the shapes that decoding it alone would use: its bits do not depend on how many rows stand beside it.
Longer calls are cut into windows, which bounds the workspace of a prompt of any length. On a CUDA device, in bf16,
calls of at most `ROWS` tokens are computed by kernels (`fast.decoder`), whose rows do not depend on each other either;
what the kernels do not cover takes the same torch operations as on a CPU.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fast import decoder, memory, scratch
from fast.errors import InputError, MeshError
from fast.layers import PREFIX, Communicator, Layer, Setting, Tap
from fast.linear import ROWS, exact_sums, linear
from fast.loader import Weights, load
from fast.ops import norm
from fast.scratch import Arena
from fast.state import KdaState, State
from fast.store import checked_device


class TokenError(InputError):
    """Tokens that no embedding exists for."""


class PaddingError(InputError):
    """Padding anywhere but in front of the first token."""


class TextModel:
    """`source` is a checkpoint directory, or weights that `fast.loader.load` returned (one rank's, when sharded).

    `dtype` is what activations are stored in: bfloat16, or float32 for the same code without storage rounding. `mtp`
    loads the draft block too, for `fast.mtp`. `window` is the most tokens that go through the layers together.
    `kernels` False leaves the kernels aside. `without_kernels` tells why there are none, or is None.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Weights,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        kda_chunk: int = 64,
        mla: str = "absorbed",
        communicator: Communicator | None = None,
        window: int = 2048,
        mtp: bool = False,
        kernels: bool = True,
    ) -> None:
        if mla not in ("absorbed", "expanded"):
            raise InputError(f"mla: found {mla!r}, expected absorbed or expanded")
        if kda_chunk < 1 or window < 1:
            raise InputError(f"kda_chunk {kda_chunk} and window {window}: expected at least 1")
        self.device, self.window = checked_device(device), window
        if self.device.type == "cuda":
            exact_sums()
        self.weights = source if isinstance(source, Weights) else load(source, device=device, mtp=mtp)
        self.config = self.weights.config
        text = self.config.text
        self.setting = Setting(dtype, kda_chunk, mla == "absorbed", communicator, self._workspaces(dtype))
        if self.setting.mesh != self.weights.mesh:
            raise MeshError(f"weights of {self.weights.mesh} for a model of {self.setting.mesh}")
        self.layers = [Layer(self.weights, i, text, self.setting) for i in range(text.num_hidden_layers)]
        self.embed_tokens = self.weights.tensor(f"{PREFIX}.embed_tokens.weight")
        self.norm = self.weights.tensor(f"{PREFIX}.norm.weight")
        self.lm_head = self.weights.tensor("lm_head.weight")
        self.state = self.fresh()
        self.without_kernels = decoder.unsupported(self) if kernels else "not asked for"
        self.kernels = decoder.Decoder(self) if self.without_kernels is None else None

    def _workspaces(self, dtype: torch.dtype) -> dict[str, Arena]:
        """What all layers of a kind share, as large as a window and a verification need, before any state is made."""
        text, weights, names = self.config.text, self.weights, self.weights.names()
        rows = max(min(self.window, text.max_position_embeddings), ROWS)
        low = [weights.tensor(f"{PREFIX}.layers.{i}.self_attn.f_a_proj.weight").shape[0] for i in text.kda_layers[:1]]
        mtp = any(f"{PREFIX}.layers.{i}.eh_proj.weight" in names for i in text.mtp_layers)
        layout = memory.workspace_layout(self.config, weights.mesh, rows, sum(low), mtp=mtp, dtype=dtype)
        arenas, tickets = memory.workspaces(layout, self.device, weights.ledger)
        weakref.finalize(self, weights.ledger.release, *tickets)
        return arenas

    def fresh(self) -> State:
        return State({layer.name: layer.attn.fresh(self.device) for layer in self.layers})

    def reset(self, room: int = 0) -> None:
        """Forget every token, and make caches for `room` of them, where kernels or torch operations want them."""
        self.state = self.fresh()
        if self.kernels is not None and room:
            self.kernels.reserve(self.state, room)
        else:
            self.state.reserve(room)

    def operands(self, name: str) -> dict[str, Tensor]:
        """What was bound for one checkpoint weight."""
        return self.weights.operands(name)

    def prefill(self, tokens: Sequence[int] | Any, tap: Tap | None = None, pad: int = 0) -> Tensor:
        """tokens [pad + T] -> logits [T, V] fp32; the next call goes on where this one ended.

        The first `pad` tokens are left padding: no layer sees them. Raises TokenError for an id outside the
        vocabulary, PaddingError for padding after the first token or longer than the call.
        """
        ids = self.ids(tokens)
        if pad and (self.state.length or not 0 < pad <= len(ids)):
            raise PaddingError(f"pad: {pad} of {len(ids)} tokens after {self.state.length}, expected before the first")
        ids = ids[pad:]
        parts = [self.logits(self.run(part, tap), tap) for part in ids.split(self.window)] if len(ids) else []
        return torch.cat(parts) if parts else torch.empty(0, self.config.text.vocab_size, device=self.device)

    def decode(self, token: int, tap: Tap | None = None) -> Tensor:
        """One token -> logits [V] fp32."""
        return self.logits(self.run(self.ids([token]), tap), tap)[0]

    @torch.inference_mode()
    def run(self, ids: Tensor, tap: Tap | None = None) -> Tensor:
        """ids [T] int64 on the device -> what enters lm_head, [T, D]; states advance by T tokens."""
        if tap is not None:
            tap = scratch.copies(tap)
            tap("tokens", ids.int())
        with self.state.call(len(ids)):
            return self._run(ids, tap)

    def _run(self, ids: Tensor, tap: Tap | None) -> Tensor:
        T, text = len(ids), self.config.text
        parts = ids.split(1) if T <= ROWS else (ids,)
        if self.kernels is not None:
            if 0 < T <= ROWS:
                return self.kernels.run(ids, self.state, tap)
            tap = None if tap is None else _unrounded(tap)
        with self.setting.frame("stack"):
            streams = scratch.empty((T, text.hc_mult, text.hidden_size), self.setting.dtype, self.device)
            rows = streams.split([len(part) for part in parts])
            for row, part in zip(rows, parts, strict=True):
                row.copy_(self.embed(part, tap)[:, None, :])
            selected: list[Tensor | None] = [None] * len(rows)
            for layer in self.layers:
                state = self.state.layers[layer.name]
                for i, row in enumerate(rows):
                    selected[i] = layer(row, state, tap, selected[i])
                if tap is not None and isinstance(state, KdaState):
                    tap(f"{layer.name}.attn.state", state.matrix)
                    tap(f"{layer.name}.attn.conv_state", state.history)
            with scratch.outside():
                return torch.cat([self.final(row, tap) for row in rows])

    def embed(self, ids: Tensor, tap: Tap | None = None) -> Tensor:
        """ids [T] -> [T, D]. Where the vocabulary is divided, each rank looks up its own rows and the sum is exact."""
        rows = self.embed_tokens.shape[0]
        if rows == self.config.text.vocab_size:
            x = self.embed_tokens[ids].to(self.setting.dtype)
        else:
            local = ids - rows * self.setting.mesh.tp_rank
            found = ((local >= 0) & (local < rows))[:, None]
            x = self.embed_tokens[local.clamp(0, rows - 1)].float() * found
            x = self.setting.join(x, "embed")
        if tap is not None:
            tap("embed", x)
        return x

    def final(self, streams: Tensor, tap: Tap | None = None) -> Tensor:
        """streams [T, C, D] -> norm of their mean, [T, D]. The mean is fp32, rounded to storage before the norm."""
        hidden = streams.float().mean(1).to(streams.dtype)
        y = norm.rms(hidden, self.norm, self.config.text.rms_norm_eps)
        if tap is not None:
            tap("final.hidden", hidden)
            tap("final.norm", y)
        return y

    @torch.inference_mode()
    def logits(self, hidden: Tensor, tap: Tap | None = None) -> Tensor:
        """hidden [T, D] -> logits [T, V] fp32, row by row for at most `ROWS` rows."""
        T = hidden.shape[0]
        if self.kernels is not None and 0 < T <= ROWS:
            logits = self.kernels.logits(hidden)
        else:
            parts = hidden.split(1) if T <= ROWS else (hidden,)
            logits = torch.cat([linear(part.clone(), self.lm_head, torch.float32) for part in parts])
        if logits.shape[1] != self.config.text.vocab_size:
            assert self.setting.communicator is not None
            logits = torch.cat(self.setting.communicator.all_gather(logits, "logits"), dim=-1)
        if tap is not None:
            tap("logits", logits)
        return logits

    def verify(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [T], at most `ROWS` -> (logits [T, V], what entered lm_head [T, D]); opens a transaction of the state.

        The caller ends it with `state.commit(kept)`. Each row has the bits of the same token decoded alone.
        """
        self.state.begin()
        hidden = self.run(ids)
        return self.logits(hidden), hidden

    def ids(self, tokens: Sequence[int] | Any) -> Tensor:
        """Any integers [T] -> int64 on the device. Raises TokenError for what is none, or outside the vocabulary."""
        try:
            found = torch.as_tensor(tokens)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TokenError(f"tokens: expected integers ({error})") from None
        whole = not (found.dtype.is_floating_point or found.dtype.is_complex or found.dtype == torch.bool)
        if found.ndim != 1 or (len(found) and not whole):
            raise TokenError(f"tokens: {found.dtype} {list(found.shape)}, expected a list of integers")
        ids = found.to(torch.int64)
        V = self.config.text.vocab_size
        outside = torch.nonzero((ids < 0) | (ids >= V))
        if len(outside):
            at = int(outside[0])
            raise TokenError(f"tokens: id {int(ids[at])} at position {at}, expected 0 to {V - 1}")
        return ids.to(self.device)


def _unrounded(tap: Tap) -> Tap:
    """Kernels add routed and shared experts before they round: both taps are fp32, whoever computes them."""

    def report(name: str, value: Any) -> None:
        tap(name, value.float() if name.endswith((".routed.out", ".shared.out")) else value)

    return report
