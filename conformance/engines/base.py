"""What an engine is to the judge, and the parts that every shipped one shares."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from conformance import rank_traces
from conformance.errors import EngineClosedError, EngineOptionError, TokenRangeError
from conformance.trace import Recorder, Schedule, Trace, metadata
from reference.errors import show
from reference.sharding import Mesh

LEAST = {"kda_chunk": 1, "timeout": 1}
"""Smallest value of an option that is a number."""


@runtime_checkable
class Engine(Protocol):
    """Opens a checkpoint directory, runs tokens through it, and can show the operands it bound.

    `open` takes options as keyword arguments (`arithmetic`, `device`, `tp`, `ep`, ...) and must refuse, with an
    InputError, one it does not understand. `run` starts from an empty state every time. `operands` answers None for a
    weight that it cannot show; the arrays it returns are compared bit by bit.
    """

    name: str
    version: str

    def open(self, directory: str | os.PathLike[str], **options: Any) -> None: ...

    def run(self, tokens: Sequence[int] | np.ndarray, schedule: Schedule, taps: str = "*") -> Trace: ...

    def operands(self, name: str) -> dict[str, np.ndarray] | None: ...


class BaseEngine(ABC):
    """Shared by the engines that compute: option checking, token checking, metadata.

    A subclass sets `name`, `version`, `options` (name -> default; a number stays a number) and `choices` (name -> the
    values allowed), fills `config`, `export` in `_open`, and
    implements `_run`; one that offers the options `tp` and `ep` also `_run_ranks`. `watch`, when set, is called with
    the name of every tap as it is computed (for progress bars).
    """

    name: ClassVar[str]
    version: ClassVar[str] = "0"
    options: ClassVar[Mapping[str, Any]] = {}
    choices: ClassVar[Mapping[str, Sequence[str]]] = {}

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.settings: dict[str, Any] = {}
        self.config: Any = None
        self.export = ""
        self.watch: Callable[[str], object] | None = None

    def open(self, directory: str | os.PathLike[str], **options: Any) -> None:
        """Raises EngineOptionError for an option the engine lacks, and whatever reading the checkpoint raises."""
        for key, value in options.items():
            if key not in self.options:
                raise EngineOptionError(
                    f"engine {self.name}: option {key}={value!r} is not offered; it has {', '.join(self.options)}"
                )
            self._check_option(key, value)
        self.settings = {**self.options, **options}
        self._open(Path(directory))
        self.directory = Path(directory)

    def _check_option(self, key: str, value: Any) -> None:
        """Raises EngineOptionError for a value of another type than the default, or outside `choices` and `LEAST`."""
        kind = type(self.options[key])
        if kind in (int, str) and type(value) is not kind:
            expected = "a whole number" if kind is int else "text"
            raise EngineOptionError(f"engine {self.name}: option {key}={show(value)}, expected {expected}")
        if key in self.choices and value not in self.choices[key]:
            expected = " or ".join(self.choices[key])
            raise EngineOptionError(f"engine {self.name}: {key} {show(value)}, expected {expected}")
        if key in LEAST and not LEAST[key] <= value < 2**31:
            raise EngineOptionError(f"engine {self.name}: {key} {value}, expected {LEAST[key]} to 2^31 - 1")

    def run(self, tokens: Sequence[int] | np.ndarray, schedule: Schedule, taps: str = "*") -> Trace:
        """Raises EngineClosedError before `open`, TokenRangeError for an id past the vocabulary."""
        ids = self._checked(tokens, schedule)
        if self.mesh.world > 1:
            return rank_traces.joined(self.run_ranks(ids, schedule, taps))
        recorder = Recorder(taps, convert=as_numpy)
        recorder("tokens", ids)
        recorder("logits", self._run(ids, schedule, self._reporter(recorder)))
        return Trace(self._metadata(schedule), recorder.taps())

    def run_ranks(self, tokens: Sequence[int] | np.ndarray, schedule: Schedule, taps: str = "*") -> list[Trace]:
        """As `run`, one trace per rank, in rank order (`conformance.rank_traces` joins them)."""
        ids = self._checked(tokens, schedule)
        recorders = [Recorder(taps, convert=as_numpy) for _ in range(self.mesh.world)]
        for recorder in recorders:
            recorder("tokens", ids)
        self._run_ranks(ids, schedule, recorders, taps)
        return [
            Trace(self._metadata(schedule) | {"rank": str(rank)}, recorder.taps())
            for rank, recorder in enumerate(recorders)
        ]

    def operands(self, name: str) -> dict[str, np.ndarray] | None:
        return None

    def rank_operands(self, rank: int, name: str) -> dict[str, np.ndarray] | None:
        """As `operands`, what one of several ranks bound."""
        return None

    @property
    def mesh(self) -> Mesh:
        """The options `tp` and `ep`. Raises MeshError."""
        return Mesh(**{key: self.settings.get(key, 1) for key in ("tp", "ep")})

    def _checked(self, tokens: Sequence[int] | np.ndarray, schedule: Schedule) -> np.ndarray:
        if self.directory is None:
            raise EngineClosedError(f"engine {self.name}: run before open")
        ids = check_tokens(tokens, self.config.text.vocab_size)
        if schedule.tokens != len(ids):
            raise EngineOptionError(f"schedule feeds {schedule.tokens} tokens, the input has {len(ids)}")
        return ids

    def _metadata(self, schedule: Schedule) -> dict[str, str]:
        assert self.directory is not None
        return metadata(
            engine=self.name,
            engine_version=self.version,
            checkpoint=self.directory.resolve().name,
            config_sha256=self.config.sha256,
            export=self.export,
            schedule=schedule,
            **self._describe(),
        )

    @abstractmethod
    def _open(self, directory: Path) -> None:
        """Reads the checkpoint with `settings`, and fills `config` and `export`."""

    @abstractmethod
    def _run(self, ids: np.ndarray, schedule: Schedule, tap: Callable[[str, Any], None]) -> Any:
        """-> logits [T, V] of all real tokens, in order."""

    def _run_ranks(self, ids: np.ndarray, schedule: Schedule, recorders: Sequence[Recorder], taps: str) -> None:
        """Each rank's taps and logits go to its recorder; `taps` are the globs that recorders keep.

        Raises EngineOptionError where the engine knows one rank only.
        """
        raise EngineOptionError(f"engine {self.name}: runs on one rank, asked for {self.mesh.world}")

    def _reporter(self, recorder: Recorder) -> Callable[[str, Any], None]:
        """The tap a model gets: `tokens` and `logits` are stored by `run` itself, from what went in and came out."""

        def report(name: str, value: Any) -> None:
            if self.watch is not None:
                self.watch(name)
            if name not in ("tokens", "logits"):
                recorder(name, value)

        return report

    def _describe(self) -> dict[str, Any]:
        """Keyword arguments for `conformance.trace.metadata`: arithmetic, tp, ep, extra."""
        return {key: self.settings[key] for key in ("arithmetic", "tp", "ep") if key in self.settings}


def check_tokens(tokens: Sequence[int] | np.ndarray, vocab: int) -> np.ndarray:
    """-> I32 [T]; raises TokenRangeError naming the first id outside 0..vocab-1 and where it stands."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise TokenRangeError(f"tokens: {ids.dtype} {list(ids.shape)}, expected a non-empty list of integers")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(outside):
        raise TokenRangeError(f"tokens: id {ids[outside[0]]} at position {outside[0]}, expected 0 to {vocab - 1}")
    return ids.astype(np.int32)


