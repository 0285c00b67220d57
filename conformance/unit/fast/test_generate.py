"""fast.generate: drafts change no token and no state, whatever they are; sampling keeps the distribution."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.unit.fast.runs import tokens
from fast.errors import InputError
from fast.generate import Chooser, DraftCountError, Generator, SamplingError, Statistics, generate
from fast.linear import ROWS
from fast.loader import load
from fast.model import TextModel
from fast.mtp import Mtp
from fast.state import StateError

CASES = [(g, e) for g in ("tiny", "odd") for e in ("nvidia", "libertai")]
EVERY = pytest.mark.parametrize(("geometry", "export"), CASES, ids=["-".join(case) for case in CASES])
COUNT = {"tiny": 16, "odd": 24}


@pytest.fixture(scope="module")
def pair(checkpoint):
    """pair(geometry, export) -> (target, draft block, prompt), one per module."""

    @cache
    def build(geometry: str, export: str) -> tuple[TextModel, Mtp, list[int]]:
        target = TextModel(load(checkpoint(geometry, export), mtp=True, progress=False))
        return target, Mtp(target), tokens(5, 27, target.config.text.vocab_size).tolist()

    return build


@pytest.fixture(scope="module")
def plain(pair):
    """plain(geometry, export) -> tokens and final states of decoding without drafts."""

    @cache
    def run(geometry: str, export: str) -> tuple[list[int], dict[str, Tensor]]:
        target, block, prompt = pair(geometry, export)
        found, statistics = generate(target, prompt, COUNT[geometry], mtp=block)
        assert statistics.tried == []
        return found, states(target, block)

    return run


def states(target: TextModel, block: Mtp) -> dict[str, Tensor]:
    return target.state.snapshot() | block.state.snapshot()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Scripted(Generator):
    """Drafts the plain continuation, wrong in the places of a round that `wrong` names."""

    def __init__(self, truth: list[int], wrong: set[int], *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.truth, self.wrong, self.given = truth, wrong, 1

    def propose(self, count: int, tap: Any = None) -> tuple[list[int], list[Tensor]]:
        super().propose(count, tap)
        V = self.target.config.text.vocab_size
        drafts = self.truth[self.given : self.given + count]
        drafts = [(token + 1) % V if i in self.wrong else token for i, token in enumerate(drafts)]
        return drafts, [torch.nn.functional.one_hot(torch.tensor(token), V).double() for token in drafts]

    def round(self, limit: int, stop=()) -> list[int]:
        found = super().round(limit, stop)
        self.given += len(found)
        return found


@EVERY
@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_drafts_of_the_block_change_nothing(pair, plain, geometry, export, drafts):
    target, block, prompt = pair(geometry, export)
    found, statistics = generate(target, prompt, COUNT[geometry], mtp=block, drafts=drafts)
    assert (found, len(statistics.tried)) == (plain(geometry, export)[0], drafts)
    assert same(states(target, block), plain(geometry, export)[1])


@EVERY
@pytest.mark.parametrize("wrong", [set(), {0}, {1}, {2}, {3}, {1, 2}], ids=str)
def test_whatever_is_accepted_changes_nothing(pair, plain, geometry, export, wrong):
    """4 drafts, right up to the first wrong one: every number of accepted drafts, and the count ends mid-round."""
    target, block, prompt = pair(geometry, export)
    truth, expected = plain(geometry, export)
    generator = Scripted(truth, wrong, target, mtp=block, drafts=4)
    assert list(generator.tokens(prompt, COUNT[geometry])) == truth
    assert same(states(target, block), expected)
    accepted = min(wrong, default=4)
    assert generator.statistics.acceptance[:4] == [1.0] * accepted + [0.0] * (4 - accepted)
    assert generator.statistics.rounds == -(-(COUNT[geometry] - 1) // (accepted + 1))


@pytest.mark.parametrize("at", range(6))
def test_a_stop_token_ends_the_round(pair, at):
    """Accepted drafts behind it are not kept: states are those of a plain run that stops there."""
    target, block, prompt = pair("odd", "nvidia")
    truth, _ = generate(target, prompt, 12, mtp=block)
    stop = (truth[at],)
    expected, _ = generate(target, prompt, 12, mtp=block, stop=stop)
    before = states(target, block)
    assert expected == truth[: truth.index(truth[at]) + 1]
    generator = Scripted(truth, set(), target, mtp=block, drafts=4)
    assert list(generator.tokens(prompt, 12, stop)) == expected
    assert same(states(target, block), before)
    made = generator.statistics
    others = len(expected) - 1
    assert sum(made.kept) == others - others // 5, "all drafts are right, the fifth token of a round is no draft"


def test_the_prompt_may_be_longer_than_a_window(checkpoint, pair):
    """The block's rows do not care where windows end: its selection and states are those of one call."""
    target, block, prompt = pair("odd", "nvidia")
    short = TextModel(load(checkpoint("odd", "nvidia"), mtp=True, progress=False), window=10)
    other = Mtp(short)
    Generator(target, mtp=block).prefill(prompt)
    Generator(short, mtp=other).prefill(prompt)
    assert other.state.length == block.state.length == len(prompt)
    a, b = block.state.arrays(), other.state.arrays()
    assert all(a[name].shape == b[name].shape for name in a)


