"""What each rank of an engine bound, compared bit by bit with the part of the stored tensor that the plan gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conformance.judge import bits
from conformance.judge.result import TensorRow
from reference.checkpoint import Checkpoint
from reference.ranks import NotOnRankError, RankSource
from reference.sharding import Mesh, part_of

VOCABULARY = {"replicated": (), "head": ("lm_head",), "split": ("lm_head", "embed_tokens")}


@dataclass(frozen=True)
class RankOperands:
    """`of(rank, name)` as an engine's `operands`, for every rank of `mesh`.

    `vocab` says which of lm_head ("head") and the embedding ("split": both) are divided by rows of the vocabulary.
    """

    mesh: Mesh
    of: Callable[[int, str], dict[str, np.ndarray] | None]
    vocab: str = "replicated"


class RankView(RankSource):
    """A checkpoint as one rank sees it: the same names, its parts of the tensors."""

    def __init__(self, checkpoint: Checkpoint, mesh: Mesh, vocab: str) -> None:
        super().__init__(checkpoint, mesh)
        self.specs, self.divided = checkpoint.specs, VOCABULARY[vocab]

    def dtype(self, name: str) -> str:
        return self.checkpoint.dtype(name)

    def stored(self, name: str) -> np.ndarray:
        whole = super().stored(name)
        if not any(leaf in name for leaf in self.divided):
            return whole
        part, parts = self.mesh.place(routed=False)
        return whole[part * len(whole) // parts : (part + 1) * len(whole) // parts]

    def encoded(self, name: str) -> dict[str, tuple[str, np.ndarray]]:
        """This rank's parts of a BF16 weight that was packed whole. `scale_2` is the whole tensor's."""
        part = part_of(self.specs[name], self.text, self.mesh)
        assert part is not None
        out = {}
        for key, (stored, array) in bits.encoded(self.checkpoint, name).items():
            width = {"codes": 2, "scale": 16}.get(key, 1) if part.axis == 1 else 1
            cut = replace(part, start=part.start // width, stop=part.stop // width)
            out[key] = stored, array if key == "scale_2" else cut.of(array)
        return out

    def raw(self, name: str) -> tuple[str, tuple[int, ...], memoryview]:
        stored = np.ascontiguousarray(self.stored(name))
        return self.checkpoint.dtype(name), stored.shape, memoryview(stored.tobytes())


def compare(checkpoint: Checkpoint, operands: RankOperands, names: list[str] | None = None) -> Iterator[TensorRow]:
    """Rows of every weight and rank, `part` being "PART, rank R".

    A weight that some rank shows must be shown by every rank that the plan gives a part of it, and by no other. One
    that no rank shows is missing where other weights of its role are shown, and yields nothing otherwise.
    """
    views: list[Any] = [
        RankView(checkpoint, replace(operands.mesh, rank=rank), operands.vocab) for rank in range(operands.mesh.world)
    ]
    roles: dict[str, None] = {}
    absent: dict[str, list[str]] = {}
    for name in bits.weights(checkpoint) if names is None else names:
        shown = [operands.of(rank, name) for rank in range(operands.mesh.world)]
        role = checkpoint.specs[name].role
        if not any(shown):
            absent.setdefault(role, []).append(name)
            continue
        roles[role] = None
        for rank, (view, bound) in enumerate(zip(views, shown, strict=True)):
            for row in _rows(view, name, bound):
                yield replace(row, part=f"{row.part}, rank {rank}")
    for name in (name for role in roles for name in absent.get(role, ())):
        yield bits.missing(checkpoint, name, (), "held by no rank")


def _rows(view: Any, name: str, bound: dict[str, np.ndarray] | None) -> Iterator[TensorRow]:
    try:
        part = view.stored(name)
    except NotOnRankError:
        if bound:
            shape = tuple(next(iter(bound.values())).shape)
            yield bits.missing(view, name, shape, "held, though its expert is another rank's")
        return
    if bound:
        yield from bits.rows(view, name, bound)
    else:
        yield bits.missing(view, name, (), f"not held, expected {view.dtype(name)} {list(part.shape)}")
