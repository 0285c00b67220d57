"""Sampling with drafts has the distribution of plain sampling: exactly, not by frequencies.

Three links make the chain. The rule: what `Chooser` and `Sampled` do with a random number u is constant between a few
fractions, so trying the middle of every interval integrates over u, and the result is the target's distribution as
fractions. The rounds: every path of drafts, acceptances and draws is walked over a toy text whose shares depend on the
whole prefix; the joint distribution of the tokens is the product of the target's shares, as fractions, for any number
of drafts. The rows: what a real engine hands the rule in a verification has the bits of decoding token by token.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.unit.fast.runs import tokens
from fast.generate import Chooser, Generator
from fast.loader import load
from fast.model import TextModel
from fast.mtp import Mtp
from reference.mtp import Sampled, Speculation

Shares = tuple[Fraction, ...]


def shares(seed: str, size: int) -> Shares:
    """Fractions that sum to 1; some are 0."""
    weights = [random.Random(f"{seed} {i}").randrange(4) for i in range(size)]
    if not any(weights):
        weights[0] = 1
    return tuple(Fraction(w, sum(weights)) for w in weights)


# --- the rule --------------------------------------------------------------------------------------------------------


def accepted(p: Shares, q: Shares, token: int) -> Fraction:
    """The rejection rule as it is published: min(1, p / q)."""
    return min(Fraction(1), p[token] / q[token])


def rest(p: Shares, q: Shares) -> Shares:
    """Where a draft was rejected: max(p - q, 0), normalised; p where nothing is left, for drafts that q excludes."""
    over = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    return tuple(x / sum(over) for x in over) if sum(over) else p


def middles(fractions: Iterable[Fraction]) -> list[Fraction]:
    """The middles of the intervals of a grid on which all of `fractions` lie."""
    n = math.lcm(*(x.denominator for x in fractions))
    return [Fraction(2 * i + 1, 2 * n) for i in range(n)]


def sums(p: Shares) -> list[Fraction]:
    return list(itertools.accumulate(p))


PAIRS = [(shares(f"p{i}", size), shares(f"q{i}", size)) for size in (2, 3, 5) for i in range(25)]


def exact(p: Shares) -> Tensor:
    return torch.tensor([float(x) for x in p], dtype=torch.float64)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_rule_of_the_engine_integrates_to_the_target(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = Chooser(1.0)

    def measure(act: Callable[[], Any], points: list[Fraction]) -> dict[Any, Fraction]:
        found: dict[Any, Fraction] = defaultdict(Fraction)
        for u in points:
            monkeypatch.setattr(torch, "rand", lambda *_, u=u, **__: torch.tensor(float(u), dtype=torch.float64))
            found[act()] += Fraction(1, len(points))
        return dict(found)

    def law(p: Shares) -> dict[int, Fraction]:
        return {token: share for token, share in enumerate(p) if share}

    for p, q in (pair for pair in PAIRS if len(pair[0]) == size):
        left, target, draft = rest(p, q), exact(p), exact(q)
        assert measure(partial(chooser.draw, target), middles(sums(p))) == law(p)
        assert measure(partial(chooser.replacement, target, draft), middles(sums(left))) == law(left)
        total = [Fraction(0)] * size
        for token in law(q):
            share = accepted(p, q, token)
            kept = measure(partial(chooser.accept, target, draft, token), middles([share]))
            assert kept.get(True, 0) == share
            for other in range(size):
                total[other] += q[token] * (share * (other == token) + (1 - share) * left[other])
        assert tuple(total) == p


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_rule_of_the_oracle_integrates_to_the_target(size: int) -> None:
    policy = Sampled(0)

    class Given:
        """The next numbers of a sequence, in place of random ones."""

        def __init__(self, *numbers: Fraction) -> None:
            self.numbers = list(numbers)

        def random(self) -> float:
            return float(self.numbers.pop(0))

    def logits(p: Shares) -> np.ndarray:
        return np.array([math.log(x) if x else -math.inf for x in p])

    for p, q in (pair for pair in PAIRS if len(pair[0]) == size):
        total = [Fraction(0)] * size
        for token, share in enumerate(q):
            if not share:
                continue
            first, second = middles([accepted(p, q, token)]), middles(sums(rest(p, q)))
            for u, v in itertools.product(first, second):
                policy._random = Given(u, v)  # type: ignore[assignment]
                total[policy.judge(token, logits(p), logits(q))] += share / (len(first) * len(second))
        assert tuple(total) == p
        picked = [Fraction(0)] * size
        for u in middles(sums(p)):
            policy._random = Given(u)  # type: ignore[assignment]
            picked[policy.pick(logits(p))] += Fraction(1, len(middles(sums(p))))
        assert tuple(picked) == p


# --- the rounds ------------------------------------------------------------------------------------------------------


class Decider:
    """One path through all that could be decided: follows `script`, then takes first choices and keeps the others."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script, self.taken = script, list[int]()
        self.probability = Fraction(1)
        self.others: list[list[int]] = []

    def choose(self, options: Sequence[tuple[Any, Fraction]]) -> Any:
        possible = [option for option in options if option[1]]
        at = len(self.taken)
        if at < len(self.script):
            choice = self.script[at]
        else:
            choice = 0
            self.others += [[*self.taken, other] for other in range(1, len(possible))]
        self.taken.append(choice)
        value, share = possible[choice]
        self.probability *= share
        return value


