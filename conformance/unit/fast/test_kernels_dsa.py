"""indexer.cu and mla.cu against float64 and against the plain definition of the selection."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance.unit.fast import kernel_cases as cases
from conformance.unit.fast.bounds import check
from conformance.unit.fast.kernel_cases import CUDA, KINDS, Noise, chain, values
from fast.kernels import indexer, mla

pytestmark = pytest.mark.gpu

RING = 12


class Case:
    """`S` sequences that hold `held` tokens each and get `T` more."""

    def __init__(
        self,
        S: int,
        T: int,
        held: list[int],
        *,
        heads: int = 32,
        p: int = 128,
        slots: int = 4,
        topk: int = 2048,
        kind: str = "normal",
        seed: int = 60,
    ) -> None:
        self.S, self.T, R, L = S, T, S * T, 512
        capacity = -(-(max(held) + T) // slots) * slots
        self.weights = indexer.Weights(
            values("normal", L, seed=seed),
            values("normal", p, seed=seed + 1),
            values("normal", p, seed=seed + 2),
            values("normal", slots, p, seed=seed + 3),
            heads,
            topk,
            1e-5,
        )
        self.rows = indexer.Rows(
            values(kind, R, L, seed=seed + 4),
            values(kind, R, p, seed=seed + 5),
            values(kind, R, p, seed=seed + 6),
            values("normal", R, heads * p, seed=seed + 7),
            values("normal", R, heads, seed=seed + 8),
        )
        ring = slots * -(-(slots + 8) // slots)
        self.cache = indexer.Cache(
            values("normal", S, capacity, L, seed=seed + 9),
            values("normal", S, capacity // slots, p, seed=seed + 10),
            values(kind, S, ring, 2, p, seed=seed + 11),
            torch.tensor(held, dtype=torch.int32, device=CUDA),
        )
        self.choice = indexer.Choice(
            torch.full((R, capacity // slots), float("nan"), device=CUDA),
            torch.full((R, topk + slots - 1), -7, dtype=torch.int32, device=CUDA),
            torch.full((R,), -7, dtype=torch.int32, device=CUDA),
        )

    def run(self, *, update: bool = True) -> None:
        arguments = self.rows, self.weights, self.cache, self.choice
        if update:
            indexer.update(*arguments)
        indexer.score(*arguments)
        indexer.select(*arguments)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("held", "T", "p", "slots"), [([0, 5, 2047], 1, 128, 4), ([3, 6], 3, 128, 4), ([7], 6, 32, 8), ([1], 8, 64, 4)]
)
def test_the_state_update(held: list[int], T: int, p: int, slots: int, kind: str) -> None:
    case = Case(len(held), T, held, p=p, slots=slots, kind=kind)
    latents, pools, ring = (x.clone() for x in (case.cache.latents, case.cache.pools, case.cache.ring))
    indexer.update(case.rows, case.weights, case.cache, case.choice)
    w = case.weights

    def rows(noise: Noise) -> tuple[Tensor, ...]:
        kv, key = case.rows.kv.double(), case.rows.key.double()
        unit = kv / (noise.f32(kv.square().mean(-1, keepdim=True), 64) + w.eps).sqrt()
        mean = key.mean(-1, keepdim=True)
        centred = key - mean - noise.spread(16 * cases.F32 * key.abs().mean(-1, keepdim=True))
        normal = centred / (noise.f32(centred.square().mean(-1, keepdim=True), 16) + 1e-6).sqrt()
        scaled = normal * w.key_weight.double()
        size = scaled.abs() + w.key_bias.double().abs()
        new = noise.bf16(scaled + w.key_bias.double() + noise.spread(6 * cases.F32 * size))
        return noise.bf16(noise.f32(unit * w.kv_norm.double(), 4)), new

    (latent, latent_error), (key, key_error) = chain(rows, seed=61)
    for s, start in enumerate(held):
        for t in range(T):
            at, r = start + t, s * T + t
            check(case.cache.latents[s, at], latent[r], latent_error[r])
            slot = case.cache.ring[s, at % ring.shape[1]]
            check(slot[0], key[r], key_error[r])
            assert torch.equal(slot[1], case.rows.gate[r])
            latents[s, at], ring[s, at % ring.shape[1]] = case.cache.latents[s, at], slot
            if at % slots == slots - 1:
                members = ring[s, [(at - slots + 1 + i) % ring.shape[1] for i in range(slots)]].double()

                def pooled(noise: Noise, members: Tensor = members) -> tuple[Tensor, ...]:
                    share = noise.f32(torch.softmax(members[:, 1] + w.ape.double(), 0), 16 + slots)
                    size = (share * members[:, 0]).abs().sum(0)
                    return (noise.bf16((share * members[:, 0]).sum(0) + noise.spread(slots * cases.F32 * size)),)

                ((exact, allowed),) = chain(pooled, seed=62)
                check(case.cache.pools[s, at // slots], exact, allowed)
                pools[s, at // slots] = case.cache.pools[s, at // slots]
    for before, after in ((latents, case.cache.latents), (pools, case.cache.pools), (ring, case.cache.ring)):
        assert torch.equal(before, after), "a place that no token belongs to was written"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("held", "T", "Q"), [([0, 9, 4], 2, 1536), ([5], 1, 1536), ([1], 8, 40)])
def test_the_query_norm_beside_the_update(held: list[int], T: int, Q: int, kind: str) -> None:
    """A row's norm does not depend on the other rows, and the state is what it is without a query."""
    case, alone, R = Case(len(held), T, held), Case(len(held), T, held), len(held) * T
    joint, norm = values(kind, R, Q + 8, seed=63), values("normal", Q, seed=64)
    q_a, resid = joint[:, :Q], torch.full((R, Q), float("nan"), dtype=torch.bfloat16, device=CUDA)
    indexer.update(case.rows, case.weights, case.cache, case.choice, indexer.Query(q_a, norm, resid))
    indexer.update(alone.rows, alone.weights, alone.cache, alone.choice)
    assert torch.equal(case.cache.latents, alone.cache.latents)
    assert torch.equal(case.cache.ring, alone.cache.ring)

    def truth(noise: Noise) -> tuple[Tensor, ...]:
        wide = q_a.double()
        unit = wide / (noise.f32(wide.square().mean(-1, keepdim=True), 64) + case.weights.eps).sqrt()
        return (noise.bf16(noise.f32(unit * norm.double(), 4)),)

    ((exact, allowed),) = chain(truth, seed=65)
    check(resid, exact, allowed)
    last, one = Case(1, 1, held[-1:]), torch.empty(1, Q, dtype=torch.bfloat16, device=CUDA)
    indexer.update(last.rows, last.weights, last.cache, last.choice, indexer.Query(q_a[-1:], norm, one))
    assert torch.equal(one[0], resid[-1])


