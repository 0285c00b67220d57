"""Calls of few tokens through the kernels: what `fast.model` does on a CUDA device in bf16.

The state of a sequence stays what it is for the torch operations (`fast.state`); only its tensors lie where the kernels
want them. A sequence that comes here is moved there, and stays until another one takes its place: what it holds is
then read and written in place by kernels and torch operations alike. A transaction can be undone: matrices are copied
when it begins and replayed by the same kernel, the rest is cut back.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fast.graph import ALIGN, DecodeStep, KdaState, Raw, Tap
from fast.kernels import compile as compiler
from fast.kernels import experts, gemv, kda, layers, mla
from fast.state import DsaState, Replay, State
from fast.state import KdaState as Kda

LEAST = 2048
"""Tokens of room at first; doubled when it is exceeded, unless room for the text to come was reserved."""


def room_for(text: Any, tokens: int) -> int:
    """Tokens that the caches of the kernels hold once `tokens` are reserved: at least `LEAST`, in whole pools."""
    return -(-max(tokens, LEAST) // text.index_kpool) * text.index_kpool


def step_bytes(text: Any, capacity: int) -> int:
    """What the steps of 1 to `gemv.ROWS` tokens hold beside weights and states, over caches of `capacity`.

    Each row count has buffers of its own, and in them each layer its projections. The parts of the attention are those
    of the device that has most of them; the kilobytes that depend on its number of processors are left out.
    """
    H, d, heads, slots = text.linear_num_heads, text.linear_head_dim, text.num_attention_heads, text.index_kpool
    D, C, k, p, h = text.hidden_size, text.hc_mult, text.num_experts_per_tok, text.index_head_dim, text.index_n_heads
    Q, L, q_width, o_width = text.q_lora_rank, text.kv_lora_rank, heads * text.qk_head_dim, heads * text.v_head_dim
    width = text.index_topk + slots - 1
    projections = {"kda": (H * d, H * d, H * d, kda.RANK, kda.RANK, H), "dsa": (Q, L, p, p, h)}
    raw = {kind: sum(-(-n // ALIGN) * ALIGN for n in widths) for kind, widths in projections.items()}
    stored = [(C + 3) * D, H * d, o_width, Q, q_width, h * p, k * text.moe_intermediate_size]
    stored += [text.shared_intermediate_size, text.intermediate_size, heads * L]
    stored += [raw[text.layer_kind(i)] for i in range(text.num_hidden_layers)]
    words = [text.n_routed_experts, 2 * k, text.vocab_size, width + 1, capacity // slots, 4 * C * (C + 1), 1]
    words += [-(-width // mla.LEAST_KEYS) * heads * (L + 2)]
    row = 2 * sum(stored) + 4 * sum(words)
    return gemv.ROWS * (gemv.ROWS + 1) // 2 * row + gemv.ROWS * experts.PLAN_BYTES


def unsupported(model: Any) -> str | None:
    """Why the kernels cannot compute this `fast.model.TextModel`, or None."""
    setting, text = model.setting, model.config.text
    if model.device.type != "cuda":
        return "no CUDA device"
    if setting.dtype != torch.bfloat16:
        return f"storage in {str(setting.dtype).removeprefix('torch.')}"
    if setting.communicator is not None:
        return "ranks"
    if not setting.absorbed:
        return "expanded MLA"
    try:
        compiler.target(*torch.cuda.get_device_capability(model.device))
    except compiler.KernelTargetError as error:
        return str(error)
    ranks = {layer.attn.f_b.shape[1] for layer in model.layers if layer.kind == "kda"}
    return unsupported_config(text, ranks)


def unsupported_config(text: Any, ranks: set[int]) -> str | None:
    """As `unsupported`, of the geometry alone; `ranks` are the gate ranks of the KDA layers."""
    if ranks - {kda.RANK} or text.linear_head_dim != kda.RANK:
        return f"config: KDA head width {text.linear_head_dim}, gate rank {sorted(ranks)}"
    reason = layers.unsupported(text)
    return None if reason is None else f"config: {reason}"


class Decoder:
    """The kernels of one model, for at most one sequence at a time. `unsupported(model)` has to be None.

    The first call of a row count is launched one by one, later ones are replayed as a graph.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.device = layers.from_model(model), model.device
        self.index = self.device.index or 0
        self.target = compiler.target(*torch.cuda.get_device_capability(self.device))
        self.most = min(gemv.ROWS, experts.rows_at_once(self.index, self.model.text.hidden_size))
        """Rows of one step; more are taken one step after the other."""
        self.capacity = 0
        self.steps: dict[int, DecodeStep] = {}
        self.loaded: set[int] = set()
        """Row counts whose kernels have all been launched since the room last grew: these can be recorded."""
        self.owner: Callable[[], State | None] = lambda: None

    @torch.inference_mode()
    def reserve(self, state: State, tokens: int) -> None:
        """Caches that hold `tokens` tokens (`room_for` says how many) without growing, and `state` in them. Larger ones
        that are there already stay."""
        if room_for(self.model.text, tokens) > self.capacity:
            self._grow(room_for(self.model.text, tokens))
        self._move(state)

    @torch.inference_mode()
    def run(self, ids: Tensor, state: State, tap: Tap | None = None) -> Tensor:
        """ids [T] int64, already counted in `state.length` -> what enters lm_head, [T, D]."""
        self._move(state)
        rows, start = [], state.length - len(ids)
        for part in ids.split(self.most):
            rows.append(self._run(part, state, start, tap))
            start += len(part)
        return torch.cat(rows)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, D] -> [T, V] fp32; a row has the bits that it has alone and in a captured step."""
        parts = hidden.contiguous().split(self.most)
        return torch.cat([gemv.linear(part, self.model.lm_head, torch.float32) for part in parts])

    def _run(self, ids: Tensor, state: State, start: int, tap: Tap | None) -> Tensor:
        T = len(ids)
        step = self._step(T)
        step.token.copy_(ids)
        step.position.fill_(start)
        for layer in state.layers.values():
            if isinstance(layer, Kda):
                layer.keep()
        if tap is not None:
            tap("embed", self.model.embed[ids])
            step.tell(tap, start)
        elif T not in self.loaded:
            step.run(pdl=False, head=False)
            self.loaded.add(T)
        else:
            if step.graph is None:
                step.capture(head=False, warm=False)
            step.replay()
        for i, layer in enumerate(state.layers.values()):
            if isinstance(layer, Kda):
                layer.count(T, self._replay(step, i) if layer.undoable else _never)
            else:
                layer.latents.length += T
                layer.pools.length = layer.latents.length // layer.slots
        return step.buffers.y.clone()

    def _step(self, T: int) -> DecodeStep:
        if T not in self.steps:
            like = next(iter(self.steps.values()), None)
            self.steps[T] = DecodeStep(self.model, sequences=1, tokens=T, capacity=self.capacity, like=like)
        return self.steps[T]

    def _replay(self, step: DecodeStep, i: int) -> Replay:
        """What the step has just done to the KDA layer `i`, for later."""
        raw, block = step.raw[i], self.model.layers[i].mixer
        assert isinstance(block, layers.Kda)
        weights, inputs = block.step, Raw(raw.whole.clone(), raw.widths)

        def replay(matrix: Tensor, history: Tensor, n: int) -> tuple[Tensor, Tensor]:
            q, k, v, f, g, beta = (x[:n] for x in inputs.parts())
            matrix, history = matrix.clone()[None], history.clone()[None]
            kda.step((q, k, v), f, g, beta, weights, history, matrix, torch.empty_like(q.contiguous()))
            return matrix[0], history[0]

        return replay

    def _move(self, state: State) -> None:
        """The tensors of `state` become those that the kernels work on; what owned them before gets copies."""
        previous = self.owner()
        if previous is not None and previous is not state:
            self._leave(previous)
        self.owner = weakref.ref(state)
        if state.length > self.capacity:
            self._grow(max(room_for(self.model.text, state.length), 2 * self.capacity))
        for own, layer in zip(self._step(1).states, state.layers.values(), strict=True):
            if isinstance(own, KdaState):
                assert isinstance(layer, Kda)
                if not _same(layer.matrix, own.matrix):
                    own.matrix[0].copy_(layer.matrix)
                    layer.matrix = own.matrix[0]
                if not _same(layer.history, own.history):
                    own.history[0].copy_(layer.history)
                    layer.history = own.history[0]
            else:
                assert isinstance(layer, DsaState)
                for rows, room in ((layer.latents, own.latents[0]), (layer.pools, own.pools[0])):
                    if not _same(rows.data, room):
                        room[: rows.length] = rows.view()
                        rows.data = room
                ring = own.ring[0]
                assert layer.keys.shape[0] == ring.shape[0], (tuple(layer.keys.shape), tuple(ring.shape))
                if not _same(layer.keys, ring):
                    ring[:, 0], ring[:, 1] = layer.keys, layer.gates
                    layer.keys, layer.gates = ring.unbind(1)

    def _grow(self, capacity: int) -> None:
        """States and steps anew; whose tensors were the old states goes on holding them until it is moved.

        Where there is no memory for them, the next call starts from no room, not from this much.
        """
        self.steps.clear()
        self.loaded.clear()
        self.capacity = 0
        gc.collect()  # a step's launches refer to the step
        step = DecodeStep(self.model, sequences=1, capacity=capacity)
        self.steps[1], self.capacity = step, step.capacity

    def _leave(self, state: State) -> None:
        for own, layer in zip(self._step(1).states, state.layers.values(), strict=True):
            if isinstance(own, KdaState):
                assert isinstance(layer, Kda)
                layer.keep()
                if _same(layer.matrix, own.matrix):
                    layer.matrix = layer.matrix.clone()
                if _same(layer.history, own.history):
                    layer.history = layer.history.clone()
            else:
                assert isinstance(layer, DsaState)
                for rows, room in ((layer.latents, own.latents), (layer.pools, own.pools)):
                    if _same(rows.data, room):
                        rows.data = rows.view().clone()
                if _same(layer.keys, own.ring):
                    layer.keys, layer.gates = layer.keys.clone(), layer.gates.clone()


def _same(tensor: Tensor, room: Tensor) -> bool:
    return tensor.data_ptr() == room.data_ptr()


def _never(matrix: Tensor, history: Tensor, n: int) -> tuple[Tensor, Tensor]:
    raise AssertionError("a replay without a transaction")
