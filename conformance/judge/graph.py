"""The text stack as a graph of steps between taps: which step makes a tap, from which others.

A node's `run` gets the model of one arithmetic and its input arrays, all with the same leading axes, and returns its
outputs. The judge feeds it the engine's own taps where the trace holds them and the results of earlier nodes where it
does not, so steps are as fine as the trace allows. `KDA`'s `u` (pre-activation conv inputs) is the one value that is no
tap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.config import TextConfig
from reference.model import TextModel
from reference.ops import mhc, router

Run = Callable[..., tuple[np.ndarray, ...]]
ELEMENTARY = 8
"""Half-ulps of fp32 that a library's exp, sigmoid, rsqrt or division may be off by in one step."""


@dataclass(frozen=True)
class Node:
    """`outputs` made from `inputs` by `run(model, *inputs)`.

    `mixes` marks a node whose row t depends on rows before t. `choice` marks a discrete one. `layer` is None outside
    the layers.
    """

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    run: Run
    layer: int | None
    mixes: bool = False
    choice: bool = False


@dataclass(frozen=True)
class Traits:
    """How a tap is judged: see `bounds.Step`. `copy` marks a tap that must equal its source bit for bit."""

    length: int = ELEMENTARY
    widen: float = 1.0
    fine: bool = False
    time: bool = True
    copy: bool = False
    slope: Callable[[np.ndarray], np.ndarray] | None = None
    kinked: bool = False
    coarse: bool = True


def nodes(config: TextConfig) -> Iterator[Node]:
    """Every node in dataflow order. A tap is made by exactly one node, and only from taps before it."""
    yield Node(("embed",), ("tokens",), lambda model, tokens: (model.embed(tokens),), None)
    source, selected = "embed", ""
    for index in range(config.num_hidden_layers):
        name = f"layers.{index}."
        yield _entry(index, source)
        yield _site(index, "attn", "in")
        yield _input(index, "attn", "in")
        if config.layer_kinds[index] == "kda":
            yield from _kda(index)
        else:
            yield from dsa(index, name, shared=selected if config.indexer(index) == "shared" else "")
            selected = name + "indexer.selected"
        yield _combine(index, "attn", "in", "mid")
        yield _site(index, "ffn", "mid")
        yield _input(index, "ffn", "mid")
        yield from moe(index, name) if config.is_sparse(index) else _dense(index)
        yield _combine(index, "ffn", "mid", "out")
        source = name + "out"
    yield Node(("final.hidden",), (source,), lambda model, x: (model.final_hidden(x),), None)
    yield Node(("final.norm",), ("final.hidden",), lambda model, x: (model.final_norm(x),), None)
    yield Node(("logits",), ("final.norm",), lambda model, x: (model.logits(x),), None)


def traits(config: TextConfig, tap: str) -> Traits:
    """How `tap` is judged. Longest contractions are those of the step with every tap present."""
    c = config
    site = c.hc_mult * c.hidden_size
    leaf = tap.split(".", 2)[2] if tap.startswith("layers.") else tap.removeprefix("mtp.")
    wide = max(c.intermediate_size, c.hidden_size)
    table = {
        "embed": Traits(copy=True),
        "in": Traits(copy=True),
        "z": Traits(2 * c.hidden_size),
        "attn.g": Traits(c.hidden_size, fine=True, slope=_sigmoid(c.gate_lower_bound), coarse=False),
        "attn.beta": Traits(c.hidden_size, slope=_sigmoid(1.0)),
        "attn.state": Traits(c.linear_head_dim, fine=True, time=False, kinked=True),
        "attn.conv_state": Traits(c.hidden_size, time=False),
        "indexer.pool_keys": Traits(c.index_kpool, time=False),
        "indexer.scores": Traits(c.index_n_heads * c.index_head_dim, fine=True, kinked=True, coarse=False),
        "router.logits": Traits(c.hidden_size, widen=math.sqrt(c.hidden_size), fine=True, coarse=False),
        "logits": Traits(c.hidden_size, widen=math.sqrt(c.hidden_size), fine=True, coarse=False),
    }
    if tap == "mtp.logits":
        return Traits(c.hidden_size)  # its step begins at z: bf16 rounding outweighs the sums
    if leaf in table:
        return table[leaf]
    if "_hc." in leaf:
        slopes = {"pre": _sigmoid(1.0), "post": _sigmoid(2.0), "comb": None}
        part = leaf.split(".")[1]
        return Traits(site, widen=math.sqrt(site), fine=part == "pre", slope=slopes[part], coarse=False)
    if leaf == "router.weights":
        return Traits(ELEMENTARY, coarse=False)
    if leaf in ("final.hidden", "mid", "out"):
        return Traits(ELEMENTARY)
    return Traits(wide)


