"""What a model remembers between calls: one record per layer, and the token count.

Arrays are replaced, never written into, so `copy()` is a complete snapshot at the price of a few references. A layer's
record knows how many tokens made it, and a `State` whose layers disagree is refused: KDA memory cannot be cut back, so
the only length to resume from is one at which every kind of layer was saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

import numpy as np

from reference.errors import InputError


class StateLengthError(InputError):
    """Layers of one state were saved after different numbers of tokens."""


@dataclass
class KdaState:
    """matrix [.., H, d_k, d_v]; conv [.., K-1, 3*H*d]: the last pre-activation inputs, oldest first, q, k, v."""

    matrix: np.ndarray
    conv: np.ndarray
    length: int = 0

    @classmethod
    def fresh(cls, batch: tuple[int, ...], H: int, d: int, K: int) -> KdaState:
        """No token seen: zeros."""
        return cls(np.zeros((*batch, H, d, d)), np.zeros((*batch, K - 1, 3 * H * d)))


@dataclass
class DsaState:
    """latent [.., n, L]; pool_keys [.., P, p] of complete pools; tail_k, tail_gate [.., n mod S, p] not pooled yet.

    A layer that shares its selection keeps the latents only. `selected` is the token sets of the last call, for the
    shared layers after this one; it is no memory.
    """

    latent: np.ndarray
    pool_keys: np.ndarray
    tail_k: np.ndarray
    tail_gate: np.ndarray
    length: int = 0
    selected: np.ndarray | None = field(default=None, compare=False)

    @classmethod
    def fresh(cls, batch: tuple[int, ...], L: int, p: int) -> DsaState:
        """No token seen: empty."""
        none = np.zeros((*batch, 0, p))
        return cls(np.zeros((*batch, 0, L)), none, none, none)


@dataclass
class State:
    """One record per layer, in layer order."""

    layers: list[KdaState | DsaState]

    @property
    def length(self) -> int:
        """Tokens seen, left padding not counted. Raises `StateLengthError` if the layers disagree."""
        lengths = {layer.length for layer in self.layers}
        if len(lengths) > 1:
            found = ", ".join(f"layers.{index}: {layer.length}" for index, layer in enumerate(self.layers))
            raise StateLengthError(f"state: layers were saved after different numbers of tokens ({found})")
        return lengths.pop() if lengths else 0

    def copy(self) -> State:
        """A snapshot that later calls cannot change."""
        return State([replace(layer) for layer in self.layers])

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every remembered array with a name, e.g. ("layers.0.conv", ..): what two equal states have in common."""
        for index, layer in enumerate(self.layers):
            for item in fields(layer):
                value = getattr(layer, item.name)
                if item.compare and isinstance(value, np.ndarray):
                    yield f"layers.{index}.{item.name}", value
