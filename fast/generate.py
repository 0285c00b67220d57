"""Continuing a prompt: plain decoding, and drafts that are verified so that the text stays the same.

Greedy text with drafts is token for token the text without, and so is every state: a draft is kept only where it is
the target's own choice, and what was rejected is undone (`fast.state`). With sampling the rejection rule keeps the
distribution: a draft d, drawn from q, is kept with probability min(1, p(d)/q(d)), else the token is drawn from
max(p - q, 0), normalised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fast.errors import InputError
from fast.layers import Tap
from fast.linear import ROWS
from fast.model import TextModel
from fast.mtp import Mtp


class DraftCountError(InputError):
    """A number of drafts that one verification cannot hold."""


class SamplingError(InputError):
    """A temperature that is not a number from 0 up."""


@dataclass
class Statistics:
    """Rounds of verification, and of the drafts at each position how many were tried and kept."""

    rounds: int = 0
    tried: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def count(self, tried: int, kept: int) -> None:
        self.rounds += 1
        for table, number in ((self.tried, tried), (self.kept, kept)):
            table.extend([0] * (tried - len(table)))
            for position in range(number):
                table[position] += 1

    @property
    def acceptance(self) -> list[float]:
        """Per draft position, the share of the drafts tried there that were kept."""
        return [kept / tried for kept, tried in zip(self.kept, self.tried, strict=True)]


class Chooser:
    """Greedy at temperature 0 (the lowest id of equal logits), else sampling from softmax(logits / temperature).

    Draws come from one seeded generator on the CPU, in fp64, so that they do not depend on the device.
    """

    def __init__(self, temperature: float = 0.0, seed: int = 0) -> None:
        if not 0 <= temperature < float("inf"):
            raise SamplingError(f"temperature: found {temperature}, expected a number from 0 up")
        self.temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        """logits [V] -> fp64 [V] on the CPU; one-hot when greedy."""
        row = logits.double().cpu()
        if self.temperature:
            return torch.softmax((row - row.max()) / self.temperature, dim=-1)
        best = int((row == row.max()).nonzero()[0])
        return torch.zeros_like(row).index_fill_(0, torch.tensor([best]), 1.0)

    def draw(self, probabilities: Tensor) -> int:
        """By inversion of the cumulated probabilities; a certain outcome takes no random number."""
        best = int(probabilities.argmax())
        if float(probabilities[best]) == 1.0:
            return best
        total = probabilities.cumsum(0)
        place = torch.rand((), generator=self._generator, dtype=torch.float64) * total[-1]
        return int(torch.searchsorted(total, place, right=True).clamp(max=len(total) - 1))

    def accept(self, target: Tensor, draft: Tensor, token: int) -> bool:
        """Whether a token drawn from `draft` stands for one drawn from `target`; never one that `target` excludes."""
        p, q = float(target[token]), float(draft[token])
        if p == 0 or p >= q:
            return p > 0
        return float(torch.rand((), generator=self._generator, dtype=torch.float64)) * q < p

    def replacement(self, target: Tensor, draft: Tensor) -> int:
        """What stands where a draft was rejected."""
        return self.draw(_normalised((target - draft).clamp_min(0.0), target))


def _normalised(rest: Tensor, target: Tensor) -> Tensor:
    return rest / rest.sum() if float(rest.sum()) > 0 else target


class Generator:
    """One sequence being continued. `drafts` K tokens are guessed and verified per round; 0 decodes plainly.

    With `mtp` the draft block sees every true pair of the target's rows and tokens, also where K is 0: after each call
    both states are functions of the tokens alone. The target has then seen all tokens but the last. Raises
    DraftCountError for K outside 0 .. ROWS - 1, or K above 0 without a block.
    """

    def __init__(
        self, target: TextModel, *, mtp: Mtp | None = None, drafts: int = 0, chooser: Chooser | None = None
    ) -> None:
        if not 0 <= drafts < ROWS:
            raise DraftCountError(f"drafts: found {drafts}, expected 0 to {ROWS - 1}")
        if drafts and mtp is None:
            raise DraftCountError(f"drafts: {drafts} asked for, but there is no draft block")
        self.target, self.mtp, self.drafts = target, mtp, drafts
        self.chooser = Chooser() if chooser is None else chooser
        self.statistics = Statistics()
        self.last = 0
        """The newest token, which the target has not seen."""

    def prefill(self, tokens: Sequence[int] | Tensor, tap: Tap | None = None, room: int = 0) -> int:
        """Reads the prompt, from empty states -> the first token after it. Taps: the target's and the block's.

        Caches are made for the prompt and `room` more tokens.
        """
        ids = self.target.ids(tokens)
        self.target.reset(len(ids) + room)
        if self.mtp is not None:
            self.mtp.reset(len(ids) + room)
        if not len(ids):
            raise InputError("prompt: found no token, expected at least one")
        start = 0
        for part in ids.split(self.target.window):
            start += len(part)
            hidden = self.target.run(part, tap)
            after = ids[start - len(part) + 1 : start + 1].tolist()
            if start == len(ids):
                after.append(self.chooser.draw(self.chooser.probabilities(self.target.logits(hidden[-1:])[0])))
            self._see(hidden, after, tap)
        return self.last

    def _see(self, hidden: Tensor, after: list[int], tap: Tap | None = None) -> None:
        """The target's rows [T, D] and the token after each become rows of the draft block."""
        self.last = after[-1]
        if self.mtp is None:
            return
        y, self._selected = self.mtp.run(hidden, torch.tensor(after, device=hidden.device), tap)
        self._y = y[-1:]
        if tap is not None:
            self.mtp.logits(y, tap)

    def observe(self, hidden: Tensor, tokens: Tensor, cuts: Sequence[int], tap: Tap) -> list[int]:
        """The block beside a text that the target has just read: `mtp.*` taps, and one round of drafts.

        hidden [T, D] is what entered lm_head at tokens [T]; the block sees them in pieces of `cuts` rows. The last
        true row pairs with the token that the target gives after the text; the rows of later drafts follow.
        """
        assert self.mtp is not None
        self.mtp.reset(len(tokens) + self.drafts)
        first = self.chooser.draw(self.chooser.probabilities(self.target.logits(hidden[-1:])[0]))
        after = [*tokens[1:].tolist(), first]
        start = 0
        for part in hidden.split(list(cuts)):
            self._see(part, after[start : start + len(part)], tap)
            start += len(part)
        return self.propose(self.drafts, tap)[0]

    def propose(self, count: int, tap: Tap | None = None) -> tuple[list[int], list[Tensor]]:
        """-> `count` drafted tokens and the probabilities each was drawn from. Leaves every state as it was.

        The newest true row of the block gives the first draft; each further row takes y of the row before as its
        hidden and the drafted token's embedding. Taps: those of the further rows.
        """
        tokens: list[int] = []
        shares: list[Tensor] = []
        if self.mtp is None or not count:
            return tokens, shares
        y, selected = self._y, self._selected
        self.mtp.state.begin()
        while True:
            shares.append(self.chooser.probabilities(self.mtp.logits(y, tap if tokens else None)[0]))
            tokens.append(self.chooser.draw(shares[-1]))
            if len(tokens) == count:
                break
            y, selected = self.mtp.later(y, torch.tensor(tokens[-1:], device=y.device), selected, tap)
        self.mtp.state.commit(0)
        return tokens, shares

    def round(self, limit: int, stop: Sequence[int] = ()) -> list[int]:
        """One verification -> the 1 .. drafts + 1 tokens it yields: at most `limit`, none after one of `stop`."""
        tokens, shares = self.propose(min(self.drafts, limit - 1))
        logits, hidden = self.target.verify(self.target.ids([self.last, *tokens]))
        found: list[int] = []
        accepted = 0
        for row in range(len(tokens) + 1):
            p = self.chooser.probabilities(logits[row])
            kept = row < len(tokens) and self.chooser.accept(p, shares[row], tokens[row])
            if kept:
                found.append(tokens[row])
            elif row < len(tokens):
                found.append(self.chooser.replacement(p, shares[row]))
            else:
                found.append(self.chooser.draw(p))
            accepted += kept
            if not kept or found[-1] in stop:
                break
        self.target.state.commit(len(found))
        self._see(hidden[: len(found)], found)
        self.statistics.count(len(tokens), accepted)
        return found

    def tokens(self, prompt: Sequence[int] | Tensor, count: int, stop: Sequence[int] = ()) -> Iterator[int]:
        """Up to `count` tokens after `prompt`, ending with the first that is in `stop`."""
        if count < 1:
            return
        found = [self.prefill(prompt, room=count)]
        while True:
            yield from found
            count -= len(found)
            if not count or found[-1] in stop:
                break
            found = self.round(count, stop)


def generate(
    target: TextModel,
    prompt: Sequence[int] | Tensor,
    count: int,
    *,
    mtp: Mtp | None = None,
    drafts: int = 0,
    chooser: Chooser | None = None,
    stop: Sequence[int] = (),
    progress: Callable[[int], None] | None = None,
) -> tuple[list[int], Statistics]:
    """-> the tokens and what became of the drafts; `progress` is told the number of tokens after each."""
    generator = Generator(target, mtp=mtp, drafts=drafts, chooser=chooser)
    tokens = []
    for token in generator.tokens(prompt, count, stop):
        tokens.append(token)
        if progress is not None:
            progress(len(tokens))
    return tokens, generator.statistics
