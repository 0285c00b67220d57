"""Correct engines against the judge, many seeds and prompts: how often it cries wolf. It must be never.

    python -m conformance.false_alarms --seeds 20 --json alarms.json

Each seed has its own synthetic checkpoints, its own prompt and its own schedule, all following from it. Engines are
those that compute the model correctly by construction: the public torch classes, the fast engine, and the reference
itself in `stochastic` arithmetic, whose every rounding goes either way, on one rank and on ranks that add in bf16.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from conformance import checkpoints
from conformance.cases.runs import SCHEDULES, random_tokens, text_tokens
from conformance.engines import registry
from conformance.judge import Rebase, compare
from conformance.suite import operands_of
from reference.checkpoint import open_checkpoint

ENGINES: dict[str, tuple[str, dict[str, object]]] = {
    "transformers-bf16": ("transformers", {"arithmetic": "bf16"}),
    "transformers-fp32": ("transformers", {"arithmetic": "fp32"}),
    "fast-bf16": ("fast", {"arithmetic": "bf16"}),
    "fast-fp32": ("fast", {"arithmetic": "fp32"}),
    "reference-stochastic": ("reference", {"arithmetic": "stochastic"}),
    "ranks-stochastic": ("reference", {"arithmetic": "stochastic"}),
}
RANKS: dict[str, dict[str, int]] = {"tiny": {"tp": 2, "ep": 2}, "odd": {"ep": 4}}
"""Of ranks-stochastic, by geometry: the packed dense blocks of `odd` do not divide, and its experts not evenly."""
ATTENTION = ("eager", "sdpa")
"""Of the public classes, in turn from seed to seed."""
GEOMETRIES = ("tiny", "odd")
EXPORTS = ("nvidia", "libertai")
TOKENS = 48
"""More pools than the budget of either geometry, so that there is something to choose."""


@dataclass(frozen=True)
class Run:
    """One correct engine on one checkpoint with one prompt."""

    engine: str
    geometry: str
    export: str
    seed: int


@dataclass(frozen=True)
class Outcome:
    """`worst` is the largest statistic / allowed of any check but exact ones, `at` where it was."""

    run: Run
    alarms: tuple[str, ...]
    checks: int
    taps: int
    tensors: int
    choices: int
    flips: int
    excused: int
    worst: float
    at: str
    seconds: float


def prompt(seed: int, vocab: int, count: int) -> np.ndarray:
    """Text from a place that the seed chooses, and every third time random ids from the whole vocabulary."""
    if seed % 3 == 2:
        return random_tokens(seed, vocab, count)
    text = text_tokens()
    return np.roll(text, -17 * seed)[:count]


def try_engines(geometry: str, export: str, seed: int, engines: Sequence[str], count: int = TOKENS) -> list[Outcome]:
    """Make the checkpoint, run each engine on it, judge all with samples of another seed."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / f"{geometry}-{export}-{seed}"
        checkpoints.make(directory, export, geometry, seed)
        judge = Rebase(open_checkpoint(directory), seed=seed, remember=True)
        return [try_once(Run(name, geometry, export, seed), directory, judge, count) for name in engines]


def try_once(run: Run, directory: Path, judge: Rebase, count: int) -> Outcome:
    start = time.process_time()
    name, options = ENGINES[run.engine]
    engine = registry.create(name)
    turn = {"attention": ATTENTION[run.seed % 2]} if name == "transformers" else {}
    fresh = {"seed": 10_000 + run.seed} if name == "reference" else {}
    mesh = RANKS[run.geometry] if run.engine == "ranks-stochastic" else {}
    engine.open(directory, **options, **turn, **fresh, **mesh)
    ids = prompt(run.seed, judge.config.vocab_size, count)
    schedule = list(SCHEDULES.values())[run.seed % len(SCHEDULES)](count)
    trace = engine.run(ids, schedule)
    result = compare(trace, judge.checkpoint, operands=operands_of(engine), expected_tokens=ids, judge=judge)
    ratios = [
        (check.ratio, f"{row.tap} {check.name}") for row in result.taps if row.kind == "bounded" for check in row.checks
    ]
    ratios += [(row.max_diff / row.max_diff_allowed, f"token {row.position}") for row in result.logits]
    worst, at = max(ratios)
    alarms = [f"{row.tap}: {row.message}" for row in result.failing_taps()]
    alarms += [f"{row.name}: {row.message}" for row in result.tensors if not row.passed]
    alarms += [f"token {row.position}" for row in result.logits if not row.passed]
    alarms += [problem.message for problem in result.problems if problem.fatal]
    return Outcome(
        run=run,
        alarms=tuple(alarms) if not result.passed else (),
        checks=result.statistics.checks,
        taps=result.coverage.taps_compared,
        tensors=result.coverage.tensors_compared,
        choices=result.choices,
        flips=result.flips,
        excused=result.excused,
        worst=worst,
        at=at,
        seconds=time.process_time() - start,
    )


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def outcomes(engines: Sequence[str], seeds: Sequence[int], count: int, workers: int) -> Iterator[Outcome]:
    """As they come, from `workers` processes of their own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        jobs = [(g, x, s) for s in seeds for g in GEOMETRIES for x in EXPORTS]
        for future in as_completed([pool.submit(try_engines, *job, engines, count) for job in jobs]):
            yield from future.result()


def table(found: Sequence[Outcome]) -> str:
    """One line per engine, geometry and export."""
    heads = f"{'runs':>5}{'alarms':>8}{'checks':>11}{'flips':>7}{'excused':>9}  worst"
    lines = [f"{'engine':22}{'geometry':10}{'export':10}" + heads]
    keys = sorted({(o.run.engine, o.run.geometry, o.run.export) for o in found})
    for key in keys:
        group = [o for o in found if (o.run.engine, o.run.geometry, o.run.export) == key]
        top = max(group, key=lambda o: o.worst)
        lines.append(
            f"{key[0]:22}{key[1]:10}{key[2]:10}{len(group):5}{sum(bool(o.alarms) for o in group):8}"
            f"{sum(o.checks for o in group):11}{sum(o.flips for o in group):7}{sum(o.excused for o in group):9}"
            f"  {top.worst:.2f} {top.at} (seed {top.run.seed})"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.false_alarms", description=__doc__)
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every outcome")
    given = parser.parse_args(argv)
    names = given.engines.split(",")
    if unknown := set(names) - set(ENGINES):
        parser.error(f"unknown engines {sorted(unknown)}")
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    found = []
    for outcome in outcomes(names, seeds, given.tokens, given.workers):
        found.append(outcome)
        for alarm in outcome.alarms:
            print(f"ALARM {outcome.run}: {alarm}", flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps([asdict(o) for o in found]), encoding="utf-8")
    print(table(found))
    return 1 if not found or any(o.alarms for o in found) else 0


if __name__ == "__main__":
    sys.exit(main())
