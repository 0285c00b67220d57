"""fast.ops.kda: the chunked form against the recurrent one, both against float64, and the gates.

Errors of the delta rule do not grow: a step multiplies the state by diag(e^g) (1 - beta k k^T), of norm at most 1 for
unit keys. So the error after T steps is at most the sum of what each step adds, a few roundings of |M| and |v|.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from conformance.unit.fast import bounds
from fast.ops import kda

WIDTHS = (1, 2, 16, 24, 32, 64)
H, d = 3, 16


def sequence(seed: int, T: int, *, near: float = 1.0, lower_bound: float = -5.0, strong: float = 0.0):
    """q, k, v, g, beta, state in float64. `near` is how much keys differ from one another, `strong` shifts beta up."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = F.normalize(draw(T, H, d), dim=-1) * d**-0.5
    shared = draw(1, H, d) if near < 1 else torch.zeros(1, H, d, dtype=torch.float64)
    k = F.normalize(shared + near * draw(T, H, d), dim=-1)
    g = lower_bound * torch.sigmoid(3 * draw(T, H, d) - (6 if near < 1 else 1))
    return q, k, draw(T, H, d), g, torch.sigmoid(draw(T, H) + strong), draw(H, d, d)


def error_bound(inputs, roundings: int, dtype: torch.dtype) -> tuple[float, float]:
    """(bound on any element of core, of the state): `roundings` per step, relative to the norms met on the way."""
    q, k, v, g, beta, state = inputs
    met = state.norm()
    total = met
    for t in range(len(k)):
        state = kda.update(state, k[t], v[t], g[t], beta[t])
        total = total + 2 * state.norm() + v[t].norm()
    error = bounds.gamma(roundings, dtype) * float(total)
    return error * float(q.norm(dim=-1).max()), error


def agree(found, expected, limits) -> None:
    for actual, wanted, limit in zip(found, expected, limits, strict=True):
        bounds.check(actual, wanted, torch.tensor(limit, dtype=torch.float64))


@pytest.mark.parametrize("w", WIDTHS)
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 130])
def test_chunked_is_recurrent(w, T):
    """In float64, where a wrong term cannot hide behind rounding."""
    inputs = sequence(T, T)
    agree(kda.chunked(w, *inputs), kda.recurrent(*inputs), error_bound(inputs, 4 * d + 2 * w, torch.float64))


@pytest.mark.parametrize("w", WIDTHS)
def test_fp32_chunks_are_as_exact_as_fp32_steps(w):
    inputs = sequence(7, 100)
    found = kda.chunked(w, *(x.float() for x in inputs))
    exact = kda.recurrent(*(x.float().double() for x in inputs))
    agree(found, exact, error_bound(inputs, 4 * d + 2 * w, torch.float32))


@pytest.mark.parametrize("w", [16, 32, 64])
@pytest.mark.parametrize(("T", "near"), [(16, 0.3), (64, 0.3), (128, 0.01)])
def test_near_parallel_keys(w, T, near):
    """Keys u + near * noise, beta about 0.97, little decay: the powers of a series inverse explode here."""
    inputs = sequence(11, T, near=near, strong=3.5)
    found = kda.chunked(w, *(x.float() for x in inputs))
    agree(
        found, kda.recurrent(*(x.float().double() for x in inputs)), error_bound(inputs, 4 * d + 2 * w, torch.float32)
    )


@pytest.mark.parametrize("lower_bound", [-5.0, -20.0])
def test_strongest_decay_neither_overflows_nor_vanishes(lower_bound):
    """g at its lower bound for 64 tokens: e^(+320) would be infinite; the answer is that only the last tokens count."""
    q, k, v, g, beta, state = sequence(13, 64)
    g = torch.full_like(g, lower_bound)
    inputs = (q, k, v, g, beta, state)
    found = kda.chunked(64, *(x.float() for x in inputs))
    exact = kda.recurrent(*(x.float().double() for x in inputs))
    agree(found, exact, error_bound(inputs, 4 * d + 2 * 64, torch.float32))
    assert float(exact[1].abs().max()) > 0


@pytest.mark.parametrize("cut", [1, 8, 63, 64, 65, 99])
def test_state_carries_over_a_cut(cut):
    inputs = sequence(17, 100)
    *rows, state = inputs
    first, middle = kda.chunked(32, *(x[:cut] for x in rows), state)
    second, last = kda.chunked(32, *(x[cut:] for x in rows), middle)
    limits = error_bound(inputs, 2 * (4 * d + 2 * 32), torch.float64)
    agree((torch.cat([first, second]), last), kda.chunked(32, *inputs), limits)


