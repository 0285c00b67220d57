"""`glm53` as a user runs it, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from conformance.engines import registry
from conformance.trace import Schedule, Trace
from tools.cli import main


def traced(directory: Path, ids: np.ndarray, schedule: Schedule) -> Trace:
    """A sound trace of the fast engine."""
    engine = registry.create("fast")
    engine.open(directory)
    return engine.run(ids, schedule)


def glm53(*arguments: Any) -> int:
    """Exit status of `glm53 ARGUMENTS`; a command that succeeds may just return."""
    try:
        main([str(word) for word in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0