def _sigmoid(height: float) -> Callable[[np.ndarray], np.ndarray]:
    """Slope of height * sigmoid(x), from its value."""
    return lambda y: np.abs(y * (1.0 - y / height))


def _entry(i: int, source: str) -> Node:
    if source == "embed":
        return Node((f"layers.{i}.in",), ("embed",), lambda model, x: (model.streams(x),), i)
    return Node((f"layers.{i}.in",), (source,), lambda model, x: (x,), i)


def _site(i: int, site: str, streams: str) -> Node:
    outputs = tuple(f"layers.{i}.{site}_hc.{part}" for part in ("pre", "post", "comb"))
    return Node(outputs, (f"layers.{i}.{streams}",), lambda model, x: tuple(model.layers[i].hc(site, x)), i)


def _input(i: int, site: str, streams: str) -> Node:
    def run(model: TextModel, x: np.ndarray, pre: np.ndarray) -> tuple[np.ndarray, ...]:
        layer = model.layers[i]
        return (layer.mixer_input(x, pre) if site == "attn" else layer.mlp_input(x, pre),)

    output = "attn.in" if site == "attn" else "mlp.in"
    return Node((f"layers.{i}.{output}",), (f"layers.{i}.{streams}", f"layers.{i}.{site}_hc.pre"), run, i)


def _combine(i: int, site: str, streams: str, output: str) -> Node:
    def run(model: TextModel, x: np.ndarray, out: np.ndarray, post: np.ndarray, comb: np.ndarray) -> Any:
        return (model.layers[i].combine(x, out, mhc.HC(post, post, comb)),)

    sublayer = "attn.out" if site == "attn" else "mlp.out"
    inputs = (streams, sublayer, f"{site}_hc.post", f"{site}_hc.comb")
    return Node((f"layers.{i}.{output}",), tuple(f"layers.{i}.{name}" for name in inputs), run, i)


def _kda(i: int) -> Iterator[Node]:
    p = f"layers.{i}.attn."

    def conv(model: TextModel, u: np.ndarray) -> tuple[np.ndarray, ...]:
        mixer = model.layers[i].attn
        return mixer.qkv(u, mixer.fresh(u.shape[:-2]).conv)

    def core(model: TextModel, *parts: np.ndarray) -> tuple[np.ndarray, ...]:
        mixer = model.layers[i].attn
        return mixer.core(*parts, mixer.fresh(parts[0].shape[:-3]).matrix)

    yield Node((p + "u",), (p + "in",), lambda model, x: (model.layers[i].attn.conv_inputs(x),), i)
    yield Node((p + "q", p + "k", p + "v", p + "conv_state"), (p + "u",), conv, i, mixes=True)
    yield Node((p + "g", p + "beta"), (p + "in",), lambda model, x: model.layers[i].attn.gates(x), i)
    yield Node((p + "core", p + "state"), (p + "q", p + "k", p + "v", p + "g", p + "beta"), core, i, mixes=True)
    yield Node((p + "out",), (p + "core", p + "in"), lambda model, o, x: (model.layers[i].attn.output(o, x),), i)


def followed(sets: np.ndarray, rows: int) -> np.ndarray:
    """Token sets [.., J, W] of the first J rows -> [.., rows, W + rows - J]: a later row takes the last of them and all
    rows since, itself included."""
    *B, J, W = sets.shape
    if rows == J:
        return sets
    out = np.full((*B, rows, W + rows - J), -1, np.int32)
    out[..., :J, :W] = sets
    out[..., J:, :W] = sets[..., -1:, :]
    since = np.arange(J, rows)
    out[..., J:, W:] = np.where(since <= since[:, None], since, -1)
    return np.sort(out.view(np.uint32), axis=-1).view(np.int32)


