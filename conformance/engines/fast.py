"""The engine under test."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from conformance.engines.base import BaseEngine, Hidden, as_numpy, drafts, feed, told
from conformance.trace import PARTIAL_SUMS, Recorder
from fast.generate import Generator
from fast.linear import ROWS
from fast.model import TextModel
from fast.mtp import Mtp
from fast.session import Session
from fast.worker import Job
from reference.checkpoint import open_checkpoint

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PORTION = 1 << 26
"""Elements of operands that are fetched from ranks at once."""


class FastEngine(BaseEngine):
    """Options: `arithmetic` (bf16, or fp32 for the same code without storage rounding), `device`, `kda_chunk`, `mla`,
    `mtp` (drafts after the input; 0 leaves the draft block out), `tp` and `ep`; with several ranks, which are processes
    of this host, `vocab` (replicated, head or split) and `timeout`, the seconds until a silent rank ends the run.

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
        "tp": 1,
        "ep": 1,
        "vocab": "replicated",
        "timeout": 300,
    }
    choices: ClassVar[dict[str, Any]] = {
        "arithmetic": tuple(DTYPES),
        "mla": ("absorbed", "expanded"),
        "vocab": ("replicated", "head", "split"),
    }

    def _open(self, directory: Path) -> None:
        self.drafts = drafts(self.name, self.settings["mtp"], ROWS - 1)
        self.checkpoint = open_checkpoint(directory)
        self.config, self.export = self.checkpoint.config, self.checkpoint.export
        if self.mesh.world > 1:
            settings = {key: value for key, value in self.settings.items() if key != "mtp"}
            self.session = Session(Job(str(directory), [], "", drafts=self.drafts, **settings))
            self.held: dict[str, list[dict[str, np.ndarray] | None]] = {}
            return
        settings = {key: self.settings[key] for key in ("device", "kda_chunk", "mla")}
        self.model = TextModel(directory, dtype=DTYPES[self.settings["arithmetic"]], mtp=self.drafts > 0, **settings)
        self.block = Mtp(self.model) if self.drafts else None

    def _run(self, ids: np.ndarray, schedule: Any, tap: Callable[[str, Any], None]) -> np.ndarray:
        self.model.reset(len(ids))
        if self.block is None:
            return feed(self.model, ids, schedule, self.config.text.vocab_size, tap)
        hidden = Hidden(tap)
        logits = feed(self.model, ids, schedule, self.config.text.vocab_size, hidden)
        generator = Generator(self.model, mtp=self.block, drafts=self.drafts)
        generator.observe(torch.cat(hidden.parts), torch.from_numpy(ids), schedule.cuts, tap)
        return logits

    def _run_ranks(self, ids: np.ndarray, schedule: Any, recorders: Sequence[Recorder], taps: str) -> None:
        found = self.session.ask(
            self._progress,
            tokens=ids.tolist(),
            prefill=list(schedule.prefill),
            pad=schedule.pad,
            taps=taps,
            operands=[],
        )
        for recorder, rank in zip(recorders, found, strict=True):
            for name, value in rank.items():
                if name != "tokens":
                    recorder(name, value)

    def _progress(self, layers: int) -> None:
        watch = self.watch or (lambda name: None)
        for _ in range(layers):
            watch("layers.0.out")

    def _describe(self) -> dict[str, Any]:
        keys = ("device", "kda_chunk", "mla", *(["vocab"] if self.mesh.world > 1 else []))
        extra = {key: str(self.settings[key]) for key in keys} | told(self.drafts)
        if self.mesh.world > 1:
            extra[PARTIAL_SUMS] = "fp32"
        if self.settings["device"] != "cpu":
            extra["kernels"] = self._kernels()
        return {key: self.settings[key] for key in ("arithmetic", "tp", "ep")} | {"extra": extra}

    def _kernels(self) -> str:
        """What the kernels of calls of few tokens were compiled for, or why torch operations took their place."""
        if self.mesh.world > 1:
            return "none: ranks"
        kernels = self.model.kernels
        return f"none: {self.model.without_kernels}" if kernels is None else kernels.target

    def operands(self, name: str) -> dict[str, np.ndarray] | None:
        """The parts bound for a weight; None for a tensor that is a part itself (scales) or was not loaded."""
        try:
            parts = self.model.operands(name)
        except KeyError:
            return None
        return {part: as_numpy(value) for part, value in parts.items()}

    def rank_operands(self, rank: int, name: str) -> dict[str, np.ndarray] | None:
        """Fetched from the ranks in portions of some size, in the order of the layout."""
        if name not in self.held:
            self.held = self._fetch(name)
        return self.held[name][rank]

    def _fetch(self, first: str) -> dict[str, list[dict[str, np.ndarray] | None]]:
        """Operands of `first` and of the weights after it, one entry per rank."""
        names, size = [], 0
        order = list(self.checkpoint.specs)
        for name in order[order.index(first) :]:
            names.append(name)
            size += math.prod(self.checkpoint.specs[name].shape)
            if size > PORTION:
                break
        found = self.session.ask(tokens=[], operands=names)
        out: dict[str, list[dict[str, np.ndarray] | None]] = {name: [None] * len(found) for name in names}
        for rank, taps in enumerate(found):
            for key, value in taps.items():
                name, part = key.removeprefix("operands.").rsplit(".", 1)
                held = out[name][rank] or {}
                out[name][rank] = held | {part: as_numpy(value)}
        return out
