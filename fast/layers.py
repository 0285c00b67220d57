"""One decoder layer: mixers, feed-forward and hyper-connections bound to their weights.

T tokens, C streams, D hidden. Every product goes through `fast.linear`, every equation lives in `fast.ops`. Where a
weight's columns are divided among ranks its products (o_proj, down_proj, the sum of routed and shared experts) stay
fp32 partial sums until they are reduced, and are rounded once after that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fast import scratch
from fast.linear import linear
from fast.ops import indexer, kda, mhc, mla, mlp, norm, router
from fast.scratch import Arena
from fast.sharding import Mesh
from fast.state import DsaState, KdaState

Tap = Callable[[str, Any], None]
PREFIX = "model.language_model"


class Communicator(Protocol):
    """Joins the ranks of one model."""

    @property
    def mesh(self) -> Mesh:
        """Sizes, and this rank's place."""

    def all_reduce(self, tensor: Tensor, site: str, *, everyone: bool) -> Tensor:
        """fp32 partial sums [T, D] of the TP group, or of `everyone` -> their sum in rank order, equal on all ranks."""

    def all_gather(self, tensor: Tensor, site: str) -> list[Tensor]:
        """The tensors of the TP group, in rank order."""

    def same(self, tensor: Tensor, site: str) -> None:
        """Raises unless every rank has the same integers."""


@dataclass(frozen=True)
class Setting:
    """How a model computes: storage dtype, KDA chunk width, absorbed or expanded MLA, ranks, and where: by kind of
    layer the workspace that all layers of that kind share (`fast.memory.workspace_layout`)."""

    dtype: torch.dtype = torch.bfloat16
    kda_chunk: int = 64
    absorbed: bool = True
    communicator: Communicator | None = None
    arenas: Mapping[str, Arena] = field(default_factory=dict)

    def frame(self, kind: str) -> AbstractContextManager[None]:
        """The workspace of a kind, for as long as one call of a layer takes."""
        return self.arenas[kind].frame() if kind in self.arenas else nullcontext()

    @property
    def mesh(self) -> Mesh:
        return Mesh() if self.communicator is None else self.communicator.mesh

    def same(self, choice: Tensor, site: str) -> None:
        """What every rank chooses for itself has to be one choice."""
        if self.communicator is not None:
            self.communicator.same(choice, site)

    def partial(self, parts: int) -> torch.dtype:
        """What a product is kept in that `parts` ranks hold parts of."""
        return self.dtype if parts == 1 else torch.float32

    def join(self, partial: Tensor, site: str, *, everyone: bool = False) -> Tensor:
        """The one all-reduce of a mixer or an MLP, then the one rounding."""
        if self.communicator is not None and (self.mesh.world if everyone else self.mesh.tp) > 1:
            partial = self.communicator.all_reduce(partial, site, everyone=everyone)
        return partial.to(self.dtype)


