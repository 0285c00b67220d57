"""Expert choice (model.md section 2.4). All fp32: logits, scores, bias, group sums, weights.

The bias picks and does nothing else: weights are the unbiased sigmoid scores of the chosen experts, divided by
(their sum + 1e-20) and scaled once by `routed_scaling_factor`. Ties take the lower expert (and the lower group).
The k chosen experts of a token are returned in ascending order, so equal sets are equal arrays; sums over them run in
that order, as `arithmetic.total`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from reference.arithmetic import Arithmetic, Sliced, sigmoid, total


class Routing(NamedTuple):
    """logits [.., T, E], indices [.., T, k] int32 ascending, weights [.., T, k]."""

    logits: np.ndarray
    indices: np.ndarray
    weights: np.ndarray


def route(
    ar: Arithmetic,
    x: np.ndarray,
    gate: Sliced,
    e_score_correction_bias: np.ndarray,
    *,
    num_experts_per_tok: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    indices: np.ndarray | None = None,
) -> Routing:
    """x [.., T, D], gate [E, D], bias [E] -> Routing. `indices` given: those experts instead of the choice."""
    logits = router_logits(ar, x, gate)
    scores = router_scores(ar, logits)
    if indices is None:
        biased = choice_scores(ar, scores, e_score_correction_bias)
        indices = choose(ar, biased, num_experts_per_tok, n_group, topk_group)
    weights = routing_weights(ar, scores, indices, norm_topk_prob, routed_scaling_factor)
    return Routing(logits, indices, weights)


def router_logits(ar: Arithmetic, x: np.ndarray, gate: Sliced) -> np.ndarray:
    """x [.., T, D], gate [E, D] -> [.., T, E], an fp32 point."""
    return ar.linear(x, gate, "router.logits", out="fp32")


def router_scores(ar: Arithmetic, logits: np.ndarray) -> np.ndarray:
    """logits [.., T, E] -> sigmoid, [.., T, E], an fp32 point."""
    return ar.single(sigmoid(logits), "router.scores")


def choice_scores(ar: Arithmetic, scores: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """scores [.., T, E], bias [E] -> what the choice is made by, [.., T, E], an fp32 point."""
    (E,) = bias.shape
    assert scores.shape[-1] == E, (scores.shape, bias.shape)
    return ar.single(scores + bias, "router.biased")


def choose(ar: Arithmetic, biased: np.ndarray, k: int, n_group: int, topk_group: int) -> np.ndarray:
    """biased scores [.., T, E] -> the k experts [.., T, k] int32, ascending.

    With n_group > 1 only experts of the `topk_group` best groups stand; a group's score is the sum of its two best.
    """
    *_, E = biased.shape
    assert E % n_group == 0, (E, n_group)
    if n_group > 1:
        biased = np.where(_standing(ar, biased, n_group, topk_group), biased, -np.inf)
    return np.sort(_best(biased, k), axis=-1).astype(np.int32)


def routing_weights(
    ar: Arithmetic, scores: np.ndarray, indices: np.ndarray, norm_topk_prob: bool, routed_scaling_factor: float
) -> np.ndarray:
    """unbiased scores [.., T, E], indices [.., T, k] -> [.., T, k], an fp32 point."""
    weights = np.take_along_axis(scores, indices.astype(np.int64), axis=-1)
    if norm_topk_prob:
        divisor = ar.single(ar.single(total(weights), "router.sum") + 1e-20, "router.divisor")
        weights = ar.single(weights / divisor[..., None], "router.normalised")
    return ar.single(weights * routed_scaling_factor, "router.weights")


def _standing(ar: Arithmetic, biased: np.ndarray, n_group: int, topk_group: int) -> np.ndarray:
    """Which experts belong to a surviving group: [.., T, E] bool."""
    *B, E = biased.shape
    grouped = biased.reshape(*B, n_group, E // n_group)
    two_best = -np.sort(-grouped, axis=-1)[..., :2]
    survivors = _best(ar.single(total(two_best), "router.group"), topk_group)
    stands = np.zeros((*B, n_group), dtype=bool)
    np.put_along_axis(stands, survivors, True, axis=-1)
    return np.repeat(stands, E // n_group, axis=-1)


def _best(scores: np.ndarray, k: int) -> np.ndarray:
    """Positions of the k largest along the last axis; of equal ones the lower position wins."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]
