"""Every tap name of `glm53-trace/1` for one config: its axes and dtype.

The table below is interfaces.md section 2 with the dimension letters of the README. Axes of the MTP block and of the
vision tower whose length the token list does not fix stay letters (`M` rows of the block, `J` of them with an indexer
of their own, `Y` complete pools of those, `N` patches, `G` merged patches): they may have any length, but one letter
means one length within a trace.

With K drafts the block has M = T + K - 1 rows. Row i < T - 1 pairs token i's final.norm with token i + 1, row T - 1 the
last final.norm with the most likely token after the text (the lowest id of equal logits). The others are the later
drafts of one round: row i takes y of row i - 1 and the most likely token of mtp.logits[i - 1]. With
`index_share_for_mtp_iteration` these use the set of row T - 1 and all rows since, and have no indexer taps: J = T.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FLOAT = ("F64", "F32", "BF16", "F16")
_INT = ("I32",)
_LOGITS = ("F32",)

_HC = {"pre": "T C", "post": "T C", "comb": "T C C"}
_LAYER = {
    "in": "T C D",
    "mid": "T C D",
    "out": "T C D",
    **{f"{site}_hc.{name}": axes for site in ("attn", "ffn") for name, axes in _HC.items()},
    "attn.in": "T D",
    "attn.out": "T D",
    "mlp.in": "T D",
    "mlp.out": "T D",
}
_KDA = {
    **{f"attn.{name}": "T H d" for name in ("q", "k", "v", "g", "core")},
    "attn.beta": "T H",
    "attn.state": "H d d",
    "attn.conv_state": "w 3Hd",
}
_DSA = {"attn.q_resid": "T Q", "attn.latent": "T L", "attn.core": "T A O"}
_SELECTED = {"indexer.selected": "T W"}
_INDEXER = {
    "indexer.q": "T h p",
    "indexer.k": "T p",
    "indexer.gate": "T p",
    "indexer.weights": "T h",
    "indexer.pool_keys": "P p",
    "indexer.scores": "T P",
    **_SELECTED,
}
_MOE = {
    "router.logits": "T E",
    "router.indices": "T k",
    "router.weights": "T k",
    "routed.out": "T D",
    "shared.out": "T D",
}
_MTP = {
    "z": "T D",
    **{name: axes for name, axes in _LAYER.items() if name.startswith(("attn.", "mlp."))},
    **_DSA,
    **_INDEXER,
    **_MOE,
    "logits": "T V",
}


@dataclass(frozen=True)
class TapSpec:
    """One tap: axis letters as documented, axis lengths (a letter where the config fixes none), dtypes allowed."""

    letters: str
    shape: tuple[int | str, ...]
    dtypes: tuple[str, ...]


def expected(config: Any, tokens: int) -> dict[str, TapSpec]:
    """name -> TapSpec for every tap a trace of `tokens` tokens may hold. `config`: reference.config.ModelConfig."""
    text = config.text
    sizes = {
        "T": tokens,
        "D": text.hidden_size,
        "C": text.hc_mult,
        "H": text.linear_num_heads,
        "d": text.linear_head_dim,
        "w": text.short_conv_kernel_size - 1,
        "3Hd": 3 * text.linear_num_heads * text.linear_head_dim,
        "A": text.num_attention_heads,
        "O": text.v_head_dim,
        "Q": text.q_lora_rank,
        "L": text.kv_lora_rank,
        "h": text.index_n_heads,
        "p": text.index_head_dim,
        "P": tokens // text.index_kpool,
        "W": text.index_topk + text.index_kpool - 1,
        "E": text.n_routed_experts,
        "k": text.num_experts_per_tok,
        "V": text.vocab_size,
    }
    if config.vision is not None:
        sizes |= {"Dv": config.vision.hidden_size, "Do": config.vision.out_hidden_size}
    return {
        name: TapSpec(axes, tuple(sizes.get(letter, letter) for letter in axes.split()), _dtypes(name))
        for name, axes in _names(config)
    }


def _names(config: Any) -> Iterator[tuple[str, str]]:
    text = config.text
    yield from (("tokens", "T"), ("embed", "T D"))
    for layer in range(text.num_hidden_layers):
        table = dict(_LAYER)
        if layer in text.kda_layers:
            table |= _KDA
        else:
            table |= _DSA | (_SELECTED if text.indexer(layer) == "shared" else _INDEXER)
        if text.is_sparse(layer):
            table |= _MOE
        yield from ((f"layers.{layer}.{name}", axes) for name, axes in table.items())
    yield from (("final.hidden", "T D"), ("final.norm", "T D"), ("logits", "T V"))
    if text.mtp_layer is not None:
        for name, axes in _MTP.items():
            letters = {"T": "J" if name.startswith("indexer.") else "M", "P": "Y"}
            yield f"mtp.{name}", " ".join(letters.get(axis, axis) for axis in axes.split())
    if config.vision is not None:
        yield "vision.patch_embed", "N Dv"
        yield from ((f"vision.blocks.{block}.out", "N Dv") for block in range(config.vision.depth))
        yield from (("vision.downsample", "G Do"), ("vision.out", "G Do"))


def _dtypes(name: str) -> tuple[str, ...]:
    if name == "tokens" or name.endswith((".selected", ".indices")):
        return _INT
    return _LOGITS if name in ("logits", "mtp.logits") else FLOAT
