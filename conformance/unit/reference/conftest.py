"""Models on the shared synthetic checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from conformance.checkpoints.shared import shared
from reference.checkpoint import open_checkpoint
from reference.model import TextModel


@pytest.fixture(scope="session")
def model() -> Callable[..., TextModel]:
    """model(geometry, export="nvidia", **options) -> a fresh TextModel; one checkpoint is decoded once."""

    @cache
    def first(geometry: str, export: str) -> TextModel:
        return TextModel(open_checkpoint(shared(export, geometry)))

    def build(geometry: str, export: str = "nvidia", **options: object) -> TextModel:
        base = first(geometry, export)
        return TextModel(base.checkpoint, weights=base.weights, **options)  # type: ignore[arg-type]

    return build
