"""The engine that computes nothing: it hands out a trace some other program wrote."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from conformance import rank_traces
from conformance.errors import EngineClosedError, EngineOptionError, TraceMismatchError
from conformance.trace import Schedule, Trace, wanted
from reference.checkpoint import open_checkpoint


class FileEngine:
    """`open(directory, trace=FILE)` reads the file, or a folder of rank traces; `run` refuses any tokens or schedule
    but the ones it was made with.

    The trace must have been made with the same config (`config_sha256`) and export as the directory.
    """

    name: ClassVar[str] = "file"
    version: ClassVar[str] = "1"

    def __init__(self) -> None:
        self.path: Path | None = None
        self.trace: Trace | None = None

    def open(self, directory: str | os.PathLike[str], **options: Any) -> None:
        """Raises EngineOptionError, TraceMismatchError and what `rank_traces.of_path` and `open_checkpoint` raise."""
        for key, value in options.items():
            if key != "trace":
                raise EngineOptionError(f"engine file: option {key}={value!r} is not offered; it has trace")
        if "trace" not in options:
            raise EngineOptionError("engine file: option trace is missing, expected the path of a trace file")
        self.path = Path(options["trace"])
        self.trace = rank_traces.of_path(self.path)
        checkpoint = open_checkpoint(Path(directory))
        belongs(self.trace, config_sha256=checkpoint.config.sha256, export=checkpoint.export, source=str(self.path))

    def run(self, tokens: Sequence[int] | np.ndarray, schedule: Schedule, taps: str = "*") -> Trace:
        if self.trace is None:
            raise EngineClosedError("engine file: run before open")
        if not np.array_equal(np.asarray(tokens), self.trace.tokens):
            raise TraceMismatchError(f"{self.path}: tap tokens is not the input asked for")
        if schedule != self.trace.schedule:
            made = self.trace.metadata["schedule"]
            raise TraceMismatchError(f"{self.path}: schedule {made}, asked for {schedule.json()}")
        globs = taps.split(",")
        return Trace(self.trace.metadata, {name: tap for name, tap in self.trace.taps.items() if wanted(name, globs)})

    def operands(self, name: str) -> dict[str, np.ndarray] | None:
        return None


def belongs(trace: Trace, *, config_sha256: str, export: str, source: str) -> None:
    """Raises TraceMismatchError when the metadata say that the trace was made with another config or export."""
    for key, want in (("config_sha256", config_sha256), ("export", export)):
        if trace.metadata[key] != want:
            raise TraceMismatchError(f"{source}: metadata {key} is {trace.metadata[key]}, the checkpoint has {want}")
