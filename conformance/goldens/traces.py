"""Traces of the reference, for both geometries, exports and arithmetics, and longer runs of which only hashes stay.

A stored trace keeps small taps whole and, of the large ones, the rows in `ROWS`; a hash of every row says which others
differ. Unlike a trace file it keeps `exact` taps as float64, logits too: a float32 copy would hide the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from conformance.checkpoints.source import integers, key_of
from conformance.goldens.case import Case, Item, Made, Workspace
from reference.checkpoint import open_checkpoint
from reference.model import TextModel
from reference.mtp import Block, Speculation
from reference.ranks import ShardedModel

SEED = 7
PREFILL, DECODE = (29, 11), 5
ROWS = {
    ("tiny", "exact"): (0, 33, 44),
    ("tiny", "bf16"): (0, 5, 12, 28, 31, 34, 39, 40, 44),
    ("odd", "exact"): (0, 12, 28, 34, 44),
    ("odd", "bf16"): (0, 3, 5, 8, 12, 17, 25, 28, 34, 39, 40, 44),
}
WHOLE_ROW_BYTES = 64


@dataclass(frozen=True)
class Run:
    """How the tokens are fed and what the model is asked to be."""

    geometry: str
    export: str
    arithmetic: str
    prefill: tuple[int, ...] = PREFILL
    decode: int = DECODE
    pad: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, int] = (1, 1)

    def settings(self) -> dict[str, Any]:
        schedule = {"prefill": list(self.prefill), "decode": self.decode, "pad": self.pad}
        mesh = {} if self.ranks == (1, 1) else {"tp": self.ranks[0], "ep": self.ranks[1]}
        return {
            "geometry": self.geometry,
            "export": self.export,
            "arithmetic": self.arithmetic,
            "schedule": schedule,
            **mesh,
            **self.options,
        }


class Recorder:
    """A tap that keeps what it is given as it is; pieces of one tap are joined along axis 0."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[np.ndarray]] = {}

    def __call__(self, name: str, array: np.ndarray) -> None:
        last_only = name.endswith((".state", ".conv_state"))
        before = [] if last_only else self.pieces.get(name, [])
        self.pieces[name] = [*before, np.array(array)]

    def taps(self) -> dict[str, np.ndarray]:
        """name -> whole array; scores of pools that did not exist yet are -inf."""
        return {name: np.concatenate(_same_width(name, pieces)) for name, pieces in self.pieces.items()}


def _same_width(name: str, pieces: list[np.ndarray]) -> list[np.ndarray]:
    if not name.endswith(".scores"):
        return pieces
    width = max(piece.shape[1] for piece in pieces)
    return [np.pad(piece, ((0, 0), (0, width - piece.shape[1])), constant_values=-np.inf) for piece in pieces]


def tokens(vocab: int, count: int, seed: int) -> np.ndarray:
    """I32 [count] ids, from the generator that the synthetic weights come from."""
    return (integers(key_of(seed, "tokens"), 0, count) % vocab).astype(np.int32)


def taps(run: Run, workspace: Workspace, seed: int) -> dict[str, np.ndarray]:
    """Every tap of a run, in the order in which the model first reported them, then its logits."""
    checkpoint = open_checkpoint(workspace.checkpoint(run.geometry, run.export, seed))
    if run.ranks == (1, 1):
        model = TextModel(checkpoint, run.arithmetic, **run.options)
    else:
        model = ShardedModel(checkpoint, *run.ranks, run.arithmetic, **run.options)
    ids = tokens(model.config.vocab_size, sum(run.prefill) + run.decode, seed)
    recorder, start = Recorder(), 0
    for index, length in enumerate(run.prefill):
        pad = run.pad if index == 0 else 0
        model.prefill(np.concatenate([ids[:pad], ids[start : start + length]]), recorder, pad=pad)
        start += length
    for token in ids[start:]:
        model.decode(int(token), recorder)
    return recorder.taps()


def smallest(value: np.ndarray) -> np.ndarray:
    """The value in the narrowest of bf16, float32 and float64 that holds every element, signs of zeros included."""
    if value.dtype.kind != "f":
        return value
    for dtype in (ml_dtypes.bfloat16, np.float32):
        with np.errstate(over="ignore", under="ignore"):
            narrow = value.astype(dtype)
        if narrow.astype(np.float64).tobytes() == value.astype(np.float64).tobytes():
            return narrow
    return value


