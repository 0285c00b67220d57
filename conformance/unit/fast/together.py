"""Ranks as forked processes, each with a job file of its own, as hosts have: real groups without a launcher's cost."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from dataclasses import asdict
from pathlib import Path

import fast.worker
from fast.worker import Job

LIMIT = 120


def on_hosts(folder: Path, jobs: list[Job]) -> list[tuple[int | None, str]]:
    """One process per job, rank r with jobs[r] -> (exit status, what `rank-R.error` says) of each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fast.worker"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank, job in enumerate(jobs):
        path = folder / f"job-{rank}.json"
        path.write_text(json.dumps(asdict(job)))
        started.append(context.Process(target=one, args=(str(path), rank, len(jobs), port)))
        started[-1].start()
    for process in started:
        process.join(LIMIT)
    found = []
    for rank, (process, job) in enumerate(zip(started, jobs, strict=True)):
        error = Path(job.folder) / f"rank-{rank}.error"
        found.append((process.exitcode, error.read_text() if error.exists() else ""))
        process.kill()
    return found


def one(path: str, rank: int, world: int, port: int) -> None:
    """One rank, with the environment that torchrun would give it."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with open(os.devnull, "w") as sys.stderr:
        os._exit(fast.worker.main(path))
