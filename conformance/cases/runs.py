"""What the suite feeds: one real text, and the ways of feeding it that have found faults.

Token ids are the text's UTF-8 bytes, which every vocabulary of at least 256 holds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conformance.trace import Schedule

DECODED = 16
TEXT = (
    "The keeper of the lighthouse wrote every evening at the same hour: wind from the north-west, sea moderate, two "
    "sails toward Höfn. In forty years he missed one line. „Nichts gesehen“, steht dort — x = [3, 1, 4][-1]"
)


def text_tokens(text: str = TEXT) -> np.ndarray:
    """I32 [T]: the UTF-8 bytes of `text`."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def random_tokens(seed: int, vocab: int, count: int) -> np.ndarray:
    """I32 [count]: uniform ids from the whole vocabulary."""
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.int32)


def _odd_chunks(count: int, decode: int, pad: int) -> Schedule:
    """Chunks of 1, 67, 3, 30, 64, ...: none a multiple of a pool or of the one before, several across chunk widths."""
    rest, pattern = count - decode, (1, 67, 3, 30, 64, 5)
    sizes: list[int] = []
    while rest:
        size = min(pattern[len(sizes) % len(pattern)], rest)
        sizes.append(size)
        rest -= size
    return Schedule(tuple(sizes), decode, pad)


SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "one-go": lambda count: Schedule.of(count),
    "one-go+decode": lambda count: Schedule.of(count, decode=DECODED),
    "odd-chunks+decode": lambda count: _odd_chunks(count, DECODED, 0),
    "left-pad+decode": lambda count: Schedule.of(count, decode=DECODED, pad=5),
    "left-pad+odd-chunks": lambda count: _odd_chunks(count, 3, 2),
}
