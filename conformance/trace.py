"""The trace file `glm53-trace/1`: what an engine computed, in a form any program can write.

A trace is a safetensors file. Its metadata are strings; every tap is stored once, all positions stacked along axis 0,
whatever chunks the engine worked in. This module reads and writes such files, joins the pieces an engine reports
(`Recorder`), and checks a trace against a checkpoint's config (`inspect`, `validate`). It knows NumPy arrays only.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from conformance.errors import (
    TapChunkError,
    TapDtypeError,
    TapMissingError,
    TapShapeError,
    TokenRangeError,
    TraceError,
    TraceFormatError,
    TraceHeaderError,
    TraceMetadataError,
    TraceScheduleError,
    TraceTruncatedError,
    TraceUnreadableError,
)
from conformance.files import write_whole
from conformance.taps import expected
from reference.errors import InputError, show

FORMAT = "glm53-trace/1"
REQUIRED_TAPS = ("tokens", "logits")
REQUIRED_METADATA = (
    "format",
    "engine",
    "engine_version",
    "checkpoint",
    "config_sha256",
    "export",
    "arithmetic",
    "tp",
    "ep",
    "schedule",
)
PARTIAL_SUMS = "partial_sums"
"""Metadata key of engines on several ranks: `fp32` or `bf16`, what ranks hand to the all-reduce. Without it, `bf16`."""
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_CAP = 100_000_000
_INTEGER_TAPS = ("tokens", ".selected", ".indices")
_LOGIT_TAPS = ("logits", "mtp.logits")


@dataclass(frozen=True)
class Schedule:
    """How the tokens were fed: chunk lengths of the prefill, then `decode` single tokens; `pad` ids left of the first.

    `pad` positions are not tokens: no tap holds a row for them.
    """

    prefill: tuple[int, ...]
    decode: int = 0
    pad: int = 0

    def __post_init__(self) -> None:
        if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in self.prefill):
            raise TraceScheduleError(f"schedule: prefill is {list(self.prefill)}, expected positive integers")
        for name in ("decode", "pad"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise TraceScheduleError(f"schedule: {name} is {value!r}, expected an integer >= 0")
        if self.tokens == 0:
            raise TraceScheduleError("schedule: feeds no token")
        if self.pad and not self.prefill:
            raise TraceScheduleError(f"schedule: pad is {self.pad} but there is no prefill chunk to pad")

    @property
    def tokens(self) -> int:
        """Number of real tokens fed."""
        return sum(self.prefill) + self.decode

    @property
    def cuts(self) -> tuple[int, ...]:
        """Tokens of each call, in order."""
        return (*self.prefill, *[1] * self.decode)

    @classmethod
    def of(cls, tokens: int, *, decode: int = 0, chunk: int | None = None, pad: int = 0) -> Schedule:
        """The last `decode` of `tokens` one at a time, the rest before them in chunks of `chunk` (default: one)."""
        if not 0 <= decode <= tokens:
            raise TraceScheduleError(f"schedule: decode {decode} of {tokens} tokens, expected 0 to {tokens}")
        if chunk is not None and chunk < 1:
            raise TraceScheduleError(f"schedule: prefill chunk {chunk}, expected at least 1")
        rest = tokens - decode
        step = chunk or max(rest, 1)
        return cls(tuple(min(step, rest - start) for start in range(0, rest, step)), decode, pad)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """From the JSON of a trace's metadata; raises TraceScheduleError."""
        try:
            value = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise TraceScheduleError(f"schedule: {show(text)} is not JSON ({error})") from None
        if not isinstance(value, dict) or not isinstance(value.get("prefill"), list):
            raise TraceScheduleError(
                f'schedule: {show(text)}, expected an object such as {{"prefill": [32], "decode": 6}}'
            )
        if unknown := set(value) - {"prefill", "decode", "pad"}:
            raise TraceScheduleError(f"schedule: unknown keys {sorted(unknown)}")
        return cls(tuple(value["prefill"]), value.get("decode", 0), value.get("pad", 0))

    def json(self) -> str:
        """The metadata form; `pad` only when there is any."""
        out: dict[str, Any] = {"prefill": list(self.prefill), "decode": self.decode}
        return json.dumps(out | {"pad": self.pad} if self.pad else out)


