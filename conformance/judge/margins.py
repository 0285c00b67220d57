"""Discrete choices (pools of tokens, experts): facts are checked exactly, the choice itself with margins.

A choice that differs from the reference's is excused only when the scores of the two candidates lie closer than their
certified errors together. Range, causality, duplicates, sentinels, counts and the tail have no margin at all. Every
function takes the reference's scores of the engine's own inputs and an allowed error per score (zero where the scores
are the engine's own).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conformance.judge.result import Check, Flip
from conformance.judge.spread import Floats

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Verdict:
    """`checks` in order, differing choices, how many choices were compared, and error / allowed of each token."""

    checks: list[Check]
    flips: tuple[Flip, ...]
    choices: int
    by_token: tuple[float, ...]


def pools(selected: Ints, scores: Floats, error: Floats, slots: int, budget: int) -> Verdict:
    """selected [T,W] token indices (-1: none), scores and error [T,P] (-inf: no candidate); `budget` pools per query.

    The set must be whole candidate pools, as many as the budget or the candidates allow, and the visible tail.
    """
    T = len(selected)
    P = scores.shape[1]
    visible = np.arange(1, T + 1)
    inside = (selected >= 0) & (selected < T)
    wrong = _common(selected, T, {"range": selected >= T, "causal": inside & (selected >= visible[:, None])})
    member = _members(selected, inside, T)
    groups = member[:, : P * slots].reshape(T, P, slots).sum(axis=-1)
    candidate = (np.arange(P) + 1) * slots <= visible[:, None]
    chosen = candidate & (groups == slots)
    tail = (np.arange(T) >= (visible // slots * slots)[:, None]) & (np.arange(T) < visible[:, None])
    wrong["tail"] = np.any(tail & ~member, axis=-1)
    wrong["pool"] = np.any(candidate & (groups > 0) & (groups < slots), axis=-1)
    need = np.minimum(budget, candidate.sum(axis=-1))
    wrong["count"] = chosen.sum(axis=-1) != need
    ranked = np.where(candidate, scores, -np.inf)
    expected = top(ranked, need)
    flips = _flips(chosen, expected, ranked, error)
    return _verdict(wrong, flips, int(need.sum()), T)


def experts(indices: Ints, scores: Floats, error: Floats, groups: int, kept: int) -> Verdict:
    """indices [T,k], scores and error [T,E]: the biased scores that experts are chosen by; `kept` of `groups` survive.

    With groups the engine's choice is measured within the surviving groups that explain it best, and those must be
    among the best by their sum of two within the errors.
    """
    T, k = indices.shape
    E = scores.shape[1]
    inside = (indices >= 0) & (indices < E)
    wrong = _common(indices, E, {"range": indices >= E})
    wrong["count"] = ~inside.all(axis=-1)
    chosen = _members(indices, inside, E)
    expected = top(standing(scores, groups, kept), np.full(T, k))
    flips: list[Flip] = []
    clean = ~(wrong["range"] | wrong["count"] | wrong["duplicate"] | wrong["sentinel"])
    for t in np.flatnonzero((chosen != expected).any(axis=-1) & clean):
        flips += _grouped_flips(int(t), chosen[t], expected[t], scores[t], error[t], groups, kept)
    return _verdict(wrong, flips, T * k, T)


def same(selected: Ints, source: Ints, length: int) -> Verdict:
    """A layer that shares its selection: as sets, row by row, `selected` and `source` must be equal."""
    wrong = _common(selected, length, {"range": selected >= length})
    a = _members(selected, (selected >= 0) & (selected < length), length)
    b = _members(source, (source >= 0) & (source < length), length)
    wrong["shared"] = (a != b).any(axis=-1)
    return _verdict(wrong, [], int(b.sum()), len(selected))


def top(scores: Floats, need: npt.NDArray[np.integer]) -> Bools:
    """[T,N] -> mask of the `need[t]` best of each row; of equal scores the lower index wins."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(scores.shape[1]), order.shape).copy(), axis=-1)
    return rank < need[:, None]