def as_numpy(value: Any) -> np.ndarray:
    """Anything with the array protocol, and torch tensors of every dtype (bfloat16 included) from any device."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    import ml_dtypes
    import torch

    tensor = value.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def drafts(name: str, value: Any, most: int | None = None) -> int:
    """Option `mtp`, the number of drafts: 0 to `most`. Raises EngineOptionError."""
    if not isinstance(value, int) or value < 0 or (most is not None and value > most):
        limit = "0 or more" if most is None else f"0 to {most}"
        raise EngineOptionError(f"engine {name}: option mtp={value!r}, expected {limit}")
    return value


def told(drafts: int) -> dict[str, str]:
    """The number of drafts as metadata: only of a run that had any."""
    return {"mtp": str(drafts)} if drafts else {}


class Hidden:
    """A tap that passes everything on and keeps what enters lm_head, for a draft block to read afterwards."""

    def __init__(self, tap: Callable[[str, Any], None]) -> None:
        self._tap = tap
        self.parts: list[Any] = []

    def __call__(self, name: str, value: Any) -> None:
        if name == "final.norm":
            self.parts.append(value)
        self._tap(name, value)


def feed(model: Any, ids: np.ndarray, schedule: Schedule, vocab: int, tap: Callable[[str, Any], None]) -> np.ndarray:
    """Drive a model that has the verbs `prefill(tokens, tap=, pad=)` and `decode(token, tap=)`; -> logits [T, V].

    The pad positions are filled with the last id of the vocabulary, whose embedding is not zero: what hides them must
    be the engine's padding rule. Their logits, where a model returns any, are dropped.
    """
    rows, start = [], 0
    for index, length in enumerate(schedule.prefill):
        pad = schedule.pad if index == 0 else 0
        chunk = np.concatenate([np.full(pad, vocab - 1, ids.dtype), ids[start : start + length]])
        rows.append(as_numpy(model.prefill(chunk, tap=tap, pad=pad))[-length:])
        start += length
    for token in ids[start:]:
        rows.append(as_numpy(model.decode(int(token), tap=tap))[None])
    return np.concatenate(rows)
