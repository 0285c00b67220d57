"""A model of full geometry with synthetic weights, made on the device: what the decode benchmark runs.

Every layer has its own backbone. The routed experts do not fit beside it on one GPU, so `banks` distinct NVFP4 banks
are cycled over the layers. The experts of one token and layer are 113 MB, more than a cache holds, so no byte is read
for free: a step moves the same bytes as with all banks present.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fast.kernels import experts, indexer, kda, layers, mhc

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Packed:
    codes: Tensor
    scale: Tensor
    scale_2: Tensor


class Maker:
    """Random tensors of one seed; linear weights keep the size of what they multiply."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator(device=DEVICE).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=DEVICE, dtype=dtype).mul_(scale)

    def linear(self, rows: int, cols: int) -> Tensor:
        return self.normal(rows, cols, scale=cols**-0.5)

    def norm(self, width: int) -> Tensor:
        return self.normal(width, scale=0.1).add_(1.0)

    def packed(self, count: int, rows: int, cols: int) -> list[Packed]:
        """Random codes; block scales 2^-1 .. 2^1; scale_2 such that the values have variance 1 / cols."""
        codes = torch.randint(
            0, 256, (count, rows, cols // 2), generator=self.generator, device=DEVICE, dtype=torch.uint8
        )
        size = (count, rows, cols // 16)
        scale = torch.randint(0x30, 0x40, size, generator=self.generator, device=DEVICE, dtype=torch.uint8)
        scale_2 = torch.full((count,), 0.3 * cols**-0.5, device=DEVICE)
        return [Packed(*parts) for parts in zip(codes, scale, scale_2, strict=True)]


def build(text: Any, *, banks: int, seed: int = 0, step: Callable[[int], None] = lambda total: None) -> layers.Model:
    """`text`: a `fast.config.TextConfig`; `step(total)` is called after every layer. BF16 except the routed experts."""
    make, D = Maker(seed), text.hidden_size
    width, E = text.moe_intermediate_size, text.n_routed_experts
    distinct = [_bank(make, E, D, width) for _ in range(banks)]
    built: list[layers.Layer] = []
    for i in range(text.num_hidden_layers):
        mixer = _kda(make, text) if text.layer_kind(i) == "kda" else _dsa(make, text)
        if text.is_sparse(i):
            F = text.shared_intermediate_size
            shared = (make.linear(F, D), make.linear(F, D), make.linear(D, F))
            bias = make.normal(E, scale=0.02, dtype=torch.float32)
            block: layers.Moe | layers.Dense = layers.Moe(make.linear(E, D), bias, distinct[i % banks], shared)
        else:
            F = text.intermediate_size
            block = layers.Dense((make.linear(F, D), make.linear(F, D), make.linear(D, F)))
        built.append(layers.Layer(_site(make, text), mixer, _site(make, text), block))
        step(text.num_hidden_layers)
    V = text.vocab_size
    return layers.Model(make.normal(V, D), tuple(built), make.norm(D), make.linear(V, D), text)


def _bank(make: Maker, E: int, D: int, width: int) -> experts.Bank:
    return experts.bank(make.packed(E, width, D), make.packed(E, width, D), make.packed(E, D, width))


def _site(make: Maker, text: Any) -> mhc.Site:
    C, M, D = text.hc_mult, text.hc_rows, text.hidden_size
    base, scale = make.normal(M, dtype=torch.float32), torch.ones(3, device=DEVICE)
    return mhc.Site(make.linear(M, C * D), base, scale, make.norm(D))


def _kda(make: Maker, text: Any) -> layers.Kda:
    D, H, d = text.hidden_size, text.linear_num_heads, text.linear_head_dim
    projections = tuple(make.linear(n, D) for n in (H * d, H * d, H * d, kda.RANK, kda.RANK, H))
    step = kda.Weights(
        make.normal(3 * H * d, 1, text.short_conv_kernel_size, scale=0.5),
        make.normal(H, dtype=torch.float32),
        make.normal(H * d, dtype=torch.float32),
        make.norm(d),
        text.gate_lower_bound,
        text.rms_norm_eps,
        f_b=make.linear(H * d, kda.RANK),
        g_b=make.linear(H * d, kda.RANK),
    )
    return layers.Kda(projections, step, make.linear(D, H * d))


def _dsa(make: Maker, text: Any) -> layers.Dsa:
    D, H, Q, L = text.hidden_size, text.num_attention_heads, text.q_lora_rank, text.kv_lora_rank
    h, p = text.index_n_heads, text.index_head_dim
    return layers.Dsa(
        tuple(make.linear(n, D) for n in (Q, L, p, p, h)),
        make.norm(Q),
        (make.linear(H * text.qk_nope_head_dim, Q), make.linear(h * p, Q)),
        indexer.Weights(
            make.norm(L),
            make.norm(p),
            make.normal(p, scale=0.1),
            make.normal(text.index_kpool, p),
            h,
            text.index_topk,
            text.rms_norm_eps,
        ),
        make.linear(H * (text.qk_nope_head_dim + text.v_head_dim), L),
        make.linear(D, H * text.v_head_dim),
    )
