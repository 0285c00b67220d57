"""Which exceptions mean "the input is bad" (exit code 2), without importing rooms that are not in use."""

from __future__ import annotations

import sys


class UsageError(Exception):
    """Options that contradict each other, or a value outside what the command accepts."""


def input_errors() -> tuple[type[BaseException], ...]:
    """The InputError of each room that has been imported, and this package's own UsageError.

    Evaluated when an exception is being matched, so a room that a command imported lazily is included.
    """
    rooms = ("reference.errors", "fast.errors", "conformance.errors")
    loaded = (sys.modules[name].InputError for name in rooms if name in sys.modules)
    return (UsageError, *loaded)
