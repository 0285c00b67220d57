"""The DSA indexer of decode rows on the device (indexer.cu): state update, pool scores, selection.

S sequences, T new tokens each, R = S T rows; h index heads, p index width, P pools, L latent width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fast.kernels import driver
from fast.kernels.compile import Variant
from fast.kernels.driver import Float, Int, Parameters, Pointer, address


class _Indexer(Parameters):
    _fields_ = (
        *((name, Pointer) for name in ("kv", "key", "gate", "query", "weights", "q_a", "q_norm", "q_resid")),
        *((name, Pointer) for name in ("kv_norm", "key_weight", "key_bias", "ape")),
        *((name, Pointer) for name in ("latents", "pools", "ring", "position", "scores", "selected", "count")),
        *(
            (name, Int)
            for name in ("rows", "tokens", "latent", "capacity", "pool_capacity", "ring_slots", "topk", "width")
        ),
        *((name, Int) for name in ("ld_kv", "ld_key", "ld_gate", "ld_query", "ld_weights", "q_rank", "ld_q_a")),
        ("rms_eps", Float),
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """kv_norm [L], key_weight, key_bias [p] (k_norm), ape [S, p], all bf16."""

    kv_norm: Tensor
    key_weight: Tensor
    key_bias: Tensor
    ape: Tensor
    heads: int
    topk: int
    eps: float


@dataclass(frozen=True, slots=True)
class Cache:
    """latents [S, capacity, L], pools [S, capacity / slots, p], ring [S, slots, 2, p] (key and gate of the token at a
    position modulo the ring), all bf16; position [S] int32: tokens held before this step."""

    latents: Tensor
    pools: Tensor
    ring: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """scores [R, P] fp32; selected [R, topk + slots - 1] int32, ascending, then -1; count [R] int32."""

    scores: Tensor
    selected: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """bf16 products of the rows: kv [R, L], key, gate [R, p], query [R, h * p], weights [R, h]; rows may be strided."""

    kv: Tensor
    key: Tensor
    gate: Tensor
    query: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Query:
    """q_a [R, Q] bf16, the q_a_proj product (rows may be strided); norm [Q] bf16; resid [R, Q] bf16: the result."""

    q_a: Tensor
    norm: Tensor
    resid: Tensor


def variant(heads: int, width: int, slots: int) -> Variant:
    return Variant("indexer", (("HEADS", heads), ("ID", width), ("POOL", slots)))


def supported(heads: int, width: int, slots: int) -> bool:
    return heads <= 32 and width % 32 == 0 and width <= 256 and slots <= 16


def _launch(
    name: str, rows: Rows, weights: Weights, cache: Cache, choice: Choice, pdl: bool, q: Query | None = None
) -> None:
    S, capacity, L = cache.latents.shape
    (slots, p), R = weights.ape.shape, rows.kv.shape[0]
    assert supported(weights.heads, p, slots), (weights.heads, p, slots)
    assert rows.kv.shape == (R, L), (tuple(rows.kv.shape), R, L)
    assert R % S == 0, (R, S)
    assert cache.pools.shape[::2] == (S, p), (tuple(cache.pools.shape), S, p)
    assert cache.ring.shape[::3] == (S, p), (tuple(cache.ring.shape), S, p)
    assert cache.ring.shape[1] >= slots, (tuple(cache.ring.shape), slots)
    assert choice.scores.shape == (R, cache.pools.shape[1]), (tuple(choice.scores.shape), R)
    assert choice.selected.shape == (R, weights.topk + slots - 1), (tuple(choice.selected.shape), R, weights.topk)
    parts = (rows.kv, rows.key, rows.gate, rows.query, rows.weights)
    own = (weights.kv_norm, weights.key_weight, weights.key_bias, weights.ape)
    for x in (*own, cache.latents, cache.pools, cache.ring, choice.scores, choice.selected):
        assert x.is_contiguous(), x.stride()
    v = _Indexer(*map(address, parts))
    v.kv_norm, v.key_weight, v.key_bias, v.ape = map(address, own)
    if q is not None:
        Q = q.norm.shape[0]
        assert q.q_a.shape == q.resid.shape == (R, Q), (tuple(q.q_a.shape), tuple(q.resid.shape), R, Q)
        assert q.resid.is_contiguous(), q.resid.stride()
        v.q_a, v.q_norm, v.q_resid, v.q_rank, v.ld_q_a = *map(address, (q.q_a, q.norm, q.resid)), Q, q.q_a.stride(0)
    v.latents, v.pools, v.ring, v.position = map(address, (cache.latents, cache.pools, cache.ring, cache.position))
    v.scores, v.selected, v.count = map(address, (choice.scores, choice.selected, choice.count))
    v.rows, v.tokens, v.latent, v.capacity, v.pool_capacity = R, R // S, L, capacity, cache.pools.shape[1]
    v.ring_slots, v.topk, v.width, v.rms_eps = cache.ring.shape[1], weights.topk, choice.selected.shape[1], weights.eps
    v.ld_kv, v.ld_key, v.ld_gate, v.ld_query, v.ld_weights = (x.stride(0) for x in parts)
    device = cache.latents.device.index
    grid, threads = {
        "indexer_update": ((S + (0 if q is None else R), 1, 1), 512),
        "indexer_score": ((driver.processors(device), R, 1), 256),
        "indexer_select": ((R, 1, 1), 1024),
    }[name]
    driver.kernel(variant(weights.heads, p, slots), name, device)(grid, threads, v, pdl=pdl)


def update(
    rows: Rows, weights: Weights, cache: Cache, choice: Choice, q: Query | None = None, *, pdl: bool = False
) -> None:
    """Normalise and store the rows' latents, index keys and gates; form the pool keys they complete. Blocks beside them
    normalise `q`."""
    _launch("indexer_update", rows, weights, cache, choice, pdl, q)


def score(rows: Rows, weights: Weights, cache: Cache, choice: Choice, *, pdl: bool = False) -> None:
    """Score the pools each row sees; the cache holds the rows. Does nothing while all pools fit the budget."""
    _launch("indexer_score", rows, weights, cache, choice, pdl)


def select(rows: Rows, weights: Weights, cache: Cache, choice: Choice, *, pdl: bool = False) -> None:
    """Choose each row's tokens by its scores; equal scores take the lower pool, NaN is below everything."""
    _launch("indexer_select", rows, weights, cache, choice, pdl)
