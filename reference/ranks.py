"""All ranks of a sharded model in one process (model.md section 5, plans of `reference.sharding`).

Every rank reads exactly its parts of the stored tensors and runs the ordinary mixers and MLPs on them; `ShardedModel`
adds their partial sums and is a `TextModel` otherwise, with the same verbs, taps, state and forms.

The reduction. A product over divided columns (o_proj, down_proj), the routed sum and routed + shared stay partial sums:
fp32 points, each the exact value of what the rank holds, rounded once. There is one all-reduce after the mixer, over
the TP group, and one after the MLP, over the TP group for a dense MLP and over all ranks for experts:

    s = p_0;  s = single(s + p_r) for r = 1, 2, ..;  out = store(s)

In `exact` that is float64 addition in rank order. In `bf16` partial sums and additions are fp32, and the one bf16
rounding follows the last of them. In `stochastic` partial sums and running sums are further bf16 points, for engines
that hand bf16 to the all-reduce. Neither routed.out nor shared.out is rounded on its own before the sum, as a single
rank would do. Everything that no division crosses (all heads, all experts, the indexer, the router, mHC, norms) has the
bits of the unsharded model, given the same inputs. What is replicated outside mixers and MLPs (embedding, mHC, norms,
lm_head) is computed once; what is replicated inside them is computed by every rank and must come out the same.

Ranks outside the first TP group do not compute the shared expert: it enters the sum once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from reference import nvfp4, values
from reference.arithmetic import Arithmetic, Sliced, get_arithmetic
from reference.checkpoint import Checkpoint
from reference.errors import InputError
from reference.layout import TEXT
from reference.model import Layer, Moe, Part, Tap, TextModel
from reference.rank_taps import agree, join, join_state, state_part
from reference.sharding import Mesh, part_of, plan
from reference.state import DsaState, KdaState
from reference.weights import Weights

WIDTHS = {"BF16": "<u2", "F32": "<u4", "U8": "u1", "F8_E4M3": "u1"}


class NotOnRankError(InputError):
    """A rank asks for an expert of another rank."""


class RankSource:
    """The `weights.Source` of one rank: the stored bytes of its parts, and nothing else, decoded."""

    def __init__(self, checkpoint: Checkpoint, mesh: Mesh) -> None:
        self.checkpoint, self.mesh, self.text = checkpoint, mesh, checkpoint.config.text

    def stored(self, name: str) -> np.ndarray:
        """This rank's part of a stored tensor, as bit patterns in a view of the file. Raises `NotOnRankError`."""
        spec = self.checkpoint.specs[name]
        part = part_of(spec, self.text, self.mesh)
        if part is None:
            raise NotOnRankError(f"{name}: expert {spec.expert} is not on rank {self.mesh.rank} of {self.mesh}")
        dtype, shape, data = self.checkpoint.raw(name)
        return part.of(np.frombuffer(data, WIDTHS[dtype]).reshape(shape))

    def weight(self, name: str) -> np.ndarray:
        """Values of the part, float32. Raises as `Checkpoint.weight`; positions count from the part's start."""
        where = f"{self.checkpoint.where(name)} (rank {self.mesh.rank})"
        stored, dtype = self.stored(name), self.checkpoint.dtype(name)
        if dtype == "U8":
            scale_2 = self.checkpoint.weight(f"{name}_scale_2")
            return nvfp4.decode(stored, self.stored(f"{name}_scale"), scale_2, name=where)
        return values.decode(where, dtype, stored.shape, memoryview(stored.tobytes()))

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """`weight(name)[start:stop]`."""
        return self.weight(name)[start:stop]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the part's values."""
        rows, *rest = self.stored(name).shape
        return (rows, 2 * rest[0]) if self.checkpoint.dtype(name) == "U8" else (rows, *rest)


class Unfinished(Arithmetic):
    """An arithmetic that leaves the last rounding at `points` to the reduction: partial sums are fp32 points."""

    def __init__(self, ar: Arithmetic, points: frozenset[str]) -> None:
        self.ar, self.points, self.name = ar, points, ar.name

    def store(self, x: np.ndarray, point: str) -> np.ndarray:
        return self.ar.single(x, point) if point in self.points else self.ar.store(x, point)

    def single(self, x: np.ndarray, point: str) -> np.ndarray:
        return self.ar.single(x, point)

    def maybe(self, x: np.ndarray, point: str) -> np.ndarray:
        return self.ar.maybe(x, point)

    def dot(self, a: np.ndarray, b: np.ndarray | Sliced, point: str, out: str = "bf16") -> np.ndarray:
        return self.ar.dot(a, b, point, "fp32" if point in self.points else out)


