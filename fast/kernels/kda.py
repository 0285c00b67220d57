"""One KDA decode step on the device (kda.cu). B sequences, T new tokens each, R = B T rows, H heads, d head width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fast.kernels import driver
from fast.kernels.compile import Variant
from fast.kernels.driver import Float, Int, Long, Parameters, Pointer, address

RANK = 128
WIDTHS = (16, 128)
"""Head widths with a kernel."""


class _Kda(Parameters):
    _fields_ = (
        *((name, Pointer) for name in ("q", "k", "v", "f", "g", "beta", "f_b", "g_b", "q_conv", "k_conv", "v_conv")),
        *(
            (name, Pointer)
            for name in ("a_log", "dt_bias", "o_norm", "q_past", "k_past", "v_past", "state", "out", "tap")
        ),
        *((name, Long) for name in ("past_sequence", "past_time")),
        *((name, Int) for name in ("heads", "sequences", "tokens", "ld", "ld_f", "ld_g", "ld_beta", "rehearse")),
        ("lower", Float),
        ("eps", Float),
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """conv [3*H*d, 1, 4] bf16 (q, k, v), A_log [H], dt_bias [H*d] fp32, o_norm [d] bf16; f_b and g_b [H*d, 128] bf16
    when the kernel is to apply them. lower_bound, eps: gate_lower_bound, rms_norm_eps."""

    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    o_norm: Tensor
    lower_bound: float
    eps: float
    f_b: Tensor | None = None
    g_b: Tensor | None = None


def supported(head_width: int, taps: int) -> bool:
    return head_width in WIDTHS and taps == 4


def variant(head_width: int, *, fused: bool) -> Variant:
    return Variant("kda", (("HD", head_width), ("FUSED", int(fused))))


def blocks(heads: int, sequences: int, processors: int) -> int:
    """As many for each head, which share its sequences; a multiprocessor has room for one."""
    return heads * max(1, min(sequences, processors // heads))


def step(
    qkv: tuple[Tensor, Tensor, Tensor],
    f: Tensor,
    g: Tensor,
    beta: Tensor,
    weights: Weights,
    history: Tensor,
    state: Tensor,
    out: Tensor,
    *,
    tap: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """q, k, v [R, H*d] and beta [R, H], raw projections, bf16, one row stride for the three; rows of a sequence follow
    each other. f and g: f_b f_a x and g_b g_a x [R, H*d], or f_a x and g_a x [R, 128] when `weights` has f_b and g_b.
    history [B, 3, 3*H*d] bf16 (oldest first) and state [B, H, d, d] fp32 are updated; out [R, H*d] bf16.

    tap [R, H, 6, d] fp32, if given, receives q, k and v behind the convolution, the log decay g, the output of the
    recurrence, and beta (its first place).

    With `pdl` state and history are read before the launch in front has ended: no launch that is still under way may
    write them. A block ends behind the whole launch in front of its own, and a launch begins when all blocks of the one
    in front have. So if the last n launches in front of one are under way when it begins, all blocks of n - 1 of them
    are on the device beside one of the first: impossible where (n - 1) * `blocks` is the number of multiprocessors or
    more. Another step on the same state may come from the n-th launch on; that is the fourth for 64 heads of one
    sequence on 132 multiprocessors. In a model a whole step lies between.
    """
    (R, HD), (B, H, d, _) = qkv[0].shape, state.shape
    fused, T = weights.f_b is not None, R // B
    assert qkv[0].shape == (B * T, H * d), (R, HD, tuple(state.shape))
    assert history.shape == (B, 3, 3 * HD), (tuple(history.shape), B, HD)
    assert weights.conv.shape == (3 * HD, 1, 4), tuple(weights.conv.shape)
    assert weights.A_log.shape == (H,), (tuple(weights.A_log.shape), H)
    assert weights.dt_bias.shape == (HD,), (tuple(weights.dt_bias.shape), HD)
    assert f.shape == g.shape == (R, RANK if fused else HD), (tuple(f.shape), tuple(g.shape))
    assert beta.shape == (R, H), (tuple(beta.shape), R, H)
    assert state.is_contiguous(), state.stride()
    assert history.is_contiguous(), history.stride()
    assert weights.conv.is_contiguous(), weights.conv.stride()
    assert (out.shape, out.is_contiguous()) == ((R, HD), True), (tuple(out.shape), out.stride())
    assert len({x.stride(0) for x in qkv}) == 1, [x.stride(0) for x in qkv]
    assert weights.dt_bias.dtype == weights.A_log.dtype == state.dtype == torch.float32
    assert fused == (weights.g_b is not None)
    p = _Kda(*map(address, qkv), address(f), address(g), address(beta), address(weights.f_b), address(weights.g_b))
    for i, name in enumerate("qkv"):
        setattr(p, f"{name}_conv", weights.conv.data_ptr() + 8 * HD * i)
        setattr(p, f"{name}_past", history.data_ptr() + 2 * HD * i)
    p.a_log, p.dt_bias, p.o_norm = address(weights.A_log), address(weights.dt_bias), address(weights.o_norm)
    p.state, p.out, p.tap = address(state), address(out), address(tap)
    if tap is not None:
        assert (tap.shape, tap.dtype) == ((R, H, 6, d), torch.float32), (tuple(tap.shape), tap.dtype)
        assert tap.is_contiguous(), tap.stride()
    p.past_sequence, p.past_time, _ = history.stride()
    p.heads, p.sequences, p.tokens, p.ld = H, B, T, qkv[0].stride(0)
    p.ld_f, p.ld_g, p.ld_beta = f.stride(0), g.stride(0), beta.stride(0)
    p.lower, p.eps = weights.lower_bound, weights.eps
    p.rehearse = int(pdl)
    for x in (*qkv, f, g):
        assert x.data_ptr() % 16 == 0, "rows of 16-byte pieces"
        assert x.stride(0) % 8 == 0, x.stride()
    device = state.device.index
    kernel = driver.kernel(variant(d, fused=fused), "kda", device)
    kernel((blocks(H, B, driver.processors(device)), 1, 1), 4 * d, p, shared=4 * d * d, pdl=pdl)