@dataclass(frozen=True)
class Trace:
    """One run: `metadata` (strings) and `taps` (name -> array, all positions along axis 0)."""

    metadata: dict[str, str]
    taps: dict[str, np.ndarray] = field(repr=False)

    @property
    def schedule(self) -> Schedule:
        return Schedule.parse(self.metadata["schedule"])

    @property
    def tokens(self) -> np.ndarray:
        return self.taps["tokens"]

    @property
    def rows(self) -> int:
        """Tokens that the stored taps hold rows for, whatever axes `tokens` has; 0 where nothing tells."""
        stored = (self.taps[name] for name in REQUIRED_TAPS if name in self.taps)
        return next((tap.shape[0] for tap in stored if tap.ndim), 0)

    @property
    def logits(self) -> np.ndarray:
        return self.taps["logits"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file under a temporary name and rename it, so that no reader ever sees half of one.

        Raises TraceMetadataError for a value that is not a string, TraceHeaderError for a dtype that safetensors lacks.
        """
        path = Path(path)
        for key, value in self.metadata.items():
            if not isinstance(value, str):
                raise TraceMetadataError(f"{path}: metadata {key} is {value!r}, expected a string")
        header: dict[str, Any] = {"__metadata__": self.metadata}
        arrays, offset = [], 0
        for name, tap in self.taps.items():
            array = np.ascontiguousarray(tap).reshape(np.shape(tap))
            array = array.astype(array.dtype.newbyteorder("<"), copy=False)
            if array.dtype not in DTYPE_NAMES:
                known = ", ".join(DTYPES)
                raise TraceHeaderError(f"{path}: tap {name} has dtype {array.dtype}, expected one of {known}")
            header[name] = {
                "dtype": DTYPE_NAMES[array.dtype],
                "shape": list(array.shape),
                "data_offsets": [offset, offset + array.nbytes],
            }
            arrays.append(array)
            offset += array.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        write_whole(path, itertools.chain([struct.pack("<Q", len(text)) + text], (array.tobytes() for array in arrays)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a file strictly; the arrays are read-only views of the mapped file.

        Raises TraceUnreadableError, TraceTruncatedError, TraceHeaderError, TraceFormatError, TraceMetadataError,
        TraceScheduleError or TapMissingError, each naming the file and the tap or key. Shapes are not checked here:
        that needs a config (`validate`).
        """
        path = Path(path)
        try:
            header, start = _read_header(path)
        except OSError as error:
            raise TraceUnreadableError(f"{path}: cannot be read: {error.strerror or error}") from None
        metadata = header.pop("__metadata__", {})
        _check_metadata(path, metadata)
        data = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
        taps = {}
        for name, (dtype, shape, begin, end) in _ranges(path, header, len(data) - start).items():
            taps[name] = np.frombuffer(data[start + begin : start + end], dtype=dtype).reshape(shape)
        for name in REQUIRED_TAPS:
            if name not in taps:
                raise TapMissingError(f"{path}: tap {name} is missing; every trace needs {' and '.join(REQUIRED_TAPS)}")
        return cls(metadata, taps)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """-> (header object, offset of the data section)."""
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or path.is_dir()):
        # Opening a pipe would wait for whoever writes into it.
        raise TraceUnreadableError(f"{path}: cannot be read: not a regular file")
    size = status.st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + length > size:
            raise TraceTruncatedError(f"{path}: {size} bytes, but its header alone needs {8 + length}")
        if not 2 <= length <= _HEADER_CAP:
            raise TraceHeaderError(f"{path}: header of {length} bytes, expected 2 to {_HEADER_CAP}")
        text = file.read(length)

    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise TraceHeaderError(f"{path}: header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise TraceHeaderError(f"{path}: header is a {type(header).__name__}, expected an object")
    for name in header:
        # A report prints names as they are: none may steer a terminal or break a line.
        if not name.isprintable() or not name:
            raise TraceHeaderError(f"{path}: tap name {show(name)} is not printable text")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose keys differ; raises ValueError naming the one that is there twice."""
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"{show(key)} is there twice")
        seen[key] = value
    return seen


def _ranges(
    path: Path, header: dict[str, Any], available: int
) -> dict[str, tuple[np.dtype[Any], tuple[int, ...], int, int]]:
    """Checked (dtype, shape, begin, end) per tap; the ranges must tile the data section without hole or overlap."""
    out = {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
            raise TraceHeaderError(f"{path}: tap {name}: entry {show(entry)}, expected dtype, shape and data_offsets")
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
            raise TraceHeaderError(
                f"{path}: tap {name}: dtype {show(entry['dtype'])}, expected one of {', '.join(DTYPES)}"
            )
        shape, offsets = entry["shape"], entry["data_offsets"]
        numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
        if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or len(offsets) != 2:
            sizes = f"shape {show(shape)}, data_offsets {show(offsets)}"
            raise TraceHeaderError(f"{path}: tap {name}: {sizes} are not sizes")
        dtype = DTYPES[entry["dtype"]]
        nbytes = dtype.itemsize
        for axis in shape:
            nbytes *= axis
        if offsets[1] - offsets[0] != nbytes:
            raise TraceHeaderError(
                f"{path}: tap {name}: {offsets[1] - offsets[0]} bytes stored, {entry['dtype']} {shape} needs {nbytes}"
            )
        out[name] = (dtype, tuple(shape), offsets[0], offsets[1])
    position = 0
    for name, (_, _, begin, end) in sorted(out.items(), key=lambda item: item[1][2:]):
        if begin != position:
            raise TraceHeaderError(f"{path}: tap {name} starts at byte {begin}, the one before it ends at {position}")
        position = end
    if position != available:
        raise TraceTruncatedError(f"{path}: {available} bytes of data, its header describes {position}")
    return out


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or "format" not in metadata:
        raise TraceFormatError(f"{path}: no metadata key format, expected {FORMAT}")
    if metadata["format"] != FORMAT:
        raise TraceFormatError(f"{path}: format {show(metadata['format'])}, expected {FORMAT}")
    for key in REQUIRED_METADATA:
        if key not in metadata:
            raise TraceMetadataError(f"{path}: metadata {key} is missing; needed are {', '.join(REQUIRED_METADATA)}")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise TraceMetadataError(f"{path}: metadata {show(key)} is {show(value)}, expected a string")
        if not (key + value).isprintable():
            raise TraceMetadataError(f"{path}: metadata {show(key)} is {show(value)}, expected printable text")
    for key in ("tp", "ep"):
        if not re.fullmatch(r"0*[1-9][0-9]{0,5}", metadata[key]):
            raise TraceMetadataError(f"{path}: metadata {key} is {show(metadata[key])}, expected a number, 1 to 999999")
    try:
        Schedule.parse(metadata["schedule"])
    except TraceScheduleError as error:
        raise TraceScheduleError(f"{path}: {error}") from None


def wanted(name: str, globs: Iterable[str]) -> bool:
    """Whether a tap passes a filter: any glob matches, or the trace could not exist without it."""
    return name in REQUIRED_TAPS or any(fnmatch.fnmatchcase(name, glob) for glob in globs)


class Recorder:
    """A `tap(name, array)` callable that keeps copies and joins the pieces of a chunked run.

    Joined along axis 0 in call order; `.state` and `.conv_state` keep the last one; `.scores` [T, pools so far] are
    padded on the right with -inf, since a pool that did not exist yet was no candidate. `convert` turns whatever the
    engine passes into a NumPy array (default: NumPy's own conversion).
    """

    def __init__(self, taps: str | Iterable[str] = "*", *, convert: Callable[[Any], np.ndarray] = np.asarray) -> None:
        self._globs = tuple(part for part in (taps.split(",") if isinstance(taps, str) else taps) if part)
        self._convert = convert
        self._pieces: dict[str, list[np.ndarray]] = {}

    def __call__(self, name: str, array: Any) -> None:
        if not wanted(name, self._globs):
            return
        piece = np.array(self._convert(array), copy=True)
        if name.endswith((".state", ".conv_state")):
            self._pieces[name] = [piece]
        else:
            self._pieces.setdefault(name, []).append(piece)

    def taps(self) -> dict[str, np.ndarray]:
        """name -> joined array. Indices become I32 and logits F32, as the format stores them; TapChunkError if not
        joinable."""
        return {name: _store(name, _join(name, pieces)) for name, pieces in self._pieces.items()}


def _join(name: str, pieces: list[np.ndarray]) -> np.ndarray:
    if name.endswith(".scores") and all(piece.ndim == 2 for piece in pieces):
        width = max(piece.shape[1] for piece in pieces)
        pieces = [
            np.pad(piece, ((0, 0), (0, width - piece.shape[1])), constant_values=piece.dtype.type(-np.inf))
            for piece in pieces
        ]
    first = pieces[0]
    for piece in pieces[1:]:
        if piece.ndim == 0 or piece.shape[1:] != first.shape[1:] or piece.dtype != first.dtype:
            raise TapChunkError(
                f"tap {name}: a chunk of {piece.dtype} {list(piece.shape)} follows one of "
                f"{first.dtype} {list(first.shape)}; only axis 0 may differ"
            )
    return first if len(pieces) == 1 else np.concatenate(pieces)


def _store(name: str, array: np.ndarray) -> np.ndarray:
    if name.endswith(_INTEGER_TAPS) and array.dtype.kind in "iu":
        return array.astype(np.int32, copy=False)
    if name in _LOGIT_TAPS and array.dtype.kind in "fV":
        return array.astype(np.float32, copy=False)
    return array


def metadata(
    *,
    engine: str,
    engine_version: str,
    checkpoint: str,
    config_sha256: str,
    export: str,
    schedule: Schedule,
    arithmetic: str = "bf16",
    tp: int = 1,
    ep: int = 1,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The metadata every trace carries, plus `extra` keys (strings) an engine cares to add."""
    return {
        "format": FORMAT,
        "engine": engine,
        "engine_version": engine_version,
        "checkpoint": checkpoint,
        "config_sha256": config_sha256,
        "export": export,
        "arithmetic": arithmetic,
        "tp": str(tp),
        "ep": str(ep),
        "schedule": schedule.json(),
        **(extra or {}),
    }


@dataclass(frozen=True)
class Inspection:
    """What a trace holds, measured against a config: names only, plus the faults found."""

    present: tuple[str, ...]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    faults: tuple[InputError, ...]


def inspect(trace: Trace, config: Any) -> Inspection:
    """Every departure of `trace` from the format for `config` (reference.config.ModelConfig), without stopping at one.

    `missing` are taps an engine may leave out (a report lists them as not covered), `unknown` names no table knows;
    `faults` are what makes a trace unusable: `tokens` or `logits` absent, wrong axes, wrong dtype, a schedule that
    does not feed the stored tokens, a token outside the vocabulary.
    """
    faults: list[InputError] = [
        TapMissingError(f"tap {name} is missing; every trace needs {' and '.join(REQUIRED_TAPS)}")
        for name in REQUIRED_TAPS
        if name not in trace.taps
    ]
    tokens = trace.taps.get("tokens")
    count = trace.rows
    specs = expected(config, count)
    lengths: dict[str, tuple[int, str]] = {}
    for name, tap in trace.taps.items():
        if name not in specs:
            continue
        spec = specs[name]
        stored = DTYPE_NAMES.get(tap.dtype, str(tap.dtype))
        if stored not in spec.dtypes:
            faults.append(TapDtypeError(f"tap {name} has dtype {stored}, expected {' or '.join(spec.dtypes)}"))
        if fault := _shape_fault(name, tap.shape, spec.shape, spec.letters, lengths):
            faults.append(fault)
    if tokens is not None and tokens.dtype.kind in "iu":
        vocab = config.text.vocab_size
        outside = np.flatnonzero((tokens.reshape(-1) < 0) | (tokens.reshape(-1) >= vocab))
        if len(outside):
            at = int(outside[0])
            faults.append(TokenRangeError(f"tap tokens: id {tokens.reshape(-1)[at]} at {at}, vocabulary has {vocab}"))
    try:
        fed = Schedule.parse(trace.metadata.get("schedule", "")).tokens
        if fed != count:
            faults.append(TraceScheduleError(f"schedule feeds {fed} tokens, tap tokens holds {count}"))
    except TraceScheduleError as error:
        faults.append(error)
    return Inspection(
        present=tuple(name for name in specs if name in trace.taps),
        missing=tuple(name for name in specs if name not in trace.taps),
        unknown=tuple(name for name in trace.taps if name not in specs),
        faults=tuple(faults),
    )


def validate(trace: Trace, config: Any) -> Inspection:
    """`inspect`, but the first fault is raised (a TraceError or TokenRangeError that counts the others)."""
    found = inspect(trace, config)
    if found.faults:
        first, others = found.faults[0], len(found.faults) - 1
        raise type(first)(f"{first}" + (f" (and {others} more)" if others else ""))
    return found


def _shape_fault(
    name: str, shape: tuple[int, ...], want: tuple[int | str, ...], letters: str, lengths: dict[str, tuple[int, str]]
) -> TraceError | None:
    """None, or what is wrong with `shape`. `lengths`: free axis letter -> (length, first tap that showed it)."""
    axes = f"[{', '.join(letters.split())}]"
    if len(shape) != len(want):
        return TapShapeError(f"tap {name} has {len(shape)} axes {list(shape)}, expected {len(want)}: {axes}")
    for axis, (found, length) in enumerate(zip(shape, want, strict=True)):
        if isinstance(length, str):
            known, source = lengths.setdefault(length, (found, name))
            if found != known:
                return TapShapeError(f"tap {name}: axis {axis} of {axes} is {found}, but {known} in tap {source}")
        elif found != length:
            return TapShapeError(f"tap {name}: axis {axis} of {axes} is {found}, expected {length}")
    return None
