"""One rank that adds in the order of many: the definition of a sharded sum, written without plans, slices or ranks.

`SplitModel` reads whole weights. Every product over columns that ranks divide is cut into equal runs of columns, every
routed sum by the owner of the expert; the pieces are fp32 points and are added in rank order. A sharded model must
have its bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reference.arithmetic import Arithmetic, Sliced, total
from reference.model import Layer, Moe, TextModel
from reference.ops import mlp


def pieces(width: int, count: int) -> list[slice]:
    """`count` equal runs of `width` columns."""
    assert width % count == 0, (width, count)
    return [slice(i * width // count, (i + 1) * width // count) for i in range(count)]


def in_order(ar: Arithmetic, parts: list[np.ndarray]) -> np.ndarray:
    out = parts[0]
    for part in parts[1:]:
        out = ar.single(out + part, "sum")
    return out


class Split(Arithmetic):
    """Cuts the products at `points` into `count` runs of columns; each is rounded once, as is every addition."""

    def __init__(self, ar: Arithmetic, points: set[str], count: int) -> None:
        self.ar, self.points, self.count, self.name = ar, points, count, ar.name

    def store(self, x: np.ndarray, point: str) -> np.ndarray:
        return self.ar.store(x, point)

    def single(self, x: np.ndarray, point: str) -> np.ndarray:
        return self.ar.single(x, point)

    def maybe(self, x: np.ndarray, point: str) -> np.ndarray:
        return self.ar.maybe(x, point)

    def partials(self, x: np.ndarray, w: Sliced, count: int) -> list[np.ndarray]:
        return [self.ar.dot(x[..., k], Sliced(w.values[k]), "partial", "fp32") for k in pieces(w.k, count)]

    def dot(self, a: np.ndarray, b: np.ndarray | Sliced, point: str, out: str = "bf16") -> np.ndarray:
        if point not in self.points or self.count == 1:
            return self.ar.dot(a, b, point, out)
        assert isinstance(b, Sliced)
        return self.ar.store(in_order(self.ar, self.partials(a, b, self.count)), point)


class SplitMoe(Moe):
    """The experts of all ranks, and the order in which what they give is added."""

    tp, ep = 1, 1

    def __call__(self, x: np.ndarray, tap: Any, indices: np.ndarray | None = None) -> np.ndarray:
        ar, world = self.ar, max(self.tp, self.ep)
        assert isinstance(ar, Split)
        routing = self.route(x, indices)
        for name, value in zip(routing._fields, routing, strict=True):
            tap(f"router.{name}", value)
        owners = np.array_split(np.arange(self.config.n_routed_experts), self.ep)
        shares = world // self.ep
        slots = [np.zeros((*routing.indices.shape, x.shape[-1])) for _ in range(world)]
        for owner, experts in enumerate(owners):
            for expert in set(experts.tolist()) & set(routing.indices.ravel().tolist()):
                w = self.w.at(f"experts.{expert}.")
                tokens, chosen = np.nonzero(routing.indices == expert)
                weights = routing.weights[tokens, chosen, None]
                for share, partial in enumerate(self._block(x[tokens], w, "expert", shares)):
                    slots[owner * shares + share][tokens, chosen] = ar.single(weights * partial, "contribution")
        routed = [ar.single(total(held, axis=-2), "routed") for held in slots]
        shared = self._block(x, self.w.at("shared_experts."), "shared", self.tp)
        shared += [np.zeros_like(routed[0])] * (world - self.tp)
        tap("routed.out", sum(routed[1:], routed[0]))
        tap("shared.out", sum(shared[1:], shared[0]))
        return ar.store(
            in_order(ar, [ar.single(r + s, "both") for r, s in zip(routed, shared, strict=True)]), "mlp.out"
        )

    def _block(self, x: np.ndarray, w: Any, point: str, count: int) -> list[np.ndarray]:
        """The partial sums of a SwiGLU; a whole expert's output is a bf16 point, no part of one is."""
        assert isinstance(self.ar, Split)
        gate, up = (self.ar.linear(x, w.linear(f"{leaf}_proj.weight"), point) for leaf in ("gate", "up"))
        hidden = mlp.activation(self.ar, gate, up, self.config.swiglu_limit, point)
        down = w.linear("down_proj.weight")
        if point == "expert" and count == 1:
            return [self.ar.linear(hidden, down, point)]
        return self.ar.partials(hidden, down, count)


class SplitModel(TextModel):
    """`TextModel` with the sums of `tp` x `ep` ranks."""

    def __init__(self, checkpoint: Any, tp: int, ep: int, arithmetic: str = "exact", **options: Any) -> None:
        super().__init__(checkpoint, arithmetic, **options)
        ar = Split(self.ar, {"kda.o_proj", "mla.o_proj", "mlp.down"}, tp)
        for layer in self.layers:
            parts: list[Any] = [layer.attn, layer.ffn]
            for part in parts:
                part.ar = ar
            self._split_experts(layer, tp, ep)

    @staticmethod
    def _split_experts(layer: Layer, tp: int, ep: int) -> None:
        if layer.sparse and max(tp, ep) > 1:
            layer.ffn.__class__ = SplitMoe
            layer.ffn.tp, layer.ffn.ep = tp, ep  # type: ignore[union-attr]
