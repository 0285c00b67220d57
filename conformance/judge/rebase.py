"""Rebased comparison: every step between two taps is recomputed from the engine's own inputs and judged on its own.

Two copies of the graph run side by side, one in `exact` arithmetic, one in `stochastic` with several samples stacked on
a leading axis. A tap that the trace holds enters both as it is; a missing one is whatever each copy computes for it, so
steps grow coarser where taps are missing. No error carries over a tap, and rows come in dataflow order.

Discrete choices of the trace are replayed after they were checked. Where a choice was left out of the trace, tokens
whose choice is within the errors of another one are not judged, nor is what depends on them.
"""

from __future__ import annotations

import copy
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.judge import graph, margins, ranks
from conformance.judge.bounds import Budget, Step, judge
from conformance.judge.graph import Node
from conformance.judge.result import Statistics, TapRow
from conformance.judge.rows import choice_row, copy_row, refused_row
from conformance.judge.sampling import Sampler
from conformance.judge.spread import measure
from conformance.trace import PARTIAL_SUMS, Trace
from reference.checkpoint import Checkpoint
from reference.model import Layer, Moe, TextModel
from reference.sharding import Mesh

SAMPLES = 16
FALSE_ALARM = 1e-6
_AT_ONCE = 1 << 22
_MOST = 1 << 26
_MOE_INPUTS = ("mlp.in", "router.indices", "router.weights")
Taint = npt.NDArray[np.bool_] | None
_Drawn = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


@dataclass
class _Side:
    """One arithmetic's view of the current trace: values of taps that the trace lacks, by name."""

    memo: dict[str, np.ndarray]


class Rebase:
    """Rebased comparison of traces with one checkpoint.

    `samples` draws of `stochastic` arithmetic with `seed`; `false_alarm` is the probability, per trace, that a correct
    engine fails. With `remember`, verdicts are kept by the bytes of all taps of a step, for traces that share most.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        samples: int = SAMPLES,
        seed: int = 0,
        false_alarm: float = FALSE_ALARM,
        remember: bool = False,
    ) -> None:
        self.checkpoint, self.samples, self.seed, self.false_alarm = checkpoint, samples, seed, false_alarm
        self.model = TextModel(checkpoint, "exact")
        self.config = self.model.config
        self.nodes = list(graph.nodes(self.config))
        self.maker = {name: node for node in self.nodes for name in node.outputs}
        self.order = {name: place for place, name in enumerate(self.maker)}
        self.memory: dict[bytes, tuple[TapRow, ...]] | None = {} if remember else None
        self.last: tuple[bytes, _Drawn] | None = None
        """What was last drawn of a node, by the bytes it was made from: for traces of which only an output differs."""
        self.blocks: dict[str, TextModel] = {}
        """The draft block as a model's only layer, by how its experts are read; see `drafts`."""
        self.meshes: dict[tuple[str, ...], Mesh] = {}

    def mesh(self, metadata: Mapping[str, str]) -> Mesh:
        """As `ranks.rounding`, which looks at every tensor of the checkpoint: once for all runs that say the same."""
        said = tuple(metadata.get(key, "") for key in ("tp", "ep", PARTIAL_SUMS))
        if said not in self.meshes:
            self.meshes[said] = ranks.rounding(metadata, self.checkpoint)
        return self.meshes[said]

    def statistics(self, rows: int) -> Statistics:
        return Statistics(self.samples, self.seed, self.false_alarm, rows)

    def rows(self, trace: Trace) -> Iterator[TapRow]:
        """Verdicts in dataflow order, one per tap that the trace holds. The trace must have passed `trace.validate`."""
        return Run(self, trace).rows()

    def free_run(self, trace: Trace, samples: int) -> tuple[np.ndarray, np.ndarray, npt.NDArray[np.bool_]]:
        """Logits [T,V] from the tokens alone, samples of them [B,T,V], and [T] rows that rest on an untold choice.

        Discrete choices that the trace holds are replayed.
        """
        few = copy.copy(self)
        few.samples = samples
        return Run(few, choices(trace)).free_run()


