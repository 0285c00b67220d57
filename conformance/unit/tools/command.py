"""`glm53` as a user runs it, in this process."""

from __future__ import annotations

from typing import Any

from tools.cli import main


def glm53(*arguments: Any) -> int:
    """Exit status of `glm53 ARGUMENTS`; a command that succeeds may just return."""
    try:
        main([str(word) for word in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0
