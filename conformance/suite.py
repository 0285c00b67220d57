"""What a conformance run is: which tokens are fed in which way, and the verdict on each.

`tox -e conformance` and `glm53 conform` run the same cases, the first on synthetic checkpoints, the second on a
directory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conformance.cases.runs import DECODED, SCHEDULES, TEXT, text_tokens
from conformance.engines.base import BaseEngine, Engine
from conformance.judge import Rebase, Result, compare
from conformance.judge.bits import Operands
from conformance.judge.rank_bits import RankOperands
from conformance.judge.verdict import Progress
from conformance.tokenizer import tokenizer_of
from conformance.trace import Trace
from reference.checkpoint import Checkpoint

PADDED = 61
"""Tokens of the left-padded case: few, since what padding can break shows at the first real tokens."""


@dataclass(frozen=True)
class Case:
    """`name` is a key of `cases.runs.SCHEDULES`; `limit` cuts the tokens, None feeds all of them."""

    name: str
    limit: int | None = None

    def tokens(self, ids: np.ndarray) -> np.ndarray:
        return ids if self.limit is None else ids[: self.limit]


CASES = (Case("one-go+decode"), Case("odd-chunks+decode"), Case("left-pad+odd-chunks", PADDED))


def prompt(checkpoint: Checkpoint) -> np.ndarray:
    """The suite's text as ids of this checkpoint: its tokenizer's where it has one, else UTF-8 bytes."""
    tokenizer = tokenizer_of(Path(checkpoint.directory))
    return text_tokens() if tokenizer is None else np.array(tokenizer.encode(TEXT).ids, np.int32)


def fits(case: Case, ids: np.ndarray) -> bool:
    """Whether there are tokens enough for the case to prefill something before it decodes."""
    return len(case.tokens(ids)) > DECODED


def run(
    engine: Engine,
    checkpoint: Checkpoint,
    ids: np.ndarray,
    case: Case,
    *,
    judge: Rebase | None = None,
    asked: Mapping[str, object] | None = None,
    with_operands: bool = True,
    stop: bool = False,
    progress: Progress | None = None,
) -> Result:
    """One case through an opened engine, then judged. The trace lies in a temporary file while it is judged.

    `asked`: the options it was opened with. `stop`: no further than the first step that fails.
    """
    tokens = case.tokens(ids)
    trace = engine.run(tokens, SCHEDULES[case.name](len(tokens)))
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "run.trace"
        trace.save(path)
        stored = Trace.load(path)
        del trace
        return compare(
            stored,
            checkpoint,
            operands=operands_of(engine) if with_operands else None,
            expected_tokens=tokens,
            asked=asked,
            judge=judge,
            stop=stop,
            progress=progress,
        )


def operands_of(engine: Any) -> Operands | RankOperands:
    """What an opened engine shows of its weights, on one rank or on several."""
    if isinstance(engine, BaseEngine) and engine.mesh.world > 1:
        return RankOperands(engine.mesh, engine.rank_operands, engine.settings.get("vocab", "replicated"))
    return engine.operands


def conform(
    engine: Engine,
    checkpoint: Checkpoint,
    ids: np.ndarray,
    cases: Sequence[Case] = CASES,
    *,
    judge: Rebase | None = None,
    asked: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> Iterator[Result]:
    """Every case that the tokens suffice for; the operands are compared with the first one only."""
    owner = judge or Rebase(checkpoint)
    for number, case in enumerate(case for case in cases if fits(case, ids)):
        first = number == 0
        yield run(engine, checkpoint, ids, case, judge=owner, asked=asked, with_operands=first, progress=progress)


def engine_options(**named: Any) -> dict[str, Any]:
    """Options for `Engine.open`: those that were given, with one rank and the default device left to the engine."""
    return {key: value for key, value in named.items() if value not in (None, 1)}
