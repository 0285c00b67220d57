"""The oracle as an engine: its traces are what goldens are made of, and what the judge must find faultless."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from conformance.engines.base import BaseEngine, feed
from reference.checkpoint import open_checkpoint
from reference.model import TextModel


class ReferenceEngine(BaseEngine):
    """Options: `arithmetic` (exact, bf16, stochastic), `seed` (stochastic only), `kda` (recurrent, chunked),
    `kda_chunk`, `mla` (expanded, absorbed)."""

    name: ClassVar[str] = "reference"
    version: ClassVar[str] = importlib.metadata.version("glm53-conformance")
    options: ClassVar[dict[str, Any]] = {
        "arithmetic": "exact",
        "seed": 0,
        "kda": "recurrent",
        "kda_chunk": 64,
        "mla": "expanded",
    }

    def _open(self, directory: Path) -> None:
        self.checkpoint = open_checkpoint(directory)
        self.config, self.export = self.checkpoint.config, self.checkpoint.export
        self.model = TextModel(self.checkpoint, **self.settings)

    def _run(self, ids: np.ndarray, schedule: Any, tap: Callable[[str, Any], None]) -> np.ndarray:
        self.model.reset()
        return feed(self.model, ids, schedule, self.config.text.vocab_size, tap)

    def _describe(self) -> dict[str, Any]:
        extra = {key: str(self.settings[key]) for key in ("seed", "kda", "kda_chunk", "mla")}
        return {"arithmetic": self.settings["arithmetic"], "extra": extra}

    def operands(self, name: str) -> dict[str, np.ndarray] | None:
        """{"value": the F32 values the arithmetic works with}; KeyError's InputError from the checkpoint otherwise."""
        return {"value": self.checkpoint.weight(name)}