class Run:
    """One trace. `taps` are its arrays as the reference can use them; `clean` says which are finite."""

    def __init__(self, owner: Rebase, trace: Trace) -> None:
        self.owner, self.model, self.trace = owner, owner.model, trace
        self.held = {name: tap for name, tap in trace.taps.items() if name in owner.maker}
        self.judged = sum(name in owner.maker or name.startswith("mtp.") for name in trace.taps)
        self.budget = Budget.of(owner.false_alarm, self.judged, trace.taps["tokens"])
        self.exact, self.sampled = _Side({}), _Side({})
        self.taint: dict[str, Taint] = {}
        self.adopted: set[str] = set()
        """Taps that the trace lacks and that another run computed."""
        self.digests: dict[str, bytes] = {}
        self.length = len(trace.taps["tokens"])
        self.mesh = owner.mesh(trace.metadata)
        self.partials: dict[str, list[np.ndarray]] = {}
        """What each rank adds to an mlp.out, by its name."""

    def rows(self) -> Iterator[TapRow]:
        for node in self.owner.nodes:
            outputs = [name for name in node.outputs if name in self.held and self.held[name].size]
            if not outputs:
                continue
            yield from self._remembered(node, outputs)
            if ends_a_layer(node.outputs[0]):
                self._forget()

    def free_run(self) -> tuple[np.ndarray, np.ndarray, npt.NDArray[np.bool_]]:
        for node in self.owner.nodes:
            if not all(name in self.held for name in node.outputs):
                for side in (self.exact, self.sampled):
                    self._value(side, node.outputs[0])
                self._taint(node.outputs[0])
            if ends_a_layer(node.outputs[0]):
                self._forget(node.outputs[0])
        doubt = self.taint["logits"]
        clear = np.zeros(self.length, bool) if doubt is None else doubt
        return self._value(self.exact, "logits"), self._value(self.sampled, "logits"), clear

    def _remembered(self, node: Node, outputs: list[str]) -> Iterator[TapRow]:
        memory, key = self.owner.memory, self._key(node, outputs)
        if memory is None or key is None:
            yield from self._judge(node, outputs)
            return
        key += repr(self.budget).encode() + b"".join(self._digest(name) for name in outputs)
        if key not in memory:
            memory[key] = tuple(self._judge(node, outputs))
        yield from memory[key]

    def _key(self, node: Node, outputs: list[str]) -> bytes | None:
        """What a node's samples are made from, in bytes; None where a judge has no memory, or where that is more: taps
        of another run, or what each rank adds to a sum."""
        roots, between = self._origin(node)
        ranked = self.mesh.world > 1 and node.outputs[0].endswith("mlp.out")
        if self.owner.memory is None or between & self.adopted or ranked:
            return None
        key = repr((outputs, self.mesh, id(self.model), sorted(between))).encode()
        return key + b"".join(self._digest(name) for name in roots)

    def _digest(self, name: str) -> bytes:
        if name not in self.digests:
            tap = self.trace.taps[name]
            digest = hashlib.blake2b(f"{name} {tap.dtype} {tap.shape}".encode(), digest_size=16)
            digest.update(np.ascontiguousarray(tap).view(np.uint8).data)
            self.digests[name] = digest.digest()
        return self.digests[name]

    def _judge(self, node: Node, outputs: list[str]) -> Iterator[TapRow]:
        bad = self._broken(node)
        if bad:
            yield from (refused_row(self._step(node, name), self.trace.taps[name], bad) for name in outputs)
            return
        if node.choice:
            yield self._choice(node, outputs[0])
            return
        if graph.traits(self.owner.config, outputs[0]).copy and all(
            name in self.held or name == "tokens" for name in node.inputs
        ):
            centre = self._value(self.exact, outputs[0], check=True)
            yield copy_row(self._step(node, outputs[0]), self.trace.taps[outputs[0]], centre)
            return
        centres, draws = self._drawn(node, outputs)
        taint = self._taint_of(node)
        for name in outputs:
            centre, engine = centres[name], self.trace.taps[name]
            # What is not finite by its meaning (scores of no candidate) has to be the same, the rest is compared.
            valid = np.isfinite(centre) | (engine.astype(np.float64) != centre)
            step = self._step(node, name)
            if taint is not None and step.time:
                valid &= ~taint.reshape(-1, *[1] * (centre.ndim - 1))
            elif taint is not None and taint.any():
                valid &= False
            if not valid.any():
                continue
            yield judge(step, engine, np.where(valid, centre, 0.0), draws[name], self.budget, valid=valid)

    def _step(self, node: Node, name: str) -> Step:
        t = graph.traits(self.owner.config, name)
        inputs = self._roots(node)
        short = [self._short(tap, node.layer) for tap in inputs]
        label = f"{', '.join(short)} -> {self._short(name, node.layer)}"
        return Step(
            self.owner.order[name],
            name,
            node.layer,
            label,
            inputs,
            t.time,
            t.length,
            t.widen,
            t.fine,
            t.slope,
            t.kinked,
            t.coarse,
        )

    @staticmethod
    def _short(tap: str, layer: int | None) -> str:
        return tap.removeprefix(f"layers.{layer}.")

    def _roots(self, node: Node) -> tuple[str, ...]:
        """The taps of the trace that a node's outputs were recomputed from."""
        return self._origin(node)[0]

    def _origin(self, node: Node) -> tuple[tuple[str, ...], set[str]]:
        """`_roots`, and the taps between them and the node, which the trace lacks."""
        roots: dict[str, None] = {}
        between: set[str] = set()
        stack = list(reversed(node.inputs))
        while stack:
            name = stack.pop()
            if name in self.held or name == "tokens":
                roots[name] = None
            elif name not in between:
                between.add(name)
                stack += reversed(self.owner.maker[name].inputs)
        return tuple(roots), between

    def _broken(self, node: Node) -> str:
        """The first input tap that holds something no step can be recomputed from."""
        for name in self._roots(node):
            tap = self.trace.taps[name]
            if tap.dtype.kind in "fV":
                with np.errstate(over="ignore"):
                    values = tap.astype(np.float32)
                bad = np.isnan(values) if name.endswith(".scores") else ~np.isfinite(values)
                if bad.any():
                    return f"input {name} holds {int(bad.sum())} values that are not finite in float32"
        return ""

    def _drawn(self, node: Node, outputs: list[str]) -> _Drawn:
        """What `_both` gives; or gave, where the inputs are those of the node last judged."""
        key = self._key(node, outputs)
        if key is None:
            return self._both(node, outputs)
        if self.owner.last is None or self.owner.last[0] != key:
            self.owner.last = key, self._both(node, outputs)
        return self.owner.last[1]

    def _both(self, node: Node, outputs: list[str]) -> _Drawn:
        """Outputs of a node in exact arithmetic, and samples of them on a new leading axis.

        A tap so wide that its samples would not fit gets fewer of them: it has elements enough to pool over.
        """
        size = max(self.trace.taps[name].size for name in outputs)
        count = min(self.owner.samples, max(4, _MOST // max(size, 1)))
        centres = node.run(self.model, *(self._value(self.exact, name) for name in node.inputs))
        parts: list[tuple[np.ndarray, ...]] = []
        step = max(1, min(count, _AT_ONCE // max(size, 1)))
        for first in range(0, count, step):
            copies = min(step, count - first)
            inputs = [self._value(self.sampled, name)[first : first + copies] for name in node.inputs]
            parts.append(node.run(self._stochastic(node, first), *inputs))
        names = dict(zip(node.outputs, range(len(node.outputs)), strict=True))
        wanted = {name: names[name] for name in outputs}
        draws = {name: np.concatenate([part[i] for part in parts]) for name, i in wanted.items()}
        return {name: centres[i] for name, i in wanted.items()}, draws

    def _value(self, side: _Side, name: str, *, check: bool = False) -> np.ndarray:
        """A tap as one side sees it: the engine's, or computed. `check` ignores the engine's own value of it."""
        if name == "tokens":
            return self._lift(side, np.asarray(self.trace.taps[name], np.int64))
        if name in self.held and not check:
            return self._lift(side, self._usable(name))
        if name in side.memo:
            return side.memo[name]
        node = self.owner.maker[name]
        inputs = [self._value(side, source) for source in node.inputs]
        outputs = node.run(self.model if side is self.exact else self._stochastic(node, 0), *inputs)
        if check:
            return outputs[node.outputs.index(name)]
        side.memo.update(zip(node.outputs, outputs, strict=True))
        return side.memo[name]

    def _lift(self, side: _Side, value: np.ndarray) -> np.ndarray:
        return value if side is self.exact else np.broadcast_to(value, (self.owner.samples, *value.shape))

    def _usable(self, name: str) -> np.ndarray:
        """Choices that are out of range become -1, so that replaying them stays possible after they failed."""
        tap = self.trace.taps[name]
        if tap.dtype.kind not in "iu":
            return tap.astype(np.float64)
        limit = self.length if name.endswith(".selected") else self.owner.config.n_routed_experts
        return np.where((tap >= 0) & (tap < limit), tap, -1).astype(np.int32)

    def _stochastic(self, node: Node, first: int) -> TextModel:
        """The model with draws of its own for one node, whatever was computed before."""
        model = copy.copy(self.model)
        model.ar = self._sampler(node, first)
        if node.layer is not None:
            weights = self.model.w.at(f"layers.{node.layer}.")
            layer = Layer(node.layer, model.ar, self.model.config, weights, self.model.options)
            model.layers = {node.layer: self._ranked(node, layer)}  # type: ignore[assignment]
        return model

    def _sampler(self, node: Node, first: int) -> Sampler:
        seed = zlib.crc32(f"{self.owner.seed} {node.outputs[0]} {first}".encode())
        return Sampler(seed) if self.mesh.world == 1 else ranks.RankSampler(seed, self.mesh)

    def _ranked(self, node: Node, layer: Any) -> Any:
        """A layer of samples whose experts are those of all ranks."""
        if self.mesh.world > 1 and isinstance(layer.ffn, Moe):
            layer.ffn = ranks.RankedMoe(layer.ffn, self.mesh, lambda: self._partials(node))
        return layer

    def _partials(self, node: Node) -> list[np.ndarray]:
        """What each rank adds to the mlp.out that `node` makes, in exact arithmetic."""
        name, layer = node.outputs[0], node.layer
        if name not in self.partials:
            assert layer is not None
            inputs = (self._value(self.exact, name.removesuffix("mlp.out") + tap) for tap in _MOE_INPUTS)
            self.partials = {name: ranks.partial_sums(self.model.layers[layer].ffn, self.mesh, *inputs)}
        return self.partials[name]

    def _forget(self, kept: str = "") -> None:
        for side in (self.exact, self.sampled):
            side.memo = {name: value for name, value in side.memo.items() if name.endswith(".selected") or name == kept}

    def _taint_of(self, node: Node) -> Taint:
        """[T] tokens whose inputs rest on a choice that the trace does not tell and that was within the errors."""
        total: Taint = None
        for name in node.inputs:
            part = None if name in self.held or name == "tokens" else self._taint(name)
            if part is not None:
                total = part if total is None else total | part
        if total is not None and node.mixes:
            total = np.logical_or.accumulate(total)
        return total

    def _taint(self, name: str) -> Taint:
        if name not in self.taint:
            node = self.owner.maker[name]
            own = self._taint_of(node)
            if node.choice and not node.inputs[0].endswith(".selected"):
                doubt = self._doubt(node, name)
                own = doubt if own is None else own | doubt
            self.taint[name] = own
        return self.taint[name]

    def _scores(self, node: Node, name: str) -> tuple[np.ndarray, np.ndarray]:
        """What a choice is made by, [T,N], and its allowed error: none for index scores that the trace holds."""
        source = node.inputs[0]
        layer = node.layer
        if name.endswith(".indices"):
            assert layer is not None
            centre = graph.choice_scores(self.model, layer, self._value(self.exact, source))
            drawn = graph.choice_scores(self._stochastic(node, 0), layer, self._value(self.sampled, source))
        else:
            centre, drawn = self._value(self.exact, source), self._value(self.sampled, source)
            if source in self.held:
                return centre, np.zeros_like(centre)
        fit = np.isfinite(centre)
        base = np.where(fit, centre, 0.0)
        if base.size == 0:
            return centre, np.zeros_like(centre)
        with np.errstate(invalid="ignore"):
            spread = measure(base, np.where(fit, drawn - base, 0.0), kinked=name.endswith(".selected"))
        limit = spread.reach(self.budget.probability / base.size) * spread.sigma
        return centre, limit + graph.ELEMENTARY * 2.0**-24 * np.abs(base)

    def _doubt(self, node: Node, name: str) -> npt.NDArray[np.bool_]:
        c = self.owner.config
        scores, error = self._scores(node, name)
        if name.endswith(".indices"):
            alive = margins.standing(scores, c.n_group, c.topk_group)
            chosen = margins.top(alive, np.full(len(scores), c.num_experts_per_tok))
            crowd = margins.unclear_groups(scores, error, c.n_group, c.topk_group)
            return crowd | margins.unclear(alive, error, chosen)
        need = np.minimum(c.index_topk // c.index_kpool, np.isfinite(scores).sum(axis=-1))
        return margins.unclear(scores, error, margins.top(scores, need))

    def _choice(self, node: Node, name: str) -> TapRow:
        c, tap = self.owner.config, np.asarray(self.trace.taps[name], np.int64)
        step = self._step(node, name)
        if node.inputs[0].endswith(".selected"):
            source = np.asarray(self._value(self.exact, node.inputs[0]), np.int64)
            return choice_row(step, tap, margins.same(tap, source, self.length))
        scores, error = self._scores(node, name)
        if name.endswith(".indices"):
            verdict = margins.experts(tap, scores, error, c.n_group, c.topk_group)
        else:
            verdict = margins.pools(tap, scores, error, c.index_kpool, c.index_topk // c.index_kpool)
        return choice_row(step, tap, verdict)


def choices(trace: Trace) -> Trace:
    """What the free run takes of a trace: the tokens and the discrete choices."""
    kept = {name: tap for name, tap in trace.taps.items() if name == "tokens" or tap.dtype.kind in "iu"}
    return Trace(trace.metadata, kept)


def ends_a_layer(tap: str) -> bool:
    return tap.startswith("layers.") and tap.endswith(".out") and tap.count(".") == 2
