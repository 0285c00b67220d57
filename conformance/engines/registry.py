"""Finding an engine by name: entry points of the group `glm53.engines`, or `package.module:Class`."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from conformance.engines.base import Engine
from conformance.errors import EngineNotFoundError

GROUP = "glm53.engines"
SHIPPED = {
    "reference": "conformance.engines.reference:ReferenceEngine",
    "fast": "conformance.engines.fast:FastEngine",
    "transformers": "conformance.engines.transformers:TransformersEngine",
    "file": "conformance.engines.file:FileEngine",
}


def names() -> list[str]:
    """Every name that `create` takes besides a path, sorted."""
    return sorted({*SHIPPED, *(point.name for point in importlib.metadata.entry_points(group=GROUP))})


def create(name: str) -> Engine:
    """An unopened engine.

    A name is looked up among the shipped engines, then among the installed entry points of `glm53.engines`; a name
    with a colon is imported. Raises EngineNotFoundError naming what was looked for and what exists.
    """
    target = name
    if ":" not in name:
        points = {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}
        if name not in SHIPPED and name not in points:
            raise EngineNotFoundError(
                f"engine {name}: unknown; there are {', '.join(names())}, or give package.module:Class"
            )
        target = SHIPPED.get(name) or points[name]
    return _instance(name, _load(name, target))


def _load(name: str, target: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except Exception as error:  # A module of someone else's may raise anything while it is imported.
        raise EngineNotFoundError(f"engine {name}: cannot import {module or 'a nameless module'} ({error})") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise EngineNotFoundError(f"engine {name}: {module} has no {attribute}")
        value = getattr(value, part)
    return value


def _instance(name: str, cls: Any) -> Engine:
    if not callable(cls):
        raise EngineNotFoundError(f"engine {name}: {cls!r} is not a class")
    try:
        engine = cls()
    except Exception as error:  # So may its constructor.
        told = f"{type(error).__name__}: {error}"
        raise EngineNotFoundError(f"engine {name}: {cls!r} cannot be made without arguments ({told})") from error
    lacking = [verb for verb in ("name", "version", "open", "run", "operands") if not hasattr(engine, verb)]
    if lacking:
        raise EngineNotFoundError(f"engine {name}: {cls.__name__} lacks {', '.join(lacking)}")
    return engine