def _stored(run: Run, workspace: Workspace, seed: int) -> Made:
    items, length = {}, sum(run.prefill) + run.decode
    for name, value in taps(run, workspace, seed).items():
        value = smallest(value)
        whole = value[0].nbytes <= WHOLE_ROW_BYTES or len(value) != length or name == "indexer.scores"
        items[name] = Item(value, None if whole else ROWS[run.geometry, run.arithmetic])
    return Made(items)


def _hashed(run: Run, workspace: Workspace, seed: int) -> Made:
    return Made({name: Item(smallest(value), ()) for name, value in taps(run, workspace, seed).items()})


PROMPT, ROUNDS, DRAFTS = 37, 5, 3


def _drafted(geometry: str, export: str, arithmetic: str) -> Callable[[Workspace], Made]:
    """The draft block beside a prompt, tap by tap, and what some greedy rounds of drafting and verifying gave."""

    def build(workspace: Workspace) -> Made:
        model = TextModel(open_checkpoint(workspace.checkpoint(geometry, export, SEED)), arithmetic)
        recorder, sequence = Recorder(), Speculation(Block(model))
        sequence.start(tokens(model.config.vocab_size, PROMPT, SEED).tolist(), recorder)
        rounds = [sequence.step(DRAFTS) for _ in range(ROUNDS)]
        items = {name: Item(smallest(value), ()) for name, value in recorder.taps().items() if name.startswith("mtp.")}
        items["rounds.drafts"] = Item(np.array([r.drafts for r in rounds], np.int32), ())
        items["rounds.accepted"] = Item(np.array([r.accepted for r in rounds], np.int32), ())
        items["rounds.tokens"] = Item(np.array(sequence.tokens, np.int32), ())
        return Made(items)

    return build


STORED = [
    Run(geometry, export, arithmetic)
    for geometry in ("tiny", "odd")
    for export in ("nvidia", "libertai")
    for arithmetic in ("exact", "bf16")
]

CHUNKED = {"kda": "chunked", "kda_chunk": 16, "mla": "absorbed"}
RECIPES = {
    "long-tiny-nvidia-bf16": Run("tiny", "nvidia", "bf16", (64, 1, 35, 3), 9),
    "long-odd-libertai-exact": Run("odd", "libertai", "exact", (64, 1, 35, 3), 9),
    "padded-tiny-libertai-exact": Run("tiny", "libertai", "exact", (38,), 3, pad=5),
    "padded-odd-nvidia-bf16": Run("odd", "nvidia", "bf16", (38,), 3, pad=3),
    "chunked-tiny-nvidia-exact": Run("tiny", "nvidia", "exact", options=CHUNKED),
    "chunked-odd-nvidia-bf16": Run("odd", "nvidia", "bf16", options=CHUNKED | {"kda_chunk": 7}),
    "ranks-tiny-libertai-bf16": Run("tiny", "libertai", "bf16", ranks=(2, 4)),
    "ranks-odd-nvidia-exact": Run("odd", "nvidia", "exact", ranks=(1, 3)),
    "stochastic-tiny-nvidia": Run("tiny", "nvidia", "stochastic", options={"seed": 1}),
    "stochastic-odd-libertai": Run("odd", "libertai", "stochastic", options={"seed": 2, **CHUNKED}),
}


def cases() -> list[Case]:
    def case(name: str, run: Run, stored: bool) -> Case:
        make = _stored if stored else _hashed
        suffix = ".safetensors" if stored else ""
        return Case(name, lambda workspace: make(run, workspace, SEED), suffix, SEED, run.settings())

    stored = [case(f"trace-{run.geometry}-{run.export}-{run.arithmetic}", run, True) for run in STORED]
    drafted = [
        Case(
            f"trace-mtp-{geometry}-{export}-{arithmetic}",
            _drafted(geometry, export, arithmetic),
            seed=SEED,
            settings={"geometry": geometry, "export": export, "arithmetic": arithmetic, "mtp": DRAFTS},
        )
        for geometry, export, arithmetic in (("tiny", "nvidia", "bf16"), ("odd", "libertai", "exact"))
    ]
    return [*stored, *(case(f"trace-{name}", run, False) for name, run in RECIPES.items()), *drafted]
