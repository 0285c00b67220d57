"""Oracle and engine behind one set of calls on NumPy arrays, so that a fault is looked for in both by one test.

Everything is exact arithmetic on one side and fp32 without storage rounding on the other; `SIDES` parametrises a test.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fast.model
from fast.linear import linear
from fast.nvfp4 import Packed
from fast.ops import indexer, kda, mhc, mla, mlp, router
from reference import model as oracle
from reference import nvfp4
from reference.arithmetic import Sliced, get_arithmetic
from reference.checkpoint import open_checkpoint
from reference.ops import indexer as r_indexer
from reference.ops import kda as r_kda
from reference.ops import mhc as r_mhc
from reference.ops import mla as r_mla
from reference.ops import mlp as r_mlp
from reference.ops import router as r_router
from reference.weights import Weights

Array = np.ndarray


def tensor(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32))


class Reference:
    """The oracle in exact arithmetic."""

    name = "reference"
    unit = 2.0**-53
    ar = get_arithmetic("exact")

    def model(self, directory: Path) -> Any:
        return oracle.TextModel(open_checkpoint(directory))

    def snapshot(self, model: Any) -> Any:
        return model.snapshot()

    def restore(self, model: Any, snapshot: Any) -> None:
        model.restore(snapshot)

    def latents(self, model: Any, layer: int) -> Array:
        return model.state.layers[layer].latent

    def pool_keys(self, model: Any, layer: int) -> Array:
        return model.state.layers[layer].pool_keys

    def conv_inputs(self, model: Any, layer: int) -> Array:
        return model.state.layers[layer].conv

    def matrix(self, model: Any, layer: int) -> Array:
        return model.state.layers[layer].matrix

    def decay(self, pre: Array, A_log: Array, dt_bias: Array, lower_bound: float) -> Array:
        """pre [T, H*d] is what f_b gives: here f_a is the identity on it, f_b too."""
        width = np.eye(pre.shape[1])
        w = Weights.of(
            {
                "f_a_proj.weight": width,
                "f_b_proj.weight": width,
                "b_proj.weight": width[: len(A_log)],
                "A_log": A_log,
                "dt_bias": dt_bias,
            }
        )
        return r_kda.gates(self.ar, pre, w, len(A_log), lower_bound)[0]

    def delta_rule(self, q: Array, k: Array, v: Array, g: Array, beta: Array, M: Array, w: int) -> tuple[Array, Array]:
        inputs = r_kda.Inputs(q, k, v, g, beta)
        return r_kda.chunked(self.ar, inputs, M, w) if w else r_kda.recurrent(self.ar, inputs, M)

    def mix(self, streams: Array, fn: Array, base: Array, scale: Array, **settings: Any) -> tuple[Array, ...]:
        names = {"norm_eps": "rms_norm_eps", "hc_eps": "hc_eps", "iterations": "hc_sinkhorn_iters"}
        named = {names[key]: value for key, value in settings.items()}
        return r_mhc.site_weights(self.ar, streams, Sliced.of_weight(fn), base, scale, **named)

    def combine(self, streams: Array, out: Array, post: Array, comb: Array) -> Array:
        return r_mhc.combine(self.ar, streams, out, r_mhc.HC(post, post, comb))

    def swiglu(self, gate: Array, up: Array, limit: float) -> Array:
        return r_mlp.activation(self.ar, gate, up, limit, "test")

    def packed_linear(self, x: Array, codes: Array, scale: Array, scale_2: float) -> Array:
        w = nvfp4.decode(codes, scale, np.array(scale_2, np.float32))
        return self.ar.linear(x, Sliced.of_weight(w), "test", out="none")

    def choose(self, scores: Array, bias: Array, k: int) -> Array:
        return r_router.choose(self.ar, r_router.choice_scores(self.ar, scores, bias), k, 1, 1)

    def weigh(self, logits: Array, indices: Array, factor: float) -> Array:
        return r_router.routing_weights(self.ar, r_router.router_scores(self.ar, logits), indices, True, factor)

    def routed(self, x: Array, indices: Array, weights: Array, experts: list[list[Array]], limit: float) -> Array:
        names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
        held = [Weights.of(dict(zip(names, expert, strict=True))) for expert in experts]
        return r_mlp.routed(self.ar, x, indices, weights, held.__getitem__, limit)

    def select(self, scores: Array, seen: int, topk: int, S: int) -> Array:
        return r_indexer.select(scores, seen, topk, S)

    def attend(self, q: Array, latents: Array, selected: Array, kv_b: Array, form: str) -> Array:
        return r_mla.attend(self.ar, q, latents, selected, Weights.of({"kv_b_proj.weight": kv_b}), form)


class Fast:
    """The engine under test, storing in fp32."""

    name = "fast"
    unit = 2.0**-24

    def model(self, directory: Path) -> Any:
        return fast.model.TextModel(directory, dtype=torch.float32)

    def snapshot(self, model: Any) -> Any:
        return model.state.snapshot()

    def restore(self, model: Any, snapshot: Any) -> None:
        model.state.restore(snapshot)

    def _array(self, model: Any, layer: int, name: str) -> Array:
        return model.state.layers[f"layers.{layer}"].arrays()[name].numpy()

    def latents(self, model: Any, layer: int) -> Array:
        return self._array(model, layer, "latent")

    def pool_keys(self, model: Any, layer: int) -> Array:
        return self._array(model, layer, "pool_keys")

    def conv_inputs(self, model: Any, layer: int) -> Array:
        return self._array(model, layer, "conv_state")

    def matrix(self, model: Any, layer: int) -> Array:
        return self._array(model, layer, "state")

    def decay(self, pre: Array, A_log: Array, dt_bias: Array, lower_bound: float) -> Array:
        return kda.decay(tensor(pre), tensor(A_log), tensor(dt_bias), lower_bound).numpy()

    def delta_rule(self, q: Array, k: Array, v: Array, g: Array, beta: Array, M: Array, w: int) -> tuple[Array, Array]:
        inputs = [tensor(x) for x in (q, k, v, g, beta, M)]
        core, state = kda.chunked(w, *inputs) if w else kda.recurrent(*inputs)
        return core.numpy(), state.numpy()

    def mix(self, streams: Array, fn: Array, base: Array, scale: Array, **settings: Any) -> tuple[Array, ...]:
        found = mhc.mix(tensor(streams), mhc.Weights(tensor(fn), tensor(base), tensor(scale)), **settings)
        return tuple(part.numpy() for part in found)

    def combine(self, streams: Array, out: Array, post: Array, comb: Array) -> Array:
        return mhc.combine(tensor(streams), tensor(out), tensor(post), tensor(comb)).numpy()

    def swiglu(self, gate: Array, up: Array, limit: float) -> Array:
        return mlp.swiglu(tensor(gate), tensor(up), limit).numpy()

    def packed_linear(self, x: Array, codes: Array, scale: Array, scale_2: float) -> Array:
        packed = Packed(torch.from_numpy(codes), torch.from_numpy(scale), torch.tensor(scale_2, dtype=torch.float32))
        return linear(tensor(x), packed).numpy()

    def choose(self, scores: Array, bias: Array, k: int) -> Array:
        return router.choose(tensor(scores), tensor(bias), k).numpy()

    def weigh(self, logits: Array, indices: Array, factor: float) -> Array:
        scores = torch.sigmoid(tensor(logits))
        return router.weigh(scores, torch.from_numpy(indices), normalise=True, factor=factor).numpy()

    def routed(self, x: Array, indices: Array, weights: Array, experts: list[list[Array]], limit: float) -> Array:
        gate, up, down = ([tensor(expert[i]) for expert in experts] for i in range(3))
        bank = SimpleNamespace(first=0, count=len(experts), total=len(experts), gate=gate, up=up, down=down)
        return mlp.routed(tensor(x), bank, torch.from_numpy(indices), tensor(weights), limit).numpy()

    def select(self, scores: Array, seen: int, topk: int, S: int) -> Array:
        """With a tile's worth of junk in the scores of pools that are no candidate, as the op itself would mask it."""
        visible = torch.arange(seen + 1, seen + 1 + len(scores))
        return indexer.tokens(indexer.best(tensor(scores), topk // S), visible, S, topk + S - 1).numpy()

    def attend(self, q: Array, latents: Array, selected: Array, kv_b: Array, form: str) -> Array:
        (_, H, N), rows = q.shape, kv_b.shape[0]
        args = tensor(q), tensor(latents), torch.from_numpy(selected), tensor(kv_b)
        return mla.attend(*args, values=rows // H - N, absorbed=form == "absorbed").numpy()


SIDES = pytest.mark.parametrize("side", [Reference(), Fast()], ids=lambda side: side.name)


def close(side: Any, found: Array, expected: Any, roundings: int, size: Any = None) -> None:
    """Within `roundings` of the side's precision, relative to `size` (default: the expected values themselves)."""
    expected = np.asarray(expected, np.float64)
    bound = roundings * max(side.unit, 2.0**-53) * np.abs(expected if size is None else size)
    error = np.abs(np.asarray(found, np.float64) - expected)
    assert error.shape == np.broadcast_shapes(error.shape, bound.shape)
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert (error <= bound).all(), f"{side.name} at {worst}: {np.asarray(found)[worst]!r}, expected {expected[worst]!r}"
