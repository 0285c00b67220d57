"""The draft block's taps, judged as the text's are: every step from the engine's own inputs.

M rows, T tokens of the text, K drafts. Row i pairs the target's hidden, or y of the row before from row T on, with a
token; both follow from the trace (`conformance.taps`). J of the rows ran the indexer. The rows of later drafts need
`mtp.logits` and the taps that y is made of; without them only the first T rows are judged.

BF16 experts count with the values that packing gives them, unless the trace's metadata say `mtp_experts` = "stored".
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from conformance import taps
from conformance.judge import graph
from conformance.judge.bounds import Budget, Step
from conformance.judge.graph import Node
from conformance.judge.rebase import Rebase, Run, Taint
from conformance.judge.result import Problem, TapRow
from conformance.trace import Trace
from reference.config import ModelConfig, TextConfig
from reference.model import TextModel
from reference.mtp import Block

EXPERTS = "mtp_experts"
"""Key of the metadata."""
READINGS = ("packed", "stored")
ROOTS = ("mtp.z", "mtp.attn.out", "mtp.mlp.out", "mtp.logits")
"""What the rows of later drafts are made from."""
INNER = ("final.norm", "mtp.hidden", "mtp.mid", "mtp.y")
"""Values of the graph that are no taps of the block."""


def order(config: TextConfig) -> list[str]:
    """Names of the block's taps in dataflow order; none where the checkpoint has no block."""
    if config.mtp_layer is None:
        return []
    return [name for node in nodes(config, 1, 1, 1) for name in node.outputs if name not in INNER]


def counted(trace: Trace, config: ModelConfig) -> str:
    """The first tap that has a row for every draft whatever the config; "" where the trace holds none."""
    for name in order(config.text):
        if name in trace.taps and trace.taps[name].ndim and not name.startswith("mtp.indexer."):
            return name
    return ""


