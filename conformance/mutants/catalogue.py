"""All mutants: every module of this package that has `MUTANTS`, in the order of the list."""

from __future__ import annotations

import functools
import importlib
import pkgutil

import conformance.mutants
from conformance.mutants.record import Mutant

MACHINERY = ("bench", "catalogue", "page", "probes", "record", "runner")


@functools.cache
def mutants() -> tuple[Mutant, ...]:
    names = [info.name for info in pkgutil.iter_modules(conformance.mutants.__path__)]
    modules = [importlib.import_module(f"conformance.mutants.{name}") for name in names if name not in MACHINERY]
    return tuple(mutant for module in modules for mutant in module.MUTANTS)


def by_name() -> dict[str, Mutant]:
    return {mutant.name: mutant for mutant in mutants()}