def standing(scores: Floats, groups: int, kept: int) -> Floats:
    """Scores [T,E] with -inf in the groups that do not survive."""
    if groups == 1:
        return scores
    T, E = scores.shape
    best = -np.sort(-scores.reshape(T, groups, -1), axis=-1)[..., :2].sum(axis=-1)
    alive = np.repeat(top(best, np.full(T, kept)), E // groups, axis=-1)
    return np.where(alive, scores, -np.inf)


def unclear(scores: Floats, error: Floats, chosen: Bools) -> Bools:
    """[T] True where some score left out may exceed some score taken, within the errors (-inf: no candidate)."""
    if scores.shape[-1] == 0:
        return np.zeros(len(scores), bool)
    low = np.where(chosen, scores - error, np.inf).min(axis=-1)
    high = np.where(~chosen & np.isfinite(scores), scores + error, -np.inf).max(axis=-1)
    return high >= low


def unclear_groups(scores: Floats, error: Floats, groups: int, kept: int) -> Bools:
    """[T] True where another set of surviving groups is within the errors of the best one."""
    if groups == kept:
        return np.zeros(len(scores), bool)
    T = len(scores)
    best, spread = _group_scores(scores, error, groups)
    return unclear(best, spread, top(best, np.full(T, kept)))


def _group_scores(scores: Floats, error: Floats, groups: int) -> tuple[Floats, Floats]:
    """Sum of each group's two best [T,G] and twice its largest error: any two members differ by no more."""
    T = len(scores)
    split = scores.reshape(T, groups, -1)
    best = -np.sort(-split, axis=-1)[..., :2].sum(axis=-1)
    return best, 2.0 * error.reshape(T, groups, -1).max(axis=-1)


def _common(indices: Ints, limit: int, wrong: dict[str, Bools]) -> dict[str, Bools]:
    """Row masks of what no margin excuses."""
    ordered = np.sort(indices, axis=-1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    out: dict[str, Bools] = {name: np.any(mask, axis=-1) for name, mask in wrong.items()}
    out["duplicate"] = np.any(repeated, axis=-1)
    out["sentinel"] = np.any(indices < -1, axis=-1)
    return out


def _members(indices: Ints, inside: Bools, length: int) -> Bools:
    """[T,W] indices -> [T,length] membership, ignoring entries that are not `inside`."""
    table = np.zeros((len(indices), length + 1), bool)
    np.put_along_axis(table, np.where(inside, indices, length), True, axis=-1)
    return table[:, :length]


def _flips(chosen: Bools, expected: Bools, scores: Floats, error: Floats) -> list[Flip]:
    out: list[Flip] = []
    for t in np.flatnonzero((chosen != expected).any(axis=-1)):
        out += _row_flips(int(t), chosen[t], expected[t], scores[t], error[t])
    return out


def _row_flips(token: int, chosen: Bools, expected: Bools, scores: Floats, error: Floats) -> list[Flip]:
    """Wrongly taken against the candidate left out that has the strongest claim."""
    out = []
    left = np.flatnonzero(~chosen & np.isfinite(scores))
    for taken in np.flatnonzero(chosen & ~expected):
        if len(left) == 0:
            continue
        rival = int(left[np.argmax(scores[left] - error[left])])
        gap = float(scores[rival] - scores[taken])
        allowed = float(error[rival] + error[taken])
        out.append(Flip(token, int(taken), rival, gap, allowed, gap < allowed))
    return out


def _grouped_flips(
    token: int, chosen: Bools, expected: Bools, scores: Floats, error: Floats, groups: int, kept: int
) -> list[Flip]:
    if groups == kept:
        return _row_flips(token, chosen, expected, scores, error)
    size = len(scores) // groups
    used = set((np.flatnonzero(chosen) // size).tolist())
    best, spread = (part[0] for part in _group_scores(scores[None], error[None], groups))
    explanations = []
    for alive in itertools.combinations(range(groups), kept):
        if not used <= set(alive):
            continue
        mask = np.isin(np.arange(groups), alive)
        within = np.where(np.repeat(mask, size), scores, -np.inf)
        count = np.array([chosen.sum()])
        flips = _row_flips(token, chosen, top(within[None], count)[0], within, error)
        ranked = _row_flips(token, mask, top(best[None], np.array([kept]))[0], best, spread)
        explanations.append(flips + ranked)
    if explanations:
        return min(explanations, key=lambda flips: (sum(not f.excused for f in flips), sum(f.gap for f in flips)))
    wrong, right = int(np.flatnonzero(chosen & ~expected)[0]), int(np.flatnonzero(expected & ~chosen)[0])
    return [Flip(token, wrong, right, float(scores[right] - scores[wrong]), 0.0, False)]


def _verdict(wrong: dict[str, Bools], flips: list[Flip], choices: int, tokens: int) -> Verdict:
    by_token = np.zeros(tokens)
    checks = []
    for name, mask in wrong.items():
        count = int(mask.sum())
        where = f"row {int(np.argmax(mask))}" if count else ""
        checks.append(Check(name, float(count), 0.0, math.inf if count else 0.0, count == 0, where))
        by_token[mask] = math.inf
    worst, ratio = None, 0.0
    for flip in flips:
        size = flip.gap / flip.allowed if flip.allowed > 0 else math.inf
        if not flip.excused:
            size = max(size, math.nextafter(1.0, 2.0))
        by_token[flip.token] = max(by_token[flip.token], size, 0.0)
        if worst is None or size > ratio:
            worst, ratio = flip, size
    bad = [flip for flip in flips if not flip.excused]
    where = "" if worst is None else f"row {worst.token}: {worst.chosen} taken, {worst.expected} left out"
    gap, allowed = (worst.gap, worst.allowed) if worst is not None else (0.0, 0.0)
    checks.append(Check("choice", gap, allowed, max(ratio, 0.0), not bad, where))
    return Verdict(checks, tuple(flips), choices, tuple(float(x) for x in by_token))
