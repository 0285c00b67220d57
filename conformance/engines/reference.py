"""The oracle as an engine: its traces are what goldens are made of, and what the judge must find faultless."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from conformance.engines.base import BaseEngine, Hidden, drafts, feed, told
from conformance.trace import PARTIAL_SUMS, Recorder
from reference.checkpoint import open_checkpoint
from reference.model import TextModel
from reference.mtp import Block, Speculation
from reference.ranked_mtp import ShardedBlock
from reference.ranks import Fan, NotOnRankError, RankSource, ShardedModel


class ReferenceEngine(BaseEngine):
    """Options: `arithmetic` (exact, bf16, stochastic), `seed` (stochastic only), `kda` (recurrent, chunked),
    `kda_chunk`, `mla` (expanded, absorbed), `mtp` (drafts after the input; 0 leaves the draft block out), `tp` and `ep`
    (all ranks in this process)."""

    name: ClassVar[str] = "reference"
    version: ClassVar[str] = importlib.metadata.version("glm53-conformance")
    options: ClassVar[dict[str, Any]] = {
        "arithmetic": "exact",
        "seed": 0,
        "kda": "recurrent",
        "kda_chunk": 64,
        "mla": "expanded",
        "mtp": 0,
        "tp": 1,
        "ep": 1,
    }
    choices: ClassVar[dict[str, Any]] = {
        "arithmetic": ("exact", "bf16", "stochastic"),
        "kda": ("recurrent", "chunked"),
        "mla": ("expanded", "absorbed"),
    }

    def _open(self, directory: Path) -> None:
        self.drafts = drafts(self.name, self.settings["mtp"])
        self.checkpoint = open_checkpoint(directory)
        self.config, self.export = self.checkpoint.config, self.checkpoint.export
        settings = {key: self.settings[key] for key in self.settings if key not in ("mtp", "tp", "ep")}
        if self.mesh.world > 1:
            self.ranked = ShardedModel(self.checkpoint, self.mesh.tp, self.mesh.ep, **settings)
            self.ranked_block = ShardedBlock(self.ranked) if self.drafts else None
            return
        self.model = TextModel(self.checkpoint, **settings)
        self.block = Block(self.model) if self.drafts else None

    def _run(self, ids: np.ndarray, schedule: Any, tap: Callable[[str, Any], None]) -> np.ndarray:
        self.model.reset()
        if self.block is None:
            return feed(self.model, ids, schedule, self.config.text.vocab_size, tap)
        hidden = Hidden(tap)
        logits = feed(self.model, ids, schedule, self.config.text.vocab_size, hidden)
        Speculation(self.block).observe(np.concatenate(hidden.parts), ids, schedule.cuts, self.drafts, tap)
        return logits

    def _run_ranks(self, ids: np.ndarray, schedule: Any, recorders: Sequence[Recorder], taps: str) -> None:
        self.ranked.reset()
        fanned, hidden = _Fanned(self.ranked, recorders), Hidden(self._watched)
        logits = feed(fanned, ids, schedule, self.config.text.vocab_size, hidden)
        if self.ranked_block is not None:
            told = Fan(None, fanned.taps)
            Speculation(self.ranked_block).observe(np.concatenate(hidden.parts), ids, schedule.cuts, self.drafts, told)
        for recorder in recorders:
            recorder("logits", logits)

    def _watched(self, name: str, value: np.ndarray) -> None:
        if self.watch is not None:
            self.watch(name)

    def _describe(self) -> dict[str, Any]:
        extra = {key: str(self.settings[key]) for key in ("seed", "kda", "kda_chunk", "mla")} | told(self.drafts)
        if self.mesh.world > 1:
            extra[PARTIAL_SUMS] = "bf16" if self.settings["arithmetic"] == "stochastic" else "fp32"
        return {key: self.settings[key] for key in ("arithmetic", "tp", "ep")} | {"extra": extra}

    def operands(self, name: str) -> dict[str, np.ndarray] | None:
        """{"value": the F32 values the arithmetic works with}; KeyError's InputError from the checkpoint otherwise."""
        return {"value": self.checkpoint.weight(name)}

    def rank_operands(self, rank: int, name: str) -> dict[str, np.ndarray] | None:
        try:
            return {"value": RankSource(self.checkpoint, replace(self.mesh, rank=rank)).weight(name)}
        except NotOnRankError:
            return None


class _Fanned:
    """The verbs of a sharded model; what each rank computes goes to its recorder."""

    def __init__(self, model: ShardedModel, recorders: Sequence[Recorder]) -> None:
        self.model = model
        self.taps = [partial(_record, recorder) for recorder in recorders]

    def prefill(self, tokens: np.ndarray, tap: Any = None, pad: int = 0) -> np.ndarray:
        return self.model.prefill(tokens, tap, pad, rank_taps=self.taps)

    def decode(self, token: int, tap: Any = None) -> np.ndarray:
        return self.model.decode(token, tap, rank_taps=self.taps)


def _record(recorder: Recorder, name: str, value: np.ndarray) -> None:
    if name not in ("tokens", "logits"):
        recorder(name, value)
