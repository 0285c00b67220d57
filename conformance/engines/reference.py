"""The oracle as an engine: its traces are what goldens are made of, and what the judge must find faultless."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from conformance.engines.base import BaseEngine, Hidden, drafts, feed, told
from reference.checkpoint import open_checkpoint
from reference.model import TextModel
from reference.mtp import Block, Speculation


class ReferenceEngine(BaseEngine):
    """Options: `arithmetic` (exact, bf16, stochastic), `seed` (stochastic only), `kda` (recurrent, chunked),
    `kda_chunk`, `mla` (expanded, absorbed), `mtp` (drafts after the input; 0 leaves the draft block out)."""

    name: ClassVar[str] = "reference"
    version: ClassVar[str] = importlib.metadata.version("glm53-conformance")
    options: ClassVar[dict[str, Any]] = {
        "arithmetic": "exact",
        "seed": 0,
        "kda": "recurrent",
        "kda_chunk": 64,
        "mla": "expanded",
        "mtp": 0,
    }

    def _open(self, directory: Path) -> None:
        self.drafts = drafts(self.name, self.settings["mtp"])
        self.checkpoint = open_checkpoint(directory)
        self.config, self.export = self.checkpoint.config, self.checkpoint.export
        self.model = TextModel(self.checkpoint, **{key: self.settings[key] for key in self.settings if key != "mtp"})
        self.block = Block(self.model) if self.drafts else None

    def _run(self, ids: np.ndarray, schedule: Any, tap: Callable[[str, Any], None]) -> np.ndarray:
        self.model.reset()
        if self.block is None:
            return feed(self.model, ids, schedule, self.config.text.vocab_size, tap)
        hidden = Hidden(tap)
        logits = feed(self.model, ids, schedule, self.config.text.vocab_size, hidden)
        Speculation(self.block).observe(np.concatenate(hidden.parts), ids, schedule.cuts, self.drafts, tap)
        return logits

    def _describe(self) -> dict[str, Any]:
        extra = {key: str(self.settings[key]) for key in ("seed", "kda", "kda_chunk", "mla")} | told(self.drafts)
        return {"arithmetic": self.settings["arithmetic"], "extra": extra}

    def operands(self, name: str) -> dict[str, np.ndarray] | None:
        """{"value": the F32 values the arithmetic works with}; KeyError's InputError from the checkpoint otherwise."""
        return {"value": self.checkpoint.weight(name)}
