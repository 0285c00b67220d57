"""The decode step of the whole model as a CUDA graph: one per row count, nothing on the host between tokens.

R rows = S sequences of T new tokens each. Tokens, positions, selections and expert ids live in device memory, every
buffer is allocated once, and the argmax of a step is the input token of the next, so a replay continues the text. The
kernels form one chain with programmatic dependent launch: while one runs, the next already fetches its weights. A row's
bits do not depend on the other rows, and a replay gives the bits of `run(pdl=False)`.

With a tap the launches are the same, and each is followed by what it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fast.errors import InputError
from fast.kernels import experts, gemv, indexer, kda, layers, mhc, mla
from fast.kernels.gemv import Product
from fast.kernels.layers import Dense, Dsa, Kda, Layer, Model, Moe
from fast.kernels.router import Router
from fast.ops import indexer as scoring
from fast.recording import recording
from fast.state import DsaState, State

Tap = Callable[[str, Any], None]
Tapped = Iterator[tuple[str, Tensor]]

ALIGN = 8
"""Elements: the joint outputs of one launch begin at 16-byte boundaries."""


class GraphGeometryError(InputError):
    """A geometry that the captured step has no kernel for."""


class GraphRowsError(InputError):
    """More rows than a captured step can have."""


def _nothing() -> Tapped:
    return iter(())


@dataclass(frozen=True, slots=True)
class Part:
    """One launch of the step: `launch(pdl)`. Bytes it cannot do without: `weights`, `per_expert` for each distinct
    expert chosen, `state` read and written for each row. `taps`: what it left in the buffers, by tap name."""

    name: str
    launch: Callable[[bool], None]
    weights: int = 0
    per_expert: int = 0
    state: int = 0
    taps: Callable[[], Tapped] = _nothing


@dataclass(frozen=True, slots=True)
class KdaState:
    """history [S, 3, 3*H*d] bf16 (oldest first), matrix [S, H, d, d] fp32."""

    history: Tensor
    matrix: Tensor


KernelState = KdaState | indexer.Cache


@dataclass(frozen=True, slots=True)
class Raw:
    """The projections of a mixer's input, side by side, each begun at a multiple of ALIGN: `whole` [R, n] bf16."""

    whole: Tensor
    widths: tuple[int, ...]

    def parts(self, whole: Tensor | None = None) -> list[Tensor]:
        """[R, width] each, of `whole` or of a copy of it."""
        found, at = [], 0
        for width in self.widths:
            found.append((self.whole if whole is None else whole)[:, at : at + width])
            at += -(-width // ALIGN) * ALIGN
        return found


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a step writes besides the state; bf16 [R, width] unless said otherwise.

    hidden: the mean of the streams; core: what enters o_proj, by width; q_resid, query, index_query: of DSA; routed
    [R, k, I]: expert products; shared, dense: SwiGLU products; ids [R, k] int32; weights [R, k], router, logits: fp32.
    """

    streams: Tensor
    y: Tensor
    hidden: Tensor
    o: Tensor
    core: dict[int, Tensor]
    q_resid: Tensor
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


@dataclass(frozen=True, slots=True)
class Witness:
    """What the kernels also write while they are tapped: kda [R, H, 6, d] fp32 (kda.step). `start`: tokens that the
    sequence held before."""

    kda: Tensor
    start: int


class DecodeStep:
    """`model`: weights on a CUDA device. `sequences` S; `tokens` T, 1 unless drafts are verified; `capacity`: the most
    tokens a sequence may hold. `token` [R] and `position` [S] int32 are its inputs (position: tokens already held).
    After a step of T = 1 both are those of the next step. `like`: another step whose states and positions this one
    works on.

    Raises GraphGeometryError for shapes the kernels do not cover, GraphRowsError for R above 8 (4 where shared memory
    is short).
    """

    def __init__(
        self, model: Model, *, sequences: int, capacity: int, tokens: int = 1, like: DecodeStep | None = None
    ) -> None:
        reason, R, slots = layers.unsupported(model.text), sequences * tokens, model.text.index_kpool
        if reason is not None:
            raise GraphGeometryError(f"config: no kernel for {reason}")
        self.device, self.capacity = model.embed.device, -(-capacity // slots) * slots
        most = min(gemv.ROWS, experts.rows_at_once(self.device.index or 0, model.text.hidden_size))
        if not 0 < R <= most:
            raise GraphRowsError(f"rows: found {sequences} sequences of {tokens} tokens, expected 1 to {most} rows")
        self.model, self.rows, self.sequences, self.tokens = model, R, sequences, tokens
        self.token = torch.zeros(R, dtype=torch.int32, device=self.device)
        if like is None:
            self.position = torch.zeros(sequences, dtype=torch.int32, device=self.device)
            self.states = [self._state(layer) for layer in model.layers]
        else:
            assert (like.capacity, like.sequences) == (self.capacity, sequences), (like.capacity, like.sequences)
            self.position, self.states = like.position, like.states
        self.buffers = self._buffers(model.text)
        self.raw = [self._raw(layer.mixer) for layer in model.layers]
        self.witness: Witness | None = None
        self.parts = list(self._parts())
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, *, pdl: bool = True, head: bool = True) -> None:
        """Launch the step on the current stream: logits, their argmax into token, position advanced when T is 1.

        Without `head` it ends with what enters lm_head, in buffers.y.
        """
        for part in self.parts if head else self.parts[:-1]:
            part.launch(pdl)

    def capture(self, *, head: bool = True, warm: bool = True) -> None:
        """Record the step. `warm` runs it once before, to load every kernel: the state must be set afterwards."""
        if warm:
            self.run(pdl=False, head=head)
            torch.cuda.synchronize(self.device)
        with recording(self.device) as graph:
            self.run(head=head)
        self.graph = graph

    def replay(self) -> None:
        assert self.graph is not None, "capture first"
        with torch.cuda.device(self.device):
            self.graph.replay()

    def tell(self, tap: Tap, start: int) -> None:
        """`run(pdl=False, head=False)` of a sequence that holds `start` tokens; every launch tells what it wrote."""
        assert self.sequences == 1, self.sequences
        text, R = self.model.text, self.rows
        H, d = text.linear_num_heads, text.linear_head_dim
        self.witness = Witness(self._new(R, H, 6, d, dtype=torch.float32), start)
        try:
            for part in self.parts[:-1]:
                part.launch(False)
                for name, value in part.taps():
                    tap(name, value.clone())
        finally:
            self.witness = None

    def load(self, sequence: int, state: State) -> None:
        """Sequence `sequence` goes on where `state`, a prompt's, ended. Raises GraphRowsError if it is too long."""
        length = state.length
        if length + self.tokens > self.capacity:
            raise GraphRowsError(f"state: {length} tokens and {self.tokens} more, expected at most {self.capacity}")
        for own, (name, other) in zip(self.states, state.layers.items(), strict=True):
            if isinstance(own, KdaState):
                assert not isinstance(other, DsaState), name
                own.history[sequence], own.matrix[sequence] = other.history, other.matrix
            else:
                assert isinstance(other, DsaState), name
                pools, ring = other.pools.view(), torch.stack([other.keys, other.gates], 1)
                assert ring.shape == own.ring.shape[1:], (name, tuple(ring.shape), tuple(own.ring.shape))
                own.latents[sequence, :length], own.pools[sequence, : len(pools)] = other.latents.view(), pools
                own.ring[sequence] = ring
        self.position[sequence] = length

    def _parts(self) -> Iterator[Part]:
        b, C, setting = self.buffers, self.model.text.hc_mult, self.model.site_setting()
        old, new = b.mixes
        streams: Tensor | tuple[Tensor, Tensor] = (self.token, self.model.embed)
        previous: tuple[Tensor, mhc.Mix] | None = None

        def site(weights: mhc.Site | Tensor, mix: mhc.Mix | None, taps: Callable[[], Tapped]) -> Part:
            given, before, hidden = streams, previous, b.hidden if mix is None else None

            def launch(pdl: bool) -> None:
                mhc.site(
                    given,
                    weights,
                    setting,
                    b.y,
                    previous=before,
                    mix=mix,
                    new_streams=b.streams,
                    x=hidden,
                    C=C,
                    pdl=pdl,
                )

            return Part("mhc site", launch, weights.fn.nbytes if isinstance(weights, mhc.Site) else 0, taps=taps)

        for i, (layer, state) in enumerate(zip(self.model.layers, self.states, strict=True)):
            for weights, block, which in ((layer.attn_site, layer.mixer, "attn"), (layer.ffn_site, layer.mlp, "ffn")):
                yield site(weights, new, self._site_taps(i, which, new))
                first, *rest = self._block(i, block, state, mhc.side(new, setting), new)
                yield replace(first, taps=self._mixed(f"layers.{i}.{which}_hc.comb", new, first.taps))
                yield from rest
                streams, previous, old, new = b.streams, (b.o, new), new, old
        yield site(self.model.norm, None, self._final_taps)
        argmax = gemv.Argmax(self.token, b.best, self.position if self.tokens == 1 else None)
        yield self._products("lm_head", b.y, [Product(self.model.lm_head, b.logits, "argmax")], argmax=argmax)

    def _site_taps(self, i: int, which: str, mix: mhc.Mix) -> Callable[[], Tapped]:
        def taps() -> Tapped:
            assert mix.pre is not None
            if which == "attn" and i:
                yield f"layers.{i - 1}.out", self.buffers.streams
            yield f"layers.{i}.{'in' if which == 'attn' else 'mid'}", self.buffers.streams
            yield f"layers.{i}.{which}_hc.pre", mix.pre
            yield f"layers.{i}.{which}_hc.post", mix.post
            yield f"layers.{i}.{'attn' if which == 'attn' else 'mlp'}.in", self.buffers.y

        return taps

    def _mixed(self, name: str, mix: mhc.Mix, then: Callable[[], Tapped]) -> Callable[[], Tapped]:
        """comb, which the first launch of a block finishes beside its own work."""

        def taps() -> Tapped:
            yield name, mix.comb
            yield from then()

        return taps

    def _final_taps(self) -> Tapped:
        yield f"layers.{len(self.states) - 1}.out", self.buffers.streams
        yield "final.hidden", self.buffers.hidden
        yield "final.norm", self.buffers.y

    def _out(self, name: str) -> Callable[[], Tapped]:
        return lambda: iter(((name, self.buffers.o),))

    def _block(
        self, i: int, block: Kda | Dsa | Moe | Dense, state: KernelState, side: mhc.SinkhornStruct, mix: mhc.Mix
    ) -> Iterator[Part]:
        """buffers.y -> buffers.o through one mixer or feed-forward; its first launch also finishes the site's `mix`."""
        if isinstance(block, Kda):
            assert isinstance(state, KdaState)
            yield from self._kda(i, block, state, side)
        elif isinstance(block, Dsa):
            assert isinstance(state, indexer.Cache)
            yield from self._dsa(i, block, state, side)
        elif isinstance(block, Moe):
            yield from self._moe(i, block, side)
        elif isinstance(block.block, tuple):
            yield from self._dense(i, block.block, side)
        else:
            setting = self.model.site_setting()
            yield Part("mhc sinkhorn", lambda pdl: mhc.sinkhorn(mix, setting, pdl=pdl))
            yield from self._packed(i, block.block)

    def _products(
        self, name: str, x: Tensor, products: list[Product], taps: Callable[[], Tapped] = _nothing, **options: Any
    ) -> Part:
        size = sum(p.weight.nbytes + (0 if p.up is None else p.up.nbytes) for p in products)
        return Part(name, lambda pdl: gemv.project(x, products, pdl=pdl, **options), size, taps=taps)

    def _joint(self, name: str, i: int, weights: tuple[Tensor, ...], side: mhc.SinkhornStruct) -> Part:
        """The products of buffers.y with several matrices, side by side in `raw[i]`."""
        products = [Product(w, out) for w, out in zip(weights, self.raw[i].parts(), strict=True)]
        return self._products(name, self.buffers.y, products, side=side)

    def _kda(self, i: int, block: Kda, state: KdaState, side: mhc.SinkhornStruct) -> Iterator[Part]:
        b, w = self.buffers, block.step
        core = b.core[block.o.shape[1]]
        yield self._joint("kda in", i, block.projections, side)
        q, k, v, f, g, beta = self.raw[i].parts()

        def launch(pdl: bool) -> None:
            tap = None if self.witness is None else self.witness.kda
            kda.step((q, k, v), f, g, beta, w, state.history, state.matrix, core, tap=tap, pdl=pdl)

        def taps() -> Tapped:
            assert self.witness is not None
            found = self.witness.kda
            for at, leaf in enumerate(("q", "k", "v", "g", "core")):
                yield f"layers.{i}.attn.{leaf}", found[:, :, at].to(torch.float32 if leaf == "g" else torch.bfloat16)
            yield f"layers.{i}.attn.beta", found[:, :, 5, 0]
            yield f"layers.{i}.attn.state", state.matrix[0]
            yield f"layers.{i}.attn.conv_state", state.history[0]

        low_rank = 0 if w.f_b is None or w.g_b is None else w.f_b.nbytes + w.g_b.nbytes
        moved = 2 * (state.matrix[0].nbytes + state.history[0].nbytes)
        yield Part("kda step", launch, low_rank, state=moved, taps=taps)
        yield self._products("kda o", core, [Product(block.o, b.o)], self._out(f"layers.{i}.attn.out"))

    def _dsa(self, i: int, block: Dsa, cache: indexer.Cache, side: mhc.SinkhornStruct) -> Iterator[Part]:
        b, choice, index, name = self.buffers, self.buffers.choice, block.index, f"layers.{i}"
        yield self._joint("dsa in", i, block.projections, side)
        r, kv, key, gate, weights = self.raw[i].parts()
        rows = indexer.Rows(kv, key, gate, b.index_query, weights)
        core = b.core[block.o.shape[1]]
        R, slots, h = self.rows, self.model.text.index_kpool, self.model.text.index_n_heads
        scaled = h**-0.5

        def stored() -> Tapped:
            assert self.witness is not None
            start = self.witness.start
            places = torch.arange(start, start + R, device=self.device) % cache.ring.shape[1]
            yield f"{name}.attn.latent", cache.latents[0, start : start + R]
            yield f"{name}.indexer.k", cache.ring[0, places, 0]
            yield f"{name}.indexer.gate", cache.ring[0, places, 1]
            yield f"{name}.indexer.pool_keys", cache.pools[0, start // slots : (start + R) // slots]

        def asked() -> Tapped:
            yield f"{name}.attn.q_resid", b.q_resid
            yield f"{name}.indexer.q", b.index_query.view(R, h, -1)
            yield f"{name}.indexer.weights", weights.float() * scaled

        def chosen() -> Tapped:
            assert self.witness is not None
            for t in range(R):
                n = self.witness.start + t + 1
                scores = choice.scores[t : t + 1, : n // slots]
                if n // slots <= index.topk // slots:  # every pool is taken and none was scored
                    query = b.index_query[t : t + 1].view(1, h, -1)
                    pools = cache.pools[0, : n // slots]
                    scores = scoring.scores(query, weights[t : t + 1].float() * scaled, pools)
                yield f"{name}.indexer.scores", scores
            yield f"{name}.indexer.selected", choice.selected

        q = indexer.Query(r, block.q_norm, b.q_resid)
        queries = [Product(w, out) for w, out in zip(block.queries, (b.query, b.index_query), strict=True)]
        yield Part("indexer update", lambda pdl: indexer.update(rows, index, cache, choice, q, pdl=pdl), taps=stored)
        yield self._products("dsa q", b.q_resid, queries, asked)
        absorb, partial, merge = mla.launches(
            b.query, block.kv_b, cache.latents, choice.selected, choice.count, b.mla, core
        )
        keys = block.kv_b.nbytes * mla.N // (mla.N + mla.O)
        yield Part("mla absorb", absorb, keys)
        yield Part("indexer score", lambda pdl: indexer.score(rows, index, cache, choice, pdl=pdl))
        yield Part("indexer select", lambda pdl: indexer.select(rows, index, cache, choice, pdl=pdl), taps=chosen)
        yield Part("mla partial", partial)
        heads = self.model.text.num_attention_heads
        attended = lambda: iter(((f"{name}.attn.core", core.view(R, heads, -1)),))  # noqa: E731
        yield Part("mla merge", merge, block.kv_b.nbytes - keys, taps=attended)
        yield self._products("dsa o", core, [Product(block.o, b.o)], self._out(f"{name}.attn.out"))

    def _moe(self, i: int, block: Moe, side: mhc.SinkhornStruct) -> Iterator[Part]:
        b, text, bank, name = self.buffers, self.model.text, block.bank, f"layers.{i}"
        scale = text.routed_scaling_factor
        router = Router(block.bias, b.ids, b.weights, text.n_group, text.topk_group, text.norm_topk_prob, scale)
        planner = experts.planner(b.ids, b.weights, bank, b.plan)
        (gate, up, down), limit = block.shared, text.swiglu_limit
        products = [Product(block.gate, b.router, "router"), Product(gate, b.shared, "swiglu", up)]
        options = {"router": router, "planner": planner, "limit": limit, "side": side}
        routing = {"logits": b.router, "indices": b.ids, "weights": b.weights}

        def routed() -> Tapped:
            yield f"{name}.routed.out", self._routed_alone(bank, limit)
            yield f"{name}.shared.out", gemv.linear(b.shared, down, torch.float32)
            yield f"{name}.mlp.out", b.o

        taps = lambda: ((f"{name}.router.{leaf}", x) for leaf, x in routing.items())  # noqa: E731
        yield self._products("router, shared up", b.y, products, taps, **options)
        matrix = experts.packed_bytes(bank.width, bank.hidden)
        yield Part(
            "experts",
            lambda pdl: experts.routed(b.y, b.plan, bank, b.routed, b.o, limit, (b.shared, down), early=True, pdl=pdl),
            down.nbytes,
            per_expert=3 * matrix,
            taps=routed,
        )

    def _routed_alone(self, bank: experts.Bank, limit: float) -> Tensor:
        """The routed experts' part of what `experts` has just added up, fp32 [R, D].

        The kernel rounds its sum to bf16, so it is asked twice: for the sum, and for what the sum lacks of it, the
        rounded sum entering as a shared expert of negative weights.
        """
        b, (R, D) = self.buffers, self.buffers.o.shape
        high, low = torch.empty_like(b.o), torch.empty_like(b.o)
        experts.routed(b.y, b.plan, bank, b.routed, high, limit, phases=experts.DOWN)
        one, minus = self._new(R, 32), self._new(D, 32)
        one[:, :R].fill_diagonal_(1.0)
        minus[:, :R] = -high.T
        experts.routed(b.y, b.plan, bank, b.routed, low, limit, (one, minus), phases=experts.DOWN)
        return high.float() + low.float()

    def _dense(self, i: int, block: tuple[Tensor, Tensor, Tensor], side: mhc.SinkhornStruct) -> Iterator[Part]:
        b, (gate, up, down) = self.buffers, block
        limit = self.model.text.swiglu_limit
        yield self._products("dense up", b.y, [Product(gate, b.dense, "swiglu", up)], limit=limit, side=side)
        yield self._products("dense down", b.dense, [Product(down, b.o)], self._out(f"layers.{i}.mlp.out"))

    def _packed(self, i: int, bank: experts.Bank) -> Iterator[Part]:
        """A packed dense block: every row chooses the bank's one expert, with weight 1."""
        b, limit, R = self.buffers, self.model.text.swiglu_limit, self.rows
        plan, h = experts.new_plan(self.device), b.dense.view(R, 1, -1)
        experts.make_plan(self._new(R, 1, dtype=torch.int32), torch.ones(R, 1, device=self.device), bank, plan)
        matrix = experts.packed_bytes(bank.width, bank.hidden)
        yield Part(
            "dense",
            lambda pdl: experts.routed(b.y, plan, bank, h, b.o, limit, pdl=pdl),
            3 * matrix,
            taps=self._out(f"layers.{i}.mlp.out"),
        )

    def _raw(self, mixer: Kda | Dsa) -> Raw:
        widths = tuple(w.shape[0] for w in mixer.projections)
        return Raw(self._new(self.rows, sum(-(-n // ALIGN) * ALIGN for n in widths)), widths)

    def _state(self, layer: Layer) -> KernelState:
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
            hidden=new(R, D),
            o=new(R, D),
            core={n: new(R, n) for n in {x.o.shape[1] for x in mixers}},
            q_resid=new(R, text.q_lora_rank),
            query=new(R, heads * text.qk_nope_head_dim),
            index_query=new(R, text.index_n_heads * text.index_head_dim),
            routed=new(R, k, text.moe_intermediate_size),
            shared=new(R, text.shared_intermediate_size),
            dense=new(R, text.intermediate_size),
            router=new(R, text.n_routed_experts, dtype=f32),
            ids=new(R, k, dtype=torch.int32),
            weights=new(R, k, dtype=f32),
            plan=experts.new_plan(self.device),
            mixes=(mhc.new_mix(R, C, self.device, pre=True), mhc.new_mix(R, C, self.device, pre=True)),
            logits=new(R, text.vocab_size, dtype=f32),
            best=gemv.argmax_scratch(self.device),
            choice=choice,
            mla=mla.workspace(R, heads, width, self.device),
        )

    def _new(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)
