"""One injected fault as data: what it is, where it sits, which tap has to fail first, and a patch that applies it.

A patch replaces attributes of modules and classes of the engine while a run is made (`patch.applied()`), then edits the
opened model (`patch.edit`). Everything is restored afterwards; models are made anew for each fault.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Make = Callable[[Any], Any]
Edit = Callable[[Any], None]
ODD: dict[str, Any] = {"geometry": "odd", "export": "libertai"}
"""Where numbers that are usual in `tiny` are not."""


@dataclass(frozen=True)
class Patch:
    """`swaps`: ("package.module:attribute.path", original -> replacement). `edits` get the opened `TextModel`; `edited`
    is where what they change is kept.
    """

    swaps: tuple[tuple[str, Make], ...] = ()
    edits: tuple[Edit, ...] = ()
    edited: str = ""

    def __add__(self, other: Patch) -> Patch:
        return Patch(self.swaps + other.swaps, self.edits + other.edits, self.edited or other.edited)

    @property
    def where(self) -> str:
        """The first thing changed, as "module:attribute"."""
        return self.edited or self.swaps[0][0]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Raises AttributeError for a target that does not exist."""
        undo: list[tuple[Any, str, Any]] = []
        try:
            for target, make in self.swaps:
                owner, name = resolve(target)
                original = vars(owner)[name]
                undo.append((owner, name, original))
                setattr(owner, name, make(original))
            yield
        finally:
            for owner, name, original in reversed(undo):
                setattr(owner, name, original)

    def edit(self, model: Any) -> None:
        for edit in self.edits:
            edit(model)


@dataclass(frozen=True)
class Mutant:
    """`fault` is the class it counts in, `source` a field bug ("FB65") or a place in the specification.

    `where` is the engine's "module:attribute" at fault. `first_tap` are globs, each standing for the first place in
    dataflow order that it matches; the first divergence has to be one of these. After all taps come the weights, for
    faults so small that only they show them. `operand` is a glob of the weight whose bound operand differs, where one
    does. `probe` names how it is judged (`probes.PROBES`): by a trace, unless the fault touches no trace. `export`,
    `geometry`, `case` and `options` (for `Engine.open`) are what it shows on. `equivalent` says why no input can show
    it. `fast` marks the CI subset.
    """

    name: str
    fault: str
    source: str
    where: str
    first_tap: tuple[str, ...]
    patch: Patch
    operand: str = ""
    probe: str = "trace"
    export: str = "nvidia"
    geometry: str = "tiny"
    case: str = "chunks"
    options: Mapping[str, Any] = field(default_factory=dict)
    equivalent: str | None = None
    fast: bool = False


def family(fault: str) -> Callable[..., Mutant]:
    """A short way to write the records of one class: name, source, first taps (a string of globs), patch, the rest."""

    def make(name: str, source: str, first_tap: str, patch: Patch, **rest: Any) -> Mutant:
        rest.setdefault("where", patch.where)
        return Mutant(name=name, fault=fault, source=source, first_tap=tuple(first_tap.split()), patch=patch, **rest)

    return make


def resolve(target: str) -> tuple[Any, str]:
    """ "module:a.b" -> (the object that holds b, "b"). Raises AttributeError when the last step is not its own."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *steps, name = path.split(".")
    for step in steps:
        owner = getattr(owner, step)
    if name not in vars(owner):
        raise AttributeError(f"{target}: {getattr(owner, '__name__', owner)} has no {name} of its own")
    return owner, name


def replace(target: str, value: Any) -> Patch:
    """The attribute becomes `value`."""
    return Patch(((target, lambda original: value),))


def _takes_all(target: str, wrapper: Callable[..., Any], original: Any) -> None:
    """Otherwise a caller that gives one parameter more would end in an error, which is no fault that was injected."""
    parameters = inspect.signature(original).parameters.values()
    named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    placed = [None for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    try:
        inspect.signature(wrapper).bind(original, *placed, **named)
    except TypeError as error:
        raise TypeError(f"{target}: the wrapper does not take what the function does: {error}") from None


def around(target: str, wrapper: Callable[..., Any]) -> Patch:
    """A function f becomes (*args) -> wrapper(f, *args). Applying it raises TypeError where the wrapper does not take
    all that f takes."""

    def make(original: Any) -> Any:
        _takes_all(target, wrapper, original)

        @functools.wraps(original)
        def wrapped(*args: Any, **named: Any) -> Any:
            return wrapper(original, *args, **named)

        return wrapped

    return Patch(((target, make),))


def output(target: str, change: Callable[[Any], Any]) -> Patch:
    """A function's result goes through `change`."""
    return around(target, lambda original, *args, **named: change(original(*args, **named)))


