"""What a trace lacks, what each missing tap would tell, and how to add it."""

from __future__ import annotations

import difflib
import fnmatch
import re
from dataclasses import dataclass
from typing import Any

from conformance.taps import TapSpec, expected
from conformance.trace import Trace, inspect


@dataclass(frozen=True)
class Group:
    """Taps that belong together: `buys` is what they let a comparison say, `how` where an engine finds them.

    `leaves` are names within a layer, globs allowed; after a colon the axes that the name must have.
    """

    title: str
    leaves: tuple[str, ...]
    buys: str
    how: str


GROUPS = (
    Group(
        "layer boundaries",
        ("in", "out"),
        "a fault is named to the layer",
        "the streams [T, C, D] that enter and leave each decoder layer: all C = hc_mult of them, before any mean",
    ),
    Group(
        "sublayer boundaries",
        ("attn.in", "attn.out", "mid", "mlp.in", "mlp.out"),
        "a fault is named to the mixer, the feed-forward or the stream mixing",
        "attn.in is after input_layernorm, mlp.in after post_attention_layernorm; attn.out and mlp.out are after the "
        "all-reduce; mid are the streams after the mixer's combine",
    ),
    Group(
        "stream mixing",
        ("attn_hc.*", "ffn_hc.*"),
        "gates and Sinkhorn are told apart from the norms around them",
        "pre, post and comb as the layer uses them, in float32; comb[i, j] goes from stream i to stream j",
    ),
    Group(
        "KDA operands",
        ("attn.q", "attn.k", "attn.v", "attn.g", "attn.beta", "attn.core: T H d"),
        "convolution, decay, delta rule and output are told apart",
        "q, k, v after convolution and SiLU but before the l2 normalisation; g is the log decay (negative); core is "
        "the delta rule's output before o_norm",
    ),
    Group(
        "KDA states",
        ("attn.state", "attn.conv_state"),
        "what the next call would start from is checked",
        "once, after the last token: state [H, d_k, d_v], conv_state the last three inputs of the q, k, v convolutions",
    ),
    Group(
        "DSA operands",
        ("attn.q_resid", "attn.latent", "attn.core: T A O"),
        "the low-rank projections are told apart from attention itself",
        "q_resid after q_a_layernorm, latent after kv_a_layernorm (what the cache holds), core before o_proj",
    ),
    Group(
        "indexer",
        ("indexer.*",),
        "a wrong selection is told apart from a wrong attention, and legitimate flips are excused",
        "selected holds token indices counted from the first real token, -1 where unused; scores are -inf where a pool "
        "was no candidate; pool_keys of complete pools only",
    ),
    Group(
        "experts",
        ("router.*", "routed.out", "shared.out"),
        "routing is told apart from the experts, and legitimate flips are excused",
        "logits before the sigmoid and without the bias, in float32; indices and weights in the same order; routed.out "
        "already weighted, without the shared expert",
    ),
    Group(
        "both ends",
        ("embed", "final.hidden", "final.norm"),
        "embedding and head are checked on their own",
        "embed before it is copied to the streams, final.hidden the mean of the streams, final.norm what enters "
        "lm_head",
    ),
    Group(
        "MTP block",
        ("mtp.*",),
        "drafting is checked",
        "z after eh_proj, then the same names as in a layer with `mtp` in place of `layers.i`",
    ),
    Group("vision tower", ("vision.*",), "image inputs are checked", "patch_embed, each block, downsample and out"),
)


@dataclass(frozen=True)
class GroupState:
    """How much of a group a trace holds; `known` is None without a config.

    `missing`: name with `i` for the layer -> (how many layers lack it, axes, dtype).
    """

    group: Group
    present: int
    known: int | None
    missing: dict[str, tuple[int, str, str]]


@dataclass(frozen=True)
class Advice:
    """`faults` make the trace unusable, `unknown` names are failures with a suggestion each, `groups` are optional.

    `localises` is the finest place that a fault in any layer can be named to, empty without a config.
    """

    faults: tuple[str, ...]
    unknown: dict[str, str]
    groups: tuple[GroupState, ...]
    localises: str

    @property
    def usable(self) -> bool:
        return not self.faults and not self.unknown


def advise(trace: Trace, config: Any = None) -> Advice:
    """Measure `trace` against the tap table of `config` (reference.config.ModelConfig).

    Without a config only names can be counted: which layers exist, which kinds they are and what axes mean is unknown.
    """
    if config is None:
        return Advice(
            (), {}, tuple(GroupState(g, sum(_belongs(g, n, "") for n in trace.taps), None, {}) for g in GROUPS), ""
        )
    found = inspect(trace, config)
    specs = expected(config, trace.rows)
    present = set(found.present)
    groups = (_state(group, specs, present) for group in GROUPS)
    choices = {name for name in specs if name.startswith("layers.") and name.endswith((".indices", ".selected"))}
    return Advice(
        faults=tuple(str(fault) for fault in found.faults),
        unknown={name: _suggestion(name, specs) for name in found.unknown},
        groups=tuple(state for state in groups if state.known),
        localises=_reach(config.text.num_hidden_layers, present, choices),
    )


def leaf(name: str) -> str:
    """The name within its layer."""
    return re.sub(r"^layers\.\d+\.", "", name)


def _belongs(group: Group, name: str, axes: str) -> bool:
    """`mtp.` and `vision.` names match whole, the others by their name within a layer. `axes` "" matches any."""
    inside = leaf(name)
    outside = inside == name and not name.startswith(("mtp.", "vision."))
    for entry in group.leaves:
        pattern, _, wanted = entry.partition(": ")
        named = inside == pattern if outside else fnmatch.fnmatchcase(inside, pattern)
        if named and (not wanted or not axes or wanted == axes):
            return True
    return False


def _state(group: Group, specs: dict[str, TapSpec], present: set[str]) -> GroupState:
    members = [name for name, spec in specs.items() if _belongs(group, name, spec.letters)]
    missing: dict[str, tuple[int, str, str]] = {}
    for name in members:
        if name not in present:
            pattern = re.sub(r"^(layers|vision\.blocks)\.\d+\.", r"\1.i.", name)
            count = missing.get(pattern, (0, "", ""))[0] + 1
            axes = f"[{', '.join(specs[name].letters.split())}]"
            missing[pattern] = (count, axes, "I32" if specs[name].dtypes == ("I32",) else "float")
    return GroupState(group, len(present & set(members)), len(members), missing)


def _suggestion(name: str, specs: dict[str, TapSpec]) -> str:
    close = difflib.get_close_matches(name, specs, n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else "no name of the format is close"


def _reach(layers: int, present: set[str], choices: set[str]) -> str:
    """The finest place that a fault in any layer can be named to. `choices`: every tap that tells a discrete choice."""

    def everywhere(*leaves: str) -> bool:
        return all(f"layers.{layer}.{name}" in present for layer in range(layers) for name in leaves)

    if everywhere("in", "mid", "out", "attn.in", "attn.out", "mlp.in", "mlp.out"):
        finer = ("attn.core", "attn_hc.comb", "ffn_hc.comb")
        return "an operation" if everywhere(*finer) else "a sublayer"
    if everywhere("in", "out"):
        return "a layer"
    if choices <= present:
        return "the logits"
    return (
        "the logits, and of those only to tokens whose experts and pools are beyond doubt; with every router.indices "
        "and indexer.selected to all of them"
    )
