"""Work in several processes of this host, for what one core takes minutes over.

They begin anew (spawn): nothing that this process holds is inherited, a CUDA context and its threads least of all. A
script that asks for them needs the guard `if __name__ == "__main__"` around what it does.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def cores() -> int:
    """Cores that this process may use; as one of pytest-xdist's workers, its share of them."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, found // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


@contextmanager
def processes(
    workers: int, begin: Callable[..., object], *args: Any, threads: int = 1
) -> Iterator[ProcessPoolExecutor]:
    """`workers` processes that each call `begin(*args)` first, with `threads` for every library that starts its own.

    At the end what has not begun is dropped and what runs is waited for.
    """
    # Bytes: the libraries that the arguments need are imported by unpickling them, which must come after `_begin` has
    # said how many threads they may start.
    payload = pickle.dumps((begin, args))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(threads, payload))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(threads: int, payload: bytes) -> None:
    os.environ.update(dict.fromkeys(THREADS, str(threads)))
    begin, args = pickle.loads(payload)
    begin(*args)
