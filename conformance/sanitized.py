"""A few steps of a model on a CUDA device, for a sanitizer to watch:

    compute-sanitizer --tool memcheck python -m conformance.sanitized DIR
    compute-sanitizer --tool racecheck python -m conformance.sanitized DIR --single

A recorded step lets each kernel begin while the one before it still works, and has it run once for nothing first, on
whatever then lies in shared memory. What that reads is thrown away (that a replay has the bits of single launches is
tested elsewhere), but a racecheck would call it a hazard: with `--single` every launch waits for the one before it and
nothing runs for nothing.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from conformance.cases.runs import random_tokens
from fast.linear import ROWS
from fast.model import TextModel

PROMPT = 5 * ROWS
"""More than a selection of the narrow models takes, and more than the kernels take in a call."""
COUNTS = (ROWS, 3, 1)
"""Rows of the calls."""
AGAIN = 3
"""Calls without taps: the first is launched one by one, the second recorded and replayed, the third replayed."""


def forget(name: str, value: Any) -> None:
    """A tap: with it a call is launched one by one."""


def main(directory: str, *, single: bool = False) -> None:
    """Calls of some row counts after a prompt, with taps and unless `single` without; then what ends in an argmax."""
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)

    model = TextModel(directory, device="cuda")
    assert model.kernels is not None, model.without_kernels
    times = 1 if single else 1 + AGAIN
    ids = random_tokens(13, model.config.text.vocab_size, PROMPT + times * sum(COUNTS) + COUNTS[1]).tolist()
    model.prefill(ids[:PROMPT])
    say("loaded, prompt done")
    for count in COUNTS:
        for again in range(times):
            start = model.state.length
            logits = model.prefill(ids[start : start + count], tap=None if again else forget)
            assert bool(logits.isfinite().all())
            say(f"{count} rows, {'without taps' if again else 'with taps'}")
    if not single:
        logits, _ = model.verify(model.ids(ids[model.state.length :]))
        model.state.commit(1)
        assert bool(logits.isfinite().all())
        say("verified")
    model.kernels.steps[1].run(pdl=False)
    best = model.kernels.steps[1].buffers.logits
    assert bool(best.isfinite().all())
    say(f"{model.state.length} tokens, {len(model.kernels.steps)} kinds of steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--single", action="store_true")
    main(**vars(parser.parse_args()))
