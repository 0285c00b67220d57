"""The released widths: one layer of each kind, few experts, few rows of the vocabulary, for GPUs to be judged on.

The text is too short for a selection to leave out anything; `narrow` and `tiny` see to that.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from conformance.cases.runs import random_tokens
from conformance.checkpoints import geometry, make
from conformance.judge.result import Result
from conformance.processes import cores
from conformance.trace import Schedule
from reference.checkpoint import Checkpoint, open_checkpoint

EXPERTS, VOCAB, SEED = 16, 2048, 0
TOKENS, CUTS = 24, Schedule((12, 4), 8)
SAMPLES = 8
LEAST_BYTES, MOST_WORKERS = 1 << 31, 24
"""Memory that a process of the judge may take, and how many of them have something to do."""

Say = Callable[[str], None]


def checkpoint(directory: Path, say: Say, workers: int | None = None) -> Checkpoint:
    """Made there by as many processes as there are cores. No text passes the vision tower: it keeps one block."""
    shape = geometry("one-layer", experts=EXPERTS, vocab=VOCAB)
    config = copy.deepcopy(shape.config)
    config["vision_config"]["depth"] = 1
    count = workers or cores()
    place = make(directory, "nvidia", replace(shape, config=config), SEED, workers=count)
    size = sum(path.stat().st_size for path in place.iterdir())
    say(f"checkpoint of {size:,} bytes made by {count} processes")
    return open_checkpoint(place)


def ids(opened: Checkpoint) -> np.ndarray:
    """[TOKENS] I32."""
    return random_tokens(6, opened.config.text.vocab_size, TOKENS)


def judges() -> int:
    """Processes for the judge: a core each, as far as they have something to do."""
    return min(cores(), MOST_WORKERS)


def told(result: Result) -> str:
    """A verdict in one line."""
    worst = max((row.max_ratio for row in result.taps if row.kind == "bounded"), default=0.0)
    logits = max((row.max_diff / row.max_diff_allowed for row in result.logits), default=0.0)
    return (
        f"{'passed' if result.passed else 'FAILED'}: {result.coverage.taps_compared} taps, "
        f"{result.coverage.elements:,} values, largest error/allowed {worst:.2f}, of the whole stack's logits "
        f"{logits:.2f}, flips {result.excused} of {result.flips} excused"
    )


@contextmanager
def telling(note: Say, uncaptured: Callable[[], AbstractContextManager]) -> Iterator[Say]:
    """`say(text)` notes the text with the seconds so far and shows it at once: a run that is cut off has told where."""
    begun = time.monotonic()

    def say(text: str) -> None:
        line = f"{time.monotonic() - begun:6.1f} s  {text}"
        note(line)
        with uncaptured():
            print(line, file=sys.stderr, flush=True)

    yield say
