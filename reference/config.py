"""config.json of `glm5_next`: parse it completely or refuse it.

Everything that decides the mathematics must be present and possible: nothing of that kind has a default here, because
the defaults of public readers differ from the released values. Kinds of layers come from
`linear_attn_config.kda_layers` / `full_attn_layers` and `first_k_dense_replace`; `layer_types`, `mlp_layer_types` and
`indexer_types` are cross-checks (and `indexer_types` alone says which layers share a selection).

Keys that this module does not read are judged by `reference.keys`: refused where they are known to change the
mathematics, else kept with their values in `ModelConfig.unread`, which `glm53 inspect` prints.

A file re-saved by `transformers` is accepted; its flat `linear_*` keys must agree with `linear_attn_config`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference import errors as e
from reference.fields import Fields, decode_json, open_regular
from reference.keys import Unknown, UnreadKey

CONFIG_CAP = 4 << 20

ARCHITECTURE = "Glm5NextForConditionalGeneration"
KDA, DSA = "kda", "dsa"
LAYER_TYPES = {
    "linear_attention": KDA,
    "deepseek_sparse_attention": DSA,
    "indexed_attention": DSA,
    "full_attention": DSA,
}
MLP_TYPES = ("dense", "sparse")
INDEXER_TYPES = ("full", "shared")


@dataclass(frozen=True)
class TextConfig:
    """The text stack; field names are the keys of `text_config` (those of `linear_attn_config` are flattened)."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    eos_token_id: tuple[int, ...]
    pad_token_id: int | None
    # mHC
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    # KDA
    linear_num_heads: int
    linear_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    # DSA
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    index_share_for_mtp_iteration: bool
    indexer_types: tuple[str | None, ...]
    # feed-forward
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """ "kda" or "dsa" for each of the `num_hidden_layers` text layers."""
        dsa = frozenset(self.full_attn_layers)
        return tuple(DSA if layer in dsa else KDA for layer in range(self.num_hidden_layers))

    @property
    def mtp_layer(self) -> int | None:
        """Index under which the MTP block is stored, or None without one."""
        return self.num_hidden_layers if self.num_nextn_predict_layers else None

    def is_sparse(self, layer: int) -> bool:
        """True where the feed-forward of `layer` is a mixture of experts (always for the MTP block)."""
        return layer >= self.first_k_dense_replace

    def indexer(self, layer: int) -> str | None:
        """ "full", "shared" or, for a KDA layer, None. The MTP block has an indexer of its own."""
        return "full" if layer == self.mtp_layer else self.indexer_types[layer]


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower; field names are the keys of `vision_config`."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    projection_intermediate_size: int
    in_channels: int
    image_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    rms_norm_eps: float
    swiglu_limit: float


@dataclass(frozen=True)
class QuantizationConfig:
    """`quantization_config`. `activations`: the config asks for FP4 activations; no reader here does that."""

    quant_method: str
    quant_algo: str
    group_size: int
    activations: bool
    kv_cache_fp8: bool
    ignore: tuple[str, ...]


@dataclass(frozen=True)
class ModelConfig:
    """A whole config.json. `sha256` is of the file's bytes, "" when parsed from a mapping."""

    text: TextConfig
    vision: VisionConfig | None
    quantization: QuantizationConfig | None
    tokens: Mapping[str, int]
    unread: tuple[UnreadKey, ...]
    raw: Mapping[str, Any]
    sha256: str = ""


def load(directory: str | Path) -> ModelConfig:
    """Parse `directory/config.json`. Raises a `ConfigError`."""
    path = Path(directory) / "config.json"
    raw, digest = read_json(path)
    return parse(raw, sha256=digest, where=str(path))


