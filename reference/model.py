"""The text stack (model.md section 2): layers, state, prefill, decode.

Arrays are float64 and may have leading batch axes (`..`). Letters: T tokens, C streams, D hidden, H heads, d KDA head
width, K conv width, Q/L query/latent ranks, h/p index heads/width, S pool slots, P pools, W selection width, E experts,
k of them per token, V vocabulary.

The finer steps of a layer are methods of its parts (`Kda`, `Dsa`, `Dense`, `Moe`), each from taps to taps, so that a
single step can be replayed on somebody else's inputs. The arithmetic decides what is rounded; nothing here does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reference.arithmetic import Arithmetic, get_arithmetic, total
from reference.checkpoint import Checkpoint
from reference.config import KDA, TextConfig
from reference.errors import InputError
from reference.layout import TEXT
from reference.ops import indexer, kda, mhc, mla, mlp, router
from reference.ops.norm import rms_norm
from reference.state import DsaState, KdaState, State
from reference.weights import Weights

Tap = Callable[[str, np.ndarray], None]


class TokenIdError(InputError):
    """A token id is not an integer inside the vocabulary."""


class PaddingError(InputError):
    """Left padding longer than the call, or after a real token."""


class SelectionError(InputError):
    """A layer that shares its token selection was given none."""


class Options:
    """How a model computes what has more than one form: `kda` recurrent or chunked, `mla` expanded or absorbed."""

    def __init__(self, kda: str = "recurrent", kda_chunk: int = 64, mla: str = "expanded") -> None:
        if kda not in ("recurrent", "chunked"):
            raise ValueError(f"kda must be recurrent or chunked, not {kda!r}")
        if mla not in ("expanded", "absorbed"):
            raise ValueError(f"mla must be expanded or absorbed, not {mla!r}")
        if kda_chunk < 1:
            raise ValueError(f"kda_chunk must be at least 1, not {kda_chunk}")
        self.kda, self.kda_chunk, self.mla = kda, kda_chunk, mla


class Part:
    """A piece of a layer: its weights, the config and the arithmetic it computes in."""

    def __init__(self, ar: Arithmetic, config: TextConfig, w: Weights, options: Options) -> None:
        self.ar, self.config, self.w, self.options = ar, config, w, options


class Kda(Part):
    """The KDA mixer. `w` is at `self_attn.`."""

    def fresh(self, batch: tuple[int, ...] = ()) -> KdaState:
        c = self.config
        return KdaState.fresh(batch, c.linear_num_heads, c.linear_head_dim, c.short_conv_kernel_size)

    def conv_inputs(self, x: np.ndarray) -> np.ndarray:
        """attn.in [.., T, D] -> pre-activation conv inputs [.., T, 3Hd]."""
        return kda.project(self.ar, x, self.w)

    def qkv(self, u: np.ndarray, history: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """conv inputs, history [.., K-1, 3Hd] -> attn.q, .k, .v [.., T, H, d] and the next history."""
        y, history = kda.conv(self.ar, u, history, self.w)
        heads = y.reshape(*y.shape[:-1], 3, self.config.linear_num_heads, self.config.linear_head_dim)
        return heads[..., 0, :, :], heads[..., 1, :, :], heads[..., 2, :, :], history

    def gates(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """attn.in -> attn.g [.., T, H, d], attn.beta [.., T, H]."""
        return kda.gates(self.ar, x, self.w, self.config.linear_num_heads, self.config.gate_lower_bound)

    def core(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, matrix: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """attn.q .k .v .g .beta and the state before them -> attn.core [.., T, H, d], the state after."""
        inputs = kda.inputs(self.ar, q, k, v, g, beta)
        if self.options.kda == "chunked":
            return kda.chunked(self.ar, inputs, matrix, self.options.kda_chunk)
        return kda.recurrent(self.ar, inputs, matrix)

    def output(self, core: np.ndarray, x: np.ndarray) -> np.ndarray:
        """attn.core, attn.in -> attn.out [.., T, D]."""
        return kda.output(self.ar, core, x, self.w, self.config.rms_norm_eps)

    def __call__(self, x: np.ndarray, state: KdaState, tap: Tap, pad: int = 0) -> np.ndarray:
        """attn.in -> attn.out. The first `pad` rows count as zeros; they leave a fresh state as it is."""
        x = np.concatenate([np.zeros_like(x[..., :pad, :]), x[..., pad:, :]], axis=-2)
        q, k, v, state.conv = self.qkv(self.conv_inputs(x), state.conv)
        g, beta = self.gates(x)
        core, state.matrix = self.core(q, k, v, g, beta, state.matrix)
        state.length += x.shape[-2] - pad
        for name, value in zip(("q", "k", "v", "g", "core"), (q, k, v, g, core), strict=True):
            tap(f"attn.{name}", value[..., pad:, :, :])
        tap("attn.beta", beta[..., pad:, :])
        tap("attn.state", state.matrix)
        tap("attn.conv_state", state.conv)
        return self.output(core, x)


class Dsa(Part):
    """The DSA mixer, with its indexer unless `shared`. `w` is at `self_attn.`."""

    shared = False

    def fresh(self, batch: tuple[int, ...] = ()) -> DsaState:
        return DsaState.fresh(batch, self.config.kv_lora_rank, self.config.index_head_dim)

    def q_resid(self, x: np.ndarray) -> np.ndarray:
        """attn.in [.., T, D] -> attn.q_resid [.., T, Q]."""
        return mla.query_residual(self.ar, x, self.w, self.config.rms_norm_eps)

    def latent(self, x: np.ndarray) -> np.ndarray:
        """attn.in -> attn.latent [.., T, L]."""
        return mla.latent(self.ar, x, self.w, self.config.rms_norm_eps)

    def index(self, x: np.ndarray, r: np.ndarray) -> indexer.Projected:
        """attn.in, attn.q_resid -> indexer.q, .k, .gate, .weights."""
        return indexer.project(self.ar, x, r, self.w.at("indexer."), self.config.index_n_heads)

    def pool(self, k: np.ndarray, gate: np.ndarray) -> np.ndarray:
        """indexer.k, .gate of whole pools [.., P*S, p] -> indexer.pool_keys [.., P, p]."""
        return indexer.pool(self.ar, k, gate, self.w.array("indexer.index_kpool_compress_ape"))

    def scores(self, q: np.ndarray, weights: np.ndarray, pool_keys: np.ndarray, seen: int) -> np.ndarray:
        """indexer.q, .weights of the rows after `seen` tokens, all pool keys so far -> indexer.scores [.., T, P]."""
        return indexer.scores(self.ar, q, weights, pool_keys, seen, self.config.index_kpool)

    def select(self, scores: np.ndarray, seen: int) -> np.ndarray:
        """indexer.scores -> indexer.selected [.., T, W] int32."""
        return indexer.select(scores, seen, self.config.index_topk, self.config.index_kpool)

    def core(self, r: np.ndarray, latents: np.ndarray, selected: np.ndarray) -> np.ndarray:
        """attn.q_resid [.., T, Q], all latents so far [.., n, L], token sets [.., T, W] -> attn.core [.., T, H, v]."""
        q = mla.queries(self.ar, r, self.w, self.config.num_attention_heads)
        return mla.attend(self.ar, q, latents, selected, self.w, self.options.mla)

    def output(self, core: np.ndarray) -> np.ndarray:
        """attn.core -> attn.out [.., T, D]."""
        return mla.output(self.ar, core, self.w)

    def choose(self, x: np.ndarray, r: np.ndarray, state: DsaState, tap: Tap) -> np.ndarray:
        """Runs the indexer on the next rows, keeps what later rows need, returns the token sets.

        A token's key and gate stay in the tail until its pool is complete; then only the pool key is kept.
        """
        projected = self.index(x, r)
        k = np.concatenate([state.tail_k, projected.k], axis=-2)
        gate = np.concatenate([state.tail_gate, projected.gate], axis=-2)
        whole = k.shape[-2] // self.config.index_kpool * self.config.index_kpool
        completed = self.pool(k[..., :whole, :], gate[..., :whole, :])
        state.pool_keys = np.concatenate([state.pool_keys, completed], axis=-2)
        state.tail_k, state.tail_gate = k[..., whole:, :], gate[..., whole:, :]
        scores = self.scores(projected.q, projected.weights, state.pool_keys, state.length)
        for name, value in zip(("q", "k", "gate", "weights"), projected, strict=True):
            tap(f"indexer.{name}", value)
        tap("indexer.pool_keys", completed)
        tap("indexer.scores", scores)
        return self.select(scores, state.length)

    def __call__(
        self,
        x: np.ndarray,
        state: DsaState,
        tap: Tap,
        selected: np.ndarray | None = None,
        pad: int = 0,
        indexed: bool = True,
    ) -> np.ndarray:
        """attn.in -> attn.out. The first `pad` rows see nothing, are seen by nothing and give 0.

        `selected`: token sets to use instead of the indexer's; a shared layer must be given one. The sets used are left
        in `state.selected`. `indexed=False`: the indexer does not see these rows.
        """
        real = x[..., pad:, :]
        r = self.q_resid(real)
        state.latent = np.concatenate([state.latent, self.latent(real)], axis=-2)
        tap("attn.q_resid", r)
        tap("attn.latent", state.latent[..., state.length :, :])
        chosen = self.choose(real, r, state, tap) if indexed and not self.shared else None
        selected = chosen if selected is None else selected
        if selected is None:
            raise SelectionError("indexer_types: a shared layer comes before any full one, or was run without its sets")
        core = self.core(r, state.latent, selected)
        state.length += real.shape[-2]
        state.selected = selected
        tap("indexer.selected", selected)
        tap("attn.core", core)
        return np.concatenate([np.zeros_like(x[..., :pad, :]), self.output(core)], axis=-2)


class SharedDsa(Dsa):
    """A DSA mixer that takes the token sets of the last full layer."""

    shared = True


class Dense(Part):
    """The dense MLP. `w` is at `mlp.`."""

    def __call__(self, x: np.ndarray, tap: Tap, indices: np.ndarray | None = None) -> np.ndarray:
        """mlp.in [.., T, D] -> mlp.out."""
        return mlp.swiglu(self.ar, x, self.w, self.config.swiglu_limit, "mlp")


class Moe(Part):
    """Router, routed experts, shared expert. `w` is at `mlp.`."""

    def route(self, x: np.ndarray, indices: np.ndarray | None = None) -> router.Routing:
        """mlp.in -> router.logits, .indices, .weights; with `indices` those experts are taken."""
        c = self.config
        return router.route(
            self.ar,
            x,
            self.w.linear("gate.weight"),
            self.w.array("gate.e_score_correction_bias"),
            num_experts_per_tok=c.num_experts_per_tok,
            n_group=c.n_group,
            topk_group=c.topk_group,
            norm_topk_prob=c.norm_topk_prob,
            routed_scaling_factor=c.routed_scaling_factor,
            indices=indices,
        )

    def routed(self, x: np.ndarray, indices: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """mlp.in, router.indices, router.weights -> routed.out [.., T, D]."""
        experts = self.w.at("experts.")
        return mlp.routed(self.ar, x, indices, weights, lambda e: experts.at(f"{e}."), self.config.swiglu_limit)

    def shared(self, x: np.ndarray) -> np.ndarray:
        """mlp.in -> shared.out [.., T, D]."""
        return mlp.swiglu(self.ar, x, self.w.at("shared_experts."), self.config.swiglu_limit, "shared")

    def sum(self, routed_out: np.ndarray, shared_out: np.ndarray) -> np.ndarray:
        """routed.out, shared.out -> mlp.out."""
        return mlp.moe_sum(self.ar, routed_out, shared_out)

    def __call__(self, x: np.ndarray, tap: Tap, indices: np.ndarray | None = None) -> np.ndarray:
        """mlp.in -> mlp.out; `indices` [.., T, k]: experts to use instead of the router's choice."""
        routing = self.route(x, indices)
        for name, value in zip(routing._fields, routing, strict=True):
            tap(f"router.{name}", value)
        routed, shared = self.routed(x, routing.indices, routing.weights), self.shared(x)
        tap("routed.out", routed)
        tap("shared.out", shared)
        return self.sum(routed, shared)


