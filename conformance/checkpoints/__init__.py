"""Synthetic checkpoints: the two exports of one source model per seed, byte for byte the same on every machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.checkpoints.export import Progress, write_export
from conformance.checkpoints.geometry import Geometry, geometry
from conformance.checkpoints.source import Synthetic

__all__ = ["Geometry", "Progress", "geometry", "make"]


def make(
    directory: str | Path,
    export: str,
    geometry: str | Geometry = "tiny",
    seed: int = 0,
    layers: tuple[int, ...] | None = None,
    experts: int | None = None,
    vocab: int | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    workers: int = 1,
    progress: Progress = lambda name, size: None,
) -> Path:
    """Write a synthetic checkpoint and return its directory.

    `layers`, `experts` and `vocab` reduce the geometry to some layers, its first experts, its first vocabulary rows.
    `config` replaces keys of `text_config`, for tests that need one setting changed. `workers`: processes that make it,
    each for itself; the bytes are the same.
    Raises `OutputError` for a directory that is not empty and `GeometryError` for an impossible reduction.
    """
    chosen = _geometry(geometry, layers=layers, experts=experts, vocab=vocab) if isinstance(geometry, str) else geometry
    raw = chosen.config
    if config:
        raw = raw | {"text_config": raw["text_config"] | dict(config)}
    source = Synthetic(raw, chosen.gate_rank, seed, chosen.layer_keys)
    write_export(source, raw, Path(directory), export, progress, workers=workers)
    return Path(directory)


_geometry = geometry
