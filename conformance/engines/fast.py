"""The engine under test."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from conformance.engines.base import BaseEngine, Hidden, as_numpy, drafts, feed, told
from conformance.errors import EngineOptionError
from fast.generate import Generator
from fast.linear import ROWS
from fast.model import TextModel
from fast.mtp import Mtp
from reference.checkpoint import open_checkpoint

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class FastEngine(BaseEngine):
    """Options: `arithmetic` (bf16, or fp32 for the same code without storage rounding), `device`, `kda_chunk`, `mla`,
    `mtp` (drafts after the input; 0 leaves the draft block out).

    The config of the trace's metadata is read by the reference's parser: the judge must not take the word of the
    engine that it judges.
    """

    name: ClassVar[str] = "fast"
    version: ClassVar[str] = importlib.metadata.version("glm53-conformance")
    options: ClassVar[dict[str, Any]] = {
        "arithmetic": "bf16",
        "device": "cpu",
        "kda_chunk": 64,
        "mla": "absorbed",
        "mtp": 0,
    }

    def _open(self, directory: Path) -> None:
        arithmetic = self.settings["arithmetic"]
        if arithmetic not in DTYPES:
            raise EngineOptionError(f"engine fast: arithmetic {arithmetic!r}, expected {' or '.join(DTYPES)}")
        self.drafts = drafts(self.name, self.settings["mtp"], ROWS - 1)
        checkpoint = open_checkpoint(directory)
        self.config, self.export = checkpoint.config, checkpoint.export
        settings = {key: value for key, value in self.settings.items() if key not in ("arithmetic", "mtp")}
        self.model = TextModel(directory, dtype=DTYPES[arithmetic], mtp=self.drafts > 0, **settings)
        self.block = Mtp(self.model) if self.drafts else None

    def _run(self, ids: np.ndarray, schedule: Any, tap: Callable[[str, Any], None]) -> np.ndarray:
        self.model.reset()
        if self.block is None:
            return feed(self.model, ids, schedule, self.config.text.vocab_size, tap)
        hidden = Hidden(tap)
        logits = feed(self.model, ids, schedule, self.config.text.vocab_size, hidden)
        generator = Generator(self.model, mtp=self.block, drafts=self.drafts)
        generator.observe(torch.cat(hidden.parts), torch.from_numpy(ids), schedule.cuts, tap)
        return logits

    def _describe(self) -> dict[str, Any]:
        extra = {key: str(self.settings[key]) for key in ("device", "kda_chunk", "mla")} | told(self.drafts)
        return {"arithmetic": self.settings["arithmetic"], "extra": extra}

    def operands(self, name: str) -> dict[str, np.ndarray] | None:
        """The parts bound for a weight; None for a tensor that is a part itself (scales) or was not loaded."""
        try:
            parts = self.model.operands(name)
        except KeyError:
            return None
        return {part: as_numpy(value) for part, value in parts.items()}