def dsa(i: int, p: str, *, shared: str = "", own: int | None = None) -> Iterator[Node]:
    """The mixer of `model.layers[i]`, whose taps begin with `p`. `shared` names the selection that it takes.

    `own`: only so many rows run the indexer; the others follow the last of them.
    """
    a, x, cut = f"{p}attn.", f"{p}indexer.", slice(own)

    def pool(model: TextModel, k: np.ndarray, gate: np.ndarray) -> tuple[np.ndarray, ...]:
        whole = k.shape[-2] // model.config.index_kpool * model.config.index_kpool
        return (model.layers[i].attn.pool(k[..., :whole, :], gate[..., :whole, :]),)

    def scores(model: TextModel, q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, ...]:
        return (model.layers[i].attn.scores(q, weights, keys, 0),)

    yield Node((a + "q_resid",), (a + "in",), lambda model, x: (model.layers[i].attn.q_resid(x),), i)
    yield Node((a + "latent",), (a + "in",), lambda model, x: (model.layers[i].attn.latent(x),), i)
    if shared:
        yield Node((x + "selected",), (shared,), lambda model, sets: (sets,), i, choice=True)
    else:
        yield Node(
            (x + "q", x + "k", x + "gate", x + "weights"),
            (a + "in", a + "q_resid"),
            lambda model, x, r: tuple(model.layers[i].attn.index(x[..., cut, :], r[..., cut, :])),
            i,
        )
        yield Node((x + "pool_keys",), (x + "k", x + "gate"), pool, i, mixes=True)
        yield Node((x + "scores",), (x + "q", x + "weights", x + "pool_keys"), scores, i, mixes=True)
        yield Node(
            (x + "selected",),
            (x + "scores",),
            lambda model, s: (model.layers[i].attn.select(s, 0),),
            i,
            mixes=True,
            choice=True,
        )
    yield Node(
        (a + "core",),
        (a + "q_resid", a + "latent", x + "selected"),
        lambda model, r, c, sets: (model.layers[i].attn.core(r, c, followed(sets, r.shape[-2])),),
        i,
        mixes=True,
    )
    yield Node((a + "out",), (a + "core",), lambda model, core: (model.layers[i].attn.output(core),), i)


def _dense(i: int) -> Iterator[Node]:
    p = f"layers.{i}.mlp."
    yield Node((p + "out",), (p + "in",), lambda model, x: (model.layers[i].mlp(x),), i)


def choice_scores(model: TextModel, i: int, logits: np.ndarray) -> np.ndarray:
    """router.logits -> what experts are chosen by: sigmoid plus the correction bias."""
    bias = model.layers[i].ffn.w.array("gate.e_score_correction_bias")
    return router.choice_scores(model.ar, router.router_scores(model.ar, logits), bias)


def moe(i: int, p: str) -> Iterator[Node]:
    """The experts of `model.layers[i]`, whose taps begin with `p`."""

    def logits(model: TextModel, x: np.ndarray) -> tuple[np.ndarray, ...]:
        return (router.router_logits(model.ar, x, model.layers[i].ffn.w.linear("gate.weight")),)

    def choose(model: TextModel, x: np.ndarray) -> tuple[np.ndarray, ...]:
        c = model.config
        biased = choice_scores(model, i, x)
        return (router.choose(model.ar, biased, c.num_experts_per_tok, c.n_group, c.topk_group),)

    def weigh(model: TextModel, x: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        c, scores = model.config, router.router_scores(model.ar, x)
        return (router.routing_weights(model.ar, scores, indices, c.norm_topk_prob, c.routed_scaling_factor),)

    yield Node((p + "router.logits",), (p + "mlp.in",), logits, i)
    yield Node((p + "router.indices",), (p + "router.logits",), choose, i, choice=True)
    yield Node((p + "router.weights",), (p + "router.logits", p + "router.indices"), weigh, i)
    yield Node(
        (p + "routed.out",),
        (p + "mlp.in", p + "router.indices", p + "router.weights"),
        lambda model, x, indices, weights: (model.layers[i].ffn.routed(x, indices, weights),),
        i,
    )
    yield Node((p + "shared.out",), (p + "mlp.in",), lambda model, x: (model.layers[i].ffn.shared(x),), i)
    yield Node(
        (p + "mlp.out",),
        (p + "routed.out", p + "shared.out"),
        lambda model, a, b: (model.layers[i].ffn.sum(a, b),),
        i,
    )