class Kda:
    """The KDA mixer of one layer. `name` is the layer's name in taps, `stem` its name in the checkpoint."""

    def __init__(self, weights: Any, stem: str, name: str, text: Any, setting: Setting) -> None:
        def get(leaf: str) -> Tensor:
            return weights.tensor(f"{stem}.self_attn.{leaf}")

        self.name, self.setting, self.eps, self.lower_bound = name, setting, text.rms_norm_eps, text.gate_lower_bound
        self.projections = [get(f"{x}_proj.weight") for x in "qkv"]
        conv = [f"{stem}.self_attn.{x}_conv1d.weight" for x in "qkv"]
        fused = weights.fused(conv)
        self.conv = torch.cat([weights.tensor(name) for name in conv]) if fused is None else fused
        self.f_a, self.f_b = get("f_a_proj.weight"), get("f_b_proj.weight")
        self.g_a, self.g_b = get("g_a_proj.weight"), get("g_b_proj.weight")
        self.b, self.A_log, self.dt_bias = get("b_proj.weight"), get("A_log"), get("dt_bias")
        self.o_norm, self.o = get("o_norm.weight"), get("o_proj.weight")

    def fresh(self, device: torch.device) -> KdaState:
        (c, _, n), H, d = self.conv.shape, self.A_log.shape[0], self.o_norm.shape[0]
        matrix = torch.zeros(H, d, d, dtype=torch.float32, device=device)
        return KdaState(matrix, torch.zeros(n - 1, c, dtype=self.setting.dtype, device=device))

    def __call__(self, x: Tensor, state: KdaState, tap: Tap | None) -> Tensor:
        """x [T, D] -> attn.out [T, D]; a single token takes the recurrent form, more the chunked one."""
        T, H, d = x.shape[0], self.A_log.shape[0], self.o_norm.shape[0]
        raw = scratch.empty((T, 3 * H * d), x.dtype, x.device)
        for part, w in zip(raw.split(H * d, 1), self.projections, strict=True):
            with scratch.frame():
                part.copy_(linear(x, w))
        mixed, history = kda.conv(raw, self.conv, state.history)
        q, k, v = mixed.view(T, 3, H, d).unbind(1)
        g = kda.decay(linear(linear(x, self.f_a), self.f_b), self.A_log, self.dt_bias, self.lower_bound)
        beta = torch.sigmoid(linear(x, self.b).float())
        step = kda.unit(k), scratch.keep(v, torch.float32), g, beta
        query = scratch.empty((T, H, d), torch.float32, x.device)
        with scratch.frame():
            torch.mul(kda.unit(q), d**-0.5, out=query)
        if T == 1:
            core, matrix = kda.recurrent(query, *step, state.matrix)
        else:
            core, matrix = kda.chunked(self.setting.kda_chunk, query, *step, state.matrix)
        state.advance(matrix, history, step)
        core = scratch.keep(core, x.dtype)
        if tap is not None:
            for leaf, value in zip(("q", "k", "v", "g", "beta", "core"), (q, k, v, g, beta, core), strict=True):
                tap(f"{self.name}.attn.{leaf}", value)
        gate = linear(linear(x, self.g_a), self.g_b).view(T, H, d)
        y = kda.gated_norm(core, gate, self.o_norm, self.eps)
        return self.setting.join(linear(y, self.o, self.setting.partial(self.setting.mesh.tp)), f"{self.name}.attn")


