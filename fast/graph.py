"""The decode step of the whole model as a CUDA graph: one per row count, nothing on the host between tokens.

R rows = S sequences of T new tokens each. Tokens, positions, selections and expert ids live in device memory, every
buffer is allocated once, and the argmax of a step is the input token of the next, so a replay continues the text. The
kernels form one chain with programmatic dependent launch: while one runs, the next already fetches its weights. A row's
bits do not depend on the other rows, and a replay gives the bits of `run(pdl=False)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fast.errors import InputError
from fast.kernels import experts, gemv, indexer, kda, layers, mhc, mla
from fast.kernels.gemv import Product
from fast.kernels.layers import Dense, Dsa, Kda, Layer, Model, Moe
from fast.kernels.router import Router

ALIGN = 8
"""Elements: the joint outputs of one launch begin at 16-byte boundaries."""


class GraphGeometryError(InputError):
    """A geometry that the captured step has no kernel for."""


class GraphRowsError(InputError):
    """More rows than a captured step can have."""


@dataclass(frozen=True, slots=True)
class Part:
    """One launch of the step: `launch(pdl)`. Bytes it cannot do without: `weights`, `per_expert` for each distinct
    expert chosen, `state` read and written for each row."""

    name: str
    launch: Callable[[bool], None]
    weights: int = 0
    per_expert: int = 0
    state: int = 0


@dataclass(frozen=True, slots=True)
class KdaState:
    """history [S, 3, 3*H*d] bf16 (oldest first), matrix [S, H, d, d] fp32."""

    history: Tensor
    matrix: Tensor


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a step writes besides the state; bf16 [R, width] unless said otherwise.

    raw: the joint projections of a mixer; core: what enters o_proj, by width; query, index_query: DSA queries; routed
    [R, k, I]: expert products; shared, dense: SwiGLU products; ids [R, k] int32; weights [R, k], router, logits: fp32.
    """

    streams: Tensor
    y: Tensor
    o: Tensor
    raw: Tensor
    core: dict[int, Tensor]
    query: Tensor
    index_query: Tensor
    routed: Tensor
    shared: Tensor
    dense: Tensor
    router: Tensor
    ids: Tensor
    weights: Tensor
    plan: Tensor
    mixes: tuple[mhc.Mix, mhc.Mix]
    logits: Tensor
    best: Tensor
    choice: indexer.Choice
    mla: mla.Workspace


