"""Watching the public torch classes from outside: every tap they compute, without a copied line of theirs.

Module inputs and outputs come from hooks. Four values never cross a module boundary; they are caught where torch or
the classes' own functions compute them: `pre` of an mHC site (the first sigmoid), the arguments of the delta-rule
kernels, the pool gate's projection and the scores that the indexer ranks.

One thing is changed on the way: `topk` promises no order among equal values, and pools whose every head is cut by the
ReLU score exactly zero. Indexer and router therefore rank with `lowest_first`, which differs on exact ties only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from transformers.models.glm5_next import modeling_glm5_next as modeling

Module = Any
"""A module of the public classes, whose parts are known by name only."""
Tap = Callable[[str, Any], None]
_KERNELS = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")


def lowest_first(values: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """`torch.topk`, with the rule that of equal values the one with the lower index is taken first."""
    ranked = values.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((ranked.values.narrow(dim, 0, k), ranked.indices.narrow(dim, 0, k)))


class Calls(TorchFunctionMode):
    """Remembers (function, positional arguments, result) of every call to one of `functions`, in order; every `topk` is
    answered by `lowest_first`."""

    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.functions = functions
        self.seen: list[tuple[Any, tuple[Any, ...], Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ranked = func is torch.topk or func is torch.Tensor.topk
        result = (lowest_first if ranked else func)(*args, **(kwargs or {}))
        if any(func is function for function in self.functions):
            self.seen.append((func, args, result))
        return result


class Observer:
    """Hooks a `Glm5NextTextModel` once; reports to a tap only inside `watch`."""

    def __init__(self, model: Module) -> None:
        self.config = model.config
        self._tap: Tap | None = None
        self._pad = self._padded = self._layer = 0
        self._cache: Any = None
        self._pools: dict[int, int] = {}
        self._output(model.embed_tokens, "embed")
        for index, layer in enumerate(model.layers):
            self._watch_layer(index, layer)
        self._output(model.hc_head, "final.hidden")
        self._output(model.norm, "final.norm")

    @contextmanager
    def watch(self, tap: Tap, *, pad: int, padded: int, cache: Any) -> Iterator[None]:
        """Report one forward call. `pad`: positions to skip at its start; `padded`: those that the cache began with."""
        if cache is not self._cache:
            self._pools = {}
        self._tap, self._pad, self._padded, self._cache = tap, pad, padded, cache
        patches = [mock.patch.object(modeling, name, self._kernel(getattr(modeling, name))) for name in _KERNELS]
        try:
            for patch in patches:
                patch.start()
            yield
        finally:
            for patch in patches:
                patch.stop()
            self._tap = None

    def _emit(self, name: str, value: torch.Tensor, *, rows: bool = True) -> None:
        """Batch entry 0; with `rows`, without the pad positions."""
        if self._tap is not None:
            self._tap(name, value[0, self._pad :] if rows else value[0])

    def _output(self, module: Module, name: str, change: Callable[[Any], torch.Tensor] = lambda out: out) -> None:
        module.register_forward_hook(lambda _module, _args, out: self._emit(name, change(out)))

    def _watch_layer(self, index: int, layer: Module) -> None:
        stem = f"layers.{index}."

        def enter(_module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._layer = index
            self._emit(f"{stem}in", args[0])
            if kwargs.get("prev_topk_indices") is not None:
                self._selected(f"{stem}indexer.selected", kwargs["prev_topk_indices"])

        layer.register_forward_pre_hook(enter, with_kwargs=True)
        self._watch_site(layer.attn_hc, f"{stem}attn_hc")
        self._output(layer.input_layernorm, f"{stem}attn.in")
        if layer.block_type == "linear_attention":
            self._watch_conv_state(layer.self_attn, index)
        else:
            self._watch_attention(layer.self_attn, stem)
        self._output(layer.self_attn, f"{stem}attn.out", lambda out: out[0] if isinstance(out, tuple) else out)
        layer.ffn_hc.register_forward_pre_hook(lambda _module, args: self._emit(f"{stem}mid", args[0]))
        self._watch_site(layer.ffn_hc, f"{stem}ffn_hc")
        self._output(layer.post_attention_layernorm, f"{stem}mlp.in")
        if hasattr(layer.mlp, "experts"):
            self._watch_moe(layer.mlp, stem)
        self._output(layer.mlp, f"{stem}mlp.out")
        self._output(layer, f"{stem}out", lambda out: out[0])

    def _watch_site(self, site: Module, name: str) -> None:
        forward = site.forward

        def observed(streams: torch.Tensor) -> Any:
            with Calls(torch.sigmoid) as calls:
                post, comb, collapsed = forward(streams)
            self._emit(f"{name}.pre", calls.seen[0][2] + site.hc_eps)
            self._emit(f"{name}.post", post)
            self._emit(f"{name}.comb", comb)
            return post, comb, collapsed

        site.forward = observed

    def _kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def observed(query: Any, key: Any, value: Any, **kwargs: Any) -> Any:
            core, state = function(query, key, value, **kwargs)
            stem = f"layers.{self._layer}.attn."
            named = {"q": query, "k": key, "v": value, "g": kwargs["g"], "beta": kwargs["beta"], "core": core}
            for name, tensor in named.items():
                self._emit(stem + name, tensor)
            self._emit(f"{stem}state", state, rows=False)
            return core, state

        return observed

    def _watch_conv_state(self, mixer: Module, index: int) -> None:
        width = mixer.conv_kernel_size - 1

        def leave(_module: Module, _args: Any, _out: Any) -> None:
            if self._tap is not None:
                inputs = self._cache.layers[index].conv_states[0]
                self._emit(f"layers.{index}.attn.conv_state", inputs[..., -width:].transpose(1, 2), rows=False)

        mixer.register_forward_hook(leave)

    def _watch_attention(self, mixer: Module, stem: str) -> None:
        self._output(mixer.q_a_layernorm, f"{stem}attn.q_resid")
        self._output(mixer.kv_a_layernorm, f"{stem}attn.latent")
        heads = mixer.num_heads
        mixer.o_proj.register_forward_pre_hook(
            lambda _module, args: self._emit(f"{stem}attn.core", args[0].unflatten(-1, (heads, -1)))
        )
        if mixer.indexer is not None:
            self._watch_indexer(mixer.indexer, f"{stem}indexer.")

    def _watch_indexer(self, indexer: Module, stem: str) -> None:
        index, forward, pooled = indexer.layer_idx, indexer.forward, indexer.get_pooled_states
        self._output(indexer.wq_b, f"{stem}q", lambda out: out.unflatten(-1, (indexer.n_heads, -1)))
        self._output(indexer.k_norm, f"{stem}k")
        self._output(indexer.weights_proj, f"{stem}weights", lambda out: out.float() * indexer.n_heads**-0.5)

        def observed_pools(packed_states: torch.Tensor) -> Any:
            keys, indices, valid = pooled(packed_states=packed_states)
            if self._tap is not None:
                self._tap(f"{stem}pool_keys", keys[0, self._pools.get(index, 0) :])
                self._pools[index] = keys.shape[1]
            return keys, indices, valid

        def observed(**kwargs: Any) -> torch.Tensor:
            with Calls(torch.nn.functional.linear, torch.Tensor.topk) as calls:
                selected = forward(**kwargs)
            gate = next(out for _, args, out in calls.seen if args[1] is indexer.index_kpool_compress_gate)
            scores = next(args[0] for func, args, _ in calls.seen if func is torch.Tensor.topk)
            self._emit(f"{stem}gate", gate)
            floor = torch.finfo(scores.dtype).min
            self._emit(f"{stem}scores", scores.masked_fill(scores == floor, float("-inf")))
            self._selected(f"{stem}selected", selected)
            return selected

        indexer.get_pooled_states = observed_pools
        indexer.forward = observed

    def _selected(self, name: str, selected: torch.Tensor) -> None:
        """Cache positions -> token indices without the padding, ascending, unused entries last."""
        end = torch.iinfo(selected.dtype).max
        tokens = selected.masked_fill(selected < 0, end).sort(dim=-1).values - self._padded
        self._emit(name, tokens.masked_fill(tokens == end - self._padded, -1))

    def _watch_moe(self, moe: Module, stem: str) -> None:
        route = moe.gate.forward

        def ranked(hidden_states: torch.Tensor) -> Any:
            with Calls():
                return route(hidden_states)

        moe.gate.forward = ranked

        def leave(_module: Module, _args: Any, out: Any) -> None:
            logits, weights, indices = out
            self._emit(f"{stem}router.logits", logits[None])
            self._emit(f"{stem}router.indices", indices[None])
            self._emit(f"{stem}router.weights", weights[None])

        moe.gate.register_forward_hook(leave)
        moe.experts.register_forward_hook(lambda _module, _args, out: self._emit(f"{stem}routed.out", out[None]))
        self._output(moe.shared_experts, f"{stem}shared.out")
