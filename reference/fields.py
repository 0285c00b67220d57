"""Typed access to JSON objects: strict decoding, one error per wrong key, and a record of what was never read."""

import errno
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from reference import errors as e
from reference.keys import Unknown

MISSING = object()


def open_regular(path: Path) -> BinaryIO:
    """A file open for reading. Raises OSError; a pipe or a device in its place is refused, not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise e.HeaderDuplicateKeyError(f"key {e.show(twice)} appears twice in one object")
    return result


def _constant(text: str) -> Any:
    raise e.HeaderSyntaxError(f"{text} is not JSON")


def decode_json(data: bytes) -> dict[str, Any]:
    """Decode one JSON object. Refuses duplicate keys, NaN and Infinity, other encodings than UTF-8, and non-objects.

    Raises `HeaderEncodingError`, `HeaderDuplicateKeyError` or `HeaderSyntaxError`; the caller adds the file's name.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise e.HeaderEncodingError(f"not UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise e.HeaderSyntaxError(f"not JSON: {e.show(str(error))}") from None
    if not isinstance(value, dict):
        raise e.HeaderSyntaxError(f"not a JSON object but a {type(value).__name__}")
    return value


class Fields:
    """One JSON object. `where` is the file, `path` the dotted prefix of its keys."""

    def __init__(self, raw: Mapping[str, Any], where: str, path: str, unknown: Unknown) -> None:
        self.raw = raw
        self.where = where
        self.path = path
        self.unknown = unknown
        self.seen: set[str] = set()

    def name(self, key: str) -> str:
        return f"{self.where}: {self.path}{key}"

    def optional(self, key: str) -> Any:
        self.seen.add(key)
        return self.raw.get(key)

    def required(self, key: str) -> Any:
        self.seen.add(key)
        value = self.raw.get(key, MISSING)
        if value is MISSING or value is None:
            raise e.ConfigMissingKeyError(f"{self.name(key)}: {'null' if value is None else 'missing'}; no default")
        return value

    def child(self, key: str) -> "Fields":
        value = self.required(key)
        if not isinstance(value, Mapping):
            raise e.ConfigTypeError(f"{self.name(key)}: {e.show(value)} is not an object")
        return Fields(value, self.where, f"{self.path}{key}.", self.unknown)

    def integer(self, key: str, least: int) -> int:
        value = self.required(key)
        if type(value) is not int:
            raise e.ConfigTypeError(f"{self.name(key)}: {e.show(value)} is not an integer")
        if not least <= value < 2**31:
            raise e.ConfigValueError(f"{self.name(key)}: {e.show(value)} is not in [{least}, 2^31)")
        return value

    def real(self, key: str, *, above: float | None = None, below: float | None = None) -> float:
        value = self.required(key)
        if type(value) not in (int, float):
            raise e.ConfigTypeError(f"{self.name(key)}: {e.show(value)} is not a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        bad = not math.isfinite(number)
        if bad or (above is not None and number <= above) or (below is not None and number >= below):
            limit = f"above {above}" if above is not None else f"below {below}"
            raise e.ConfigValueError(f"{self.name(key)}: {e.show(value)} is not a finite number {limit}")
        return number

    def boolean(self, key: str) -> bool:
        value = self.required(key)
        if type(value) is not bool:
            raise e.ConfigTypeError(f"{self.name(key)}: {e.show(value)} is not true or false")
        return value

    def flag(self, key: str, only: bool, *, optional: bool = False) -> None:
        """A switch of which one position exists."""
        if optional and self.optional(key) is None:
            return
        if self.boolean(key) is not only:
            raise e.ConfigUnsupportedError(
                f"{self.name(key)}: {str(not only).lower()}; only {str(only).lower()} is known"
            )

    def enum(self, key: str, values: tuple[Any, ...], *, optional: bool = False) -> Any:
        if optional and self.optional(key) is None:
            return None
        value = self.required(key)
        if not isinstance(value, str) or value not in values:
            raise e.ConfigEnumError(f"{self.name(key)}: {e.show(value)}; known: {', '.join(map(repr, values))}")
        return value

    def equals(self, key: str, expected: Any) -> None:
        value = self.required(key)
        if type(value) is not type(expected) or value != expected:
            raise e.ConfigUnsupportedError(f"{self.name(key)}: {e.show(value)}; expected {expected!r}")

    def restates(self, key: str, expected: int | float) -> None:
        value = self.optional(key)
        if value is None:
            return
        if type(value) not in (int, float):
            raise e.ConfigTypeError(f"{self.name(key)}: {e.show(value)} is not a number")
        if value != expected:
            raise e.ConfigContradictionError(f"{self.name(key)}: {e.show(value)}, but other keys make it {expected!r}")

    def items(self, key: str) -> list[Any]:
        value = self.required(key)
        if not isinstance(value, list):
            raise e.ConfigTypeError(f"{self.name(key)}: {e.show(value)} is not a list")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        values = self.items(key)
        for position, value in enumerate(values):
            if type(value) is not int:
                raise e.ConfigTypeError(f"{self.name(key)}[{position}]: {e.show(value)} is not an integer")
        return tuple(values)

    def strings(self, key: str) -> tuple[str, ...]:
        values = self.items(key)
        for position, value in enumerate(values):
            if not isinstance(value, str):
                raise e.ConfigTypeError(f"{self.name(key)}[{position}]: {e.show(value)} is not a string")
        return tuple(values)

    def names(self, key: str, length: int, known: tuple[str, ...]) -> tuple[str, ...] | None:
        """A list with one known word per layer, or None when absent."""
        if self.optional(key) is None:
            return None
        values = self.strings(key)
        for layer, value in enumerate(values):
            if value not in known:
                raise e.ConfigEnumError(
                    f"{self.name(key)}: layer {layer} is {e.show(value)}; known: {', '.join(map(repr, known))}"
                )
        if len(values) != length:
            raise e.ConfigLayersError(f"{self.name(key)}: {len(values)} entries for num_hidden_layers {length}")
        return values

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        value = self.optional(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for one in ids:
            if type(one) is not int:
                raise e.ConfigTypeError(f"{self.name(key)}: {e.show(one)} is not an integer")
            if not 0 <= one < vocab_size:
                raise e.ConfigValueError(f"{self.name(key)}: {e.show(one)} is not in 0..{vocab_size - 1}")
        return tuple(ids)

    def finish(self) -> None:
        """Judges the keys that were not read; see `Unknown`."""
        for key, value in self.raw.items():
            if key not in self.seen:
                self.unknown.judge(self.where, f"{self.path}{key}", value)
