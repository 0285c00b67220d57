"""What every mutant of one checkpoint shares: the reference, and the sound engine's runs with their verdicts.

Judging the sound engine costs as much as several mutants, so a bench can keep that in a file, and others take it.
"""

from __future__ import annotations

import functools
import pickle
from dataclasses import dataclass, field
from pathlib import Path

from conformance.cases.runs import text_tokens
from conformance.checkpoints.shared import shared
from conformance.engines.fast import FastEngine
from conformance.engines.threads import ThreadedEngine
from conformance.judge import Rebase, compare
from conformance.mutants.record import Mutant, Patch
from conformance.suite import operands_of
from conformance.trace import Schedule, Trace
from reference.checkpoint import Checkpoint, open_checkpoint

OPTIONS = {"kda_chunk": 16}
"""Chunks of the KDA that a short prompt has several of."""

CASES: dict[str, tuple[int, Schedule]] = {
    "chunks": (72, Schedule((41, 23), 8, 0)),
    "pad": (48, Schedule((27, 17), 4, 3)),
}
"""Tokens and how they are fed: more pools than the budget holds, an incomplete pool at every cut."""


class CleanEngineError(AssertionError):
    """The engine without a fault does not pass: no mutant can be judged."""


def run_name(mutant: Mutant) -> str:
    """The sound run that a mutant is held against, as a file name."""
    options = [f"{key}={value}" for key, value in sorted(mutant.options.items())]
    return " ".join([mutant.geometry, mutant.export, mutant.case, *options])


@dataclass
class Bench:
    """`clean` holds the sound engine's trace of each run, or why it does not pass. All else is made when it is needed:
    the checkpoint in a directory of its own, unless it is in `given`.
    """

    export: str
    geometry: str
    given: Path | None = None
    clean: dict[str, Trace | str] = field(default_factory=dict)

    @functools.cached_property
    def directory(self) -> Path:
        return self.given or shared(self.export, self.geometry)

    @functools.cached_property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.directory)

    @functools.cached_property
    def judge(self) -> Rebase:
        return Rebase(self.checkpoint, remember=True)

    def run(self, mutant: Mutant, patch: Patch) -> tuple[Trace, FastEngine]:
        """Several ranks are threads: they start at once, and the patch applies to each."""
        count, schedule = CASES[mutant.case]
        engine = ThreadedEngine() if {"tp", "ep"} & set(mutant.options) else FastEngine()
        with patch.applied():
            engine.open(self.directory, **OPTIONS | dict(mutant.options))
            for model in engine.models if isinstance(engine, ThreadedEngine) else [engine.model]:
                patch.edit(model)
            return engine.run(text_tokens()[:count], schedule), engine

    def sound(self, mutant: Mutant) -> Trace:
        """The trace without a fault, judged once. Raises CleanEngineError."""
        key = run_name(mutant)
        if key not in self.clean:
            trace, engine = self.run(mutant, Patch())
            result = compare(trace, self.checkpoint, operands=operands_of(engine), judge=self.judge, stop=True)
            self.clean[key] = trace if result.first_divergence is None else result.first_divergence.line
        found = self.clean[key]
        if isinstance(found, str):
            raise CleanEngineError(f"{key}: {found}")
        return found

    def keep(self, mutant: Mutant, place: Path) -> None:
        """Write what judging the sound run taught to a file of `place`."""
        key = run_name(mutant)
        with (place / key).open("wb") as file:
            pickle.dump((self.clean[key], self.judge.memory), file, protocol=pickle.HIGHEST_PROTOCOL)

    def take(self, mutant: Mutant, place: Path) -> None:
        """Read that file, unless the run is known."""
        key = run_name(mutant)
        if key not in self.clean:
            with (place / key).open("rb") as file:
                self.clean[key], memory = pickle.load(file)
            assert self.judge.memory is not None
            self.judge.memory.update(memory)
