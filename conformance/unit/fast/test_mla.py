"""fast.ops.mla: both forms against float64 attention over a Python set of tokens."""

from __future__ import annotations

import pytest
import torch

from conformance.unit.fast import bounds, workspace
from fast.ops import mla

H, N, V, L = 3, 8, 6, 16
FORMS = pytest.mark.parametrize("absorbed", [True, False], ids=["absorbed", "expanded"])


def tensors(seed: int, T: int, n: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(T, H, N, generator=generator).to(dtype)
    latents = torch.randn(n, L, generator=generator).to(dtype)
    kv_b = (torch.randn(H * (N + V), L, generator=generator) / L**0.5).bfloat16()
    return q, latents, kv_b


def choice(seed: int, T: int, n: int, W: int) -> torch.Tensor:
    """Rows of different sizes, ascending, then -1; row 0 empty where there is more than one."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.full((T, W), -1, dtype=torch.int32)
    for t in range(T):
        size = 0 if t == 0 and T > 1 else int(torch.randint(1, min(W, n) + 1, (1,), generator=generator))
        rows[t, :size] = torch.randperm(n, generator=generator)[:size].sort().values.int()
    return rows


def in_float64(q, latents, selected, kv_b, dtype, absorbed):
    """-> core and its bound. Scores may err by `slack`, which scales a weight by at most e^(2 slack)."""
    T = q.shape[0]
    weights = kv_b.double().view(H, N + V, L)
    core, bound = torch.zeros(T, H, V).double(), torch.zeros(T, H, V).double()
    for t in range(T):
        ids = sorted({int(i) for i in selected[t] if 0 <= i < len(latents)})
        if not ids:
            continue
        c = latents[ids].double()
        for h in range(H):
            K, values = c @ weights[h, :N].T, c @ weights[h, N:].T
            size_k, size_v = c.abs() @ weights[h, :N].abs().T, c.abs() @ weights[h, N:].abs().T
            error_k, error_v = bounds.gamma(L) * size_k, bounds.gamma(L) * size_v
            if not absorbed:
                error_k, error_v = bounds.stored(K, error_k, dtype), bounds.stored(values, error_v, dtype)
            query = q[t, h].double()
            share = torch.softmax(K @ query * N**-0.5, 0)
            slack = (error_k + bounds.gamma(L + N + 4) * size_k) @ query.abs() * N**-0.5
            swing = torch.expm1(2 * slack.max()) + bounds.gamma(len(ids) + L + 16)
            core[t, h] = share @ values
            bound[t, h] = swing * (share @ size_v) + share @ error_v
    return core, bounds.stored(core, bound, dtype)


@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("T", "n", "W"), [(1, 1, 1), (1, 40, 12), (9, 40, 12), (5, 7, 12)])
def test_attend(absorbed, dtype, T, n, W):
    q, latents, kv_b = tensors(T * n, T, n, dtype)
    selected = choice(n, T, n, W)
    expected, bound = in_float64(q, latents, selected, kv_b, dtype, absorbed)
    bounds.check(mla.attend(q, latents, selected, kv_b, values=V, absorbed=absorbed), expected, bound)


@FORMS
def test_a_selection_is_a_set(absorbed):
    """Order, duplicates, -1 in the middle and ids past the context change no bit."""
    q, latents, kv_b = tensors(3, 1, 20, torch.bfloat16)
    plain = torch.tensor([[2, 5, 11, 19, -1, -1]])
    other = torch.tensor([[19, -1, 5, 2, 2, 11]])
    past = torch.tensor([[2, 5, 11, 19, 20, 1 << 20]])
    found = [mla.attend(q, latents, s.int(), kv_b, values=V, absorbed=absorbed) for s in (plain, other, past)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@FORMS
def test_nothing_selected_gives_zeros(absorbed):
    q, latents, kv_b = tensors(4, 3, 6, torch.float32)
    nothing = torch.full((3, 5), -1, dtype=torch.int32)
    for selected, cached in ((nothing, latents), (nothing[:, :0], latents), (nothing, latents[:0])):
        found = mla.attend(q, cached, selected, kv_b, values=V, absorbed=absorbed)
        assert torch.equal(found, torch.zeros(3, H, V))


@FORMS
@pytest.mark.parametrize("tile", [1, 5000, 1 << 27])
def test_tiles_change_nothing(monkeypatch, absorbed, tile):
    q, latents, kv_b = tensors(5, 9, 40, torch.float32)
    selected = choice(5, 9, 40, 12)
    monkeypatch.setattr(mla, "TILE_BYTES", tile)
    expected, bound = in_float64(q, latents, selected, kv_b, torch.float32, absorbed)
    bounds.check(mla.attend(q, latents, selected, kv_b, values=V, absorbed=absorbed), expected, bound)


@FORMS
def test_workspace_does_not_grow_with_queries_or_context(monkeypatch, absorbed):
    monkeypatch.setattr(mla, "TILE_BYTES", 1 << 16)
    peaks = []
    for T, n in ((32, 64), (128, 64), (32, 4096)):
        q, latents, kv_b = tensors(6, T, n, torch.float32)
        selected = choice(6, T, n, 12)
        with workspace.Peak() as peak:
            mla.attend(q, latents, selected, kv_b, values=V, absorbed=absorbed)
        peaks.append(peak.bytes - T * (H * V * 4 * 2 + 12 * 40))
    assert max(peaks) <= 4 * (1 << 16)


@FORMS
def test_memory_behind_the_context_is_never_read(absorbed):
    """The cache grows in blocks; what lies past its length is not part of it."""
    q, latents, kv_b = tensors(7, 2, 10, torch.bfloat16)
    buffer = torch.full((64, L), float("nan"), dtype=torch.bfloat16)
    buffer[:10] = latents
    selected = torch.tensor([[0, 3, 9, 12], [1, 63, -1, -1]], dtype=torch.int32)
    found = mla.attend(q, buffer[:10], selected, kv_b, values=V, absorbed=absorbed)
    assert torch.equal(found, mla.attend(q, latents, selected, kv_b, values=V, absorbed=absorbed))
    assert bool(found.isfinite().all())