def read_json(path: Path) -> tuple[dict[str, Any], str]:
    """The object in a JSON file and the sha256 of its bytes; duplicate keys, NaN and non-objects are refused."""
    try:
        with open_regular(path) as file:
            data = file.read(CONFIG_CAP + 1)
    except OSError as error:
        raise e.ConfigFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > CONFIG_CAP:
        raise e.ConfigFileError(f"{path}: more than {CONFIG_CAP} bytes")
    try:
        raw = decode_json(data)
    except e.HeaderDuplicateKeyError as error:
        raise e.ConfigDuplicateKeyError(f"{path}: {error}") from None
    except e.ShardError as error:
        raise e.ConfigFileError(f"{path}: {error}") from None
    return raw, hashlib.sha256(data).hexdigest()


def parse(raw: Mapping[str, Any], *, sha256: str = "", where: str = "config.json") -> ModelConfig:
    """Parse a decoded config.json. Raises a `ConfigError` that names the key and, for a list, the layer."""
    unknown = Unknown()
    top = Fields(raw, where, "", unknown)
    top.enum("model_type", ("glm5_next",))
    names = top.optional("architectures")
    if names is not None and ARCHITECTURE not in (names if isinstance(names, list) else ()):
        raise e.ConfigEnumError(f"{top.name('architectures')}: {e.show(names)}; expected a list with {ARCHITECTURE}")
    top.flag("tie_word_embeddings", False)
    tokens = {
        f"{kind}_token_id": top.integer(f"{kind}_token_id", 0)
        for kind in ("image", "video", "image_start", "image_end", "video_start", "video_end")
        if f"{kind}_token_id" in raw
    }
    text = _text(top.child("text_config"))
    for key, token in tokens.items():
        if token >= text.vocab_size:
            raise e.ConfigContradictionError(f"{top.name(key)}: token {token}, but vocab_size is {text.vocab_size}")
    vision = None
    if raw.get("vision_config") is not None:
        vision = _vision(top.child("vision_config"))
        if vision.out_hidden_size != text.hidden_size:
            raise e.ConfigContradictionError(
                f"{where}: vision_config.out_hidden_size is {vision.out_hidden_size}, "
                f"text_config.hidden_size is {text.hidden_size}"
            )
    quantization = None
    if raw.get("quantization_config") is not None:
        quantization = _quantization(top.child("quantization_config"))
    top.finish()
    return ModelConfig(text, vision, quantization, tokens, tuple(unknown.unread), raw, sha256)


def _text(f: Fields) -> TextConfig:
    f.enum("model_type", ("glm5_next_text",))
    f.enum("dtype", ("bfloat16",))
    f.enum("hidden_act", ("silu",))
    f.enum("scoring_func", ("sigmoid",))
    f.enum("topk_method", ("noaux_tc",))
    f.enum("moe_router_dtype", ("float32",))
    f.flag("tie_word_embeddings", False, optional=True)
    f.flag("mhc", True)
    f.flag("mla_use_nope", True)
    f.flag("attention_bias", False)
    f.flag("index_kpool_compress", True)
    f.flag("index_kpool_always_select_tail", True)
    dropout = f.optional("attention_dropout")
    if dropout is not None and (type(dropout) not in (int, float) or dropout != 0):
        raise e.ConfigUnsupportedError(f"{f.name('attention_dropout')}: {e.show(dropout)}; expected 0")
    layers = f.integer("num_hidden_layers", 1)
    linear = f.child("linear_attn_config")
    sizes: dict[str, Any] = {
        key: f.integer(key, least)
        for key, least in (
            *(("vocab_size", 1), ("hidden_size", 1), ("max_position_embeddings", 1), ("num_nextn_predict_layers", 0)),
            *(("hc_mult", 1), ("hc_sinkhorn_iters", 1), ("num_attention_heads", 1), ("q_lora_rank", 1)),
            *(("kv_lora_rank", 1), ("qk_nope_head_dim", 1), ("qk_rope_head_dim", 0), ("v_head_dim", 1)),
            *(("index_n_heads", 1), ("index_head_dim", 1), ("index_topk", 1), ("index_kpool", 1)),
            *(("first_k_dense_replace", 0), ("intermediate_size", 1), ("moe_intermediate_size", 1)),
            *(("n_routed_experts", 2), ("n_shared_experts", 1), ("num_experts_per_tok", 1)),
            *(("n_group", 1), ("topk_group", 1)),
        )
    }
    reals: dict[str, Any] = {
        key: f.real(key, above=0.0) for key in ("rms_norm_eps", "hc_eps", "routed_scaling_factor", "swiglu_limit")
    }
    switches: dict[str, Any] = {key: f.boolean(key) for key in ("norm_topk_prob", "index_share_for_mtp_iteration")}
    lists: dict[str, Any] = _layer_kinds(f, linear, layers)
    indexer_types = _indexer_types(f, lists["full_attn_layers"], layers)
    _mlp_kinds(f, sizes["first_k_dense_replace"], layers)
    text = TextConfig(
        num_hidden_layers=layers,
        eos_token_id=f.token_ids("eos_token_id", sizes["vocab_size"]),
        pad_token_id=_pad(f, sizes["vocab_size"]),
        linear_num_heads=linear.integer("num_heads", 1),
        linear_head_dim=linear.integer("head_dim", 1),
        short_conv_kernel_size=linear.integer("short_conv_kernel_size", 2),
        gate_lower_bound=linear.real("gate_lower_bound", below=0.0),
        indexer_types=indexer_types,
        **sizes,
        **reals,
        **switches,
        **lists,
    )
    _divisibility(f, text)
    _restated(f, text)
    linear.finish()
    f.finish()
    return text


