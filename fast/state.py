"""What the engine remembers between calls, and how drafts that were rejected are forgotten.

Per KDA layer: the matrix M [H, d_k, d_v] fp32 and the last conv inputs [n-1, 3*H*d]. Per DSA layer: the latents of all
tokens, the pool keys of all complete pools, and the index keys and gates of recent tokens.

A transaction (`begin`, then at most `ROWS` tokens, then `commit(kept)`) keeps the first `kept` of those tokens and
leaves every state as if the others had never been seen, bit for bit: matrices are replayed from the entry state
through the same update, the rest is cut back. Tensors handed out by `KdaState` are replaced; only kernels write them in
place, and not those that an open transaction goes back to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fast.errors import InputError
from fast.linear import ROWS
from fast.ops import kda


class StateError(InputError):
    """A state was asked for something it cannot do."""


class Rows:
    """A tensor [length, width] that grows at the end and can be cut back."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.empty(0, width, dtype=dtype, device=device)
        self.length = 0

    def reserve(self, rows: int) -> None:
        """Room for `rows` rows in all and not one more, unless there is more already."""
        if rows > self.data.shape[0]:
            grown = self.data.new_empty(rows, self.data.shape[1])
            grown[: self.length] = self.data[: self.length]
            self.data = grown

    def append(self, rows: Tensor) -> None:
        """What was not reserved is made as it comes: capacity at least doubles whenever it is exceeded."""
        end = self.length + rows.shape[0]
        if end > self.data.shape[0]:
            self.reserve(max(end, 2 * self.data.shape[0], 256))
        self.data[self.length : end] = rows
        self.length = end

    def cut(self, length: int) -> None:
        self.length = min(self.length, length)

    def view(self) -> Tensor:
        return self.data[: self.length]