def argument(target: str, position: int | str, change: Callable[[Any], Any]) -> Patch:
    """One argument of a function, by position or keyword, goes through `change`."""

    def wrapper(original: Any, *args: Any, **named: Any) -> Any:
        if isinstance(position, str):
            return original(*args, **named | {position: change(named[position])})
        changed = list(args)
        changed[position] = change(changed[position])
        return original(*changed, **named)

    return around(target, wrapper)


def bound(suffix: str, change: Callable[[Any], Any], *, layer: int | None = None) -> Patch:
    """What loading binds for unpacked weights whose name ends in `suffix` (of one layer): seen by model and operands.

    `fast.model` calls `load`, so that its name there is what is replaced.
    """

    def wrapper(original: Any, *args: Any, **named: Any) -> Any:
        weights = original(*args, **named)
        for name, value in weights._values.items():
            if name.endswith(suffix) and (layer is None or f".layers.{layer}." in name):
                weights._values[name] = change(value.clone())
        return weights

    return around("fast.model:load", wrapper)


def packed(suffix: str, part: str, change: Callable[[Any], Any], *, layer: int | None = None) -> Patch:
    """As `bound`, for `part` (codes, scale, scale_2) of packed weights; `suffix` without ".weight"."""

    def wrapper(original: Any, *args: Any, **named: Any) -> Any:
        weights = original(*args, **named)
        for name, value in weights._packed.items():
            if name.endswith(suffix) and (layer is None or f".layers.{layer}." in name):
                parts = {key: getattr(value, key) for key in ("codes", "scale", "scale_2")}
                weights._packed[name] = type(value)(**parts | {part: change(parts[part].clone())})
        return weights

    return around("fast.model:load", wrapper)


def configured(**changed: Any) -> Patch:
    """Fields of the engine's text config that were read wrong: value, or a function of the right one.

    Only what the model computes with changes; the weights are laid out by the file.
    """
    import dataclasses

    def wrapper(original: Any, *args: Any, **named: Any) -> Any:
        weights = original(*args, **named)
        text = weights.config.text
        fields = {key: value(getattr(text, key)) if callable(value) else value for key, value in changed.items()}
        config = dataclasses.replace(weights.config, text=dataclasses.replace(text, **fields))
        return dataclasses.replace(weights, config=config)

    return around("fast.model:load", wrapper)


def layers(kind: str, change: Edit) -> Patch:
    """`change(part)` on every "kda" or "dsa" mixer, "dense" or "moe" block, "indexer" or "layer" of the model."""

    def edit(model: Any) -> None:
        for layer in model.layers:
            block = "moe" if layer.sparse else "dense"
            if kind == "layer":
                change(layer)
            elif kind == layer.kind:
                change(layer.attn)
            elif kind == block:
                change(layer.mlp)
            elif kind == "indexer" and layer.kind == "dsa" and layer.attn.indexer is not None:
                change(layer.attn.indexer)

    names = {"kda": "Kda", "dsa": "Dsa", "dense": "Dense", "moe": "Moe", "indexer": "Indexer", "layer": "Layer"}
    return Patch(edits=(edit,), edited=f"fast.layers:{names[kind]}")


def swap(kind: str, first: str, second: str) -> Patch:
    """Two attributes of every part of a kind change places."""

    def change(part: Any) -> None:
        a, b = getattr(part, first), getattr(part, second)
        setattr(part, first, b)
        setattr(part, second, a)

    return layers(kind, change)


def attribute(kind: str, name: str, change: Callable[[Any], Any]) -> Patch:
    """An attribute of every part of a kind goes through `change`: what the file says stays in the operands."""
    return layers(kind, lambda part: setattr(part, name, change(getattr(part, name))))