def _pad(f: Fields, vocab_size: int) -> int | None:
    if isinstance(f.optional("pad_token_id"), list):
        raise e.ConfigTypeError(f"{f.name('pad_token_id')}: {e.show(f.raw['pad_token_id'])} is not an integer")
    return next(iter(f.token_ids("pad_token_id", vocab_size)), None)


def _layer_kinds(f: Fields, linear: Fields, layers: int) -> dict[str, tuple[int, ...]]:
    """`kda_layers` and `full_attn_layers`: together every layer once, 0-based; `layer_types` agrees."""
    lists = {key: linear.integers(key) for key in ("kda_layers", "full_attn_layers")}
    found: dict[int, str] = {}
    for key, members in lists.items():
        for layer in members:
            if not 0 <= layer < layers:
                hint = ""
                if layer == layers and 0 not in (*lists["kda_layers"], *lists["full_attn_layers"]):
                    hint = " (the lists look 1-based; they must be 0-based)"
                raise e.ConfigLayersError(
                    f"{linear.name(key)}: layer {layer} is out of range 0..{layers - 1}, "
                    f"num_hidden_layers is {layers}{hint}"
                )
            if layer in found:
                what = f"twice in {key}" if found[layer] == key else f"in both {found[layer]} and {key}"
                raise e.ConfigLayersError(f"{linear.name(key)}: layer {layer} is {what}")
            found[layer] = key
    for layer in range(layers):
        if layer not in found:
            raise e.ConfigLayersError(
                f"{linear.name('kda_layers')}: layer {layer} is in neither kda_layers nor full_attn_layers"
            )
    types = f.names("layer_types", layers, tuple(LAYER_TYPES))
    for layer, spelled in enumerate(types or ()):
        kind = KDA if found[layer] == "kda_layers" else DSA
        if LAYER_TYPES[spelled] != kind:
            raise e.ConfigLayersError(
                f"{f.name('layer_types')}: layer {layer} is {spelled!r}, but linear_attn_config.{found[layer]} names it"
            )
    return {key: tuple(sorted(members)) for key, members in lists.items()}


def _indexer_types(f: Fields, dsa: tuple[int, ...], layers: int) -> tuple[str | None, ...]:
    """Per layer "full", "shared" or (KDA) None; without the key every DSA layer is "full"."""
    types = f.names("indexer_types", layers, INDEXER_TYPES) or ("full",) * layers
    if dsa and types[dsa[0]] == "shared":
        raise e.ConfigLayersError(
            f"{f.name('indexer_types')}: layer {dsa[0]} is 'shared', but no 'full' layer comes before it"
        )
    return tuple(types[layer] if layer in frozenset(dsa) else None for layer in range(layers))