class Layer:
    """One text layer. `kind` "kda" or "dsa", `sparse` with experts, `indexer` "full", "shared" or None."""

    def __init__(self, index: int, ar: Arithmetic, config: TextConfig, w: Weights, options: Options) -> None:
        self.index = index
        self.kind = config.layer_kinds[index]
        self.sparse = config.is_sparse(index)
        self.indexer = config.indexer(index)
        self.ar, self.config, self.w = ar, config, w
        mixer = Kda if self.kind == KDA else SharedDsa if self.indexer == "shared" else Dsa
        self.attn: Any = mixer(ar, config, w.at("self_attn."), options)
        self.ffn: Dense | Moe = (Moe if self.sparse else Dense)(ar, config, w.at("mlp."), options)

    def hc(self, site: str, streams: np.ndarray) -> mhc.HC:
        """streams [.., T, C, D] -> pre, post [.., T, C], comb [.., T, C, C]. site: "attn" (in) or "ffn" (mid)."""
        c = self.config
        return mhc.site_weights(
            self.ar,
            streams,
            self.w.linear(f"hc_{site}_fn"),
            self.w.array(f"hc_{site}_base"),
            self.w.array(f"hc_{site}_scale"),
            rms_norm_eps=c.rms_norm_eps,
            hc_eps=c.hc_eps,
            hc_sinkhorn_iters=c.hc_sinkhorn_iters,
        )

    def mixer_input(self, streams: np.ndarray, pre: np.ndarray) -> np.ndarray:
        """in, attn_hc.pre -> attn.in [.., T, D]."""
        return self._input(streams, pre, "input_layernorm")

    def mlp_input(self, streams: np.ndarray, pre: np.ndarray) -> np.ndarray:
        """mid, ffn_hc.pre -> mlp.in [.., T, D]."""
        return self._input(streams, pre, "post_attention_layernorm")

    def _input(self, streams: np.ndarray, pre: np.ndarray, norm: str) -> np.ndarray:
        x = mhc.collapse(self.ar, streams, pre)
        return rms_norm(self.ar, x, self.w.array(f"{norm}.weight"), self.config.rms_norm_eps, norm)

    def mixer(
        self,
        x: np.ndarray,
        state: KdaState | DsaState | None = None,
        tap: Tap | None = None,
        selected: np.ndarray | None = None,
        pad: int = 0,
    ) -> np.ndarray:
        """attn.in [.., T, D] -> attn.out. `state` is moved on (None: a fresh one); `selected`: see `Dsa`."""
        state = self.attn.fresh(x.shape[:-2]) if state is None else state
        report = self._reporter(tap)
        if self.kind == KDA:
            return self.attn(x, state, report, pad)
        return self.attn(x, state, report, selected, pad)

    def mlp(self, x: np.ndarray, tap: Tap | None = None, indices: np.ndarray | None = None, pad: int = 0) -> np.ndarray:
        """mlp.in -> mlp.out. The first `pad` rows choose no expert and give 0."""
        out = self.ffn(x[..., pad:, :], self._reporter(tap), indices)
        return np.concatenate([np.zeros_like(x[..., :pad, :]), out], axis=-2)

    def combine(self, streams: np.ndarray, out: np.ndarray, hc: mhc.HC) -> np.ndarray:
        """(in, attn.out, attn_hc) -> mid [.., T, C, D], or (mid, mlp.out, ffn_hc) -> out."""
        return mhc.combine(self.ar, streams, out, hc)

    def __call__(
        self,
        streams: np.ndarray,
        state: KdaState | DsaState | None = None,
        tap: Tap | None = None,
        selected: np.ndarray | None = None,
        indices: np.ndarray | None = None,
        pad: int = 0,
    ) -> np.ndarray:
        """in [.., T, C, D] -> out. Taps cover the rows after `pad`."""
        report = self._reporter(tap)
        report("in", streams[..., pad:, :, :])
        hc = self._sited("attn", streams, report, pad)
        x = self.mixer_input(streams, hc.pre)
        report("attn.in", x[..., pad:, :])
        out = self.mixer(x, state, tap, selected, pad)
        report("attn.out", out[..., pad:, :])
        streams = self.combine(streams, out, hc)
        report("mid", streams[..., pad:, :, :])
        hc = self._sited("ffn", streams, report, pad)
        x = self.mlp_input(streams, hc.pre)
        report("mlp.in", x[..., pad:, :])
        out = self.mlp(x, tap, indices, pad)
        report("mlp.out", out[..., pad:, :])
        streams = self.combine(streams, out, hc)
        report("out", streams[..., pad:, :, :])
        return streams

    def _sited(self, site: str, streams: np.ndarray, report: Tap, pad: int) -> mhc.HC:
        hc = self.hc(site, streams)
        report(f"{site}_hc.pre", hc.pre[..., pad:, :])
        report(f"{site}_hc.post", hc.post[..., pad:, :])
        report(f"{site}_hc.comb", hc.comb[..., pad:, :, :])
        return hc

    def _reporter(self, tap: Tap | None) -> Tap:
        return reporter(tap, f"layers.{self.index}.")


