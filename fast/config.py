"""config.json: parse it completely or refuse it.

`load(directory)` and `parse(raw)` return a frozen `Config`. Field names are the checkpoint's own key names; the keys of
`linear_attn_config` stand flat in `TextConfig` (`num_heads` and `head_dim` as `linear_num_heads`, `linear_head_dim`).

Nothing that changes a result is defaulted: an absent key is `ConfigMissingKeyError`, a known enum with an unknown value
`ConfigValueError`, two keys that disagree `ConfigContradictionError`, layer lists that do not cover every layer once
`LayerListError`. Which mixer and which feed-forward a layer has follows from `kda_layers`, `full_attn_layers` and
`first_k_dense_replace` alone; the other lists, where present, have to agree. Other keys are judged by `fast.keys`:
what would change the mathematics is refused, what says nothing here is kept in `Config.unread` with its value.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fast.errors import (
    ConfigContradictionError,
    ConfigTypeError,
    ConfigValueError,
    LayerListError,
)
from fast.keys import Leftover, leftovers
from fast.strictjson import Section, decode, naming, read_small, short

MAX_LAYERS = 4096
DSA_SPELLINGS = ("deepseek_sparse_attention", "indexed_attention", "full_attention")
MARKERS = tuple(f"{x}_token_id" for x in ("image", "video", "image_start", "image_end", "video_start", "video_end"))
KDA_SPELLING = "linear_attention"


@dataclass(frozen=True, slots=True)
class TextConfig:
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    index_share_for_mtp_iteration: bool
    linear_num_heads: int
    linear_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    indexer_types: tuple[str | None, ...]
    max_position_embeddings: int
    eos_token_id: tuple[int, ...]
    pad_token_id: int | None

    @property
    def hc_rows(self) -> int:
        """Rows of an mHC projection: C pre, C post and C x C comb weights."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def shared_intermediate_size(self) -> int:
        return self.moe_intermediate_size * self.n_shared_experts

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mtp_layers(self) -> tuple[int, ...]:
        """Indices under which the MTP blocks are stored: they follow the text layers."""
        return tuple(range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers))

    def layer_kind(self, layer: int) -> str:
        """ "kda" or "dsa"; an MTP block is a DSA layer."""
        return "kda" if layer in self.kda_layers else "dsa"

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's feed-forward is the routed one; an MTP block's always is."""
        return layer >= self.first_k_dense_replace

    def indexer_type(self, layer: int) -> str | None:
        """ "full", "shared", or None for a KDA layer; an MTP block runs its own."""
        return "full" if layer >= self.num_hidden_layers else self.indexer_types[layer]

    def kv_slot(self, layer: int) -> int:
        """Position of a DSA layer in the latent cache: its ordinal among the DSA layers, never its layer index."""
        return self.full_attn_layers.index(layer)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    depth: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    out_hidden_size: int
    projection_intermediate_size: int
    image_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    in_channels: int
    rms_norm_eps: float
    swiglu_limit: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    quant_algo: str
    group_size: int
    quantized_activations: bool
    kv_cache_bits: int | None
    ignore: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Config:
    text: TextConfig
    vision: VisionConfig | None
    quantization: QuantizationConfig | None
    image_token_id: int | None
    video_token_id: int | None
    unread: tuple[Leftover, ...]
    raw: Mapping[str, Any] = dataclasses.field(repr=False, compare=False)
    sha256: str


def load(directory: str | os.PathLike[str]) -> Config:
    """Parse `directory`/config.json; hf_quant_config.json beside it, where present, has to agree.

    Every refusal begins with the path of the file.
    """
    root = Path(directory)
    data = read_small(root / "config.json")
    with naming(root / "config.json"):
        config = parse(decode(data), sha256=hashlib.sha256(data).hexdigest())
    path = root / "hf_quant_config.json"
    if os.path.lexists(path):
        data = read_small(path)
        with naming(path):
            section = Section(Section(decode(data), "").need("quantization"), "quantization")
            section.only("quant_algo", "NVFP4")
            section.only("group_size", 16)
            cache = section.only("kv_cache_quant_algo", "FP8", optional=True)
            section.strings("exclude_modules", optional=True)
            if config.quantization is None:
                raise ConfigContradictionError("present, but config.json has no quantization_config")
            if (cache is None) != (config.quantization.kv_cache_bits is None):
                raise ConfigContradictionError(
                    f"{section.where('kv_cache_quant_algo')}: found {short(cache)}, but kv_cache_scheme of config.json "
                    f"has {config.quantization.kv_cache_bits} bits"
                )
    return config


def parse(raw: Any, *, sha256: str | None = None) -> Config:
    """A `Config` from the decoded JSON of config.json, or a refusal that names the key."""
    top = Section(raw, "")
    top.only("model_type", "glm5_next")
    names = raw.get("architectures")
    if names is not None and (not isinstance(names, list) or "Glm5NextForConditionalGeneration" not in names):
        raise ConfigValueError(f"architectures: found {short(names)}, expected Glm5NextForConditionalGeneration in it")
    top.only("tie_word_embeddings", False)
    vision = raw.get("vision_config")
    quantization = raw.get("quantization_config")
    if sha256 is None:
        sha256 = hashlib.sha256(json.dumps(raw, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
    config = Config(
        text=_text(Section(top.need("text_config"), "text_config")),
        vision=None if vision is None else _vision(Section(vision, "vision_config")),
        quantization=None if quantization is None else _quantization(Section(quantization, "quantization_config")),
        image_token_id=top.integer("image_token_id", 0) if "image_token_id" in raw else None,
        video_token_id=top.integer("video_token_id", 0) if "video_token_id" in raw else None,
        unread=leftovers(raw),
        raw=raw,
        sha256=sha256,
    )
    special: dict[str, tuple[int | None, ...]] = {
        "eos_token_id": config.text.eos_token_id,
        "pad_token_id": (config.text.pad_token_id,),
    }
    for key in MARKERS:
        special[key] = (top.integer(key, 0),) if key in raw else ()
    for key, tokens in special.items():
        for token in tokens:
            if token is not None and token >= config.text.vocab_size:
                raise ConfigContradictionError(f"{key}: token {token}, but vocab_size is {config.text.vocab_size}")
    if config.vision is not None and config.vision.out_hidden_size != config.text.hidden_size:
        raise ConfigContradictionError(
            f"vision_config.out_hidden_size: found {config.vision.out_hidden_size}, "
            f"but text_config.hidden_size is {config.text.hidden_size}"
        )
    return config


def _text(s: Section) -> TextConfig:
    for key, allowed in (
        ("model_type", ("glm5_next_text",)),
        ("dtype", ("bfloat16",)),
        ("mhc", (True,)),
        ("mla_use_nope", (True,)),
        ("scoring_func", ("sigmoid",)),
        ("topk_method", ("noaux_tc",)),
        ("moe_router_dtype", ("float32",)),
        ("index_kpool_compress", (True,)),
        ("index_kpool_always_select_tail", (True,)),
        ("hidden_act", ("silu",)),
        ("attention_bias", (False,)),
    ):
        s.only(key, *allowed)
    s.only("tie_word_embeddings", False, optional=True)
    s.only("attention_dropout", 0.0, 0, optional=True)
    layers = s.integer("num_hidden_layers", 1, MAX_LAYERS)
    linear = Section(s.need("linear_attn_config"), s.where("linear_attn_config"))
    kda, dsa = linear.layers("kda_layers", layers), linear.layers("full_attn_layers", layers)
    kinds = _kinds(linear, kda, dsa, layers)
    dense = s.integer("first_k_dense_replace", 0, layers)
    _agree(s, kinds, dense)
    text = TextConfig(
        hidden_size=s.integer("hidden_size"),
        vocab_size=s.integer("vocab_size"),
        num_hidden_layers=layers,
        num_nextn_predict_layers=s.integer("num_nextn_predict_layers", 0, 1),
        num_attention_heads=s.integer("num_attention_heads"),
        q_lora_rank=s.integer("q_lora_rank"),
        kv_lora_rank=s.integer("kv_lora_rank"),
        qk_nope_head_dim=s.integer("qk_nope_head_dim"),
        qk_rope_head_dim=s.only("qk_rope_head_dim", 0),
        v_head_dim=s.integer("v_head_dim"),
        intermediate_size=s.integer("intermediate_size"),
        moe_intermediate_size=s.integer("moe_intermediate_size"),
        first_k_dense_replace=dense,
        n_routed_experts=s.integer("n_routed_experts"),
        n_shared_experts=s.integer("n_shared_experts"),
        num_experts_per_tok=s.integer("num_experts_per_tok"),
        n_group=s.integer("n_group"),
        topk_group=s.integer("topk_group"),
        norm_topk_prob=s.flag("norm_topk_prob"),
        routed_scaling_factor=s.positive("routed_scaling_factor"),
        swiglu_limit=s.positive("swiglu_limit"),
        rms_norm_eps=s.positive("rms_norm_eps"),
        hc_mult=s.integer("hc_mult"),
        hc_eps=s.positive("hc_eps"),
        hc_sinkhorn_iters=s.integer("hc_sinkhorn_iters"),
        index_n_heads=s.integer("index_n_heads"),
        index_head_dim=s.integer("index_head_dim"),
        index_topk=s.integer("index_topk"),
        index_kpool=s.integer("index_kpool"),
        index_share_for_mtp_iteration=s.flag("index_share_for_mtp_iteration"),
        linear_num_heads=linear.integer("num_heads"),
        linear_head_dim=linear.integer("head_dim"),
        short_conv_kernel_size=linear.integer("short_conv_kernel_size", 2),
        gate_lower_bound=linear.number("gate_lower_bound"),
        kda_layers=kda,
        full_attn_layers=dsa,
        indexer_types=_indexers(s, kinds),
        max_position_embeddings=s.integer("max_position_embeddings"),
        eos_token_id=_tokens(s, "eos_token_id"),
        pad_token_id=s.integer("pad_token_id", 0) if s.raw.get("pad_token_id") is not None else None,
    )
    _check_text(s, text)
    return text


def _check_text(s: Section, text: TextConfig) -> None:
    """Relations between keys that a wrong computation would otherwise hide."""
    s.same("num_key_value_heads", text.num_attention_heads, "num_attention_heads")
    s.same("qk_head_dim", text.qk_head_dim, "qk_nope_head_dim + qk_rope_head_dim")
    s.same("head_dim", text.qk_rope_head_dim, "qk_rope_head_dim")
    for key in ("num_local_experts", "num_experts"):
        s.same(key, text.n_routed_experts, "n_routed_experts")
    s.same("num_experts_per_token", text.num_experts_per_tok, "num_experts_per_tok")
    for key, field in (
        ("linear_num_heads", "num_heads"),
        ("linear_num_key_heads", "num_heads"),
        ("linear_num_value_heads", "num_heads"),
        ("linear_head_dim", "head_dim"),
        ("linear_key_head_dim", "head_dim"),
        ("linear_value_head_dim", "head_dim"),
        ("linear_conv_kernel_dim", "short_conv_kernel_size"),
        ("linear_lower_bound", "gate_lower_bound"),
    ):
        s.same(key, s.raw["linear_attn_config"][field], f"linear_attn_config.{field}")
    if text.gate_lower_bound >= 0:
        raise ConfigValueError(
            f"text_config.linear_attn_config.gate_lower_bound: found {text.gate_lower_bound}, expected less than 0"
        )
    if text.index_topk % text.index_kpool:
        raise ConfigContradictionError(
            f"text_config.index_topk: {text.index_topk} is no multiple of index_kpool {text.index_kpool}"
        )
    experts, groups, chosen = text.n_routed_experts, text.n_group, text.num_experts_per_tok
    if experts % groups:
        raise ConfigContradictionError(f"text_config.n_group: {experts} experts do not divide into {groups} groups")
    if groups > 1 and experts // groups < 2:
        raise ConfigValueError(f"text_config.n_group: groups of {experts // groups} have no two best experts")
    if text.topk_group > groups:
        raise ConfigContradictionError(f"text_config.topk_group: found {text.topk_group}, but n_group is {groups}")
    if chosen > experts // groups * text.topk_group:
        raise ConfigContradictionError(
            f"text_config.num_experts_per_tok: found {chosen}, but {text.topk_group} of {groups} groups hold "
            f"{experts // groups * text.topk_group} experts"
        )


def _kinds(s: Section, kda: tuple[int, ...], dsa: tuple[int, ...], layers: int) -> list[str]:
    both = sorted(set(kda) & set(dsa))
    if both:
        raise LayerListError(f"{s.path}: layer {both[0]} is in kda_layers and in full_attn_layers")
    missing = sorted(set(range(layers)) - set(kda) - set(dsa))
    if missing:
        raise LayerListError(f"{s.path}: layer {missing[0]} is in neither kda_layers nor full_attn_layers")
    linear = set(kda)
    return ["kda" if layer in linear else "dsa" for layer in range(layers)]


def _agree(s: Section, kinds: list[str], dense: int) -> None:
    """The lists that repeat what a layer is, where present; first that they speak the language, then what they say."""
    types, mlps = s.texts("layer_types", len(kinds)) or (), s.texts("mlp_layer_types", len(kinds)) or ()
    known = (("layer_types", types, (KDA_SPELLING, *DSA_SPELLINGS)), ("mlp_layer_types", mlps, ("dense", "sparse")))
    for key, values, spellings in known:
        for layer, value in enumerate(values):
            if value not in spellings:
                raise ConfigValueError(f"{s.where(key)}: layer {layer} has the unknown type {short(value)}")
    for layer, value in enumerate(types):
        if (value == KDA_SPELLING) != (kinds[layer] == "kda"):
            raise ConfigContradictionError(
                f"{s.where('layer_types')}: layer {layer} is {short(value)}, but linear_attn_config makes it a "
                f"{kinds[layer].upper()} layer"
            )
    for layer, value in enumerate(mlps):
        if (value == "dense") != (layer < dense):
            raise ConfigContradictionError(
                f"{s.where('mlp_layer_types')}: layer {layer} is {value}, but first_k_dense_replace is {dense}"
            )


def _indexers(s: Section, kinds: list[str]) -> tuple[str | None, ...]:
    """Per layer "full", "shared" or None (KDA); absent means that every DSA layer runs its own indexer."""
    given = s.texts("indexer_types", len(kinds)) or ("full",) * len(kinds)
    full_before = False
    out: list[str | None] = []
    for layer, (value, kind) in enumerate(zip(given, kinds, strict=True)):
        if value not in ("full", "shared"):
            raise ConfigValueError(f"{s.where('indexer_types')}: layer {layer} has the unknown type {short(value)}")
        if kind == "kda":
            out.append(None)
            continue
        if value == "shared" and not full_before:
            raise ConfigContradictionError(
                f"{s.where('indexer_types')}: layer {layer} shares a selection, but no full DSA layer comes before it"
            )
        full_before = full_before or value == "full"
        out.append(value)
    return tuple(out)


def _tokens(s: Section, key: str) -> tuple[int, ...]:
    value = s.raw.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
        raise ConfigTypeError(f"{s.where(key)}: expected a token id or a list of them")
    return tuple(values)


def _vision(s: Section) -> VisionConfig:
    s.only("model_type", "glm5_next_vision")
    s.only("hidden_act", "silu")
    s.only("attention_bias", True)
    s.only("rope_parameters", {"rope_theta": 10000.0, "rope_type": "axial"}, optional=True)
    fields = [f.name for f in dataclasses.fields(VisionConfig) if f.name not in ("rms_norm_eps", "swiglu_limit")]
    vision = VisionConfig(
        **{name: s.integer(name) for name in fields},
        rms_norm_eps=s.positive("rms_norm_eps"),
        swiglu_limit=s.positive("swiglu_limit"),
    )
    if vision.hidden_size % (4 * vision.num_heads):
        raise ConfigContradictionError(
            f"vision_config.num_heads: hidden_size {vision.hidden_size} does not give {vision.num_heads} heads a width "
            "divisible by 4, as axial positions need"
        )
    return vision


def _quantization(s: Section) -> QuantizationConfig:
    s.only("quant_method", "modelopt")
    s.only("quant_algo", "NVFP4")
    groups = Section(s.need("config_groups"), s.where("config_groups"))
    if tuple(groups.raw) != ("group_0",):
        raise ConfigValueError(f"{groups.path}: found {short(sorted(groups.raw))}, expected ['group_0']")
    group = Section(groups.raw["group_0"], groups.where("group_0"))
    group.only("targets", ["Linear"], optional=True)
    if group.raw.get("output_activations") is not None:
        raise ConfigValueError(f"{group.where('output_activations')}: found a scheme, expected null")
    activations = group.raw.get("input_activations") is not None
    for side in ("weights", "input_activations") if activations else ("weights",):
        numbers = Section(group.need(side), group.where(side))
        numbers.only("num_bits", 4)
        numbers.only("type", "float")
        numbers.only("group_size", 16)
        numbers.only("dynamic", False)
        numbers.only("symmetric", True, optional=True)
    cache = s.only("kv_cache_scheme", {"dynamic": False, "num_bits": 8, "type": "float"}, optional=True)
    bits = None if cache is None else 8
    return QuantizationConfig("NVFP4", 16, activations, bits, s.strings("ignore"))