class DecodeStep:
    """`model`: weights on a CUDA device. `sequences` S; `tokens` T, 1 unless drafts are verified; `capacity`: the most
    tokens a sequence may hold. `token` [R] and `position` [S] int32 are its inputs (position: tokens already held).
    After a step of T = 1 both are those of the next step.

    Raises GraphGeometryError for shapes the kernels do not cover, GraphRowsError for R above 8 (4 where shared memory
    is short).
    """

    def __init__(self, model: Model, *, sequences: int, capacity: int, tokens: int = 1) -> None:
        reason, R, slots = layers.unsupported(model.text), sequences * tokens, model.text.index_kpool
        if reason is not None:
            raise GraphGeometryError(f"config: no kernel for {reason}")
        if not 0 < R <= gemv.ROWS:
            raise GraphRowsError(
                f"rows: found {sequences} sequences of {tokens} tokens, expected 1 to {gemv.ROWS} rows"
            )
        self.model, self.rows, self.sequences, self.tokens = model, R, sequences, tokens
        self.device, self.capacity = model.embed.device, -(-capacity // slots) * slots
        self.token, self.position = (torch.zeros(n, dtype=torch.int32, device=self.device) for n in (R, sequences))
        self.states = [self._state(layer) for layer in model.layers]
        self.buffers = self._buffers(model.text)
        self.parts = list(self._parts())
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, *, pdl: bool = True) -> None:
        """Launch the step on the current stream: logits, their argmax into token, position advanced when T is 1."""
        for part in self.parts:
            part.launch(pdl)

    def capture(self) -> None:
        """Record the step. Runs it once before, to load every kernel: the state must be set afterwards."""
        self.run(pdl=False)
        torch.cuda.synchronize(self.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def replay(self) -> None:
        assert self.graph is not None, "capture first"
        self.graph.replay()

    def _parts(self) -> Iterator[Part]:
        b, C, setting = self.buffers, self.model.text.hc_mult, self.model.site_setting()
        old, new = b.mixes
        streams: Tensor | tuple[Tensor, Tensor] = (self.token, self.model.embed)
        previous: tuple[Tensor, mhc.Mix] | None = None

        def site(weights: mhc.Site | Tensor, mix: mhc.Mix | None) -> Part:
            given, before, target = streams, previous, None if mix is None else b.streams

            def launch(pdl: bool) -> None:
                mhc.site(given, weights, setting, b.y, previous=before, mix=mix, new_streams=target, C=C, pdl=pdl)

            return Part("mhc site", launch, weights.fn.nbytes if isinstance(weights, mhc.Site) else 0)

        for layer, state in zip(self.model.layers, self.states, strict=True):
            for weights, block in ((layer.attn_site, layer.mixer), (layer.ffn_site, layer.mlp)):
                yield site(weights, new)
                yield from self._block(block, state, mhc.side(new, setting), new)
                streams, previous, old, new = b.streams, (b.o, new), new, old
        yield site(self.model.norm, None)
        argmax = gemv.Argmax(self.token, b.best, self.position if self.tokens == 1 else None)
        yield self._products("lm_head", b.y, [Product(self.model.lm_head, b.logits, "argmax")], argmax=argmax)

    def _block(
        self, block: Kda | Dsa | Moe | Dense, state: KdaState | indexer.Cache, side: mhc.SinkhornStruct, mix: mhc.Mix
    ) -> Iterator[Part]:
        """buffers.y -> buffers.o through one mixer or feed-forward; its first launch also finishes the site's `mix`."""
        if isinstance(block, Kda):
            assert isinstance(state, KdaState)
            yield from self._kda(block, state, side)
        elif isinstance(block, Dsa):
            assert isinstance(state, indexer.Cache)
            yield from self._dsa(block, state, side)
        elif isinstance(block, Moe):
            yield from self._moe(block, side)
        elif isinstance(block.block, tuple):
            yield from self._dense(block.block, side)
        else:
            setting = self.model.site_setting()
            yield Part("mhc sinkhorn", lambda pdl: mhc.sinkhorn(mix, setting, pdl=pdl))
            yield from self._packed(block.block)

    def _products(self, name: str, x: Tensor, products: list[Product], **options: Any) -> Part:
        size = sum(p.weight.nbytes + (0 if p.up is None else p.up.nbytes) for p in products)
        return Part(name, lambda pdl: gemv.project(x, products, pdl=pdl, **options), size)

    def _joint(self, name: str, weights: tuple[Tensor, ...], side: mhc.SinkhornStruct) -> tuple[list[Tensor], Part]:
        """The products of buffers.y with several matrices, side by side in buffers.raw."""
        parts, at = [], 0
        for w in weights:
            parts.append(self.buffers.raw[:, at : at + w.shape[0]])
            at += -(-w.shape[0] // ALIGN) * ALIGN
        products = [Product(w, out) for w, out in zip(weights, parts, strict=True)]
        return parts, self._products(name, self.buffers.y, products, side=side)

    def _kda(self, block: Kda, state: KdaState, side: mhc.SinkhornStruct) -> Iterator[Part]:
        b, w = self.buffers, block.step
        (q, k, v, f, g, beta), project = self._joint("kda in", block.projections, side)
        core = b.core[block.o.shape[1]]
        yield project
        low_rank = 0 if w.f_b is None or w.g_b is None else w.f_b.nbytes + w.g_b.nbytes
        yield Part(
            "kda step",
            lambda pdl: kda.step((q, k, v), f, g, beta, w, state.history, state.matrix, core, pdl=pdl),
            low_rank,
            state=2 * (state.matrix[0].nbytes + state.history[0].nbytes),
        )
        yield self._products("kda o", core, [Product(block.o, b.o)])

    def _dsa(self, block: Dsa, cache: indexer.Cache, side: mhc.SinkhornStruct) -> Iterator[Part]:
        b, choice, index = self.buffers, self.buffers.choice, block.index
        (r, kv, key, gate, weights), project = self._joint("dsa in", block.projections, side)
        rows = indexer.Rows(kv, key, gate, b.index_query, weights)
        core = b.core[block.o.shape[1]]
        yield project
        yield Part("indexer update", lambda pdl: indexer.update(rows, index, cache, choice, pdl=pdl))
        queries = [Product(w, out) for w, out in zip(block.queries, (b.query, b.index_query), strict=True)]
        yield self._products("dsa q", r, queries, norm=block.q_norm, eps=index.eps)
        absorb, partial, merge = mla.launches(
            b.query, block.kv_b, cache.latents, choice.selected, choice.count, b.mla, core
        )
        keys = block.kv_b.nbytes * mla.N // (mla.N + mla.O)
        yield Part("mla absorb", absorb, keys)
        yield Part("indexer score", lambda pdl: indexer.score(rows, index, cache, choice, pdl=pdl))
        yield Part("indexer select", lambda pdl: indexer.select(rows, index, cache, choice, pdl=pdl))
        yield Part("mla partial", partial)
        yield Part("mla merge", merge, block.kv_b.nbytes - keys)
        yield self._products("dsa o", core, [Product(block.o, b.o)])

    def _moe(self, block: Moe, side: mhc.SinkhornStruct) -> Iterator[Part]:
        b, text, bank = self.buffers, self.model.text, block.bank
        scale = text.routed_scaling_factor
        router = Router(block.bias, b.ids, b.weights, text.n_group, text.topk_group, text.norm_topk_prob, scale)
        planner = experts.planner(b.ids, b.weights, bank, b.plan)
        (gate, up, down), limit = block.shared, text.swiglu_limit
        products = [Product(block.gate, b.router, "router"), Product(gate, b.shared, "swiglu", up)]
        options = {"router": router, "planner": planner, "limit": limit, "side": side}
        yield self._products("router, shared up", b.y, products, **options)
        matrix = experts.packed_bytes(bank.width, bank.hidden)
        yield Part(
            "experts",
            lambda pdl: experts.routed(b.y, b.plan, bank, b.routed, b.o, limit, (b.shared, down), early=True, pdl=pdl),
            down.nbytes,
            per_expert=3 * matrix,
        )

    def _dense(self, block: tuple[Tensor, Tensor, Tensor], side: mhc.SinkhornStruct) -> Iterator[Part]:
        b, (gate, up, down) = self.buffers, block
        limit = self.model.text.swiglu_limit
        yield self._products("dense up", b.y, [Product(gate, b.dense, "swiglu", up)], limit=limit, side=side)
        yield self._products("dense down", b.dense, [Product(down, b.o)])

    def _packed(self, bank: experts.Bank) -> Iterator[Part]:
        """A packed dense block: every row chooses the bank's one expert, with weight 1."""
        b, limit, R = self.buffers, self.model.text.swiglu_limit, self.rows
        plan, h = experts.new_plan(self.device), b.dense.view(R, 1, -1)
        experts.make_plan(self._new(R, 1, dtype=torch.int32), torch.ones(R, 1, device=self.device), bank, plan)
        matrix = experts.packed_bytes(bank.width, bank.hidden)
        yield Part("dense", lambda pdl: experts.routed(b.y, plan, bank, h, b.o, limit, pdl=pdl), 3 * matrix)

    def _state(self, layer: Layer) -> KdaState | indexer.Cache:
        text, S, new = self.model.text, self.sequences, self._new
        if isinstance(layer.mixer, Kda):
            H, d = text.linear_num_heads, text.linear_head_dim
            return KdaState(new(S, 3, 3 * H * d), new(S, H, d, d, dtype=torch.float32))
        slots, p = text.index_kpool, text.index_head_dim
        ring = slots * -(-(slots + gemv.ROWS) // slots)
        latents, pools = new(S, self.capacity, text.kv_lora_rank), new(S, self.capacity // slots, p)
        return indexer.Cache(latents, pools, new(S, ring, 2, p), self.position)

    def _buffers(self, text: Any) -> Buffers:
        R, C, D, new, f32 = self.rows, text.hc_mult, text.hidden_size, self._new, torch.float32
        mixers = [layer.mixer for layer in self.model.layers]
        joint = max(sum(-(-w.shape[0] // ALIGN) * ALIGN for w in x.projections) for x in mixers)
        width, k = text.index_topk + text.index_kpool - 1, text.num_experts_per_tok
        heads = text.num_attention_heads
        choice = indexer.Choice(
            new(R, self.capacity // text.index_kpool, dtype=f32),
            new(R, width, dtype=torch.int32),
            new(R, dtype=torch.int32),
        )
        return Buffers(
            streams=new(R, C, D),
            y=new(R, D),
            o=new(R, D),
            raw=new(R, joint),
            core={n: new(R, n) for n in {x.o.shape[1] for x in mixers}},
            query=new(R, heads * text.qk_nope_head_dim),
            index_query=new(R, text.index_n_heads * text.index_head_dim),
            routed=new(R, k, text.moe_intermediate_size),
            shared=new(R, text.shared_intermediate_size),
            dense=new(R, text.intermediate_size),
            router=new(R, text.n_routed_experts, dtype=f32),
            ids=new(R, k, dtype=torch.int32),
            weights=new(R, k, dtype=f32),
            plan=experts.new_plan(self.device),
            mixes=(mhc.new_mix(R, C, self.device), mhc.new_mix(R, C, self.device)),
            logits=new(R, text.vocab_size, dtype=f32),
            best=gemv.argmax_scratch(self.device),
            choice=choice,
            mla=mla.workspace(R, heads, width, self.device),
        )

    def _new(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)
