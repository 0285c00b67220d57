"""The ranks of one model on this host: started once under torchrun, then given one job after the other.

    with Session(Job(directory, [], "", tp=2, ep=2)) as session:
        taps = session.ask(tokens=[..], prefill=[..])          one dict per rank, in rank order
        parts = session.ask(operands=[name])

Jobs and their ends travel through a store of torch.distributed, results through files. When a rank fails or dies,
torchrun ends the others, and what is raised is the one message that explains it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from fast import config, layout
from fast.distributed import SILENT, check_device, count_devices
from fast.errors import InputError
from fast.loader import void
from fast.sharding import check
from fast.shards import open_directory
from fast.worker import END, Job

FOREIGN = ("PET_", "TORCHELASTIC_", "LOGLEVEL")
"""Variables, by their beginnings, with which a cluster tells a torchrun of its own about other processes than these."""
POLL = 0.005
GRACE = 10.0
"""Seconds that ranks get to end by themselves after the last job."""


class RunFailedError(InputError):
    """A sharded run that ended on some rank."""


@dataclass
class _Line:
    """How far the jobs have come: the number of the next one, and whether the ranks are busy."""

    number: int = 0
    busy: bool = False


class Session:
    """`job` has what all jobs have in common; its tokens and its folder do not matter.

    Raises what `Mesh`, config and headers raise, and IndivisibleError with the numbers, before any process starts. What
    goes wrong on ranks is raised by `ask`.
    """

    def __init__(self, job: Job) -> None:
        refuse(job)
        self.world = job.mesh.world
        folder = tempfile.TemporaryDirectory(prefix="glm53-ranks-")
        self.folder, self.log = Path(folder.name), Path(folder.name) / "log"
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = f"127.0.0.1:{self.store.port}"
        path = self.folder / "job.json"
        path.write_text(json.dumps(dataclasses.asdict(job) | {"folder": folder.name, "serve": where}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
        command += ["--nproc-per-node", str(self.world)]
        with self.log.open("w") as log:
            self.started = subprocess.Popen(
                [*command, "-m", "fast.worker", str(path)],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment(),
                start_new_session=True,
            )
        self._line = _Line()
        self._finish = weakref.finalize(self, _finish, self.store, self.started, folder, self._line)

    def ask(self, progress: Callable[[int], object] | None = None, **changes: Any) -> list[dict[str, Tensor]]:
        """The job with `changes` -> what each rank left, in rank order.

        `progress` is called with the number of layers that have been computed since it was last called. Raises
        RunFailedError, which ends the session.
        """
        number = self._line.number
        self._line.number, self._line.busy = number + 1, True
        self.store.set(f"job {number}", json.dumps(changes))
        done = 0
        for rank in range(self.world):
            while not self.store.check([f"answer {number} {rank}"]):
                self._alive()
                if progress is not None:
                    layers = self.store.add(f"layers {number}", 0)
                    progress(layers - done)
                    done = layers
                time.sleep(POLL)
        self._line.busy = False
        paths = [self.folder / f"answer-{number}-{rank}.safetensors" for rank in range(self.world)]
        found = [load_file(path) for path in paths]
        for path in paths:
            path.unlink()
        return found

    def processes(self) -> list[int]:
        """Process ids of the ranks, once they have loaded their weights. Raises RunFailedError."""
        keys = [f"process {rank}" for rank in range(self.world)]
        while not self.store.check(keys):
            self._alive()
            time.sleep(POLL)
        return [int(self.store.get(key)) for key in keys]

    def close(self) -> None:
        """Ends the ranks; again does nothing."""
        self._finish()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _alive(self) -> None:
        if not self._finish.alive:
            raise RunFailedError("a job for ranks that have ended")
        if self.started.poll() is not None:
            message = explain(self.folder, self.world, self.log.read_text(errors="replace"), self.started.poll() or 0)
            self.close()
            raise RunFailedError(message)


def _finish(store: dist.TCPStore, started: subprocess.Popen, folder: tempfile.TemporaryDirectory, line: _Line) -> None:
    """Ranks that wait for a job are told that there is none; busy ones are ended by torchrun."""
    store.set(f"job {line.number}", END)
    try:
        started.wait(0 if line.busy else GRACE)
    except subprocess.TimeoutExpired:
        started.terminate()
        try:
            started.wait(GRACE)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
    folder.cleanup()


def launch(job: Job) -> list[dict[str, Tensor]]:
    """One job on this host -> what each rank left, in rank order. Raises as `Session` does."""
    common = dataclasses.replace(job, tokens=[], prefill=[], pad=0, new=0, operands=[])
    asked = {key: getattr(job, key) for key in ("tokens", "prefill", "pad", "new", "operands")}
    with Session(common) as session:
        return session.ask(**asked)


def environment() -> dict[str, str]:
    """That of this process, for ranks that import what it imports, whatever lies in the working directory."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path)
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}


def refuse(job: Job, *, here: bool = True) -> None:
    """Raises for a mesh, a checkpoint or a device that every rank would refuse, from config and headers alone.

    `here`: the ranks are on this host, which needs a GPU for each of them.
    """
    mesh, found = job.mesh, config.load(job.directory)
    check_device(job.device)
    if job.device == "cuda" and here:
        count_devices(mesh.world)
    opened = open_directory(job.directory, lambda name: void(layout.find(found, name)))
    try:
        check(layout.match(found, opened.tensors), mesh, found.text.n_routed_experts)
    finally:
        opened.close()


def explain(folder: Path, world: int, log: str, status: int = 0) -> str:
    """Why a run ended: the first error that is not about another rank, then silence, then a death, then any error.

    A rank that was killed leaves no message; `log` is what torchrun wrote, which tells the exit status of every rank,
    and of the one that failed first. After a silence it is torchrun that kills. `status` is its own.
    """
    own: list[str] = []
    others: list[str] = []
    for rank in range(world):
        path = folder / f"rank-{rank}.error"
        if path.exists():
            kind, _, message = path.read_text().partition(": ")
            told = others if kind in ("RankLostError", "RankFailedError") else own
            told.append(f"rank {rank}: {message.removeprefix(f'rank {rank}: ')}")
    silent = [message for message in others if SILENT in message]
    ended = [
        (int(rank), int(code)) for rank, code in re.findall(r"rank\s+: (\d+) [^\n]*\n\s*exitcode\s+: (-?\d+)", log)
    ]
    first = [f"rank {rank}: {ending(code)}" for rank, code in ended[-1:]]
    dead = [f"rank {rank}: {ending(code)}" for rank, code in ended if code < 0 and code != -signal.SIGTERM]
    dead += [line for line in first if ended[-1][1] < 0]
    if own or silent or dead or others or first:
        return (own + silent + dead + others + first)[0]
    said = [line for line in log.splitlines() if line.strip(" =-*")]
    last = "".join(f": {line.strip()}" for line in said[-1:])
    return f"{world} ranks ended without a message, torchrun {ending(status)}{last}"


def ending(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    known = {int(one): one.name for one in signal.Signals}
    return f"ended by {known.get(-status, f'signal {-status}')}"
