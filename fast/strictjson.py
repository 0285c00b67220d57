"""Small JSON files: read with a cap, decode without lenience, and take values out with their type checked."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fast.errors import (
    ConfigContradictionError,
    ConfigDuplicateKeyError,
    ConfigMissingKeyError,
    ConfigSyntaxError,
    ConfigTooLargeError,
    ConfigTypeError,
    ConfigValueError,
    InputError,
    LayerListError,
    MissingFileError,
    NotRegularFileError,
)

MAX_CONFIG_BYTES = 4 << 20


class Section:
    """Typed access to one JSON object; every refusal names the key with its path."""

    def __init__(self, raw: Any, path: str) -> None:
        if not isinstance(raw, dict):
            raise ConfigTypeError(f"{path or 'the file'}: found {kind(raw)}, expected an object")
        self.raw, self.path = raw, path

    def where(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def need(self, key: str) -> Any:
        if key not in self.raw:
            raise ConfigMissingKeyError(f"{self.where(key)}: absent, and never defaulted")
        return self.raw[key]

    def integer(self, key: str, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigTypeError(f"{self.where(key)}: found {kind(value)}, expected a whole number")
        if not low <= value <= high:
            raise ConfigValueError(f"{self.where(key)}: found {value}, expected {low} .. {high}")
        return value

    def number(self, key: str) -> float:
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigTypeError(f"{self.where(key)}: found {kind(value)}, expected a number")
        value = float(value) if abs(value) < 1e300 else math.inf
        if not math.isfinite(value):
            raise ConfigValueError(f"{self.where(key)}: not a finite number")
        return value

    def positive(self, key: str) -> float:
        value = self.number(key)
        if value <= 0:
            raise ConfigValueError(f"{self.where(key)}: found {value}, expected more than 0")
        return value

    def flag(self, key: str) -> bool:
        value = self.need(key)
        if not isinstance(value, bool):
            raise ConfigTypeError(f"{self.where(key)}: found {kind(value)}, expected true or false")
        return value

    def only(self, key: str, *allowed: Any, optional: bool = False) -> Any:
        """The value of an enum-like key; anything outside `allowed` would be computed wrongly, so it is refused. Null
        stands for an absent key where that is optional."""
        if optional and self.raw.get(key) is None:
            return None
        value = self.need(key)
        if not any(type(value) is type(a) and value == a for a in allowed):
            expected = " or ".join(json.dumps(a) for a in allowed)
            raise ConfigValueError(f"{self.where(key)}: found {short(value)}, expected {expected}")
        return value

    def same(self, key: str, expected: Any, because: str) -> None:
        value = self.raw.get(key)
        if value is not None and (value != expected or type(value) not in (int, float)):
            found = short(value)
            raise ConfigContradictionError(f"{self.where(key)}: found {found}, but {because} is {expected}")

    def texts(self, key: str, length: int) -> tuple[str, ...] | None:
        if self.raw.get(key) is None:
            return None
        value = self.raw[key]
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ConfigTypeError(f"{self.where(key)}: expected a list of strings")
        if len(value) != length:
            raise LayerListError(
                f"{self.where(key)}: found {len(value)} entries, expected num_hidden_layers = {length}"
            )
        return tuple(value)

    def strings(self, key: str, *, optional: bool = False) -> tuple[str, ...]:
        value = self.raw.get(key) if optional else self.need(key)
        if value is None and optional:
            return ()
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ConfigTypeError(f"{self.where(key)}: expected a list of strings")
        return tuple(value)

    def layers(self, key: str, count: int) -> tuple[int, ...]:
        value = self.need(key)
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise ConfigTypeError(f"{self.where(key)}: expected a list of layer indices")
        seen: set[int] = set()
        for layer in value:
            if not 0 <= layer < count:
                raise LayerListError(f"{self.where(key)}: layer {layer} outside 0 .. {count - 1} (lists are 0-based)")
            if layer in seen:
                raise LayerListError(f"{self.where(key)}: layer {layer} named twice")
            seen.add(layer)
        return tuple(sorted(seen))


def kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), short(value))


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Refusals of what is read inside begin with the path of the file."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{path}: {error}") from None


def read_small(path: Path) -> bytes:
    """The bytes of a small regular file; a pipe or device in its place is refused, not waited for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MissingFileError(f"{path}: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotRegularFileError(f"{path}: not a regular file")
        if status.st_size > MAX_CONFIG_BYTES:
            raise ConfigTooLargeError(f"{path}: {status.st_size} bytes, expected at most {MAX_CONFIG_BYTES}")
        return file.read(MAX_CONFIG_BYTES)


def decode(data: bytes) -> Any:
    """Raises ConfigSyntaxError and ConfigDuplicateKeyError; the caller names the file."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in items:
            if key in out:
                raise ConfigDuplicateKeyError(f"key {short(key)} given twice in one object")
            out[key] = value
        return out

    def constant(text: str) -> Any:
        raise ConfigSyntaxError(f"{text} is not JSON")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise ConfigSyntaxError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ConfigSyntaxError("nested too deeply") from None
    except ValueError as error:
        raise ConfigSyntaxError(f"not JSON: {error}") from None
