"""kda.cu against float64: outputs, state and history over several tokens, both forms of the gates, row invariance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance.unit.fast import kernel_cases as cases
from conformance.unit.fast.bounds import check
from conformance.unit.fast.kernel_cases import CUDA, KINDS, Noise, chain, silu, values
from fast.kernels import kda

pytestmark = pytest.mark.gpu

EPS, LOWER = 1e-5, -5.0


class Case:
    """Weights, state and projections of `B` sequences with `T` new tokens; q, k, v, gates and beta side by side."""

    def __init__(self, B: int, T: int, H: int, d: int, kind: str, *, fused: bool, seed: int) -> None:
        self.shape, HD, R = (B, T, H, d), H * d, B * T
        g = cases.generator(seed)
        rank = kda.RANK if fused else HD
        self.raw = values(kind, R, 3 * HD + 2 * rank + -(-H // 8) * 8, seed=seed + 1)
        self.raw[:, 3 * HD :] = values("normal", R, self.raw.shape[1] - 3 * HD, seed=seed + 2)
        ends = [HD, HD, HD, rank, rank, self.raw.shape[1] - 3 * HD - 2 * rank]
        *self.inputs, beta = self.raw.split(ends, -1)
        self.beta = beta[:, :H]
        low = (values("normal", HD, rank, seed=seed + i, scale=rank**-0.5) for i in (3, 4)) if fused else (None, None)
        f_b, g_b = low
        self.weights = kda.Weights(
            values("normal", 3 * HD, 1, 4, seed=seed + 5, scale=0.5),
            torch.rand(H, generator=g, device=CUDA) * 3 - 1,
            torch.randn(HD, generator=g, device=CUDA) * 2 - 1,
            values("normal", d, seed=seed + 6),
            LOWER,
            EPS,
            f_b=f_b,
            g_b=g_b,
        )
        self.history = values(kind, B, 3, 3 * HD, seed=seed + 7)
        self.state = values("normal", B, H, d, d, seed=seed + 8, dtype=torch.float32)

    def run(self, sequences: slice | None = None, tokens: int | None = None, *, pdl: bool = False) -> list[Tensor]:
        """-> [out, history, state] after the first `tokens` tokens of some of the sequences."""
        B, T, H, d = self.shape
        sequences, tokens = sequences or slice(None), tokens or T
        rows = torch.arange(B * T, device=CUDA).view(B, T)[sequences, :tokens].reshape(-1)
        q, k, v, f, g = (x[rows] for x in self.inputs)
        history, state = self.history[sequences].clone(), self.state[sequences].clone()
        out = torch.full((len(rows), H * d), float("nan"), dtype=torch.bfloat16, device=CUDA)
        beta = self.beta[rows]
        torch.cuda.synchronize()  # with `pdl` some of it is read before the launch in front has ended
        kda.step((q, k, v), f, g, beta, self.weights, history, state, out, pdl=pdl)
        return [out, history, state]

    def truth(self, noise: Noise) -> tuple[Tensor, Tensor]:
        B, T, H, d = self.shape
        w = self.weights
        q, k, v, f, g = (x.double().view(B, T, -1) for x in self.inputs)
        if w.f_b is not None and w.g_b is not None:
            f, g = noise.bf16(noise.product(f, w.f_b)), noise.bf16(noise.product(g, w.g_b))
        padded = torch.cat([self.history.double(), torch.cat([q, k, v], -1)], 1)
        kernel = w.conv.double().view(-1, 4)
        terms = torch.stack([padded[:, j : j + T] * kernel[:, j] for j in range(4)])
        mixed, size = terms.sum(0), terms.abs().sum(0)
        mixed = silu(mixed + noise.spread(4 * cases.F32 * size))
        q, k, v = noise.bf16(noise.f32(mixed, 6)).view(B, T, 3, H, d).unbind(2)
        q, k = (noise.f32(x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), 40) for x in (q, k))
        q = q * d**-0.5
        rate = w.A_log.double().exp()[:, None]
        decay = torch.sigmoid(rate * (f + w.dt_bias.double()).view(B, T, H, d)) * LOWER
        decay = noise.f32(decay.exp(), 16)
        beta = noise.f32(torch.sigmoid(self.beta.double()).view(B, T, H), 6)
        state, outs = self.state.double(), []
        for t in range(T):
            state = state * decay[:, t, :, :, None]
            recalled = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            size = torch.einsum("bhkv,bhk->bhv", state.abs(), k[:, t].abs())
            delta = beta[:, t, :, None] * (v[:, t] - recalled + noise.spread(24 * cases.F32 * size))
            state = noise.f32(state + k[:, t, :, :, None] * delta[:, :, None, :], 3)
            out = torch.einsum("bhkv,bhk->bhv", state, q[:, t])
            size = torch.einsum("bhkv,bhk->bhv", state.abs(), q[:, t].abs())
            outs.append(noise.bf16(out + noise.spread(40 * cases.F32 * size)))
        core = torch.stack(outs, 1)
        unit = core / (core.square().mean(-1, keepdim=True) + EPS).sqrt()
        gated = noise.f32(unit * w.o_norm.double() * torch.sigmoid(g.view(B, T, H, d)), 40)
        return noise.bf16(gated).view(B * T, H * d), state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("B", "T", "H", "d", "fused"),
    [(1, 1, 64, 128, True), (2, 3, 3, 128, True), (3, 2, 5, 128, False), (2, 4, 6, 16, False)],
)
def test_a_step_against_float64(B: int, T: int, H: int, d: int, fused: bool, kind: str) -> None:
    case = Case(B, T, H, d, kind, fused=fused, seed=30)
    out, history, state = case.run()
    (exact_out, allowed_out), (exact_state, allowed_state) = chain(case.truth, seed=31)
    check(out, exact_out, allowed_out)
    check(state, exact_state, allowed_state)
    rows = torch.cat(case.inputs[:3], -1).view(B, T, -1)
    assert torch.equal(history, torch.cat([case.history, rows], 1)[:, T:])


@pytest.mark.parametrize(
    ("H", "d", "fused"), [(8, 128, True), (64, 128, True), (64, 128, False), (8, 128, False), (6, 16, False)]
)
def test_sequences_and_tokens_have_the_same_bits_alone_and_together(H: int, d: int, fused: bool) -> None:
    case = Case(4, 3, H, d, "heavy", fused=fused, seed=32)
    together = case.run()
    for b in range(4):
        alone = case.run(slice(b, b + 1))
        assert torch.equal(alone[0], together[0].view(4, 3, -1)[b])
        assert torch.equal(alone[1][0], together[1][b])
        assert torch.equal(alone[2][0], together[2][b])
    first = case.run(tokens=1)[0]
    assert torch.equal(first, together[0].view(4, 3, -1)[:, 0])


@pytest.mark.parametrize(
    ("B", "T", "H", "d", "fused"),
    [(1, 1, 8, 128, True), (1, 11, 8, 128, True), (5, 2, 64, 128, True), (3, 2, 6, 16, False)],
)
def test_a_rehearsal_changes_no_bit(B: int, T: int, H: int, d: int, fused: bool) -> None:
    case = Case(B, T, H, d, "heavy", fused=fused, seed=34)
    plain = case.run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(case.run(pdl=True), plain, strict=True))


@pytest.mark.parametrize("T", [4, 11])
def test_one_token_at_a_time_gives_the_bits_of_a_window(T: int) -> None:
    """Eleven are more rows than the kernel multiplies with f_b and g_b at a time."""
    case = Case(2, T, 4, 128, "normal", fused=True, seed=33)
    together = case.run()
    history, state, outs = case.history.clone(), case.state.clone(), []
    for t in range(T):
        q, k, v, f, g = (x.view(2, T, -1)[:, t].contiguous() for x in case.inputs)
        out = torch.empty_like(q)
        kda.step((q, k, v), f, g, case.beta.view(2, T, -1)[:, t].contiguous(), case.weights, history, state, out)
        outs.append(out)
    assert torch.equal(torch.stack(outs, 1).view(2 * T, -1), together[0])
    assert torch.equal(history, together[1])
    assert torch.equal(state, together[2])
