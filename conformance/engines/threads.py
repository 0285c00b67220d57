"""All ranks of the fast engine as threads of one process: the reductions of `fast.distributed` without its transport.

They start at once and see what is patched in this process, so faults are tried on them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fast.model
from conformance.engines.base import Hidden, as_numpy, drafts, feed
from conformance.engines.fast import DTYPES, FastEngine
from conformance.trace import Recorder
from fast.generate import Generator
from fast.linear import ROWS
from fast.mtp import Mtp
from fast.sharding import Mesh
from reference.checkpoint import open_checkpoint

PATIENCE = 120.0
"""Seconds until a rank that the others wait for counts as lost."""


class Exchange:
    """One place where all ranks lay down a tensor and take what the others laid down."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=PATIENCE)
        self.slots: list[Any] = [None] * world

    def swap(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class Thread:
    """A communicator; `calls` notes (site, shape, dtype, everyone) of every reduction.

    Without `check` ranks may choose differently, for the judge to find out.
    """

    def __init__(self, mesh: Mesh, exchange: Exchange, *, check: bool = True) -> None:
        self.mesh, self.exchange, self.check = mesh, exchange, check
        self.calls: list[tuple[str, tuple[int, ...], torch.dtype, bool]] = []

    def all_reduce(self, tensor: Tensor, site: str, *, everyone: bool) -> Tensor:
        self.calls.append((site, tuple(tensor.shape), tensor.dtype, everyone))
        found = self._swap(site, tensor)
        parts = found if everyone else [found[rank] for rank in self.mesh.tp_group]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def all_gather(self, tensor: Tensor, site: str) -> list[Tensor]:
        found = self._swap(site, tensor)
        return [found[rank] for rank in self.mesh.tp_group]

    def same(self, tensor: Tensor, site: str) -> None:
        for rank, other in enumerate(self._swap(site, tensor) if self.check else ()):
            assert torch.equal(other, tensor), (site, rank, self.mesh.rank)

    def _swap(self, site: str, tensor: Tensor) -> list[Tensor]:
        # A copy: the rank's own memory is used again before the others have read it.
        found = self.exchange.swap(self.mesh.rank, (site, tensor.clone()))
        assert {name for name, _ in found} == {site}, "ranks meet at different sites"
        return [value for _, value in found]


def on_ranks(
    tp: int, ep: int, run: Callable[[Thread], Any], vocab: str = "replicated", exchange: Exchange | None = None
) -> list[Any]:
    """run(communicator) on every rank at once -> results in rank order; the first error ends all."""
    world = Mesh(tp, ep).world
    exchange = exchange or Exchange(world)

    def one(rank: int) -> Any:
        try:
            return run(Thread(Mesh(tp, ep, rank, vocab), exchange))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(one, rank) for rank in range(world)]
        errors = [future.exception() for future in futures]
    for error in sorted(
        (e for e in errors if e is not None), key=lambda e: isinstance(e, threading.BrokenBarrierError)
    ):
        raise error
    return [future.result() for future in futures]


class ThreadedEngine(FastEngine):
    """The fast engine on several ranks, all of them here. `models` are theirs, in rank order."""

    def _open(self, directory: Path) -> None:
        self.drafts = drafts(self.name, self.settings["mtp"], ROWS - 1)
        self.checkpoint = open_checkpoint(directory)
        self.config, self.export = self.checkpoint.config, self.checkpoint.export
        self.exchange = Exchange(self.mesh.world)
        self.models = [self._rank(directory, rank) for rank in range(self.mesh.world)]
        self.blocks = [Mtp(model) for model in self.models] if self.drafts else []

    def _rank(self, directory: Path, rank: int) -> fast.model.TextModel:
        mesh = Mesh(self.mesh.tp, self.mesh.ep, rank, self.settings["vocab"])
        sizes: dict[str, Any] = {"tp": mesh.tp, "ep": mesh.ep, "rank": rank, "vocab": mesh.vocab}
        return fast.model.TextModel(
            fast.model.load(directory, progress=False, mtp=self.drafts > 0, **sizes),
            dtype=DTYPES[self.settings["arithmetic"]],
            communicator=Thread(mesh, self.exchange, check=False),
            **{key: self.settings[key] for key in ("kda_chunk", "mla")},
        )

    def _run_ranks(self, ids: np.ndarray, schedule: Any, recorders: Sequence[Recorder], taps: str) -> None:
        def run(ranks: Thread) -> None:
            rank = ranks.mesh.rank
            model, recorder = self.models[rank], recorders[rank]
            model.reset()
            hidden = Hidden(lambda name, value: heard(recorder, name, value))
            recorder("logits", feed(model, ids, schedule, self.config.text.vocab_size, hidden))
            if self.drafts:
                generator = Generator(model, mtp=self.blocks[rank], drafts=self.drafts)
                generator.observe(torch.cat(hidden.parts), torch.from_numpy(ids), schedule.cuts, hidden)

        def heard(recorder: Recorder, name: str, value: Any) -> None:
            if name not in ("tokens", "logits"):
                recorder(name, value)

        self.exchange.barrier.reset()
        on_ranks(self.mesh.tp, self.mesh.ep, run, exchange=self.exchange)

    def rank_operands(self, rank: int, name: str) -> dict[str, np.ndarray] | None:
        model = self.models[rank]
        if name not in model.weights.names():
            return None
        return {part: as_numpy(value) for part, value in model.operands(name).items()}