def sizes(trace: Trace, config: ModelConfig) -> dict[str, int]:
    """Lengths of the axes M, J and Y. M is that of the first tap that has it, or follows from the metadata."""
    T = len(trace.taps["tokens"])
    first, told = counted(trace, config), trace.metadata.get("mtp", "")
    drafts = int(told) if re.fullmatch("[1-9][0-9]{0,5}", told) else 1
    M = len(trace.taps[first]) if first else T + drafts - 1
    J = min(M, T) if config.text.index_share_for_mtp_iteration else M
    return {"M": M, "J": J, "Y": J // config.text.index_kpool}


def unfit(trace: Trace, config: ModelConfig) -> dict[str, str]:
    """Taps of the block that do not have the rows which the block's first tap and the text ask for (name -> why)."""
    lengths, out = sizes(trace, config), {}
    for name, spec in taps.expected(config, len(trace.taps["tokens"])).items():
        if name in trace.taps and name.startswith("mtp."):
            shape, want = list(trace.taps[name].shape), [lengths.get(str(axis), axis) for axis in spec.shape]
            if shape != want or not lengths["M"]:
                out[name] = f"shape {shape}, expected {want}"
    return out


def nodes(config: TextConfig, T: int, M: int, J: int) -> Iterator[Node]:
    """Every node of the block. The first makes final.norm, which is the text's: it only names where that comes from."""
    i = config.mtp_layer
    assert i is not None

    def hidden(model: Any, h: np.ndarray, *y: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.concatenate([h[..., :M, :], *(part[..., T - 1 : M - 1, :] for part in y)], axis=-2),)

    def z(model: Any, tokens: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, ...]:
        return (model.layers[i].z(h, tokens),)

    yield Node(("final.norm",), ("tokens",), hidden, None)
    yield Node(("mtp.hidden",), ("final.norm", "mtp.y") if M > T else ("final.norm",), hidden, i)
    yield Node(("mtp.z",), ("tokens", "mtp.hidden"), z, i)
    yield Node(("mtp.attn.in",), ("mtp.z",), lambda model, z: (model.layers[i].mixer_input(z),), i)
    yield from graph.dsa(i, "mtp.", own=J)
    yield Node(("mtp.mid",), ("mtp.z", "mtp.attn.out"), lambda model, z, out: (model.layers[i].add(z, out),), i)
    yield Node(("mtp.mlp.in",), ("mtp.mid",), lambda model, z: (model.layers[i].mlp_input(z),), i)
    yield from graph.moe(i, "mtp.")
    yield Node(
        ("mtp.y",),
        ("mtp.mid", "mtp.mlp.out"),
        lambda model, z, out: (model.layers[i].output(model.layers[i].add(z, out)),),
        i,
    )
    yield Node(("mtp.logits",), ("mtp.y",), lambda model, y: (model.layers[i].logits(y),), i)


def rows(owner: Rebase, trace: Trace) -> Iterator[TapRow]:
    """Verdicts in dataflow order, one per tap of the block that the trace holds. The trace must have passed `unfit`."""
    if not any(name in trace.taps for name in order(owner.config)):
        return
    T, lengths = len(trace.taps["tokens"]), sizes(trace, owner.checkpoint.config)
    M = min(lengths["M"], T) if lacking(trace) else lengths["M"]
    J = min(M, lengths["J"])
    lengths = {"M": M, "J": J, "Y": J // owner.config.index_kpool}
    specs = taps.expected(owner.checkpoint.config, T)
    held = {"tokens": following(trace, M)}
    for name in order(owner.config):
        if name in trace.taps:
            held[name] = trace.taps[name][: lengths[str(specs[name].shape[0])]]
            if name.endswith(".scores"):
                held[name] = held[name][:, : lengths["Y"]]
    if "final.norm" in trace.taps:
        held["final.norm"] = trace.taps["final.norm"][:M]
    text = Run(owner, trace)
    run = DraftRun(_owner(owner, trace.metadata, T, M, J), Trace(trace.metadata, held), J)
    run.budget = Budget.of(owner.false_alarm, text.judged, held["tokens"])
    if "final.norm" not in held:
        run.adopt(text, "final.norm", M)
    yield from run.rows()


def lacking(trace: Trace) -> list[str]:
    """The taps without which the rows of later drafts cannot be judged."""
    return [name for name in ROOTS if name not in trace.taps]


def problems(trace: Trace, config: ModelConfig) -> Iterator[Problem]:
    """What is wrong with the block's part of a trace, besides shapes."""
    if (experts := reading(trace.metadata)) not in READINGS:
        want = " or ".join(READINGS)
        text = f"metadata {EXPERTS} is {experts}, expected {want}"
        yield Problem("metadata", EXPERTS, experts, want, True, text)
    ids = trace.taps.get("tokens")
    told, first = trace.metadata.get("mtp"), counted(trace, config)
    if told is not None and first and ids is not None and ids.ndim:
        drafts = sizes(trace, config)["M"] - len(ids) + 1
        if told != str(drafts):
            text = f"metadata mtp is {told}, but tap {first} has rows for {drafts} drafts"
            yield Problem("metadata", "mtp", told, str(drafts), True, text)
    if ids is not None and ids.ndim and sizes(trace, config)["M"] > len(ids):
        for name in lacking(trace):
            text = f"tap {name} is missing: the rows of later drafts are not judged"
            yield Problem("missing", name, "", "present", False, text)


def reading(metadata: dict[str, str]) -> str:
    """How the engine takes the block's BF16 experts, by its own word."""
    return metadata.get(EXPERTS, READINGS[0])


def following(trace: Trace, rows: int) -> np.ndarray:
    """I32 [rows]: the token that each row of the block pairs with a hidden."""
    ids, likely = trace.taps["tokens"], []
    if rows >= len(ids):
        likely.append(int(np.argmax(trace.taps["logits"][-1])))
        likely += [int(np.argmax(row)) for row in trace.taps.get("mtp.logits", ids[:0])[len(ids) - 1 : rows - 1]]
    return np.array([*ids[1 : rows + 1], *likely], np.int32)


def _owner(owner: Rebase, metadata: dict[str, str], T: int, M: int, J: int) -> Rebase:
    """A judge whose text is the block's rows and whose model has the block for its only layer."""
    experts = reading(metadata)
    experts = experts if experts in READINGS else READINGS[0]
    if experts not in owner.blocks:
        model = copy.copy(owner.model)
        model.layers = {owner.config.mtp_layer: Block(owner.model, experts)}  # type: ignore[assignment]
        owner.blocks[experts] = model
    other = copy.copy(owner)
    other.model = owner.blocks[experts]
    made = list(nodes(owner.config, T, M, J))
    other.nodes = made[1:]
    other.maker = {name: node for node in made for name in node.outputs}
    other.order = {name: len(owner.order) + place for place, name in enumerate(other.maker)}
    return other


class DraftRun(Run):
    """One trace's rows of the block. Doubt about the last of the `indexed` rows is doubt about all that follow it."""

    def __init__(self, owner: Rebase, trace: Trace, indexed: int) -> None:
        super().__init__(owner, trace)
        self.indexed = indexed

    def adopt(self, text: Run, name: str, rows: int) -> None:
        """What the text computes for a tap that the trace lacks, on both sides, and which rows of it are in doubt."""
        self.exact.memo[name] = text._value(text.exact, name)[..., :rows, :]
        self.sampled.memo[name] = text._value(text.sampled, name)[..., :rows, :]
        self.adopted.add(name)
        doubt = text._taint(name)
        self.taint[name] = None if doubt is None else self._stretched(doubt[:rows])

    def _taint(self, name: str) -> Taint:
        own = super()._taint(name)
        return None if own is None else self._stretched(own)

    def _stretched(self, doubt: np.ndarray) -> np.ndarray:
        return np.concatenate([doubt, np.repeat(doubt[-1:], self.length - len(doubt))])

    def _taint_of(self, node: Node) -> Taint:
        total = super()._taint_of(node)
        return total if total is None or not node.outputs[0].startswith("mtp.indexer.") else total[: self.indexed]

    def _step(self, node: Node, name: str) -> Step:
        return replace(super()._step(node, name), layer=None)

    def _stochastic(self, node: Node, first: int) -> TextModel:
        model = copy.copy(self.model)
        model.ar = self._sampler(node, first)
        index = self.owner.config.mtp_layer
        model.layers = {index: self._ranked(node, self.model.layers[index].beside(model))}  # type: ignore
        return model
