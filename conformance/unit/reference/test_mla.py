"""reference.ops.mla: both forms against the definition and against each other; only the selected tokens are read."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.unit.reference.bounds import Recorder, check, gamma
from reference.arithmetic import Arithmetic, get_arithmetic
from reference.ops import mla
from reference.weights import Weights

EXACT = Arithmetic()
H, N, O_, L = 3, 6, 5, 7
FORMS = ("expanded", "absorbed")


def _case(seed: int, T: int, n: int, W: int):
    """Queries, latents, kv_b and random sets of 0..W of the n tokens."""
    rng = np.random.default_rng(seed)
    q, c, kv_b = rng.standard_normal((T, H, N)), rng.standard_normal((n, L)), rng.standard_normal((H * (N + O_), L))
    selected = np.full((T, W), -1, np.int32)
    for t in range(T):
        count = int(rng.integers(0, min(n, W) + 1)) if t else min(n, W)
        selected[t, :count] = np.sort(rng.permutation(n)[:count])
    return q, c, kv_b, selected


def _attend(form, q, c, kv_b, selected, ar=EXACT):
    return mla.attend(ar, q, c, selected, Weights.of({"kv_b_proj.weight": kv_b}), form)


def _definition(q, c, kv_b, selected) -> tuple[np.ndarray, np.ndarray]:
    """The equations, and the bound on any implementation's float64 error.

    A logit's error is gamma of its two contractions times the sum of the sizes of all products; it enters the output
    as a relative error of every weight, twice (softmax numerator and denominator).
    """
    per_head = kv_b.reshape(H, N + O_, L)
    out, bound = np.zeros((len(q), H, O_)), np.zeros((len(q), H, O_))
    for t, head in np.ndindex(len(q), H):
        rows = c[selected[t][selected[t] >= 0]]
        if not len(rows):
            continue
        keys, values = rows @ per_head[head, :N].T, rows @ per_head[head, N:].T
        logits = keys @ q[t, head] * N**-0.5
        share = np.exp(logits - logits.max())
        share /= share.sum()
        out[t, head] = share @ values
        sizes = (np.abs(rows) @ np.abs(per_head[head, :N]).T) @ np.abs(q[t, head]) * N**-0.5
        slack = gamma(N + L + 8) * sizes.max() * 2 + gamma(len(rows) + 2 * L + 16)
        bound[t, head] = slack * (share @ (np.abs(rows) @ np.abs(per_head[head, N:]).T))
    return out, bound


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("T", "n", "W"), [(1, 1, 1), (5, 9, 4), (4, 30, 23), (3, 2, 40)])
def test_attention_is_the_definition(form, T, n, W):
    case = _case(T * n, T, n, W)
    expected, bound = _definition(*case)
    check(_attend(form, *case), expected, bound)


@pytest.mark.parametrize("seed", range(4))
def test_absorbed_is_expanded(seed):
    case = _case(100 + seed, 6, 25, 17)
    check(_attend("absorbed", *case), _attend("expanded", *case), 2 * _definition(*case)[1])


@pytest.mark.parametrize("form", FORMS)
def test_a_query_that_selects_nothing_gives_zero_and_leaves_the_others_alone(form):
    q, c, kv_b, selected = _case(7, 4, 9, 6)
    alone = _attend(form, q[:1], c, kv_b, selected[:1])
    selected[2] = -1
    found = _attend(form, q, c, kv_b, selected)
    assert np.array_equal(found[2], np.zeros((H, O_)))
    assert np.array_equal(found[0], alone[0])
    nothing = _attend(form, q, c[:0], kv_b, np.full_like(selected, -1))
    assert np.array_equal(nothing, np.zeros((4, H, O_)))


@pytest.mark.parametrize("form", FORMS)
def test_only_selected_tokens_are_read(form):
    q, c, kv_b, selected = _case(8, 3, 12, 5)
    found = _attend(form, q, c, kv_b, selected)
    poisoned = np.full_like(c, np.nan)
    used = np.unique(selected[selected >= 0])
    poisoned[used] = c[used]
    assert len(used) < len(c)
    assert np.array_equal(_attend(form, q, poisoned, kv_b, selected), found)
    # Token 0 is what an unmasked -1 would read.
    row = np.array([[3, 5, -1, -1]], np.int32)
    poisoned = c.copy()
    poisoned[0] = np.nan
    assert np.array_equal(_attend(form, q[:1], poisoned, kv_b, row), _attend(form, q[:1], c, kv_b, row))


@pytest.mark.parametrize("form", FORMS)
def test_wider_padding_changes_no_bit(form):
    q, c, kv_b, selected = _case(9, 3, 12, 5)
    wide = np.concatenate([selected, np.full((3, 30), -1, np.int32)], axis=1)
    assert np.array_equal(_attend(form, q, c, kv_b, wide), _attend(form, q, c, kv_b, selected))


@pytest.mark.parametrize("form", FORMS)
def test_a_set_has_no_order_and_its_unused_places_may_stand_anywhere(form):
    q, c, kv_b, selected = _case(14, 5, 12, 7)
    wide = np.concatenate([selected, np.full((5, 4), -1, np.int32)], axis=1)
    for rows in (wide[:, ::-1], np.random.default_rng(14).permuted(wide, axis=1)):
        check(_attend(form, q, c, kv_b, rows), *_definition(q, c, kv_b, selected))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["exact", "bf16"])
@pytest.mark.parametrize("tile", [1, 1 << 23])
def test_a_row_does_not_depend_on_rows_or_tiles(form, name, tile, monkeypatch):
    q, c, kv_b, selected = _case(10, 5, 14, 9)
    ar = get_arithmetic(name)
    whole = _attend(form, q, c, kv_b, selected, ar)
    monkeypatch.setattr(mla, "TILE", tile)
    assert np.array_equal(_attend(form, q, c, kv_b, selected, ar), whole)
    for t in range(5):
        assert np.array_equal(_attend(form, q[t : t + 1], c, kv_b, selected[t : t + 1], ar)[0], whole[t])


@pytest.mark.parametrize("form", FORMS)
def test_leading_axes_are_independent(form):
    cases = [_case(seed, 4, 10, 6) for seed in (11, 12)]
    kv_b = cases[0][2]
    q, c, selected = (np.stack([case[i] for case in cases]) for i in (0, 1, 3))
    whole = _attend(form, q, c, kv_b, selected)
    for i in range(2):
        assert np.array_equal(whole[i], _attend(form, q[i], c[i], kv_b, selected[i]))


def test_key_rows_come_before_value_rows_in_every_head():
    """One token: the softmax weight is 1, so the output is the value half of kv_b, whatever the query."""
    kv_b = np.arange(float(H * (N + O_) * L)).reshape(-1, L)
    c = np.zeros((1, L))
    c[0, 2] = 1.0
    for form in FORMS:
        found = _attend(form, np.ones((1, H, N)), c, kv_b, np.zeros((1, 1), np.int32))
        assert np.array_equal(found[0], kv_b.reshape(H, N + O_, L)[:, N:, 2])


def test_projections_norm_their_low_rank_halves():
    rng = np.random.default_rng(13)
    D, Q = 8, 5
    shapes = {
        "q_a_proj.weight": (Q, D),
        "q_a_layernorm.weight": (Q,),
        "q_b_proj.weight": (H * N, Q),
        "kv_a_proj_with_mqa.weight": (L, D),
        "kv_a_layernorm.weight": (L,),
        "o_proj.weight": (D, H * O_),
    }
    w = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    x = rng.standard_normal((2, 3, D))

    def low_rank(proj: str, norm: str) -> tuple[np.ndarray, np.ndarray]:
        raw = x @ w[proj].T
        root = np.sqrt((raw * raw).mean(-1, keepdims=True) + 1e-5)
        error = gamma(D + raw.shape[-1] + 8) * (np.abs(x) @ np.abs(w[proj]).T).max(-1, keepdims=True) / root
        return raw / root * w[norm], 3 * error * np.abs(w[norm])

    held = Weights.of(w)
    r = mla.query_residual(EXACT, x, held, 1e-5)
    check(r, *low_rank("q_a_proj.weight", "q_a_layernorm.weight"))
    check(mla.latent(EXACT, x, held, 1e-5), *low_rank("kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight"))
    q = mla.queries(EXACT, r, held, H)
    bound = gamma(Q) * (np.abs(r) @ np.abs(w["q_b_proj.weight"]).T)
    check(q, (r @ w["q_b_proj.weight"].T).reshape(2, 3, H, N), bound.reshape(2, 3, H, N))
    core = rng.standard_normal((2, 3, H, O_))
    flat = core.reshape(2, 3, -1)
    bound = gamma(H * O_) * (np.abs(flat) @ np.abs(w["o_proj.weight"]).T)
    check(mla.output(EXACT, core, held), flat @ w["o_proj.weight"].T, bound)


@pytest.mark.parametrize("form", FORMS)
def test_rounding_points(form):
    ar = Recorder()
    q, c, kv_b, selected = _case(14, 3, 9, 4)
    _attend(form, q, c, kv_b, selected, ar)
    stored = {"mla.core"} | ({"mla.kv_b"} if form == "expanded" else set())
    further = {"mla.softmax"} | ({"mla.q_absorbed", "mla.mixed"} if form == "absorbed" else set())
    assert ar.points("store") == stored
    assert ar.points("maybe") == further
    assert {"mla.qk", "mla.scaled", "mla.softmax"} <= ar.points("single")