class Rule:
    """The rule with decisions instead of random numbers; a row of logits is the number of a prefix of the toy text."""

    def __init__(self, text: Toy, decider: Decider) -> None:
        self.text, self.decider = text, decider

    def probabilities(self, row: Any) -> Shares:
        return self.text.shares(int(row[0]))

    def draw(self, p: Shares) -> int:
        return self.decider.choose(list(enumerate(p)))

    def accept(self, p: Shares, q: Shares, token: int) -> bool:
        share = accepted(p, q, token)
        return self.decider.choose([(True, share), (False, 1 - share)])

    def replacement(self, p: Shares, q: Shares) -> int:
        return self.draw(rest(p, q))

    def pick(self, row: Any) -> int:
        return self.draw(self.probabilities(row))

    def judge(self, draft: int, target: Any, drafted_from: Any) -> int:
        p, q = self.probabilities(target), self.probabilities(drafted_from)
        return draft if self.accept(p, q, draft) else self.replacement(p, q)


class Toy:
    """Numbers for prefixes, as the target or the draft block has them; the shares of the next token after each."""

    def __init__(self, vocab: int) -> None:
        self.vocab, self.prefixes = vocab, list[tuple[str, tuple[int, ...]]]()

    def number(self, who: str, prefix: Sequence[int]) -> int:
        self.prefixes.append((who, tuple(prefix)))
        return len(self.prefixes) - 1

    def prefix(self, number: int, who: str) -> tuple[int, ...]:
        found, prefix = self.prefixes[number]
        assert found == who
        return prefix

    def shares(self, number: int) -> Shares:
        who, prefix = self.prefixes[number]
        return shares(f"{who} {prefix}", self.vocab)


@dataclass
class Held:
    """Tokens that a state has taken in, and where a transaction began."""

    tokens: list[int] = field(default_factory=list)
    entry: int = 0

    def begin(self) -> None:
        self.entry = len(self.tokens)

    def commit(self, kept: int) -> None:
        del self.tokens[self.entry + kept :]