def _mlp_kinds(f: Fields, first: int, layers: int) -> None:
    if first > layers:
        raise e.ConfigLayersError(f"{f.name('first_k_dense_replace')}: {first} exceeds num_hidden_layers {layers}")
    for layer, kind in enumerate(f.names("mlp_layer_types", layers, MLP_TYPES) or ()):
        expected = MLP_TYPES[layer >= first]
        if kind != expected:
            raise e.ConfigLayersError(
                f"{f.name('mlp_layer_types')}: layer {layer} is {kind!r}, "
                f"but first_k_dense_replace {first} makes it {expected!r}"
            )


def _divisibility(f: Fields, t: TextConfig) -> None:
    if t.num_nextn_predict_layers > 1:
        raise e.ConfigUnsupportedError(
            f"{f.name('num_nextn_predict_layers')}: {t.num_nextn_predict_layers}; only one MTP block is known"
        )
    if t.qk_rope_head_dim != 0:
        raise e.ConfigUnsupportedError(
            f"{f.name('qk_rope_head_dim')}: {t.qk_rope_head_dim}; the text stack has no rotary part, expected 0"
        )
    if t.index_topk % t.index_kpool:
        raise e.ConfigValueError(
            f"{f.name('index_topk')}: {t.index_topk} is not divisible by index_kpool {t.index_kpool}"
        )
    if t.n_routed_experts % t.n_group:
        raise e.ConfigValueError(
            f"{f.name('n_group')}: {t.n_group} groups do not divide n_routed_experts {t.n_routed_experts}"
        )
    size = t.n_routed_experts // t.n_group
    if size < 2:
        raise e.ConfigValueError(f"{f.name('n_group')}: a group's score is the sum of its two best, it has {size}")
    if t.topk_group > t.n_group:
        raise e.ConfigValueError(f"{f.name('topk_group')}: {t.topk_group} exceeds n_group {t.n_group}")
    if t.num_experts_per_tok > t.topk_group * size:
        raise e.ConfigValueError(
            f"{f.name('num_experts_per_tok')}: {t.num_experts_per_tok} exceeds the {t.topk_group * size} experts of "
            f"topk_group {t.topk_group} groups"
        )


def _restated(f: Fields, t: TextConfig) -> None:
    """Keys that repeat another one, where present."""
    for key, value in (
        ("num_key_value_heads", t.num_attention_heads),
        ("qk_head_dim", t.qk_nope_head_dim + t.qk_rope_head_dim),
        ("head_dim", t.qk_rope_head_dim),
        ("num_local_experts", t.n_routed_experts),
        ("num_experts", t.n_routed_experts),
        ("num_experts_per_token", t.num_experts_per_tok),
        ("linear_num_heads", t.linear_num_heads),
        ("linear_num_key_heads", t.linear_num_heads),
        ("linear_num_value_heads", t.linear_num_heads),
        ("linear_head_dim", t.linear_head_dim),
        ("linear_key_head_dim", t.linear_head_dim),
        ("linear_value_head_dim", t.linear_head_dim),
        ("linear_conv_kernel_dim", t.short_conv_kernel_size),
        ("linear_lower_bound", t.gate_lower_bound),
    ):
        f.restates(key, value)


