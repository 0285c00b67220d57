"""Machine-readable results."""

import json
from pathlib import Path
from typing import Any

from tools.errors import UsageError


def write_json(path: Path | None, value: Any) -> None:
    """Write `value` where `--json FILE` says, if given. Raises `UsageError` for a file that cannot be written."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {path}: cannot be written: {error.strerror or error}") from None
