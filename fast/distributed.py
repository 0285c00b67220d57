"""The ranks of one model as processes: torch.distributed under torchrun, gloo on CPUs, NCCL on GPUs.

    torchrun --nproc-per-node 2 -m fast.worker JOB                                 one host
    torchrun --nnodes 2 --node-rank 0|1 --nproc-per-node 1 \\
             --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 -m fast.worker JOB   two hosts, one GPU each

A reduction gathers the partial sums and adds them in rank order, fp32: the same bits on every rank, whatever the number
of rows, of ranks or the transport. What ranks must agree on is compared before it is used, a failure on one is told to
all, and a rank that vanishes ends the others when their `timeout` is over at the latest.

Ranks meet over gloo, on GPUs too: NCCL communicators take memory and are made once the ranks know that they belong
together, one for all ranks and one more only where a TP group is neither one rank nor all.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fast.errors import HardwareError, InputError
from fast.loader import Weights, load
from fast.sharding import Mesh
from fast.shards import open_directory

PRIMES = (1_000_003, 998_244_353)
"""Multipliers of the digest that ranks compare."""
SHOWN = 8
"""Lists up to this length are shown whole where ranks differ."""
SILENT = "another rank is silent"
"""How `RankLostError` says so, unlike the end of a connection."""
SAMPLE = 64
"""Bytes of every stored tensor that ranks compare."""


class NotLaunchedError(InputError):
    """Several ranks were asked for in a process that no launcher started, or with another number of processes."""


class DeviceCountError(InputError):
    """A host has fewer GPUs than ranks."""


class RankMismatchError(InputError):
    """Ranks differ in what they must have in common."""


class RankFailedError(InputError):
    """Another rank refused its input."""


class RankLostError(InputError):
    """Another rank is gone, or did not answer in time."""


class Ranks:
    """This process as one rank of `tp` x `ep`; a `fast.layers.Communicator`.

    `check` compares on every call what the ranks chose (selected tokens, experts). `timeout` is in seconds. Raises
    NotLaunchedError, DeviceCountError, RankMismatchError, RankLostError, and what `Mesh` and `check_device` raise.
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
        check_device(device)
        _from_launcher("MASTER_PORT")
        if device == "cuda":
            count_devices(_from_launcher("LOCAL_WORLD_SIZE"))
        self.device = torch.device("cuda", _from_launcher("LOCAL_RANK")) if device == "cuda" else torch.device(device)
        self.timeout, self.check = timeout, check
        limit = datetime.timedelta(seconds=timeout)
        with self._watched("start"):
            dist.init_process_group("gloo", timeout=limit)
        program = importlib.metadata.version("glm53-conformance")
        mesh = {"tp": tp, "ep": ep, "vocab": vocab, "device": self.device.type, "check": check}
        self.agree("mesh", {"version": program, **mesh})
        backend = "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            backend = "nccl"
            # A dead peer shall be an error that names the site, not the end of the process by its watchdog.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        with self._watched("start"):
            self._all = dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend, timeout=limit)
            self._tp = self._all
            if 1 < tp < world:
                for first in range(0, world, tp):
                    group = dist.new_group(list(range(first, first + tp)), timeout=limit, backend=backend)
                    self._tp = group if rank in range(first, first + tp) else self._tp

    def close(self) -> None:
        """Leave the group; every rank must."""
        dist.destroy_process_group()

    def all_reduce(self, tensor: Tensor, site: str, *, everyone: bool) -> Tensor:
        """fp32 partial sums -> their sum in rank order. Raises RankLostError naming `site`."""
        assert tensor.dtype == torch.float32, tensor.dtype
        parts = self._gather(tensor, site, everyone=everyone)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def all_gather(self, tensor: Tensor, site: str) -> list[Tensor]:
        """The tensors of the TP group, in rank order, all of one shape. Raises RankLostError."""
        return self._gather(tensor, site)

    def same(self, tensor: Tensor, site: str) -> None:
        """Compares an integer tensor [T, W] over all ranks by a digest. Raises RankMismatchError, RankLostError."""
        if not self.check or self.mesh.world == 1:
            return
        place = torch.arange(1, tensor.numel() + 1, device=tensor.device)
        mixed = (tensor.reshape(-1).long() * PRIMES[0] + place * PRIMES[1]) ^ (place << 20)
        digest = torch.stack([mixed.sum(), (mixed * place).sum()])
        for rank, other in enumerate(self._gather(digest, site, everyone=True)):
            if not torch.equal(other, digest):
                raise RankMismatchError(f"{site}: ranks {rank} and {self.mesh.rank} chose differently")

    def agree(self, what: str, value: Any) -> None:
        """Compares any small value over all ranks. Raises RankMismatchError with the key or position that differs."""
        with self._watched(what):
            found: list[Any] = [None] * self.mesh.world
            dist.all_gather_object(found, value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise RankMismatchError(_difference(what, found[0], other, rank))

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
            dist.all_gather_object(found, message)
        if error is not None:
            raise error
        for rank, message in enumerate(found):
            if message is not None:
                raise RankFailedError(f"{what}: rank {rank} failed: {message}")

    def _gather(self, tensor: Tensor, site: str, *, everyone: bool = False) -> list[Tensor]:
        size, group = (self.mesh.world, self._all) if everyone else (self.mesh.tp, self._tp)
        if size == 1:
            return [tensor]
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(size)]
        with self._watched(site):
            dist.all_gather(parts, tensor, group=group)
        return parts

    @contextmanager
    def _watched(self, site: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as e:
            first = re.sub(r"^\[[^]]*\] *|\. This is typically.*", "", (str(e).splitlines() or [type(e).__name__])[0])
            silent = time.monotonic() - started >= self.timeout
            what = f"{SILENT} for {self.timeout:g} s" if silent else "another rank is gone or out of reach"
            raise RankLostError(f"rank {self.mesh.rank}: {what} at {site} ({first})") from e


def check_device(device: str) -> None:
    """Raises HardwareError: which GPU a rank has follows from its number."""
    if device not in ("cpu", "cuda"):
        raise HardwareError(f"device {device}: expected cpu or cuda, where there are several ranks")


def count_devices(ranks: int) -> None:
    """Raises DeviceCountError unless this host has a GPU for each of its ranks."""
    found = torch.cuda.device_count()
    if found < ranks:
        raise DeviceCountError(f"device cuda: {ranks} ranks on a host with {found} GPUs, expected one for each")


def _difference(what: str, first: Any, other: Any, rank: int) -> str:
    """Where two values that should be equal are not: the first key of mappings, the first position of long lists."""
    if isinstance(first, dict) and isinstance(other, dict) and first.keys() == other.keys():
        key = next(key for key in first if first[key] != other[key])
        return _difference(f"{what}, {key}", first[key], other[key], rank)
    if isinstance(first, list) and isinstance(other, list) and len(first) > SHOWN:
        if len(first) != len(other):
            return f"{what}: rank 0 has {len(first)}, rank {rank} has {len(other)}"
        at = next(at for at, pair in enumerate(zip(first, other, strict=True)) if pair[0] != pair[1])
        what, first, other = f"{what} at position {at}", first[at], other[at]
    return f"{what}: rank 0 has {first!r}, rank {rank} has {other!r}"


def _from_launcher(name: str) -> int:
    value = os.environ.get(name)
    if value is None:
        raise NotLaunchedError(f"{name} is not set: several ranks need torchrun")
    if not re.fullmatch(r"[0-9]{1,6}", value):
        raise NotLaunchedError(f"{name} is {value[:40]!r}, expected a number: several ranks need torchrun")
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
    ranks.agree("checkpoint (sha256 of config and headers)", weights.fingerprint)
    with ranks.together("reading"):
        sampled = sample(directory)
    ranks.agree(f"checkpoint (sha256 of {SAMPLE} bytes of every tensor)", sampled)
    return weights


def sample(directory: str | os.PathLike[str]) -> str:
    """A digest of the bytes in the middle of every stored tensor.

    It tells files of the same names, dtypes and shapes apart at a small part of the cost of reading them.
    """
    digest = hashlib.sha256()
    opened = open_directory(directory, lambda name: None)
    try:
        for name in sorted(opened.tensors):
            info = opened.tensors[name]
            count = min(SAMPLE, info.end - info.begin)
            middle = info.begin + (info.end - info.begin - count) // 2
            digest.update(os.pread(opened.shards[info.shard].fd, count, middle))
    finally:
        opened.close()
    return digest.hexdigest()
