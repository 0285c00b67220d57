"""Which exceptions mean "the input is bad" (exit code 2), without importing rooms that are not in use."""

from __future__ import annotations

import sys


class UsageError(Exception):
    """Options that contradict each other, or a value outside what the command accepts."""


def check_seed(seed: int | None) -> None:
    """Raises UsageError for a seed outside 0 .. 2^63 - 1: beyond that, two seeds would name one stream of numbers."""
    if seed is not None and not 0 <= seed < 2**63:
        raise UsageError(f"--seed {seed}: expected 0 to 2^63 - 1")


def input_errors() -> tuple[type[BaseException], ...]:
    """The InputError of each room that has been imported, and this package's own UsageError.

    Evaluated when an exception is being matched, so a room that a command imported lazily is included.
    """
    rooms = ("reference.errors", "fast.errors", "conformance.errors")
    loaded = (sys.modules[name].InputError for name in rooms if name in sys.modules)
    return (UsageError, *loaded)