def reporter(tap: Tap | None, prefix: str) -> Tap:
    """A tap that puts `prefix` before the name, or does nothing where there is none."""
    if tap is None:
        return lambda name, value: None
    return lambda name, value: tap(prefix + name, value)


class TextModel:
    """The whole text stack over one checkpoint.

    `arithmetic`: "exact", "bf16" or "stochastic" (with `seed`). With kda="recurrent" prefill in one go, in chunks and
    token by token give the same bits in `exact` and `bf16`, taps and state included.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        arithmetic: str = "exact",
        *,
        seed: int = 0,
        kda: str = "recurrent",
        kda_chunk: int = 64,
        mla: str = "expanded",
        weights: Weights | None = None,
    ) -> None:
        """`weights`: those of another model over the same checkpoint, to share what it has decoded."""
        self.checkpoint = checkpoint
        self.config: TextConfig = checkpoint.config.text
        self.ar = get_arithmetic(arithmetic, seed)
        self.options = Options(kda, kda_chunk, mla)
        self.weights = Weights(checkpoint) if weights is None else weights
        self.w = self.weights.at(TEXT)
        self.layers = [
            Layer(index, self.ar, self.config, self.w.at(f"layers.{index}."), self.options)
            for index in range(self.config.num_hidden_layers)
        ]
        self.state = self.fresh()

    def fresh(self, batch: tuple[int, ...] = ()) -> State:
        """The state before the first token, for inputs with these leading axes."""
        return State([layer.attn.fresh(batch) for layer in self.layers])

    def reset(self) -> None:
        """Forgets every token."""
        self.state = self.fresh()

    def snapshot(self) -> State:
        """The state as it is now; nothing that follows changes it."""
        return self.state.copy()

    def restore(self, snapshot: State) -> None:
        """Goes back to a snapshot, bit for bit. Raises `StateLengthError` if its layers differ in length."""
        _ = snapshot.length
        self.state = snapshot.copy()

    def embed(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """tokens [.., T] -> embed [.., T, D]. Raises `TokenIdError`."""
        return self.ar.store(self.w.lookup("embed_tokens.weight", self._checked(tokens)), "embed")

    def streams(self, x: np.ndarray) -> np.ndarray:
        """embed [.., T, D] -> layers.0.in [.., T, C, D]: every stream starts as the embedding."""
        return np.repeat(x[..., None, :], self.config.hc_mult, axis=-2)

    def final_hidden(self, streams: np.ndarray) -> np.ndarray:
        """out of the last layer [.., T, C, D] -> final.hidden [.., T, D]: the unweighted mean."""
        return self.ar.store(total(streams, axis=-2) / self.config.hc_mult, "final.hidden")

    def final_norm(self, hidden: np.ndarray) -> np.ndarray:
        """final.hidden -> final.norm [.., T, D]."""
        return rms_norm(self.ar, hidden, self.w.array("norm.weight"), self.config.rms_norm_eps, "final.norm")

    def logits(self, y: np.ndarray) -> np.ndarray:
        """final.norm -> logits [.., T, V], an fp32 point."""
        blocks = self.weights.linear_blocks("lm_head.weight")
        return np.concatenate([self.ar.linear(y, block, "logits", out="fp32") for block in blocks], axis=-1)

    def prefill(self, tokens: Sequence[int] | np.ndarray, tap: Tap | None = None, pad: int = 0) -> np.ndarray:
        """Feeds tokens [.., pad + T] after those already seen; returns logits [.., T, V].

        The first `pad` tokens are left padding: they go through the layers, change nothing at the others, and have
        neither taps nor logits. Raises `TokenIdError`, `PaddingError`.
        """
        logits = self.logits(self.run(tokens, tap, pad))
        reporter(tap, "")("logits", logits)
        return logits

    def decode(self, token: int | np.ndarray, tap: Tap | None = None) -> np.ndarray:
        """Feeds one token (or one per leading axis); returns its logits [.., V]."""
        return self.prefill(np.asarray(token)[..., None], tap)[..., 0, :]

    def run(self, tokens: Sequence[int] | np.ndarray, tap: Tap | None = None, pad: int = 0) -> np.ndarray:
        """As `prefill`, but returns what enters lm_head: final.norm [.., T, D]."""
        tokens = self._checked(tokens)
        *batch, T = tokens.shape
        if not 0 <= pad <= T:
            raise PaddingError(f"pad: {pad} of {T} tokens")
        if pad and self.state.length:
            raise PaddingError(f"pad: {pad} after {self.state.length} real tokens; padding is on the left")
        if T == 0:
            return np.zeros((*batch, 0, self.config.hidden_size))
        if self.state.length == 0:
            self.state = self.fresh(tuple(batch))
        report = reporter(tap, "")
        report("tokens", tokens[..., pad:].astype(np.int32))
        x = self.embed(tokens)
        report("embed", x[..., pad:, :])
        streams, selected = self.streams(x), None
        for layer, state in zip(self.layers, self.state.layers, strict=True):
            streams = layer(streams, state, tap, selected if layer.indexer == "shared" else None, pad=pad)
            if isinstance(state, DsaState):
                selected = state.selected
        hidden = self.final_hidden(streams[..., pad:, :, :])
        report("final.hidden", hidden)
        y = self.final_norm(hidden)
        report("final.norm", y)
        return y

    def _checked(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        ids = np.asarray(tokens)
        if ids.size == 0:
            ids = ids.astype(np.int64)
        if ids.dtype.kind not in "iu":
            raise TokenIdError(f"tokens: expected integers, found {ids.dtype}")
        V = self.config.vocab_size
        for position in np.argwhere((ids < 0) | (ids >= V)):
            where = "][".join(str(int(axis)) for axis in position)
            raise TokenIdError(f"tokens[{where}]: id {ids[tuple(position)]} is outside the vocabulary of {V}")
        return ids
