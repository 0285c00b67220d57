"""The rebased comparison by several processes: steps between taps that the trace holds wait for nothing.

Every step is recomputed from the trace alone and draws its samples from a seed of its own, so where and in which order
steps are judged changes no bit of a verdict. The whole-stack run that the logits are held against is the one long
chain; its exact and its sampled half are two tasks, begun first.

    with together(checkpoint, workers=8) as judge:
        result = verdict.compare(trace, checkpoint, judge=judge)

Several traces may be judged at once, each from a thread of its own, by the same processes.
"""

from __future__ import annotations

import copy
import functools
import pickle
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from conformance.judge import tokens
from conformance.judge.graph import Node
from conformance.judge.rebase import FALSE_ALARM, SAMPLES, Rebase, Run, choices, ends_a_layer
from conformance.judge.result import TapRow
from conformance.processes import cores, processes
from conformance.trace import Trace
from reference.checkpoint import Checkpoint, open_checkpoint

Settings = tuple[int, int, float]
HELD = 4
"""Traces that a process keeps open."""


class Together(Rebase):
    """A `Rebase` whose steps `pool` judges; its processes began with `begin`. `folder` takes the traces meanwhile."""

    def __init__(self, checkpoint: Checkpoint, pool: Executor, folder: Path, settings: Settings) -> None:
        samples, seed, false_alarm = settings
        super().__init__(checkpoint, samples=samples, seed=seed, false_alarm=false_alarm)
        self.pool, self.folder = pool, folder
        self._halves: dict[int, tuple[Future[np.ndarray], Future[np.ndarray]]] = {}

    def rows(self, trace: Trace) -> Iterator[TapRow]:
        path, finished = self._saved(trace), False
        begun: list[Future] = []
        if "logits" in trace.taps and _tells_all(self, trace):
            exact = self.pool.submit(_half, path, tokens.SAMPLES, True)
            sampled = self.pool.submit(_half, path, tokens.SAMPLES, False)
            self._halves[id(trace)] = exact, sampled
            begun += exact, sampled
        steps = [self.pool.submit(_step, path, place) for place in range(len(self.nodes))]
        begun += steps
        try:
            for step in steps:
                yield from step.result()
            finished = True
        finally:
            for task in () if finished else begun:
                task.cancel()

    def free_run(self, trace: Trace, samples: int) -> tuple[np.ndarray, np.ndarray, npt.NDArray[np.bool_]]:
        """Begun by `rows`, where every choice is told."""
        halves = self._halves.pop(id(trace), None)
        if halves is None or samples != tokens.SAMPLES:
            return super().free_run(trace, samples)
        exact, sampled = (half.result() for half in halves)
        return exact, sampled, np.zeros(len(exact), bool)

    def _saved(self, trace: Trace) -> str:
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            pickle.dump(trace, file)
        return file.name


class Part(Run):
    """What one task does of a run."""

    def step(self, node: Node) -> list[TapRow]:
        """The verdicts of one node."""
        outputs = [name for name in node.outputs if name in self.held and self.held[name].size]
        return list(self._judge(node, outputs)) if outputs else []

    def half(self, exact: bool) -> np.ndarray:
        """Logits of the whole-stack run: exact [T,V], or samples of them [B,T,V]."""
        side = self.exact if exact else self.sampled
        # Samples of a sum over ranks need its exact parts: the exact half goes along, lest each layer begin anew.
        along = [self.exact, side] if self.mesh.world > 1 and not exact else [side]
        for node in self.owner.nodes:
            if not all(name in self.held for name in node.outputs):
                for one in along:
                    self._value(one, node.outputs[0])
            if ends_a_layer(node.outputs[0]):
                self._forget(node.outputs[0])
        return self._value(side, "logits")


@contextmanager
def together(
    checkpoint: Checkpoint,
    workers: int | None = None,
    *,
    samples: int = SAMPLES,
    seed: int = 0,
    false_alarm: float = FALSE_ALARM,
    threads: int = 1,
) -> Iterator[Together]:
    """A judge with `workers` processes (one per core), each with `threads` for its products."""
    settings = (samples, seed, false_alarm)
    with (
        tempfile.TemporaryDirectory(prefix="glm53-judge-") as folder,
        processes(workers or cores(), begin, str(checkpoint.directory), settings, threads=threads) as pool,
    ):
        yield Together(checkpoint, pool, Path(folder), settings)


_own: list[Rebase] = []
"""In a process of the pool: its judge."""


def begin(directory: str, settings: Settings) -> None:
    samples, seed, false_alarm = settings
    _own[:] = [Rebase(open_checkpoint(directory), samples=samples, seed=seed, false_alarm=false_alarm)]


@functools.lru_cache(HELD)
def _trace(path: str) -> Trace:
    return pickle.loads(Path(path).read_bytes())


def _step(path: str, place: int) -> list[TapRow]:
    return Part(_own[0], _trace(path)).step(_own[0].nodes[place])


def _half(path: str, samples: int, exact: bool) -> np.ndarray:
    few, trace = copy.copy(_own[0]), _trace(path)
    few.samples = samples
    return Part(few, choices(trace)).half(exact)


def _tells_all(owner: Rebase, trace: Trace) -> bool:
    """No choice is left to guess, so nothing of the whole-stack run can be in doubt."""
    return all(name in trace.taps for node in owner.nodes if node.choice for name in node.outputs)
