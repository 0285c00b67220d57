"""A few steps of a model on a CUDA device, for a sanitizer to watch:

compute-sanitizer --tool memcheck python -m conformance.sanitized DIR
"""

from __future__ import annotations

import sys

from conformance.cases.runs import random_tokens
from fast.linear import ROWS
from fast.model import TextModel

TOKENS = 5 * ROWS
"""More than a selection of the narrow models takes."""


def main(directory: str) -> None:
    """All tokens in calls that the kernels take, then each way to make a call."""
    model = TextModel(directory, device="cuda")
    assert model.kernels is not None, model.without_kernels
    ids = random_tokens(13, model.config.text.vocab_size, TOKENS + 8).tolist()
    for start in range(0, TOKENS, ROWS):
        model.prefill(ids[start : start + ROWS])
    for token in ids[TOKENS : TOKENS + 4]:
        model.decode(token)
    model.decode(ids[TOKENS + 4], tap=lambda name, value: None)
    logits, _ = model.verify(model.ids(ids[TOKENS + 5 :]))
    model.state.commit(1)
    assert bool(logits.isfinite().all())
    print(f"{model.state.length} tokens, {len(model.kernels.steps)} kinds of steps")


if __name__ == "__main__":
    main(sys.argv[1])