class Target:
    """The verbs of `fast.model.TextModel` and `reference.model.TextModel` that rounds use."""

    window = 1 << 20

    def __init__(self, text: Toy) -> None:
        self.text, self.state = text, Held()

    def reset(self, room: int = 0) -> None:
        self.state = Held()

    def ids(self, given: Sequence[int]) -> Tensor:
        return torch.as_tensor(given)

    def run(self, ids: Any, tap: Any = None) -> Any:
        rows = []
        for token in [int(x) for x in ids]:
            self.state.tokens.append(token)
            rows.append([self.text.number("target", self.state.tokens)])
        return torch.tensor(rows) if isinstance(ids, Tensor) else np.array(rows)

    def logits(self, hidden: Any, tap: Any = None) -> Any:
        return hidden

    def verify(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        self.state.begin()
        hidden = self.run(ids)
        return hidden, hidden

    def snapshot(self) -> list[int]:
        return list(self.state.tokens)

    def restore(self, saved: list[int]) -> None:
        self.state.tokens = list(saved)


@dataclass
class Rows:
    """A block's state: how many rows it holds, and the selection that the oracle looks at."""

    length: int = 0
    selected: np.ndarray | None = None


class BlockOf:
    """The verbs of `fast.mtp.Mtp` and `reference.mtp.Block`; a row pairs a prefix with the token after it."""

    class config:
        index_share_for_mtp_iteration = False

    def __init__(self, target: Target) -> None:
        self.target, self.text, self.state = target, target.text, Held()

    def _rows(self, hidden: Any, following: Any, held: int) -> list[list[int]]:
        found = []
        for h, token in zip(hidden.tolist(), following, strict=True):
            who = self.text.prefixes[h[0]][0]
            prefix = self.text.prefix(h[0], who)
            assert len(prefix) == held + 1
            held += 1
            found.append([self.text.number("draft", (*prefix, int(token)))])
        return found

    def reset(self, room: int = 0) -> None:
        self.state = Held()

    def run(self, hidden: Tensor, following: Tensor, tap: Any = None) -> tuple[Tensor, Tensor]:
        made = self._rows(hidden, following, len(self.state.tokens))
        self.state.tokens += following.tolist()
        return torch.tensor(made), torch.zeros(1, 0)

    def later(self, y: Tensor, token: Tensor, selected: Tensor, tap: Any = None) -> tuple[Tensor, Tensor]:
        return self.run(y, token)

    def logits(self, y: Any, tap: Any = None) -> Any:
        return y

    def fresh(self) -> Rows:
        return Rows()

    def rows(self, hidden: Any, following: Any, state: Rows, tap: Any = None, selected: Any = None) -> Any:
        made = self._rows(hidden, following, state.length)
        state.length += len(made)
        state.selected = np.zeros((len(made), 1), np.int32)
        return np.array(made)


PROMPT = [0, 1, 1]


def by_engine(vocab: int, drafts: int, count: int, stop: Sequence[int], decider: Decider) -> list[int]:
    target = Target(Toy(vocab))
    rule: Any = Rule(target.text, decider)
    generator = Generator(target, mtp=BlockOf(target), drafts=drafts, chooser=rule)  # type: ignore[arg-type]
    return list(generator.tokens(PROMPT, count, stop))


def by_oracle(vocab: int, drafts: int, count: int, stop: Sequence[int], decider: Decider) -> list[int]:
    target = Target(Toy(vocab))
    run = Speculation(BlockOf(target), Rule(target.text, decider))  # type: ignore[arg-type]
    return run.generate(PROMPT, count, drafts, stop)[0]


def law(run: Callable[[Decider], list[int]]) -> dict[tuple[int, ...], Fraction]:
    """The joint distribution of the tokens of `run`, over every path."""
    found: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    scripts: list[list[int]] = [[]]
    while scripts:
        decider = Decider(scripts.pop())
        made = tuple(run(decider))
        found[made] += decider.probability
        scripts += decider.others
    return dict(found)


def product(vocab: int, count: int, stop: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """Plain sampling: each token by the target's shares after all tokens before it."""
    open_: list[tuple[tuple[int, ...], Fraction]] = [((), Fraction(1))]
    while open_:
        made, share = open_.pop()
        if len(made) == count or (made and made[-1] in stop):
            yield made, share
            continue
        for token, p in enumerate(shares(f"target {(*PROMPT, *made)}", vocab)):
            if p:
                open_.append(((*made, token), share * p))


SIZES = [(2, 6), (3, 4)]


@pytest.mark.parametrize("stop", [(), (1,)], ids=["", "stop"])
@pytest.mark.parametrize("drafts", range(5))
@pytest.mark.parametrize(("vocab", "count"), SIZES, ids=str)
@pytest.mark.parametrize("run", [by_engine, by_oracle], ids=["fast", "reference"])
def test_any_number_of_drafts_leaves_the_joint_distribution(
    run: Callable[..., list[int]], vocab: int, count: int, drafts: int, stop: tuple[int, ...]
) -> None:
    assert law(lambda decider: run(vocab, drafts, count, stop, decider)) == dict(product(vocab, count, stop))


@pytest.mark.parametrize("fault", ["always", "never replaced", "row before"])
def test_a_wrong_rule_has_another_distribution(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts kept whatever they are; a rejected draft's place drawn from p; each draft held against the row before."""
    if fault == "always":
        monkeypatch.setattr(Rule, "accept", lambda self, p, q, token: True)
    elif fault == "never replaced":
        monkeypatch.setattr(Rule, "replacement", lambda self, p, q: self.draw(p))
    else:
        verify = Target.verify
        monkeypatch.setattr(Target, "verify", lambda self, ids: (lambda h: (h.roll(1, 0), h))(verify(self, ids)[1]))
    assert law(lambda decider: by_engine(2, 2, 4, (), decider)) != dict(product(2, 4, ()))


# --- the rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("export", "drafts"), [("nvidia", 1), ("nvidia", 4), ("libertai", 2), ("libertai", 3)])
def test_the_rows_of_a_sampled_text_are_those_of_plain_decoding(checkpoint: Any, export: str, drafts: int) -> None:
    """Where a draft stands or falls, the engine judges it by the very bits of decoding token by token."""
    target = TextModel(load(checkpoint("tiny", export), mtp=True, progress=False))
    seen: dict[int, Tensor] = {}
    verify = target.verify

    def recorded(ids: Tensor) -> tuple[Tensor, Tensor]:
        start = target.state.length
        logits, hidden = verify(ids)
        seen.update({start + row: logits[row].clone() for row in range(len(ids))})
        return logits, hidden

    target.verify = recorded  # type: ignore[method-assign]
    # So hot that drafts and target nearly agree: some drafts are kept, some are not.
    generator = Generator(target, mtp=Mtp(target), drafts=drafts, chooser=Chooser(2.0, seed=drafts))
    prompt = tokens(6, 19, target.config.text.vocab_size).tolist()
    made = list(generator.tokens(prompt, 14))
    tried, kept = sum(generator.statistics.tried), sum(generator.statistics.kept)
    assert 0 < kept < tried
    target.reset()
    target.prefill(prompt)
    for place, token in enumerate(made[:-1], len(prompt)):
        assert torch.equal(target.decode(token), seen[place]), place
