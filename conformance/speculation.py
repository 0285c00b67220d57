"""Speculative decoding against plain decoding, in either engine: same tokens, same final states, bit for bit.

Drafts of a synthetic block are as good as never right, so scripts stand in for it: they know the plain continuation and
decide which drafts of a round are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from conformance.engines.base import as_numpy
from fast.generate import Generator
from fast.layers import Communicator
from fast.loader import Weights, load
from fast.model import TextModel as FastModel
from fast.mtp import Mtp
from fast.sharding import Mesh
from reference.checkpoint import Checkpoint
from reference.model import TextModel
from reference.mtp import Block, Speculation
from reference.ranks import ShardedModel

Script = Callable[[Sequence[int], int], list[int] | None]
"""(the true tokens of a round, its number) -> the drafts to verify, as many; None leaves the block its own."""


@dataclass(frozen=True)
class Round:
    """How many drafts were verified, how many of them led with the plain tokens, how many were accepted."""

    tried: int
    right: int
    accepted: int


@dataclass(frozen=True)
class Outcome:
    """What a run left behind: its tokens, every state of target and block, its rounds."""

    tokens: list[int]
    states: dict[str, np.ndarray]
    rounds: tuple[Round, ...] = ()

    def same_states(self, other: Outcome) -> list[str]:
        """Names of the states that differ in any bit, or that only one of the two has."""
        names = self.states.keys() | other.states.keys()
        return sorted(name for name in names if _bits(self.states.get(name)) != _bits(other.states.get(name)))

    def acceptance(self) -> list[tuple[int, int]]:
        """Per position (tried, accepted)."""
        most = max((one.tried for one in self.rounds), default=0)
        return [
            (sum(one.tried > place for one in self.rounds), sum(one.accepted > place for one in self.rounds))
            for place in range(most)
        ]


def _bits(array: np.ndarray | None) -> tuple[Any, ...] | None:
    return None if array is None else (array.dtype, array.shape, array.tobytes())


def sometimes_right(probability: float, seed: int, vocab: int) -> Script:
    """Each draft is the true token with `probability`, else any other one; a function of seed and round."""

    def script(truth: Sequence[int], number: int) -> list[int]:
        random = Random(f"{seed} {number}")
        return [
            token if random.random() < probability else (token + random.randrange(1, vocab)) % vocab for token in truth
        ]

    return script


def wrong_at(place: int, vocab: int) -> Script:
    """The draft at `place` is wrong in every round; none where a round has no such place."""
    return lambda truth, number: [(t + 1) % vocab if at == place else t for at, t in enumerate(truth)]


def wrong_in_turn(vocab: int) -> Script:
    """Round r has a wrong draft at position r mod (K + 1), and none where that is K."""

    return lambda truth, number: wrong_at(number % (len(truth) + 1), vocab)(truth, number)


def every_other(script: Script) -> Script:
    """The block's own drafts in even rounds, those of `script` in odd ones, which it sees numbered 0, 1, 2, .."""
    return lambda truth, number: script(truth, number // 2) if number % 2 else None


class Runner(Protocol):
    """One engine on one checkpoint."""

    vocab: int

    def plain(self, prompt: Sequence[int], count: int) -> Outcome:
        """One token at a time; the block reads along."""

    def drafted(self, prompt: Sequence[int], truth: Sequence[int], K: int, script: Script | None) -> Outcome:
        """As many tokens as `truth`, the plain ones, with K drafts a round, chosen by the script, if any."""


class FastRunner:
    """The fast engine. `weights` of one rank go with its communicator."""

    def __init__(self, weights: Weights, device: str = "cpu", communicator: Communicator | None = None) -> None:
        self.model = FastModel(weights, device=device, communicator=communicator)
        self.block = Mtp(self.model)
        self.vocab = self.model.config.text.vocab_size

    def plain(self, prompt: Sequence[int], count: int) -> Outcome:
        return Outcome(list(Generator(self.model, mtp=self.block).tokens(prompt, count)), self._states())

    def drafted(self, prompt: Sequence[int], truth: Sequence[int], K: int, script: Script | None) -> Outcome:
        generator = Scripted(truth, script, self.model, mtp=self.block, drafts=K)
        tokens = list(generator.tokens(prompt, len(truth)))
        return Outcome(tokens, self._states(), tuple(generator.rounds))

    def once(self, prompt: Sequence[int], truth: Sequence[int], K: int, script: Script | None) -> Outcome:
        """The prompt and one round of K drafts; `truth` is K + 1 tokens or more."""
        generator = Scripted(truth, script, self.model, mtp=self.block, drafts=K)
        tokens = [generator.prefill(prompt), *generator.round(K + 1)]
        return Outcome(tokens, self._states(), tuple(generator.rounds))

    def _states(self) -> dict[str, np.ndarray]:
        states = self.model.state.snapshot() | self.block.state.snapshot()
        return {name: as_numpy(value) for name, value in states.items()}


class Scripted(Generator):
    """A generator whose drafts a script may replace."""

    def __init__(self, truth: Sequence[int], script: Script | None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.truth, self.script, self.given = truth, script, 1
        self.rounds: list[Round] = []

    def propose(self, count: int, tap: Any = None) -> tuple[list[int], list[Tensor]]:
        expected = list(self.truth[self.given : self.given + count])
        scripted = None if self.script is None else self.script(expected, len(self.rounds))
        if scripted is None:
            drafts, shares = super().propose(count, tap)
        else:
            vocab = self.target.config.text.vocab_size
            drafts, shares = scripted, [one_hot(torch.tensor(token), vocab).double() for token in scripted]
        self.rounds.append(Round(len(drafts), leading(drafts, expected), -1))
        return drafts, shares

    def round(self, limit: int, stop: Sequence[int] = ()) -> list[int]:
        found = super().round(limit, stop)
        self.given += len(found)
        self.rounds[-1] = Round(self.rounds[-1].tried, self.rounds[-1].right, len(found) - 1)
        return found


class ReferenceRunner:
    """The oracle, on one rank or on tp x ep of them in this process."""

    def __init__(self, checkpoint: Checkpoint, arithmetic: str = "exact", tp: int = 1, ep: int = 1) -> None:
        one = Mesh(tp, ep).world == 1
        self.model = TextModel(checkpoint, arithmetic) if one else ShardedModel(checkpoint, tp, ep, arithmetic)
        self.block = Block(self.model)
        self.vocab = self.model.config.vocab_size

    def plain(self, prompt: Sequence[int], count: int) -> Outcome:
        """The target by its own verbs, and then the block in one pass over all pairs."""
        self.model.reset()
        hidden = [self.model.run(prompt)]
        tokens = [int(self.model.logits(hidden[0][-1:])[0].argmax())]
        while len(tokens) < count:
            hidden.append(self.model.run(tokens[-1:]))
            tokens.append(int(self.model.logits(hidden[-1])[0].argmax()))
        state = self.block.fresh()
        self.block.rows(np.concatenate(hidden), [*prompt[1:], *tokens], state)
        return Outcome(tokens, dict(self._states(state)))

    def drafted(self, prompt: Sequence[int], truth: Sequence[int], K: int, script: Script | None) -> Outcome:
        run, rounds = Speculation(self.block), list[Round]()
        run.start(prompt)
        while (made := len(run.tokens) - len(prompt)) < len(truth):
            count = min(K, len(truth) - made - 1)
            expected = truth[made : made + count]
            one = run.step(count, drafts=None if script is None else script(expected, len(rounds)))
            rounds.append(Round(len(one.drafts), leading(one.drafts, expected), one.accepted))
        return Outcome(run.tokens[len(prompt) :], dict(self._states(run.state)), tuple(rounds))

    def _states(self, block: Any) -> Iterator[tuple[str, np.ndarray]]:
        yield from self.model.state.arrays()
        for name in ("latent", "pool_keys", "tail_k", "tail_gate"):
            yield f"mtp.{name}", getattr(block, name)


def fast_runner(directory: Path, device: str = "cpu") -> FastRunner:
    """One rank, its weights from a checkpoint directory."""
    return FastRunner(load(directory, device=device, mtp=True, progress=False), device)


def leading(drafts: Sequence[int], truth: Sequence[int]) -> int:
    """How many drafts are right before the first wrong one."""
    pairs = zip(drafts, truth, strict=True)
    return next((place for place, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