def unfinished_points(mesh: Mesh) -> frozenset[str]:
    """The points at which a rank of this mesh holds a partial sum."""
    points: set[str] = set()
    if mesh.tp > 1:
        points |= {"kda.o_proj", "mla.o_proj", "mlp.down"}
    if mesh.world > 1:
        points |= {"shared.down", "routed.out", "mlp.out"}
    if mesh.ranks_per_expert > 1:
        points |= {"expert.down"}
    return frozenset(points)


def reduce(ar: Arithmetic, parts: Sequence[np.ndarray], point: str) -> np.ndarray:
    """Partial sums of a group, in rank order -> their sum, a bf16 point; see the head of the file."""
    held = [ar.maybe(part, f"{point}.partial") for part in parts]
    out = held[0]
    for part in held[1:]:
        out = ar.maybe(ar.single(out + part, f"{point}.sum"), f"{point}.partial")
    return ar.store(out, point)


class RankMoe(Moe):
    """The experts of one rank: the whole router, its range of the routed experts, its part of the shared one."""

    def __init__(self, mesh: Mesh, *args: Any) -> None:
        super().__init__(*args)
        self.mesh, self.owned = mesh, mesh.experts(self.config.n_routed_experts)

    def routed(self, x: np.ndarray, indices: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """As `Moe.routed`, over the chosen experts of this rank; the others' slots add zero."""
        here = (indices >= self.owned.start) & (indices < self.owned.stop)
        return super().routed(x, np.where(here, indices, -1), weights)

    def shared(self, x: np.ndarray) -> np.ndarray:
        """As `Moe.shared`, a partial sum; zeros outside the first TP group."""
        return super().shared(x) if self.mesh.adds_shared_expert() else np.zeros_like(x)

    def __call__(self, x: np.ndarray, tap: Tap, indices: np.ndarray | None = None) -> np.ndarray:
        """As `Moe`, a partial sum. Outside the first TP group there is no shared.out."""

        def listen(name: str, value: np.ndarray) -> None:
            if name != "shared.out" or self.mesh.adds_shared_expert():
                tap(name, value)

        return super().__call__(x, listen, indices)


class Fan:
    """A tap for the whole model and one for each rank. Called itself, it reports the same to all."""

    def __init__(self, whole: Tap | None, ranks: Sequence[Tap] | None) -> None:
        self.whole, self.ranks = whole, ranks

    def __call__(self, name: str, value: np.ndarray) -> None:
        for tap in ((self.whole,) if self.whole else ()) + tuple(self.ranks or ()):
            tap(name, value)


def each(mesh: Mesh, tap: Tap | None, run: Callable[[int, Tap | None], np.ndarray]) -> list[np.ndarray]:
    """run(rank, its tap) for every rank, in rank order; then the whole's tap gets the joined values.

    Raises `RankDisagreementError`.
    """
    fan = tap if isinstance(tap, Fan) else Fan(tap, None)
    heard: list[dict[str, np.ndarray]] = [{} for _ in range(mesh.world)]

    def listener(rank: int) -> Tap | None:
        if fan.whole is None and fan.ranks is None:
            return None

        def listen(name: str, value: np.ndarray) -> None:
            heard[rank][name] = value
            if fan.ranks is not None:
                fan.ranks[rank](name, value)

        return listen

    parts = [run(rank, listener(rank)) for rank in range(mesh.world)]
    for name in heard[0]:
        whole = join(name, [taps.get(name) for taps in heard], mesh)
        if fan.whole is not None:
            fan.whole(name, whole)
    return parts


def reduce_over_tp(ar: Arithmetic, parts: Sequence[np.ndarray], mesh: Mesh, where: str, point: str) -> np.ndarray:
    """The sum over the first TP group; the others must hold the same. Raises `RankDisagreementError`."""
    for rank in range(mesh.tp, len(parts)):
        agree(f"{where}.{point} before the all-reduce", parts[rank % mesh.tp], parts[rank], rank % mesh.tp, rank)
    return reduce(ar, parts[: mesh.tp], point) if mesh.tp > 1 else parts[0]


class ShardedLayer(Layer):
    """A layer whose mixer and MLP run on all ranks. `ranks` are the layers as each rank has them."""

    def __init__(self, mesh: Mesh, ranks: list[Layer], *args: Any) -> None:
        super().__init__(*args)
        self.mesh, self.ranks = mesh, ranks

    def mixer(
        self,
        x: np.ndarray,
        state: KdaState | DsaState | None = None,
        tap: Tap | None = None,
        selected: np.ndarray | None = None,
        pad: int = 0,
    ) -> np.ndarray:
        """As `Layer.mixer`, after the all-reduce. `state` is the whole layer's. Raises `RankDisagreementError`."""
        state = self.attn.fresh(x.shape[:-2]) if state is None else state
        states = [state_part(state, self._mesh(rank)) for rank in range(self.mesh.world)]
        parts = each(self.mesh, tap, lambda rank, tap: self.ranks[rank].mixer(x, states[rank], tap, selected, pad))
        for item, value in vars(join_state(f"layers.{self.index}", states, self.mesh)).items():
            setattr(state, item, value)
        return reduce_over_tp(self.ar, parts, self.mesh, f"layers.{self.index}", "attn.out")

    def mlp(self, x: np.ndarray, tap: Tap | None = None, indices: np.ndarray | None = None, pad: int = 0) -> np.ndarray:
        """As `Layer.mlp`, after the all-reduce. Raises `RankDisagreementError`."""
        parts = each(self.mesh, tap, lambda rank, tap: self.ranks[rank].mlp(x, tap, indices, pad))
        if self.sparse and self.mesh.world > 1:
            return reduce(self.ar, parts, "mlp.out")
        return reduce_over_tp(self.ar, parts, self.mesh, f"layers.{self.index}", "mlp.out")

    def _mesh(self, rank: int) -> Mesh:
        return replace(self.mesh, rank=rank)


class ShardedModel(TextModel):
    """`TextModel` over `tp` x `ep` ranks (max(tp, ep) of them; see `sharding.Mesh`).

    Raises `MeshError`, and `DivisionError` with the numbers where a tensor of the checkpoint cannot be divided.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tp: int = 1,
        ep: int = 1,
        arithmetic: str = "exact",
        *,
        seed: int = 0,
        kda: str = "recurrent",
        kda_chunk: int = 64,
        mla: str = "expanded",
    ) -> None:
        super().__init__(checkpoint, arithmetic, seed=seed, kda=kda, kda_chunk=kda_chunk, mla=mla)
        self.mesh = Mesh(tp, ep)
        self.ranks: list[list[Layer]] = []
        for rank in range(self.mesh.world):
            mesh = Mesh(tp, ep, rank)
            plan(checkpoint.specs.values(), self.config, mesh)
            self.ranks.append(self._rank(mesh, arithmetic, seed))
        whole = self.layers
        self.layers = [
            ShardedLayer(
                self.mesh,
                [layers[index] for layers in self.ranks],
                *(index, self.ar, self.config, whole[index].w, self.options),
            )
            for index in range(len(whole))
        ]

    def _rank(self, mesh: Mesh, arithmetic: str, seed: int) -> list[Layer]:
        """The layers of one rank: its heads, its weights, its experts.

        Ranks share the seed, so what all compute alike is rounded alike.
        """
        ar = Unfinished(get_arithmetic(arithmetic, seed), unfinished_points(mesh))
        config = replace(
            self.config,
            linear_num_heads=self.config.linear_num_heads // mesh.tp,
            num_attention_heads=self.config.num_attention_heads // mesh.tp,
        )
        weights = Weights(RankSource(self.checkpoint, mesh)).at(TEXT)
        layers = []
        for index in range(self.config.num_hidden_layers):
            layer = Layer(index, ar, config, weights.at(f"layers.{index}."), self.options)
            if layer.sparse:
                ffn: Part = layer.ffn
                layer.ffn = RankMoe(mesh, ar, config, ffn.w, self.options)
            layers.append(layer)
        return layers

    def prefill(
        self,
        tokens: Sequence[int] | np.ndarray,
        tap: Tap | None = None,
        pad: int = 0,
        rank_taps: Sequence[Tap] | None = None,
    ) -> np.ndarray:
        """As `TextModel.prefill`. `tap` hears the whole model, `rank_taps` each rank (see `reference.rank_taps`)."""
        if rank_taps is not None and len(rank_taps) != self.mesh.world:
            raise ValueError(f"{len(rank_taps)} taps for {self.mesh.world} ranks")
        if tap is None and rank_taps is None:
            return super().prefill(tokens, None, pad)
        return super().prefill(tokens, Fan(tap, rank_taps), pad)

    def decode(
        self, token: int | np.ndarray, tap: Tap | None = None, rank_taps: Sequence[Tap] | None = None
    ) -> np.ndarray:
        """As `TextModel.decode`."""
        return self.prefill(np.asarray(token)[..., None], tap, rank_taps=rank_taps)[..., 0, :]