class Indexer:
    """The indexer of one DSA layer that has one."""

    def __init__(self, weights: Any, stem: str, name: str, text: Any) -> None:
        def get(leaf: str) -> Tensor:
            return weights.tensor(f"{stem}.self_attn.indexer.{leaf}")

        self.name, self.topk, self.slots = name, text.index_topk, text.index_kpool
        self.width = text.index_head_dim
        self.wq_b, self.wk, self.weights = get("wq_b.weight"), get("wk.weight"), get("weights_proj.weight")
        self.k_norm = get("k_norm.weight"), get("k_norm.bias")
        self.gate, self.ape = get("index_kpool_compress_gate"), get("index_kpool_compress_ape")

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> index keys and gates, [T, p] each."""
        return norm.layer(linear(x, self.wk), *self.k_norm, eps=1e-6), linear(x, self.gate)

    def __call__(self, x: Tensor, r: Tensor, state: DsaState, visible: Tensor, tap: Tap | None) -> Tensor:
        """x [T, D], r [T, Q], visible [T] -> selected [T, W']; the state already holds these tokens' pools."""
        T, p = x.shape[0], self.width
        q = linear(r, self.wq_b).view(T, -1, p)
        weights = linear(x, self.weights).float() * q.shape[1] ** -0.5
        pools = state.pools.view()
        selected = indexer.select(q, weights, pools, visible, self.slots, self.topk)
        if tap is not None:
            tap(f"{self.name}.indexer.q", q)
            tap(f"{self.name}.indexer.weights", weights)
            tap(f"{self.name}.indexer.scores", indexer.masked(q, weights, pools, visible, self.slots))
        return selected


class Dsa:
    """The DSA mixer: latent attention over the tokens its indexer, or the last full layer's, selects."""

    def __init__(self, weights: Any, stem: str, name: str, text: Any, setting: Setting, *, shared: bool) -> None:
        def get(leaf: str) -> Tensor:
            return weights.tensor(f"{stem}.self_attn.{leaf}.weight")

        self.name, self.setting, self.eps = name, setting, text.rms_norm_eps
        self.nope, self.values = text.qk_nope_head_dim, text.v_head_dim
        self.slots, self.selected = text.index_kpool, text.index_topk + text.index_kpool - 1
        self.q_a, self.q_norm, self.q_b = get("q_a_proj"), get("q_a_layernorm"), get("q_b_proj")
        self.kv_a, self.kv_norm = get("kv_a_proj_with_mqa"), get("kv_a_layernorm")
        self.kv_b, self.o = get("kv_b_proj"), get("o_proj")
        self.indexer = None if shared else Indexer(weights, stem, name, text)

    def fresh(self, device: torch.device) -> DsaState:
        width = None if self.indexer is None else self.indexer.width
        return DsaState(self.kv_norm.shape[0], width, self.slots, self.setting.dtype, device)

    def __call__(
        self, x: Tensor, state: DsaState, tap: Tap | None, selected: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [T, D] -> (attn.out [T, D], the selection used [T, W']).

        `selected` stands in for the indexer's own choice: a layer without an indexer needs it, one with an indexer
        still keeps its keys and pools.
        """
        T, start = x.shape[0], state.length
        r = norm.rms(linear(x, self.q_a), self.q_norm, self.eps)
        c = norm.rms(linear(x, self.kv_a), self.kv_norm, self.eps)
        if tap is not None:
            tap(f"{self.name}.attn.q_resid", r)
            tap(f"{self.name}.attn.latent", c)
        if self.indexer is None:
            state.append(c, None, None)
        else:
            self._extend(self.indexer, x, c, state, tap)
            if selected is None:
                visible = torch.arange(start + 1, start + T + 1, device=x.device)
                selected = self.indexer(x, r, state, visible, tap)
                self.setting.same(selected, f"{self.name}.indexer.selected")
        assert selected is not None, f"{self.name}: an indexer of type shared before any full one"
        if tap is not None:
            pad = self.selected - selected.shape[1]
            tap(f"{self.name}.indexer.selected", torch.nn.functional.pad(selected, (0, pad), value=-1))
        q = linear(r, self.q_b).view(T, -1, self.nope)
        core = mla.attend(
            q, state.latents.view(), selected, self.kv_b, values=self.values, absorbed=self.setting.absorbed
        )
        if tap is not None:
            tap(f"{self.name}.attn.core", core)
        out = linear(core.reshape(T, -1), self.o, self.setting.partial(self.setting.mesh.tp))
        return self.setting.join(out, f"{self.name}.attn"), selected

    def _extend(self, own: Indexer, x: Tensor, c: Tensor, state: DsaState, tap: Tap | None) -> None:
        keys, gates = own.keys(x)
        complete = state.append(c, keys, gates)
        assert complete is not None
        pool_keys = indexer.pool(*complete, own.ape)
        state.pools.append(pool_keys)
        if tap is not None:
            tap(f"{self.name}.indexer.k", keys)
            tap(f"{self.name}.indexer.gate", gates)
            tap(f"{self.name}.indexer.pool_keys", pool_keys)


class Dense:
    """The dense SwiGLU of the first layers."""

    def __init__(self, weights: Any, stem: str, name: str, text: Any, setting: Setting) -> None:
        self.name, self.setting, self.limit = name, setting, text.swiglu_limit
        self.block = projections(weights, f"{stem}.mlp")

    def __call__(self, x: Tensor, tap: Tap | None, indices: Tensor | None = None) -> Tensor:
        """x [T, D] -> mlp.out [T, D]."""
        out = mlp.dense(x, self.block, self.limit, self.setting.partial(self.setting.mesh.tp))
        return self.setting.join(out, f"{self.name}.mlp")


class Moe:
    """Router, routed experts and shared expert. The router is whole on every rank, the experts need not be."""

    def __init__(self, weights: Any, stem: str, name: str, layer: int, text: Any, setting: Setting) -> None:
        self.name, self.setting, self.text = name, setting, text
        self.gate = weights.tensor(f"{stem}.mlp.gate.weight")
        self.bias = weights.tensor(f"{stem}.mlp.gate.e_score_correction_bias")
        self.bank = weights.experts(layer)
        self.shared = projections(weights, f"{stem}.mlp.shared_experts")

    def route(self, x: Tensor, tap: Tap | None, indices: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [T, D] -> expert indices [T, k] int32 and weights [T, k] fp32; `indices` replaces the choice."""
        text = self.text
        logits = router.logits(x, self.gate)
        scores = torch.sigmoid(logits)
        if indices is None:
            indices = router.choose(scores, self.bias, text.num_experts_per_tok, text.n_group, text.topk_group)
            self.setting.same(indices, f"{self.name}.router.indices")
        weights = router.weigh(scores, indices, normalise=text.norm_topk_prob, factor=text.routed_scaling_factor)
        if tap is not None:
            for leaf, value in (("logits", logits), ("indices", indices), ("weights", weights)):
                tap(f"{self.name}.router.{leaf}", value)
        return indices, weights

    def __call__(self, x: Tensor, tap: Tap | None, indices: Tensor | None = None) -> Tensor:
        """x [T, D] -> mlp.out [T, D]: routed experts plus the shared one, each rounded to storage, then the sum.

        With more than one rank neither is rounded before the reduction. Ranks after the first TP group leave the
        shared expert out: it enters the sum once.
        """
        limit, setting, mesh = self.text.swiglu_limit, self.setting, self.setting.mesh
        partial = setting.partial(mesh.world)
        total = mlp.routed(x, self.bank, *self.route(x, tap, indices), limit, setting.partial(mesh.expert_tp))
        total = total.to(partial)
        if tap is not None:
            tap(f"{self.name}.routed.out", total)
        if mesh.adds_shared:
            shared = mlp.dense(x, self.shared, limit, partial)
            if tap is not None:
                tap(f"{self.name}.shared.out", shared)
            total = total.float() + shared.float()
        return setting.join(total, f"{self.name}.mlp", everyone=True)


def projections(weights: Any, stem: str) -> mlp.Projections:
    """gate, up and down of one block, packed where the checkpoint packs them."""
    return mlp.Projections(*(weights.linear(f"{stem}.{leaf}_proj") for leaf in ("gate", "up", "down")))


class Layer:
    """One text layer: two hyper-connection sites around a mixer and a feed-forward block."""

    def __init__(self, weights: Any, index: int, text: Any, setting: Setting) -> None:
        self.index, self.name, self.text, self.setting = index, f"layers.{index}", text, setting
        self.kind, self.indexer, self.sparse = text.layer_kind(index), text.indexer_type(index), text.is_sparse(index)
        stem = f"{PREFIX}.layers.{index}"
        self.sites = {
            site: mhc.Weights(*(weights.tensor(f"{stem}.hc_{site}_{part}") for part in ("fn", "base", "scale")))
            for site in ("attn", "ffn")
        }
        self.norms = {x: weights.tensor(f"{stem}.{x}_layernorm.weight") for x in ("input", "post_attention")}
        self.attn: Kda | Dsa
        if self.kind == "kda":
            self.attn = Kda(weights, stem, self.name, text, setting)
        else:
            self.attn = Dsa(weights, stem, self.name, text, setting, shared=self.indexer == "shared")
        self.mlp: Dense | Moe
        if self.sparse:
            self.mlp = Moe(weights, stem, self.name, index, text, setting)
        else:
            self.mlp = Dense(weights, stem, self.name, text, setting)

    def __call__(
        self, streams: Tensor, state: KdaState | DsaState, tap: Tap | None, selected: Tensor | None
    ) -> Tensor | None:
        """streams [T, C, D], replaced in place -> the selection in force; `selected` is the last full layer's."""
        if tap is not None:
            tap(f"{self.name}.in", streams)
        with self.setting.frame("KDA" if isinstance(self.attn, Kda) else "DSA"):
            mix = self.hc("attn", streams, tap)
            x = norm.rms(mhc.collapse(streams, mix.pre), self.norms["input"], self.text.rms_norm_eps)
            if tap is not None:
                tap(f"{self.name}.attn.in", x)
            if isinstance(self.attn, Kda):
                assert isinstance(state, KdaState)
                out = self.attn(x, state, tap)
            else:
                assert isinstance(state, DsaState)
                out, selected = self.attn(x, state, tap, selected if self.attn.indexer is None else None)
            streams.copy_(mhc.combine(streams, out, mix.post, mix.comb))
            if tap is not None:
                tap(f"{self.name}.attn.out", out)
                tap(f"{self.name}.mid", streams)
        with self.setting.frame("MoE" if self.sparse else "dense"):
            mix = self.hc("ffn", streams, tap)
            x = norm.rms(mhc.collapse(streams, mix.pre), self.norms["post_attention"], self.text.rms_norm_eps)
            if tap is not None:
                tap(f"{self.name}.mlp.in", x)
            out = self.mlp(x, tap)
            streams.copy_(mhc.combine(streams, out, mix.post, mix.comb))
            if tap is not None:
                tap(f"{self.name}.mlp.out", out)
                tap(f"{self.name}.out", streams)
        return selected

    def hc(self, site: str, streams: Tensor, tap: Tap | None) -> mhc.Mix:
        text = self.text
        mix = mhc.mix(
            streams,
            self.sites[site],
            norm_eps=text.rms_norm_eps,
            hc_eps=text.hc_eps,
            iterations=text.hc_sinkhorn_iters,
        )
        if tap is not None:
            for part, value in zip(mix._fields, mix, strict=True):
                tap(f"{self.name}.{site}_hc.{part}", value)
        return mix
