"""Synthetic checkpoints made once per process, for tests that only read them or that change a copy."""

import functools
import shutil
import tempfile
from pathlib import Path


@functools.cache
def _root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="glm53-")


@functools.cache
def _made(export: str, geometry: str, seed: int) -> Path:
    from conformance.checkpoints import make

    return make(Path(_root().name) / f"{geometry}-{export}-{seed}", export, geometry, seed)


def shared(export: str, geometry: str = "tiny", seed: int = 0) -> Path:
    """The directory of a synthetic checkpoint. It is removed when the process ends; do not change it."""
    return _made(export, geometry, seed)


def copy_of(directory: Path, export: str, geometry: str = "tiny", seed: int = 0) -> Path:
    """A copy of a shared checkpoint, inside `directory`, that may be changed."""
    return Path(shutil.copytree(shared(export, geometry, seed), directory / f"{geometry}-{export}"))