def test_drafting_leaves_every_state(pair):
    target, block, prompt = pair("odd", "nvidia")
    generator = Generator(target, mtp=block, drafts=4)
    generator.prefill(prompt)
    before = states(target, block)
    drafts, shares = generator.propose(4)
    assert len(drafts) == len(shares) == 4
    assert same(states(target, block), before)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]),
        ([0.0, 1.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
        ([0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0]),
        ([0.7, 0.1, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1]),
    ],
    ids=["different", "certain target", "certain draft", "equal"],
)
def test_rejection_keeps_the_distribution(p, q):
    """Frequencies of 20000 seeded draws within 6 standard deviations of p."""
    draws, chooser = 20_000, Chooser(1.0, seed=9)
    target, draft = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    counts = torch.zeros(4)
    for _ in range(draws):
        token = chooser.draw(draft)
        if not chooser.accept(target, draft, token):
            token = chooser.replacement(target, draft)
        counts[token] += 1
    deviation = (target * (1 - target) / draws).sqrt()
    assert bool(((counts / draws - target).abs() <= 6 * deviation).all())


def test_sampling_is_seeded(pair):
    target, block, prompt = pair("odd", "nvidia")
    runs = [generate(target, prompt, 8, mtp=block, drafts=2, chooser=Chooser(1.0, seed=seed))[0] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_the_lowest_of_equal_logits_is_chosen():
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0])
    assert Chooser().draw(Chooser().probabilities(logits)) == 1


def test_a_draft_that_the_target_excludes_is_never_kept():
    """Also where the draft's own probability is 0: greedy text depends on no draft."""
    certain = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    for draft in (certain, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)):
        assert not Chooser().accept(certain, draft, 2)
        assert Chooser().replacement(certain, draft) == 1


@pytest.mark.parametrize("temperature", [1e-300, 1e-308, 5e-324])
def test_no_temperature_is_too_low(temperature):
    """Logits over it may be infinite; their differences from the largest are 0 and -inf at worst."""
    chooser = Chooser(temperature)
    shares = chooser.probabilities(torch.tensor([-30.0, 20.0, 1e-3, 19.0]))
    assert shares.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert chooser.draw(shares) == 1


def test_statistics_count_by_position():
    statistics = Statistics()
    for tried, kept in ((3, 2), (3, 0), (1, 1)):
        statistics.count(tried, kept)
    assert (statistics.rounds, statistics.tried, statistics.kept) == (3, [3, 2, 2], [2, 1, 0])
    assert statistics.acceptance == [2 / 3, 1 / 2, 0.0]


def test_bad_requests_are_refused(pair):
    target, block, prompt = pair("odd", "nvidia")
    with pytest.raises(DraftCountError, match=f"found {ROWS}, expected 0 to {ROWS - 1}"):
        generate(target, prompt, 4, mtp=block, drafts=ROWS)
    with pytest.raises(DraftCountError, match="no draft block"):
        generate(target, prompt, 4, drafts=1)
    with pytest.raises(SamplingError, match="-1"):
        Chooser(-1.0)
    with pytest.raises(InputError, match="prompt"):
        generate(target, [], 4)
    assert generate(target, prompt, 0) == ([], Statistics())


class StoppedError(Exception):
    """What a tap raises in the middle of a call."""


@pytest.mark.parametrize("place", ["layers.0.attn.in", "layers.4.mid", "layers.5.attn.latent", "layers.6.mlp.out"])
@pytest.mark.parametrize("rows", [1, 20])
def test_a_call_that_fails_half_way_is_never_continued(pair, place, rows):
    """Its layers have seen different tokens: refused until undone, restored or reset, and then as if it never was."""
    target, _, prompt = pair("odd", "nvidia")
    target.reset()
    target.prefill(prompt)
    before = target.state.snapshot()
    expected = target.decode(1)

    def tap(name: str, value: Any) -> None:
        if name == place:
            raise StoppedError

    def fail() -> None:
        with pytest.raises(StoppedError):
            target.run(target.ids(prompt[:rows]), tap)
        with pytest.raises(StateError, match="failed half way"):
            target.decode(1)
        with pytest.raises(StateError, match="failed half way"):
            target.state.begin()

    target.state.restore(before)
    fail()
    target.state.restore(before)
    assert torch.equal(target.decode(1), expected)
    fail()
    target.reset()
    target.prefill(prompt)
    assert torch.equal(target.decode(1), expected)


def test_a_verification_that_fails_half_way_can_be_undone(pair):
    target, block, prompt = pair("odd", "nvidia")
    generator = Generator(target, mtp=block, drafts=2)
    generator.prefill(prompt)
    before = states(target, block)

    def tap(name: str, value: Any) -> None:
        if name in ("layers.4.mid", "mtp.attn.latent"):
            raise StoppedError

    hidden = torch.zeros(3, target.config.text.hidden_size, dtype=torch.bfloat16)
    ids = target.ids([1, 2, 3])
    for model, call in ((target, lambda: target.run(ids, tap)), (block, lambda: block.run(hidden, ids, tap))):
        model.state.begin()
        with pytest.raises(StoppedError):
            call()
        with pytest.raises(StateError, match="failed half way"):
            model.state.commit(1)
        model.state.commit(0)
    assert same(states(target, block), before)
