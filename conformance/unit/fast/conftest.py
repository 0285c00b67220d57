"""Fixtures of the fast engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.checkpoints.shared import shared


@pytest.fixture(scope="session")
def checkpoint() -> Callable[..., Path]:
    """checkpoint(geometry, export, seed=0) -> directory."""
    return lambda geometry, export, seed=0: shared(export, geometry, seed)
