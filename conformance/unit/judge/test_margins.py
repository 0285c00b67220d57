"""Discrete choices: what no margin excuses, and which flips the margins do."""

import numpy as np
import pytest

from conformance.judge import margins
from reference.ops import indexer, router

SLOTS, BUDGET, T = 4, 3, 30
P = T // SLOTS


def scored(seed=0):
    """Scores [T,P] with -inf where a pool is not complete yet, the reference's selection of them, and no error."""
    rng = np.random.default_rng(seed)
    scores = np.where(np.arange(P) < (np.arange(1, T + 1) // SLOTS)[:, None], rng.normal(size=(T, P)), -np.inf)
    return scores, indexer.select(scores, 0, BUDGET * SLOTS, SLOTS).astype(np.int64), np.zeros((T, P))


def failed(verdict):
    return {check.name for check in verdict.checks if not check.passed}


@pytest.mark.parametrize("seed", range(5))
def test_the_references_own_selection_passes_in_any_order(seed):
    scores, selected, error = scored(seed)
    for sets in (selected, np.random.default_rng(seed).permuted(selected, axis=1)):
        verdict = margins.pools(sets, scores, error, SLOTS, BUDGET)
        assert failed(verdict) == set()
        assert verdict.flips == ()
        assert verdict.choices == sum(min(BUDGET, (t + 1) // SLOTS) for t in range(T))


def future(sets):
    sets[10, 0] = 11


def outside(sets):
    sets[10, 0] = T


def twice(sets):
    sets[20, 1] = sets[20, 0]


def below_minus_one(sets):
    sets[10, -1] = -2


def no_tail(sets):
    sets[sets == 22] = -1


def torn_pool(sets):
    row = sets[25]
    row[np.flatnonzero(row >= 0)[1]] = -1


def one_pool_short(sets):
    row = sets[23]
    row[row // SLOTS == row[0] // SLOTS] = -1


WRONG = {
    future: {"causal"},
    outside: {"range"},
    twice: {"duplicate"},
    below_minus_one: {"sentinel"},
    no_tail: {"tail"},
    torn_pool: {"pool", "count"},
    one_pool_short: {"count"},
}


@pytest.mark.parametrize(("damage", "checks"), WRONG.items(), ids=[damage.__name__ for damage in WRONG])
def test_facts_have_no_margin(damage, checks):
    scores, selected, error = scored()
    damage(selected)
    verdict = margins.pools(selected, scores, error + 1e9, SLOTS, BUDGET)
    assert checks <= failed(verdict)
    assert max(verdict.by_token) == np.inf


def swapped(gap):
    """A selection that takes the fourth-best pool instead of the third, which is `gap` better."""
    scores, _, error = scored()
    row = np.array([5.0, 4.0, 3.0, 3.0 - gap, 1.0, 0.0, -1.0])
    scores[28] = row
    selected = indexer.select(scores, 0, BUDGET * SLOTS, SLOTS).astype(np.int64)
    selected[28][selected[28] // SLOTS == 2] += SLOTS
    return selected, scores, error


@pytest.mark.parametrize(("gap", "error", "excused"), [(0.5, 0.2, False), (0.5, 0.3, True), (0.0, 0.0, False)])
def test_a_flip_is_excused_only_within_both_errors(gap, error, excused):
    selected, scores, zero = swapped(gap)
    verdict = margins.pools(selected, scores, zero + error, SLOTS, BUDGET)
    (flip,) = verdict.flips
    assert (flip.token, flip.chosen, flip.expected, flip.excused) == (28, 3, 2, excused)
    assert flip.gap == gap
    assert failed(verdict) == (set() if excused else {"choice"})


def test_equal_scores_take_the_lower_pool():
    scores, _, error = scored()
    scores = np.where(np.isfinite(scores), 0.0, -np.inf)
    lower = indexer.select(scores, 0, BUDGET * SLOTS, SLOTS).astype(np.int64)
    assert failed(margins.pools(lower, scores, error, SLOTS, BUDGET)) == set()
    higher = lower.copy()
    higher[28][higher[28] // SLOTS == 0] += 5 * SLOTS
    assert "choice" in failed(margins.pools(higher, scores, error, SLOTS, BUDGET))


def test_no_pool_at_all_is_a_tail_only():
    selected = np.array([[0, -1, -1], [0, 1, -1], [0, 1, 2]])
    verdict = margins.pools(selected, np.zeros((3, 0)), np.zeros((3, 0)), SLOTS, BUDGET)
    assert failed(verdict) == set()
    selected[2, 2] = -1
    assert failed(margins.pools(selected, np.zeros((3, 0)), np.zeros((3, 0)), SLOTS, BUDGET)) == {"tail"}


def routed(groups, kept, seed=0, experts=8, k=3):
    from reference.arithmetic import get_arithmetic

    scores = np.random.default_rng(seed).uniform(size=(20, experts))
    chosen = router.choose(get_arithmetic("exact"), scores, k, groups, kept).astype(np.int64)
    return scores, chosen, np.zeros_like(scores)


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_the_references_experts_pass_in_any_order(groups, kept, seed):
    scores, chosen, error = routed(groups, kept, seed)
    verdict = margins.experts(chosen[:, ::-1], scores, error, groups, kept)
    assert failed(verdict) == set()
    assert (verdict.choices, verdict.flips) == (60, ())


@pytest.mark.parametrize(
    ("value", "checks"), [(8, {"range", "count"}), (-1, {"count"}), (-2, {"count", "sentinel"}), (None, {"duplicate"})]
)
def test_impossible_experts_have_no_margin(value, checks):
    scores, chosen, error = routed(1, 1)
    chosen[4, 1] = chosen[4, 0] if value is None else value
    assert checks == failed(margins.experts(chosen, scores, error + 1e9, 1, 1))


@pytest.mark.parametrize(("error", "excused"), [(0.01, False), (0.06, True)])
def test_an_expert_flip_is_excused_only_within_both_errors(error, excused):
    scores, _, zero = routed(1, 1)
    scores[4] = [0.9, 0.8, 0.5, 0.4, 0.1, 0.1, 0.1, 0.1]
    chosen = margins.top(scores, np.full(20, 3)).nonzero()[1].reshape(20, 3)
    chosen[4] = [0, 1, 3]
    verdict = margins.experts(chosen, scores, zero + error, 1, 1)
    assert [(flip.chosen, flip.expected, flip.excused) for flip in verdict.flips] == [(3, 2, excused)]
    assert failed(verdict) == (set() if excused else {"choice"})


@pytest.mark.parametrize(("error", "excused"), [(0.001, False), (0.02, True)])
def test_another_surviving_group_is_excused_only_within_the_errors(error, excused):
    scores = np.array([[0.9, 0.5, 0.2, 0.1, 0.75, 0.7, 0.2, 0.1]])
    assert not margins.unclear_groups(scores, np.full_like(scores, 0.001), 2, 1)[0]
    assert margins.unclear_groups(scores, np.full_like(scores, 0.02), 2, 1)[0]
    verdict = margins.experts(np.array([[0, 1, 2]]), scores, np.full_like(scores, error), 2, 1)
    assert bool(failed(verdict)) is not excused
    assert all(flip.excused is excused for flip in verdict.flips)


def test_experts_of_a_group_too_many_fail():
    scores = np.array([[0.9, 0.5, 0.2, 0.1, 0.75, 0.7, 0.2, 0.1]])
    verdict = margins.experts(np.array([[0, 1, 4]]), scores, np.full_like(scores, 1e9), 2, 1)
    assert failed(verdict) == {"choice"}


def test_unclear_rows_are_those_within_the_errors():
    scores = np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.9], [3.0, 2.0, -np.inf]])
    chosen = np.array([[True, True, False]] * 3)
    assert list(margins.unclear(scores, np.full(scores.shape, 0.1), chosen)) == [False, True, False]


def test_a_shared_selection_must_be_the_same_set():
    source = np.array([[0, -1, -1], [0, 1, -1]])
    assert failed(margins.same(np.array([[0, -1, -1], [1, 0, -1]]), source, 2)) == set()
    assert failed(margins.same(np.array([[0, -1, -1], [1, -1, -1]]), source, 2)) == {"shared"}
