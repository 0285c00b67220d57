"""Runs mutants and counts: caught, missed, localised, per fault class."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.checkpoints import make
from conformance.mutants import catalogue
from conformance.mutants.bench import Bench, CleanEngineError, run_name
from conformance.mutants.probes import PROBES
from conformance.mutants.record import Mutant

LOCALISED = 0.95
"""Share of the caught faults that have to be named at the step their record says."""


@dataclass(frozen=True)
class Outcome:
    """`caught`: something failed. `localised`: the first failure is where the record says, see `Verdict.at`. `changed`:
    some bit differs from the sound engine's. `error`: the faulty engine raised, or the sound one did not pass.
    `seconds` are of the processor.
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
    start = time.process_time()
    key = mutant.export, mutant.geometry
    if key not in benches:
        benches[key] = Bench(*key)
    caught = localised = changed = False
    first = line = error = ""
    try:
        verdict = PROBES[mutant.probe](mutant, benches[key])
        caught, changed, first, line = not verdict.passed, verdict.changed, verdict.first, verdict.line
        localised = verdict.at(mutant)
        if mutant.operand:
            first = f"{first} ({verdict.operand})" if verdict.operand not in ("", first) else first
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
        time.process_time() - start,
    )


_BENCHES: dict[tuple[str, str], Bench] = {}
_PLACE: list[Path] = []
"""Of a worker: where checkpoints and sound runs lie."""


def _set_up(place: Path) -> None:
    import torch

    torch.set_num_threads(1)
    _PLACE.append(place)


def _bench(mutant: Mutant) -> Bench:
    key = mutant.export, mutant.geometry
    if key not in _BENCHES:
        _BENCHES[key] = Bench(*key, _PLACE[0] / f"{mutant.geometry}-{mutant.export}")
    return _BENCHES[key]


def _judge_sound(name: str) -> None:
    mutant = catalogue.by_name()[name]
    bench = _bench(mutant)
    with contextlib.suppress(CleanEngineError):  # kept, and told with every mutant of the run
        bench.sound(mutant)
    bench.keep(mutant, _PLACE[0])


def _judge(name: str) -> Outcome:
    mutant = catalogue.by_name()[name]
    bench = _bench(mutant)
    if mutant.probe == "trace":
        bench.take(mutant, _PLACE[0])
    return run_one(mutant, _BENCHES)


def run(mutants: Sequence[Mutant], workers: int | None = None) -> Iterator[Outcome]:
    """Outcomes as they come. Several processes share the work; one runs it here.

    Each sound run is judged once, by whichever process is free, and read by all.
    """
    count = min(workers or os.cpu_count() or 1, max(1, len(mutants) // 4))
    uses = Counter(run_name(m) for m in mutants)
    ordered = sorted(mutants, key=lambda m: (-uses[run_name(m)], run_name(m)))
    if count <= 1:
        for mutant in ordered:
            yield run_one(mutant, _BENCHES)
        return
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="glm53-") as place,
        ProcessPoolExecutor(count, mp_context=context, initializer=_set_up, initargs=(Path(place),)) as pool,
    ):
        todo: set[Future[Any]] = {pool.submit(_judge, m.name) for m in ordered if m.probe in ("codec", "config")}
        for export, geometry in dict.fromkeys((m.export, m.geometry) for m in ordered):
            make(Path(place) / f"{geometry}-{export}", export, geometry)
        waiting: dict[Future[Any], list[Mutant]] = {}
        for _, group in itertools.groupby((m for m in ordered if m.probe == "trace"), run_name):
            members = list(group)
            waiting[pool.submit(_judge_sound, members[0].name)] = members
        todo |= set(waiting) | {pool.submit(_judge, m.name) for m in ordered if m.probe == "drafts"}
        while todo:
            done, todo = wait(todo, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                if future in waiting:
                    todo |= {pool.submit(_judge, m.name) for m in waiting.pop(future)}
                else:
                    yield result


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
