"""The engine under test."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from conformance.engines.base import BaseEngine, as_numpy, feed
from conformance.errors import EngineOptionError
from fast.model import TextModel
from reference.checkpoint import open_checkpoint

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class FastEngine(BaseEngine):
    """Options: `arithmetic` (bf16, or fp32 for the same code without storage rounding), `device`, `kda_chunk`, `mla`.

    The config of the trace's metadata is read by the reference's parser: the judge must not take the word of the
    engine that it judges.
    """

    name: ClassVar[str] = "fast"
    version: ClassVar[str] = importlib.metadata.version("glm53-conformance")
    options: ClassVar[dict[str, Any]] = {"arithmetic": "bf16", "device": "cpu", "kda_chunk": 64, "mla": "absorbed"}

    def _open(self, directory: Path) -> None:
        arithmetic = self.settings["arithmetic"]
        if arithmetic not in DTYPES:
            raise EngineOptionError(f"engine fast: arithmetic {arithmetic!r}, expected {' or '.join(DTYPES)}")
        checkpoint = open_checkpoint(directory)
        self.config, self.export = checkpoint.config, checkpoint.export
        settings = {key: value for key, value in self.settings.items() if key != "arithmetic"}
        self.model = TextModel(directory, dtype=DTYPES[arithmetic], **settings)

    def _run(self, ids: np.ndarray, schedule: Any, tap: Callable[[str, Any], None]) -> np.ndarray:
        self.model.reset()
        return feed(self.model, ids, schedule, self.config.text.vocab_size, tap)

    def _describe(self) -> dict[str, Any]:
        extra = {key: str(self.settings[key]) for key in ("device", "kda_chunk", "mla")}
        return {"arithmetic": self.settings["arithmetic"], "extra": extra}

    def operands(self, name: str) -> dict[str, np.ndarray] | None:
        """The parts bound for a weight; None for a tensor that is a part itself (scales) or was not loaded."""
        try:
            parts = self.model.operands(name)
        except KeyError:
            return None
        return {part: as_numpy(value) for part, value in parts.items()}
