"""The ranks of one model as processes: torch.distributed under torchrun, gloo on CPUs, NCCL on GPUs.

    torchrun --nproc-per-node 2 -m fast.worker JOB                                 one host
    torchrun --nnodes 2 --node-rank 0|1 --nproc-per-node 1 \\
             --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 -m fast.worker JOB   two hosts, one GPU each

A reduction gathers the partial sums and adds them in rank order, fp32: the same bits on every rank, whatever the number
of rows, of ranks or the transport. What ranks must agree on is compared before it is used, a failure on one is told to
all, and a rank that vanishes ends the others when their `timeout` is over at the latest.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fast.errors import InputError
from fast.loader import Weights, load
from fast.sharding import Mesh

PRIMES = (1_000_003, 998_244_353)
"""Multipliers of the digest that ranks compare."""


class NotLaunchedError(InputError):
    """Several ranks were asked for in a process that no launcher started, or with another number of processes."""


class RankMismatchError(InputError):
    """Ranks differ in what they must have in common."""


class RankFailedError(InputError):
    """Another rank refused its input."""


class RankLostError(InputError):
    """Another rank is gone, or did not answer in time."""


class Ranks:
    """This process as one rank of `tp` x `ep`; a `fast.layers.Communicator`.

    `check` compares on every call what the ranks chose (selected tokens, experts). `timeout` is in seconds. Raises
    NotLaunchedError, and what `Mesh` raises.
    """

    def __init__(
        self,
        tp: int = 1,
        ep: int = 1,
        *,
        device: str = "cpu",
        vocab: str = "replicated",
        timeout: float = 300.0,
        check: bool = True,
    ) -> None:
        rank, world = (_from_launcher(name) for name in ("RANK", "WORLD_SIZE"))
        if world != Mesh(tp, ep).world:
            raise NotLaunchedError(
                f"tp {tp}, ep {ep} need {Mesh(tp, ep).world} processes, the launcher started {world}"
            )
        self.mesh = Mesh(tp, ep, rank, vocab)
        self.device = torch.device("cuda", _from_launcher("LOCAL_RANK")) if device == "cuda" else torch.device(device)
        self.timeout, self.check = timeout, check
        limit = datetime.timedelta(seconds=timeout)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with self._watched("start"):
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=limit)
            self._control = dist.new_group(backend="gloo", timeout=limit)
            self._tp = None
            for first in range(0, world, tp):
                group = dist.new_group(list(range(first, first + tp)), timeout=limit)
                self._tp = group if rank in range(first, first + tp) else self._tp

    def close(self) -> None:
        """Leave the group; every rank must."""
        dist.destroy_process_group()

    def all_reduce(self, tensor: Tensor, site: str, *, everyone: bool) -> Tensor:
        """fp32 partial sums -> their sum in rank order. Raises RankLostError naming `site`."""
        assert tensor.dtype == torch.float32, tensor.dtype
        parts = self._gather(tensor, site, None if everyone else self._tp)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def all_gather(self, tensor: Tensor, site: str) -> list[Tensor]:
        """The tensors of the TP group, in rank order, all of one shape. Raises RankLostError."""
        return self._gather(tensor, site, self._tp)

    def same(self, tensor: Tensor, site: str) -> None:
        """Compares an integer tensor [T, W] over all ranks by a digest. Raises RankMismatchError, RankLostError."""
        if not self.check or self.mesh.world == 1:
            return
        place = torch.arange(1, tensor.numel() + 1, device=tensor.device)
        mixed = (tensor.reshape(-1).long() * PRIMES[0] + place * PRIMES[1]) ^ (place << 20)
        digest = torch.stack([mixed.sum(), (mixed * place).sum()])
        for rank, other in enumerate(self._gather(digest, site, None)):
            if not torch.equal(other, digest):
                raise RankMismatchError(f"{site}: ranks {rank} and {self.mesh.rank} chose differently")

    def agree(self, what: str, value: Any) -> None:
        """Compares any small value over all ranks. Raises RankMismatchError with both values."""
        with self._watched(what):
            found: list[Any] = [None] * self.mesh.world
            dist.all_gather_object(found, value, group=self._control)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise RankMismatchError(f"{what}: rank 0 has {found[0]!r}, rank {rank} has {other!r}")

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Work that may fail on some ranks: it ends on all of them, or it fails on all of them.

        The rank that failed raises its own error, the others RankFailedError with its message.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as e:
            error = e
        with self._watched(what):
            found: list[Any] = [None] * self.mesh.world
            message = None if error is None else f"{type(error).__name__}: {error}"
            dist.all_gather_object(found, message, group=self._control)
        if error is not None:
            raise error
        for rank, message in enumerate(found):
            if message is not None:
                raise RankFailedError(f"{what}: rank {rank} failed: {message}")

    def _gather(self, tensor: Tensor, site: str, group: Any) -> list[Tensor]:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        with self._watched(site):
            dist.all_gather(parts, tensor, group=group)
        return parts

    @contextmanager
    def _watched(self, site: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            first = str(e).splitlines()[0]
            raise RankLostError(
                f"rank {self.mesh.rank}: another rank is gone or silent for {self.timeout:g} s at {site} ({first})"
            ) from e


def _from_launcher(name: str) -> int:
    value = os.environ.get(name)
    if value is None:
        raise NotLaunchedError(f"{name} is not set: several ranks need torchrun")
    return int(value)


def load_together(
    directory: str | os.PathLike[str], ranks: Ranks, *, mtp: bool = False, loader: Callable[..., Weights] = load
) -> Weights:
    """This rank's weights, once all ranks have theirs and they are of one checkpoint.

    Raises what `fast.loader.load` raises, RankFailedError, RankMismatchError with both digests.
    """
    mesh = ranks.mesh
    with ranks.together("loading"):
        weights = loader(
            directory,
            device=ranks.device,
            tp=mesh.tp,
            ep=mesh.ep,
            rank=mesh.rank,
            vocab=mesh.vocab,
            mtp=mtp,
            progress=mesh.rank == 0,
        )
    ranks.agree(f"{Path(directory) / 'config.json'} (sha256)", weights.config.sha256)
    ranks.agree("checkpoint (fingerprint of config and headers)", weights.fingerprint)
    ranks.agree("checkpoint (sha256 of the norm weights)", _sample(weights))
    return weights


def _sample(weights: Weights) -> str:
    """A digest of small weights that every rank holds whole: another checkpoint of the same shapes has another one."""
    digest = hashlib.sha256()
    for name in sorted(weights.names()):
        if name.endswith("norm.weight"):
            digest.update(weights.tensor(name).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
