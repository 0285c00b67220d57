"""fast.state: rings, growth, transactions and snapshots, without a model."""

from __future__ import annotations

import pytest
import torch

from fast.linear import ROWS
from fast.ops import kda
from fast.state import DsaState, KdaState, Rows, State, StateError

L, P = 5, 3


def rows(seed: int, T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    latents, keys, gates = (torch.randn(T, width, generator=generator) for width in (L, P, P))
    return latents, keys, gates


def dsa(S: int) -> DsaState:
    return DsaState(L, P, S, torch.float32, torch.device("cpu"))


def feed(state: DsaState, latents: torch.Tensor, keys: torch.Tensor, gates: torch.Tensor) -> None:
    """Append, and pool by a sum that shows every slot: key times its place, plus the gate."""
    complete = state.append(latents, keys, gates)
    assert complete is not None
    k, g = complete
    place = torch.arange(1, state.slots + 1)[None, :, None]
    state.pools.append((k * place + g).sum(1))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_rows_grow_without_losing_anything():
    table, parts = Rows(2, torch.float32, torch.device("cpu")), []
    for length in (1, 0, 255, 1, 300, 7):
        parts.append(torch.randn(length, 2, generator=torch.Generator().manual_seed(length)))
        table.append(parts[-1])
        assert torch.equal(table.view(), torch.cat(parts))
    table.cut(10)
    assert torch.equal(table.view(), torch.cat(parts)[:10])


@pytest.mark.parametrize("S", [1, 2, 4, 8])
@pytest.mark.parametrize("cuts", [[1] * 41, [3, 1, 30, 7], [41], [8, 8, 8, 8, 9], [7, 34]], ids=str)
def test_pools_do_not_depend_on_the_calls(S, cuts):
    latents, keys, gates = rows(S, 41)
    whole, pieces = dsa(S), dsa(S)
    feed(whole, latents, keys, gates)
    start = 0
    for cut in cuts:
        feed(pieces, *(x[start : start + cut] for x in (latents, keys, gates)))
        start += cut
    assert same(whole.arrays(), pieces.arrays())
    place = torch.arange(1, S + 1)[None, :, None]
    n = 41 // S
    expected = (keys[: n * S].view(n, S, P) * place + gates[: n * S].view(n, S, P)).sum(1)
    assert torch.equal(whole.arrays()["pool_keys"], expected)
    assert torch.equal(whole.arrays()["tail_keys"], keys[n * S :])


@pytest.mark.parametrize("S", [1, 2, 4, 8])
@pytest.mark.parametrize("start", [0, 3, 4, 5, 7, 8, 30])
@pytest.mark.parametrize("seen", [1, 4, ROWS])
def test_cutting_back_leaves_what_never_seeing_them_leaves(S, start, seen):
    first, drafts, after = rows(1, start), rows(2, seen), rows(3, 11)
    for kept in range(seen + 1):
        plain, tried = dsa(S), dsa(S)
        if start:
            feed(plain, *first)
            feed(tried, *first)
        tried.begin()
        for i in range(seen):
            feed(tried, *(x[i : i + 1] for x in drafts))
        tried.commit(kept)
        for i in range(kept):
            feed(plain, *(x[i : i + 1] for x in drafts))
        assert same(plain.arrays(), tried.arrays())
        feed(plain, *after)
        feed(tried, *after)
        assert same(plain.arrays(), tried.arrays())


def matrix_state() -> KdaState:
    return KdaState(torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(3, 24))


def step(state: KdaState, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    k, v, g = (torch.randn(1, 2, 4, generator=generator) for _ in range(3))
    beta = torch.rand(1, 2, generator=generator)
    history = torch.cat([state.history[1:], torch.randn(1, 24, generator=generator)])
    state.advance(kda.update(state.matrix, k[0], v[0], -g[0].abs(), beta[0]), history, (k, v, -g.abs(), beta))


@pytest.mark.parametrize("kept", range(5))
def test_matrices_are_replayed_bit_for_bit(kept):
    plain, tried = matrix_state(), matrix_state()
    tried.begin()
    for seed in range(4):
        step(tried, seed)
    tried.commit(kept)
    for seed in range(kept):
        step(plain, seed)
    assert same(plain.arrays(), tried.arrays())
    step(plain, 9)
    step(tried, 9)
    assert same(plain.arrays(), tried.arrays())


def whole() -> State:
    state = State({"layers.0": matrix_state(), "layers.1": dsa(4)})
    for seed in range(6):
        move(state, seed)
    return state


def move(state: State, seed: int) -> None:
    kda_layer, dsa_layer = state.layers["layers.0"], state.layers["layers.1"]
    assert isinstance(kda_layer, KdaState)
    assert isinstance(dsa_layer, DsaState)
    step(kda_layer, seed)
    feed(dsa_layer, *rows(seed, 1))
    state.advance(1)


def test_a_snapshot_is_a_copy_of_everything():
    state = whole()
    kept = state.snapshot()
    before = {name: x.clone() for name, x in kept.items()}
    move(state, 7)
    assert same(kept, before)
    state.restore(kept)
    assert same(state.snapshot(), before)
    assert same(state.snapshot(), whole().snapshot())


@pytest.mark.parametrize("damage", ["lacks", "extra", "mixed"])
def test_a_snapshot_that_does_not_fit_is_refused(damage):
    state = whole()
    snapshot = state.snapshot()
    if damage == "lacks":
        del snapshot["layers.0.conv_state"]
    elif damage == "extra":
        snapshot["layers.2.state"] = snapshot["layers.0.state"]
    else:
        snapshot["layers.1.length"] = torch.tensor(4)
    with pytest.raises(StateError, match=r"layers\."):
        state.restore(snapshot)


def test_transactions_that_make_no_sense_are_refused():
    state = whole()
    with pytest.raises(StateError, match="without a transaction"):
        state.commit(0)
    state.begin()
    with pytest.raises(StateError, match="open since token 6"):
        state.begin()
    with pytest.raises(StateError, match="commit of 1 rows, the transaction saw 0"):
        state.commit(1)
    state.advance(ROWS)
    with pytest.raises(StateError, match=f"{ROWS + 1} rows in one transaction, at most {ROWS}"):
        state.advance(1)
    state.commit(0)
    assert state.length == 6
