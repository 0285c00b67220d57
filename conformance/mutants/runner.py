"""Runs mutants and counts: caught, missed, localised, per fault class."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from conformance.mutants import catalogue
from conformance.mutants.probes import PROBES, Bench, CleanEngineError
from conformance.mutants.record import Mutant

LOCALISED = 0.95
"""Share of the caught faults that have to be named at the step their record says."""


@dataclass(frozen=True)
class Outcome:
    """`caught`: something failed. `localised`: the first failure is where the record says. `changed`: some bit differs
    from the sound engine's. `error`: the faulty engine raised, or the sound one did not pass.
    """

    name: str
    fault: str
    source: str
    where: str
    expected: tuple[str, ...]
    equivalent: str | None
    caught: bool
    localised: bool
    changed: bool
    first: str
    line: str
    error: str
    seconds: float

    @property
    def good(self) -> bool:
        """An equivalent mutant changes nothing; every other one is caught, and not by falling over."""
        return not self.error and self.caught != (self.equivalent is not None)


@dataclass(frozen=True)
class Score:
    """Counts of one fault class, or of all. `caught` and `missed` leave the equivalent ones out."""

    fault: str
    mutants: int
    caught: int
    missed: int
    localised: int
    equivalent: int
    wrong: int


def run_one(mutant: Mutant, benches: dict[tuple[str, str], Bench]) -> Outcome:
    """Judge one mutant; benches are made as they are needed and kept."""
    start = time.perf_counter()
    key = mutant.export, mutant.geometry
    if key not in benches:
        benches[key] = Bench.of(*key)
    caught = localised = changed = False
    first = line = error = ""
    try:
        verdict = PROBES[mutant.probe](mutant, benches[key])
        caught, changed, first, line = not verdict.passed, verdict.changed, verdict.first, verdict.line
        localised = caught and any(fnmatchcase(first, glob) for glob in mutant.first_tap)
        if mutant.operand:
            localised = caught and fnmatchcase(verdict.operand, mutant.operand)
            first = f"{first} ({verdict.operand})" if verdict.operand else first
    except CleanEngineError as fault:
        error = f"the engine without a fault does not pass: {fault}"
    except Exception as fault:
        error = f"{type(fault).__name__}: {str(fault)[:200]}"
    return Outcome(
        mutant.name,
        mutant.fault,
        mutant.source,
        mutant.where,
        mutant.first_tap,
        mutant.equivalent,
        caught,
        localised,
        changed,
        first,
        line,
        error,
        time.perf_counter() - start,
    )


_BENCHES: dict[tuple[str, str], Bench] = {}


def _quiet() -> None:
    import torch

    torch.set_num_threads(1)


def _named(name: str) -> Outcome:
    return run_one(catalogue.by_name()[name], _BENCHES)


def run(mutants: Sequence[Mutant], workers: int | None = None) -> Iterator[Outcome]:
    """Outcomes as they come. Several processes share the work; one runs it here."""
    count = min(workers or os.cpu_count() or 1, max(1, len(mutants) // 4))
    ordered = sorted(mutants, key=lambda m: (m.geometry, m.export, m.case))
    if count <= 1:
        for mutant in ordered:
            yield run_one(mutant, _BENCHES)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context, initializer=_quiet) as pool:
        for future in as_completed([pool.submit(_named, mutant.name) for mutant in ordered]):
            yield future.result()


def score(fault: str, outcomes: Sequence[Outcome]) -> Score:
    live = [o for o in outcomes if o.equivalent is None]
    return Score(
        fault=fault,
        mutants=len(outcomes),
        caught=sum(o.caught for o in live),
        missed=sum(not o.caught for o in live),
        localised=sum(o.localised for o in live),
        equivalent=len(outcomes) - len(live),
        wrong=sum(not o.good for o in outcomes),
    )


def scores(outcomes: Sequence[Outcome]) -> list[Score]:
    """One per fault class in the catalogue's order, then `all`."""
    order = list(dict.fromkeys(m.fault for m in catalogue.mutants()))
    classes = [[o for o in outcomes if o.fault == fault] for fault in order]
    return [*(score(c[0].fault, c) for c in classes if c), score("all", outcomes)]


def passed(outcomes: Sequence[Outcome]) -> bool:
    """Something ran, every outcome is good, and enough of the caught are localised."""
    total = score("all", outcomes)
    return bool(outcomes) and total.wrong == 0 and total.localised >= LOCALISED * total.caught


def to_dict(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "format": "glm53-mutants/1",
        "passed": passed(outcomes),
        "scores": [asdict(s) for s in scores(outcomes)],
        "mutants": [asdict(o) | {"good": o.good} for o in outcomes],
    }
