"""All ranks of a model as threads of one process: the reductions of `fast.distributed` without its transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fast.sharding import Mesh


class Exchange:
    """One place where all ranks lay down a tensor and take what the others laid down."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world)
        self.slots: list[Any] = [None] * world

    def swap(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class Thread:
    """A communicator; `calls` notes (site, shape, dtype, everyone) of every reduction."""

    def __init__(self, mesh: Mesh, exchange: Exchange) -> None:
        self.mesh, self.exchange = mesh, exchange
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
        for rank, other in enumerate(self._swap(site, tensor)):
            assert torch.equal(other, tensor), (site, rank, self.mesh.rank)

    def _swap(self, site: str, tensor: Tensor) -> list[Tensor]:
        found = self.exchange.swap(self.mesh.rank, (site, tensor))
        assert {name for name, _ in found} == {site}, "ranks meet at different sites"
        return [value for _, value in found]


def on_ranks(tp: int, ep: int, run: Callable[[Thread], Any], vocab: str = "replicated") -> list[Any]:
    """run(communicator) on every rank at once -> results in rank order; the first error ends all."""
    world = Mesh(tp, ep).world
    exchange = Exchange(world)

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