def _vision(f: Fields) -> VisionConfig:
    f.enum("model_type", ("glm5_next_vision",))
    f.enum("hidden_act", ("silu",))
    f.flag("attention_bias", True)
    if (rope := f.optional("rope_parameters")) is not None and rope != {"rope_theta": 10000.0, "rope_type": "axial"}:
        raise e.ConfigUnsupportedError(
            f"{f.name('rope_parameters')}: {e.show(rope)}; the tower has axial positions with theta 10000"
        )
    sizes: dict[str, Any] = {
        key: f.integer(key, 1)
        for key in (
            "depth",
            "hidden_size",
            "num_heads",
            "intermediate_size",
            "out_hidden_size",
            "projection_intermediate_size",
            "in_channels",
            "image_size",
            "patch_size",
            "temporal_patch_size",
            "spatial_merge_size",
        )
    }
    reals: dict[str, Any] = {key: f.real(key, above=0.0) for key in ("rms_norm_eps", "swiglu_limit")}
    vision = VisionConfig(**sizes, **reals)
    if vision.hidden_size % vision.num_heads or vision.hidden_size // vision.num_heads % 4:
        raise e.ConfigValueError(
            f"{f.name('hidden_size')}: {vision.hidden_size} does not give {vision.num_heads} heads a width divisible "
            "by 4, which axial positions need"
        )
    f.finish()
    return vision


def _quantization(f: Fields) -> QuantizationConfig:
    f.enum("quant_method", ("modelopt",))
    f.enum("quant_algo", ("NVFP4",))
    groups = f.child("config_groups")
    if tuple(groups.raw) != ("group_0",):
        raise e.ConfigUnsupportedError(f"{f.name('config_groups')}: {e.show(sorted(groups.raw))}; expected ['group_0']")
    group = groups.child("group_0")
    if group.optional("targets") not in (None, ["Linear"]):
        raise e.ConfigUnsupportedError(f"{group.name('targets')}: {e.show(group.raw['targets'])}; expected ['Linear']")
    activations = False
    for key in ("weights", "input_activations"):
        if key == "weights" or group.optional(key) is not None:
            part = group.child(key)
            part.equals("num_bits", 4)
            part.equals("group_size", 16)
            part.equals("dynamic", False)
            part.enum("type", ("float",))
            part.flag("symmetric", True, optional=True)
            activations = key == "input_activations"
    if group.optional("output_activations") is not None:
        raise e.ConfigUnsupportedError(f"{group.name('output_activations')}: must be null")
    kv_cache = f.optional("kv_cache_scheme")
    if kv_cache not in (None, {"dynamic": False, "num_bits": 8, "type": "float"}):
        raise e.ConfigUnsupportedError(f"{f.name('kv_cache_scheme')}: {e.show(kv_cache)}; expected null or static FP8")
    ignore = f.strings("ignore")
    f.optional("producer")
    f.finish()
    return QuantizationConfig("modelopt", "NVFP4", 16, activations, kv_cache is not None, ignore)


def check_hf_quant_config(path: Path, config: ModelConfig) -> None:
    """hf_quant_config.json restates `quantization_config`; raises a `ConfigError` where it does not agree."""
    raw, _ = read_json(path)
    f = Fields(raw, str(path), "", Unknown()).child("quantization")
    f.enum("quant_algo", ("NVFP4",))
    f.equals("group_size", 16)
    f.enum("kv_cache_quant_algo", ("FP8",), optional=True)
    if config.quantization is None:
        raise e.ConfigContradictionError(f"{path}: present, but config.json has no quantization_config")
    fp8 = f.optional("kv_cache_quant_algo") == "FP8"
    if fp8 != config.quantization.kv_cache_fp8:
        raise e.ConfigContradictionError(
            f"{f.name('kv_cache_quant_algo')}: {e.show(f.raw.get('kv_cache_quant_algo'))}, "
            f"but config.json has kv_cache_scheme {'FP8' if config.quantization.kv_cache_fp8 else None}"
        )
    # Repositories have corrected one of the two lists without the other; both only advise, dtypes decide.
    if f.optional("exclude_modules") is not None:
        f.strings("exclude_modules")


def canonical(raw: Mapping[str, Any]) -> str:
    """One line of JSON with sorted keys, for messages and comparisons."""
    return json.dumps(raw, sort_keys=True, separators=(",", ":"))
