"""Synthetic checkpoints, written once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from conformance.checkpoints import make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(geometry, export, seed=0) -> directory."""

    @cache
    def build(geometry: str, export: str, seed: int = 0) -> Path:
        return make(tmp_path_factory.mktemp("checkpoint") / f"{geometry}-{export}-{seed}", export, geometry, seed)

    return build