Replay = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(matrix, history, n) -> both after the first n tokens of a call, as new tensors."""


class KdaState:
    """matrix [H, d, d] fp32, history [n-1, 3*H*d] storage."""

    def __init__(self, matrix: Tensor, history: Tensor) -> None:
        self.matrix, self.history = matrix, history
        self.length = 0
        self._entry: tuple[Tensor, Tensor] | None = None
        self._steps: list[tuple[int, Replay]] = []

    def advance(self, matrix: Tensor, history: Tensor, step: Sequence[Tensor]) -> None:
        """Take the state after a call; `step` = (k, v, g, beta), each [T, H, ..], is what replaying the call needs.

        T is 1 while a transaction is open.
        """
        self.matrix, self.history = matrix, history
        own = [part.clone() for part in step] if self.undoable else []
        self.count(len(step[0]), lambda entry, _, n: (kda.update(entry, *(part[0] for part in own)), history))

    def count(self, tokens: int, replay: Replay) -> None:
        """Count `tokens` that matrix and history have taken in; `replay` does it again from the state before them."""
        self.length += tokens
        if self._entry is not None:
            self._steps.append((tokens, replay))

    @property
    def undoable(self) -> bool:
        """Whether a transaction is open."""
        return self._entry is not None

    def keep(self) -> None:
        """Before matrix and history are written in place: an open transaction gets a copy of what it began with."""
        if self._entry is not None and self._entry[0] is self.matrix:
            self._entry = (self.matrix.clone(), self.history.clone())

    def begin(self) -> None:
        self._entry, self._steps = (self.matrix, self.history), []

    def commit(self, kept: int) -> None:
        assert self._entry is not None
        seen = sum(tokens for tokens, _ in self._steps)
        self.length -= seen - kept
        if kept < seen:
            self.matrix, self.history = self._entry
            for tokens, replay in self._steps:
                if kept > 0:
                    self.matrix, self.history = replay(self.matrix, self.history, min(tokens, kept))
                    kept -= tokens
        self._entry, self._steps = None, []

    def arrays(self) -> dict[str, Tensor]:
        return {"state": self.matrix, "conv_state": self.history}

    def load(self, arrays: dict[str, Tensor], length: int) -> None:
        self.matrix, self.history, self.length = arrays["state"].clone(), arrays["conv_state"].clone(), length
        self._entry, self._steps = None, []


class DsaState:
    """latents [n, L]; with an indexer of its own, pool keys [P, p] and the recent keys and gates [R, p].

    The recent ones lie in a ring indexed by position modulo R. R is a multiple of the pool size that holds an
    incomplete pool and a whole transaction, so that cutting back never needs a token that was overwritten.
    """

    def __init__(self, latent: int, index: int | None, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.latents = Rows(latent, dtype, device)
        self.slots, self.indexed = slots, index is not None
        self.pools = Rows(index or 0, dtype, device)
        ring = slots * -(-(slots + ROWS) // slots)
        self.keys, self.gates = torch.zeros(2, ring, index or 0, dtype=dtype, device=device).unbind()
        self._entry = 0

    @property
    def length(self) -> int:
        return self.latents.length

    def reserve(self, tokens: int) -> None:
        self.latents.reserve(tokens)
        if self.indexed:
            self.pools.reserve(tokens // self.slots)

    def append(self, latents: Tensor, keys: Tensor | None, gates: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """latents [T, L], keys and gates [T, p] of the next T tokens -> keys and gates of the pools they complete.

        Both [P', S, p]; the caller pools them and appends the result to `pools`. None without an indexer.
        """
        start, T, S = self.length, latents.shape[0], self.slots
        self.latents.append(latents)
        if not self.indexed:
            return None
        assert keys is not None
        assert gates is not None
        ring = self.keys.shape[0]
        open_, full = self._places(start - start % S, start), (start % S + T) // S * S
        pools = tuple(
            torch.cat([kept[open_], new])[:full].view(full // S, S, new.shape[1])
            for kept, new in ((self.keys, keys), (self.gates, gates))
        )
        recent = self._places(start + max(0, T - ring), start + T)
        self.keys[recent], self.gates[recent] = keys[-ring:], gates[-ring:]
        return pools[0], pools[1]

    def _places(self, start: int, end: int) -> Tensor:
        return torch.arange(start, end, device=self.keys.device) % self.keys.shape[0]

    def begin(self) -> None:
        self._entry = self.length

    def commit(self, kept: int) -> None:
        self.latents.cut(self._entry + kept)
        self.pools.cut(self.length // self.slots)

    def arrays(self) -> dict[str, Tensor]:
        found = {"latent": self.latents.view()}
        if self.indexed:
            tail = self._places(self.length - self.length % self.slots, self.length)
            found |= {"pool_keys": self.pools.view(), "tail_keys": self.keys[tail], "tail_gates": self.gates[tail]}
        return found

    def load(self, arrays: dict[str, Tensor], length: int) -> None:
        assert arrays["latent"].shape[0] == length, (arrays["latent"].shape, length)
        self.latents.cut(0)
        self.latents.append(arrays["latent"])
        if self.indexed:
            self.pools.cut(0)
            self.pools.append(arrays["pool_keys"])
            tail = self._places(self.length - self.length % self.slots, self.length)
            self.keys[tail], self.gates[tail] = arrays["tail_keys"], arrays["tail_gates"]


class State:
    """All layers of one sequence. `layers` maps a name such as "layers.3" to that layer's state."""

    def __init__(self, layers: dict[str, KdaState | DsaState]) -> None:
        self.layers = layers
        self.length = 0
        self._entry: int | None = None
        self._whole = True

    def reserve(self, tokens: int) -> None:
        """Caches that hold `tokens` tokens without growing: the bytes that `fast.memory.cache_bytes` counts."""
        for layer in self.layers.values():
            if isinstance(layer, DsaState):
                layer.reserve(tokens)

    @contextlib.contextmanager
    def call(self, tokens: int) -> Iterator[None]:
        """The work of one call: inside, layers take `tokens` in, one after the other.

        When it does not reach its end, some layers have seen tokens that others have not. What follows is then refused
        with StateError, until a transaction is undone as a whole or a snapshot restored. Raises as `advance` does.
        """
        self.advance(tokens)
        self._whole = False
        yield
        self._whole = True

    def advance(self, tokens: int) -> None:
        """Count tokens whose states are about to be taken.

        Raises StateError for more rows in a transaction than it can undo, and after a call that did not end.
        """
        self._refuse_torn()
        if self._entry is not None and self.length + tokens - self._entry > ROWS:
            raise StateError(f"state: {self.length + tokens - self._entry} rows in one transaction, at most {ROWS}")
        self.length += tokens

    def begin(self) -> None:
        """Open a transaction. Raises StateError when one is open."""
        if self._entry is not None:
            raise StateError(f"state: a transaction is open since token {self._entry}; commit it first")
        self._refuse_torn()
        self._entry = self.length
        self._each(lambda layer: layer.begin())

    def commit(self, kept: int) -> None:
        """Keep the first `kept` tokens since `begin`; 0 undoes all of them. Raises StateError outside 0 .. seen."""
        if self._entry is None:
            raise StateError(f"state: commit of {kept} rows without a transaction")
        seen = self.length - self._entry
        if not 0 <= kept <= seen:
            raise StateError(f"state: commit of {kept} rows, the transaction saw {seen}")
        if kept:
            self._refuse_torn()
        self._each(lambda layer: layer.commit(kept))
        self.length, self._entry, self._whole = self._entry + kept, None, True

    def _refuse_torn(self) -> None:
        if not self._whole:
            raise StateError(f"state: a call that led to token {self.length} failed half way; reset or restore it")

    def _each(self, act: Callable[[KdaState | DsaState], None]) -> None:
        for layer in self.layers.values():
            act(layer)

    def arrays(self) -> dict[str, Tensor]:
        """Everything the next token depends on, and nothing else: `layers.i.state`, `layers.i.latent`, ... (views)."""
        return {f"{name}.{key}": x for name, layer in self.layers.items() for key, x in layer.arrays().items()}

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of `arrays()`, and how many tokens made each layer's part (`layers.i.length`)."""
        copies = {name: x.clone() for name, x in self.arrays().items()}
        return copies | {f"{name}.length": torch.tensor(layer.length) for name, layer in self.layers.items()}

    @torch.inference_mode()
    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Raises StateError when the snapshot lacks a layer's state, has one too many, or mixes lengths.

        A recurrent state cannot be cut back, so all layers have to have been saved after the same token.
        """
        expected = {*self.arrays(), *(f"{name}.length" for name in self.layers)}
        if expected != set(snapshot):
            raise StateError(f"state: snapshot differs in {sorted(expected ^ set(snapshot))}")
        lengths = {name: int(snapshot[f"{name}.length"]) for name in self.layers}
        first, length = next(iter(lengths.items()))
        for name, found in lengths.items():
            if found != length:
                raise StateError(f"state: {name} was saved after {found} tokens, {first} after {length}")
        for name, layer in self.layers.items():
            layer.load({key: snapshot[f"{name}.{key}"] for key in layer.arrays()}, length)
        self.length, self._entry, self._whole = length, None, True