def expected(scores: Tensor, n: int, slots: int, topk: int) -> list[int]:
    """Lowest index wins: a stable descending sort."""
    pools = n // slots
    order = scores[:pools].nan_to_num(float("-inf")).sort(dim=-1, descending=True, stable=True).indices[: topk // slots]
    chosen = [slots * int(i) + s for i in sorted(order.tolist()) for s in range(slots)]
    return chosen + list(range(pools * slots, n))


@pytest.mark.parametrize(
    ("held", "T", "heads", "p", "slots", "topk"),
    [
        ([2046, 2051, 2052, 9001], 2, 32, 128, 4, 2048),
        ([32768 * 4 + 2], 1, 32, 128, 4, 2048),
        ([200000], 1, 32, 128, 4, 2048),
        ([29, 33, 64, 200], 2, 4, 32, 4, 32),
        ([23, 100], 3, 3, 32, 8, 24),
    ],
)
def test_scores_and_selection(held: list[int], T: int, heads: int, p: int, slots: int, topk: int) -> None:
    case = Case(len(held), T, held, heads=heads, p=p, slots=slots, topk=topk)
    case.run(update=False)
    for r in range(len(held) * T):
        n = held[r // T] + r % T + 1
        pools = n // slots
        if pools > topk // slots:
            keys = case.cache.pools[r // T, :pools].double()
            q = case.rows.query[r].double().view(heads, p)
            dots = q @ keys.T
            error = cases.gamma(p) * (q.abs() @ keys.abs().T)
            w = case.rows.weights[r].double() * heads**-0.5
            terms = w[:, None] * torch.relu(dots) * p**-0.5
            allowed = (w.abs()[:, None] * error * p**-0.5).sum(0) + 16 * cases.F32 * terms.abs().sum(0)
            check(case.choice.scores[r, :pools], terms.sum(0), allowed)
            wanted = expected(case.choice.scores[r], n, slots, topk)
        else:
            wanted = list(range(n))
        got = case.choice.selected[r].tolist()
        assert int(case.choice.count[r]) == len(wanted)
        assert got == wanted + [-1] * (len(got) - len(wanted))


@pytest.mark.parametrize("pools", [513, 1024, 5000, 32768, 40000])
@pytest.mark.parametrize("pattern", ["ties", "equal", "nan", "few", "ordered"])
def test_ties_take_the_lowest_index(pools: int, pattern: str) -> None:
    n, topk, slots = 4 * pools + 3, 2048, 4
    case = Case(1, 1, [n - 1])
    g = cases.generator(63)
    scores = {
        "ties": torch.randint(0, 4, (pools,), generator=g, device=CUDA).float() - 1.0,
        "equal": torch.zeros(pools, device=CUDA),
        "nan": torch.where(torch.rand(pools, generator=g, device=CUDA) < 0.5, float("nan"), 1.0),
        "few": torch.where(torch.arange(pools, device=CUDA) % 997 == 5, 1.0, -0.0),
        "ordered": torch.arange(pools, device=CUDA).float(),
    }[pattern]
    case.rows.weights.zero_()
    arguments = case.rows, case.weights, case.cache, case.choice
    case.choice.scores[0, :pools] = scores
    indexer.select(*arguments)
    wanted = expected(scores, n, slots, topk)
    got = case.choice.selected[0].tolist()
    assert got == wanted + [-1] * (len(got) - len(wanted))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("R", "S", "H", "counts"), [(1, 1, 64, [2051]), (4, 4, 64, [1, 130, 2048, 700]), (3, 1, 5, [64, 65, 66])]
)
def test_attention_against_float64(R: int, S: int, H: int, counts: list[int], kind: str) -> None:
    capacity, W = 4096, 2051
    q, kv_b = values("normal", R, H * 256, seed=64), values("normal", H * 512, 512, seed=65, scale=512**-0.5)
    latents = values(kind, S, capacity, 512, seed=66, scale=0.3 if kind == "normal" else 0.01)
    g = cases.generator(67)
    selected = torch.full((R, W), -1, dtype=torch.int32, device=CUDA)
    for r, n in enumerate(counts):
        selected[r, :n] = torch.randperm(capacity, generator=g, device=CUDA)[:n].sort().values.int()
    count = torch.tensor(counts, dtype=torch.int32, device=CUDA)
    out = torch.full((R, H * 256), float("nan"), dtype=torch.bfloat16, device=CUDA)
    work = mla.workspace(R, H, W, CUDA)
    mla.attend(q, kv_b, latents, selected, count, work, out)
    weights = kv_b.double().view(H, 512, 512)
    for r, n in enumerate(counts):
        rows = latents[r * S // R, selected[r, :n].long()].double()
        asked = q[r].double().view(H, 256)

        def truth(noise: Noise, rows: Tensor = rows, asked: Tensor = asked) -> tuple[Tensor, ...]:
            onto = torch.einsum("hn,hnl->hl", asked, weights[:, :256])
            size = torch.einsum("hn,hnl->hl", asked.abs(), weights[:, :256].abs())
            onto = noise.bf16(onto + noise.spread(cases.gamma(256) * size))
            logits = onto @ rows.T + noise.spread(cases.gamma(512) * (onto.abs() @ rows.abs().T))
            share = torch.softmax(noise.f32(logits / 16, 2), -1)
            share = share + noise.spread(2.0**-16 * share)
            mixed = noise.bf16(share @ rows + noise.spread(cases.gamma(2048) * (share @ rows.abs())))
            core = torch.einsum("hl,hol->ho", mixed, weights[:, 256:])
            size = torch.einsum("hl,hol->ho", mixed.abs(), weights[:, 256:].abs())
            return (noise.bf16(core + noise.spread(cases.gamma(512) * size)).flatten(),)

        ((exact, allowed),) = chain(truth, seed=68)
        check(out[r], exact, allowed)
        single = torch.empty(1, H * 256, dtype=torch.bfloat16, device=CUDA)
        own = latents[r * S // R : r * S // R + 1].contiguous()
        alone = mla.workspace(1, H, W, CUDA)
        mla.attend(
            q[r : r + 1], kv_b, own, selected[r : r + 1].contiguous(), count[r : r + 1].contiguous(), alone, single
        )
        assert torch.equal(single[0], out[r])