def test_long_calls_are_prepared_in_segments(monkeypatch):
    inputs = sequence(19, 130)
    whole = kda.chunked(16, *inputs)
    monkeypatch.setattr(kda, "SEGMENT", 32)
    agree(kda.chunked(16, *inputs), whole, error_bound(inputs, 4 * d + 2 * 16, torch.float64))


def test_several_threads_may_be_the_first(monkeypatch):
    """Of a linear algebra that is loaded at its first call, and by one thread only."""
    solve, threads = torch.linalg.solve_triangular, 4
    loading, loaded = threading.Lock(), threading.Event()
    together = threading.Barrier(threads, timeout=60)
    inputs = sequence(11, 40)
    expected = kda.chunked(16, *inputs)

    def loads(*args: Any, **options: Any) -> torch.Tensor:
        if not loaded.is_set():
            assert loading.acquire(blocking=False), "two threads are the first"
            time.sleep(0.05)
            loaded.set()
        return solve(*args, **options)

    def run(_: int) -> tuple[torch.Tensor, ...]:
        together.wait()
        return kda.chunked(16, *inputs)

    monkeypatch.setattr(torch.linalg, "solve_triangular", loads)
    monkeypatch.setattr(kda, "_loaded", set())
    with ThreadPoolExecutor(threads) as pool:
        for found in pool.map(run, range(threads)):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert kda._loaded == {"cpu"}, "later calls wait for nobody"


def test_update_writes_nothing_in_place():
    _, k, v, g, beta, state = sequence(23, 1)
    before = state.clone()
    kda.update(state, k[0], v[0], g[0], beta[0])
    assert torch.equal(state, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [2, 4])
def test_conv(dtype, n):
    generator = torch.Generator().manual_seed(n)
    c, T = 6, 9
    x = torch.randn(T, c, generator=generator).to(dtype)
    weight = torch.randn(c, 1, n, generator=generator).bfloat16()
    history = torch.randn(n - 1, c, generator=generator).to(dtype)
    padded = torch.cat([history, x]).double()
    raw, size = torch.zeros(T, c).double(), torch.zeros(T, c).double()
    for t in range(T):
        for j in range(n):
            term = weight[:, 0, j].double() * padded[t + j]
            raw[t] += term
            size[t] += term.abs()
    y = raw / (1 + torch.exp(-raw))
    error = 1.1 * bounds.gamma(n + 1) * size + bounds.gamma(8) * y.abs()
    found, after = kda.conv(x, weight, history)
    bounds.check(found, y, bounds.stored(y, error, dtype))
    assert torch.equal(after, torch.cat([history, x])[-(n - 1) :])
    pieces, carried = [], history
    for part in x.split([1, 2, 6]):
        out, carried = kda.conv(part, weight, carried)
        pieces.append(out)
    assert torch.equal(carried, after)
    bounds.check(torch.cat(pieces), y, bounds.stored(y, error, dtype))


def test_decay_is_per_head_rate_and_per_channel_bias():
    generator = torch.Generator().manual_seed(2)
    f = torch.randn(4, H * d, generator=generator).bfloat16()
    A_log, dt_bias = torch.randn(H, generator=generator), torch.randn(H * d, generator=generator)
    found = kda.decay(f, A_log, dt_bias, -5.0)
    pre = f.double() + dt_bias.double()
    for h in range(H):
        for c in range(d):
            x = torch.exp(A_log[h].double()) * pre[:, h * d + c]
            size = torch.exp(A_log[h].double()) * (f.double().abs() + dt_bias.double().abs())[:, h * d + c]
            expected = -5.0 / (1 + torch.exp(-x))
            bounds.check(found[:, h, c], expected, 5.0 / 4 * bounds.gamma(6) * size + bounds.gamma(6) * expected.abs())


def test_unit_and_gated_norm():
    generator = torch.Generator().manual_seed(3)
    x, gate = torch.randn(5, H, d, generator=generator), torch.randn(5, H, d, generator=generator).bfloat16()
    o_norm = (1 + 0.3 * torch.randn(d, generator=generator)).bfloat16()
    expected = x.double() / torch.sqrt(x.double().square().sum(-1, keepdim=True) + 1e-6)
    bounds.check(kda.unit(x), expected, bounds.gamma(d + 4) * expected.abs())
    assert torch.equal(kda.unit(torch.zeros(1, d)), torch.zeros(1, d))
    wide = x.double()
    y = (
        wide
        / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-2)
        * o_norm.double()
        / (1 + torch.exp(-gate.double()))
    )
    found = kda.gated_norm(x, gate, o_norm, 1e-2)
    bounds.check(found, y.reshape(5, H * d), bounds.gamma(d + 12) * y.reshape(5, H * d).abs())
