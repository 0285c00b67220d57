"""Synthetic checkpoints and the models on them, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from conformance.checkpoints import make
from reference.checkpoint import open_checkpoint
from reference.model import TextModel


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(geometry, export="nvidia", seed=0, **reductions) -> directory."""

    @cache
    def build(geometry: str, export: str = "nvidia", seed: int = 0, **reductions: int) -> Path:
        name = f"{geometry}-{export}-{seed}-{len(reductions)}"
        return make(tmp_path_factory.mktemp("checkpoint") / name, export, geometry, seed, **reductions)  # type: ignore[arg-type]

    return build


@pytest.fixture(scope="session")
def model(checkpoint: Callable[..., Path]) -> Callable[..., TextModel]:
    """model(geometry, export="nvidia", **options) -> a fresh TextModel; one checkpoint is decoded once."""

    @cache
    def first(geometry: str, export: str) -> TextModel:
        return TextModel(open_checkpoint(checkpoint(geometry, export)))

    def build(geometry: str, export: str = "nvidia", **options: object) -> TextModel:
        base = first(geometry, export)
        return TextModel(base.checkpoint, weights=base.weights, **options)  # type: ignore[arg-type]

    return build
