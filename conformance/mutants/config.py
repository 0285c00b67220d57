"""Faults of reading config.json: keys defaulted, contradictions and unknown values taken, lists misread."""

from __future__ import annotations

from typing import Any

from conformance.mutants.record import ODD, Patch, around, configured, family, replace

C, S = "fast.config", "fast.strictjson:Section"
PROBE = {"probe": "config"}
_m = family("config")


def _defaulted(method: str, key: str, value: Any) -> Patch:
    """A key that is absent takes a value."""

    def read(original: Any, self: Any, name: str, *rest: Any) -> Any:
        if name == key:
            self.raw.setdefault(key, value)
        return original(self, name, *rest)

    return around(f"{S}.{method}", read)


def _ignored(key: str) -> Patch:
    """Any value of an enum is taken."""

    def only(original: Any, self: Any, name: str, *allowed: Any, **named: Any) -> Any:
        return allowed[0] if name == key else original(self, name, *allowed, **named)

    return around(f"{S}.only", only)


def _dropped(original: Any, self: Any, key: str, count: int) -> Any:
    """Layers out of range vanish."""
    kept = dict(self.raw) | {key: [layer for layer in self.raw[key] if 0 <= layer < count]}
    return original(type(self)(kept, self.path), key, count)


def _field(key: str, value: Any) -> Patch:
    """One number is read from elsewhere."""

    def read(original: Any, self: Any, name: str, *rest: Any) -> Any:
        return value if name == key else original(self, name, *rest)

    return around(f"{S}.positive", read)


def _kinds(s: Any, kda: tuple[int, ...], dsa: tuple[int, ...], layers: int) -> list[str]:
    return ["dsa" if layer in dsa else "kda" for layer in range(layers)]


def _all_full(original: Any, s: Any, kinds: list[str]) -> tuple[str | None, ...]:
    """`shared` is not known: every DSA layer runs an indexer."""
    return tuple("full" if kind else None for kind in original(s, kinds))


def _nothing(*args: Any) -> None:
    return None


MUTANTS = (
    _m(
        "config-bound-defaulted",
        "model.md 1",
        "refuse.gate_lower_bound*",
        _defaulted("number", "gate_lower_bound", -5.0),
        fast=True,
        **PROBE,
    ),
    _m("config-kpool-defaulted", "FB138", "refuse.index_kpool*", _defaulted("integer", "index_kpool", 1), **PROBE),
    _m(
        "config-eps-defaulted",
        "model.md 1",
        "refuse.rms_norm_eps*",
        _defaulted("positive", "rms_norm_eps", 1e-6),
        **PROBE,
    ),
    _m("config-limit-defaulted", "FB19", "refuse.swiglu_limit*", _defaulted("positive", "swiglu_limit", 1e30), **PROBE),
    _m("config-eps-for-hc-eps", "FB108", "config.hc_eps*", _field("hc_eps", 1e-5), **PROBE),
    _m("config-limit-misread", "FB19", "config.swiglu_limit*", _field("swiglu_limit", 7.0), **PROBE),
    _m(
        "config-factor-misread", "FB147", "config.routed_scaling_factor*", _field("routed_scaling_factor", 1.0), **PROBE
    ),
    _m("config-scoring-ignored", "model.md 1", "refuse.scoring_func*", _ignored("scoring_func"), **PROBE),
    _m("config-topk-method-ignored", "model.md 1", "refuse.topk_method*", _ignored("topk_method"), **PROBE),
    _m("config-activation-ignored", "model.md 1", "refuse.hidden_act*", _ignored("hidden_act"), **PROBE),
    _m("config-rotary-width-ignored", "FB103", "refuse.qk_rope_head_dim*", _ignored("qk_rope_head_dim"), **PROBE),
    _m("config-layers-out-of-range-dropped", "FB139", "refuse.out-of-range*", around(f"{S}.layers", _dropped), **PROBE),
    _m("config-overlap-taken", "FB139", "refuse.both-lists*", replace(f"{C}:_kinds", _kinds), **PROBE),
    _m("config-contradictions-taken", "model.md 1", "refuse.layer_types*", replace(f"{C}:_agree", _nothing), **PROBE),
    _m(
        "config-relations-unchecked",
        "model.md 1",
        "refuse.positive-bound*",
        replace(f"{C}:_check_text", _nothing),
        **PROBE,
    ),
    _m(
        "config-shared-unknown",
        "model.md 2.3",
        "config.indexer_types.odd",
        around(f"{C}:_indexers", _all_full),
        **PROBE,
    ),
    _m(
        "config-topk-of-experts",
        "model.md 2.4",
        "layers.*.router.indices",
        configured(num_experts_per_tok=lambda k: k - 1),
    ),
    _m("config-norm-topk-off", "model.md 2.4", "layers.*.router.weights", configured(norm_topk_prob=False)),
    _m("config-factor-off", "FB147", "layers.*.router.weights", configured(routed_scaling_factor=1.0)),
    _m("config-eps-of-torch", "model.md", "layers.*_hc.pre", configured(rms_norm_eps=1e-6), **ODD),
    _m("config-hc-eps", "FB108", "layers.*_hc.pre", configured(hc_eps=1e-6), **ODD),
    _m(
        "config-index-topk-halved", "model.md 2.3", "layers.*.indexer.selected", configured(index_topk=lambda n: n // 2)
    ),
)
