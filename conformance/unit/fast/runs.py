"""Feeding tokens to a model and collecting what its taps say, for tests of either engine."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from reference.checkpoint import open_checkpoint
from reference.model import TextModel

AGREEMENT = 2e-5
"""Relative L2 that fp32 without storage rounding is required to reach against exact arithmetic."""


class Taps:
    """A tap callback; `arrays()` stacks what the calls of a run gave, states keep the last."""

    def __init__(self) -> None:
        self.parts: dict[str, list[np.ndarray]] = {}

    def __call__(self, name: str, value: Any) -> None:
        array = np.asarray(value.float().numpy() if hasattr(value, "numpy") else value, np.float64)
        self.parts.setdefault(name, []).append(array)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: _stack(name, parts) for name, parts in self.parts.items()}


def _stack(name: str, parts: list[np.ndarray]) -> np.ndarray:
    if name.endswith((".state", ".conv_state")):
        return parts[-1]
    if name.endswith(".scores"):
        width = max(part.shape[1] for part in parts)
        parts = [np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=-np.inf) for p in parts]
    return np.concatenate(parts)


def feed(model: Any, tokens: np.ndarray, prefill: list[int], tap: Any = None, pad: int = 0) -> np.ndarray:
    """Prefill in chunks of the given lengths, decode the rest -> logits [T, V]. `pad` ids of 1 precede the first."""
    rows, start = [], 0
    for index, length in enumerate(prefill):
        chunk = tokens[start : start + length]
        if pad and index == 0:
            chunk = np.concatenate([np.ones(pad, chunk.dtype), chunk])
        rows.append(np.asarray(model.prefill(chunk, tap=tap, pad=0 if index else pad)))
        start += length
    rows += [np.asarray(model.decode(int(token), tap=tap))[None] for token in tokens[start:]]
    return np.concatenate(rows)


def tokens(seed: int, count: int, vocab: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, count)


@functools.cache
def exact(directory: Path, count: int, prefill: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits and taps of `count` tokens in exact arithmetic, on one rank; the first `prefill` of them in one call."""
    checkpoint, taps = open_checkpoint(directory), Taps()
    logits = feed(TextModel(checkpoint), tokens(1, count, checkpoint.config.text.vocab_size), [prefill], taps)
    return logits, taps.arrays()


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 over the finite elements; infinite ones must be equal."""
    finite = np.isfinite(expected)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert np.array_equal(np.isfinite(found), finite)
    assert np.array_equal(found[~finite], expected[~finite])
    difference = np.linalg.norm(found[finite] - expected[finite])
    return float(difference / max(np.linalg.norm(expected[finite]), np.finfo(np.float64).tiny))
