"""Every weight of the model: its name, role, shape, how it may be stored, what it is bound as and how it may be cut.

The table follows from the config alone. What a file holds is then matched against it by dtype: a packable linear is
either one BF16 tensor or a U8 tensor with its scales, an mHC base may be F32 or BF16, and so on; which export a
directory is makes no difference here. `match` is the only place that decides whether the tensors of a checkpoint are
those of the model.

One dimension is not in the config: the KDA gate rank R, the row count of `f_a_proj`. `gate_rank` reads it from the
headers; every KDA layer has to agree.

    forms on disk            operand
    BF16                     BF16 as stored
    F32                      F32 as stored; rounded to BF16 for a convolution
    NVFP4                    codes, scale and scale_2 as stored
    BF16 routed expert       quantised to NVFP4 (MTP block only)
    BF16 mHC base and scale  widened to F32
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from fast import errors as E
from fast.config import Config, TextConfig, VisionConfig
from fast.nvfp4 import BLOCK
from fast.shards import TensorInfo

PREFIX = "model.language_model."
ROLES = (
    "embed", "final norm", "lm_head", "norms", "KDA", "DSA", "DSA indexer", "mHC", "dense MLP", "router",
    "shared expert", "routed experts, text", "routed experts, MTP", "MTP head", "vision",
)  # fmt: skip
FOREIGN = {
    "weight_packed": "compressed-tensors",
    "weight_global_scale": "compressed-tensors",
    "input_global_scale": "compressed-tensors",
    "weight_scale_inv": "block FP8",
    "pre_quant_scale": "AWQ",
    "k_scale": "a calibrated FP8 cache",
    "v_scale": "a calibrated FP8 cache",
}
SIBLINGS = {
    "weight": "codes",
    "weight_scale": "weight_scale",
    "weight_scale_2": "weight_scale_2",
    "input_scale": "input_scale",
}
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a weight may be divided: into `parts` pieces of `unit` rows (axis 0) or columns (axis 1), or not at all."""

    rule: str = "replicated"
    axis: int | None = None
    parts: int = 1
    unit: int = 1
    what: str = ""
    vocabulary: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """One row of the table, the same for every layer of a kind."""

    role: str
    shape: tuple[int, ...]
    forms: tuple[str, ...] = ("BF16",)
    operand: str = "BF16"
    cut: Cut = Cut()
    block: str | None = None
    """Weights of one block lie back to back in memory, so their rows can be used as one matrix."""
    quantised: bool = False
    """Whether a BF16 form is quantised when it is bound."""


@dataclass(frozen=True, slots=True)
class Weight:
    name: str
    spec: Spec
    layer: int | None = None
    expert: int | None = None

    @property
    def role(self) -> str:
        return self.spec.role

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def cut(self) -> Cut:
        return self.spec.cut

    @property
    def quantised(self) -> bool:
        return self.spec.quantised


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight together with the form in which a checkpoint holds it."""

    weight: Weight
    form: str
    input_scale: bool = False

    def names(self) -> dict[str, str]:
        """{component: tensor name}: `value`, or `codes`, `weight_scale`, `weight_scale_2` and perhaps `input_scale`."""
        if self.form != "NVFP4":
            return {"value": self.weight.name}
        stem = self.weight.name.removesuffix("weight")
        names = {component: stem + leaf for leaf, component in SIBLINGS.items()}
        if not self.input_scale:
            del names["input_scale"]
        return names


def _linear(role: str, rows: int, cols: int, cut: Cut, packed: bool, block: str | None = None) -> Spec:
    return Spec(role, (rows, cols), ("BF16", "NVFP4") if packed else ("BF16",), "BF16", cut, block)


def _kda(c: TextConfig, rank: int) -> dict[str, Spec]:
    H, d, D, n = c.linear_num_heads, c.linear_head_dim, c.hidden_size, c.short_conv_kernel_size
    channels = Cut("channel rows", 0, H, d, "KDA heads")
    heads = Cut("head rows", 0, H, 1, "KDA heads")
    columns = Cut("input columns", 1, H, d, "KDA heads")
    table = {f"self_attn.{x}_proj.weight": Spec("KDA", (H * d, D), cut=channels, block="qkv") for x in "qkv"}
    table["self_attn.b_proj.weight"] = Spec("KDA", (H, D), cut=heads, block="qkv")
    table["self_attn.f_a_proj.weight"] = Spec("KDA", (rank, D), block="qkv")
    table["self_attn.g_a_proj.weight"] = Spec("KDA", (rank, D), block="qkv")
    for x in "qkv":
        table[f"self_attn.{x}_conv1d.weight"] = Spec("KDA", (H * d, 1, n), ("BF16", "F32"), "BF16", channels, "conv")
    table["self_attn.f_b_proj.weight"] = Spec("KDA", (H * d, rank), cut=channels)
    table["self_attn.g_b_proj.weight"] = Spec("KDA", (H * d, rank), cut=channels)
    table["self_attn.A_log"] = Spec("KDA", (H,), ("F32",), "F32", heads)
    table["self_attn.dt_bias"] = Spec("KDA", (H * d,), ("F32",), "F32", channels)
    table["self_attn.o_norm.weight"] = Spec("KDA", (d,))
    table["self_attn.o_proj.weight"] = Spec("KDA", (D, H * d), cut=columns)
    return table


def _dsa(c: TextConfig, indexer: bool) -> dict[str, Spec]:
    H, D, Q, L = c.num_attention_heads, c.hidden_size, c.q_lora_rank, c.kv_lora_rank
    qk, pair, v = c.qk_head_dim, c.qk_nope_head_dim + c.v_head_dim, c.v_head_dim
    h, p, S = c.index_n_heads, c.index_head_dim, c.index_kpool
    table = {
        "self_attn.q_a_proj.weight": Spec("DSA", (Q, D), block="a"),
        "self_attn.kv_a_proj_with_mqa.weight": Spec("DSA", (L + c.qk_rope_head_dim, D), block="a"),
        "self_attn.q_a_layernorm.weight": Spec("DSA", (Q,)),
        "self_attn.kv_a_layernorm.weight": Spec("DSA", (L,)),
        "self_attn.q_b_proj.weight": Spec("DSA", (H * qk, Q), cut=Cut("head rows", 0, H, qk, "attention heads")),
        "self_attn.kv_b_proj.weight": Spec(
            "DSA", (H * pair, L), cut=Cut("kv head rows", 0, H, pair, "attention heads")
        ),
        "self_attn.o_proj.weight": Spec("DSA", (D, H * v), cut=Cut("input columns", 1, H, v, "attention heads")),
    }
    if indexer:
        table |= {
            "self_attn.indexer.wq_b.weight": Spec("DSA indexer", (h * p, Q)),
            "self_attn.indexer.wk.weight": Spec("DSA indexer", (p, D), block="index"),
            "self_attn.indexer.index_kpool_compress_gate": Spec("DSA indexer", (p, D), block="index"),
            "self_attn.indexer.weights_proj.weight": Spec("DSA indexer", (h, D), block="index"),
            "self_attn.indexer.k_norm.weight": Spec("DSA indexer", (p,)),
            "self_attn.indexer.k_norm.bias": Spec("DSA indexer", (p,)),
            "self_attn.indexer.index_kpool_compress_ape": Spec("DSA indexer", (S, p)),
        }
    return table


def _hyper(c: TextConfig) -> dict[str, Spec]:
    table = {}
    for site in ("attn", "ffn"):
        table[f"hc_{site}_fn"] = Spec("mHC", (c.hc_rows, c.hc_mult * c.hidden_size))
        table[f"hc_{site}_base"] = Spec("mHC", (c.hc_rows,), ("F32", "BF16"), "F32")
        table[f"hc_{site}_scale"] = Spec("mHC", (3,), ("F32", "BF16"), "F32")
    return table


def _gated(role: str, stem: str, D: int, width: int, packed: bool, what: str) -> dict[str, Spec]:
    rows, columns = Cut("width rows", 0, width, 1, what), Cut("input columns", 1, width, 1, what)
    return {
        f"{stem}.gate_proj.weight": _linear(role, width, D, rows, packed, f"{stem} gate_up"),
        f"{stem}.up_proj.weight": _linear(role, width, D, rows, packed, f"{stem} gate_up"),
        f"{stem}.down_proj.weight": _linear(role, D, width, columns, packed),
    }


@lru_cache(maxsize=64)
def _layer(c: TextConfig, layer_kind: str, sparse: bool, indexer: bool, mtp: bool, rank: int) -> dict[str, Spec]:
    """{name inside the layer: Spec}, without the routed experts."""
    D, E_ = c.hidden_size, c.n_routed_experts
    table = {} if mtp else _hyper(c)
    table["input_layernorm.weight"] = Spec("norms", (D,))
    table |= _kda(c, rank) if layer_kind == "kda" else _dsa(c, indexer)
    table["post_attention_layernorm.weight"] = Spec("norms", (D,))
    if sparse:
        table["mlp.gate.weight"] = Spec("router", (E_, D))
        table["mlp.gate.e_score_correction_bias"] = Spec("router", (E_,), ("F32",), "F32")
        table |= _gated("shared expert", "mlp.shared_experts", D, c.shared_intermediate_size, False, "shared columns")
    else:
        table |= _gated("dense MLP", "mlp", D, c.intermediate_size, True, "intermediate columns")
    if mtp:
        table["eh_proj.weight"] = Spec("MTP head", (D, 2 * D))
        for name in ("enorm", "hnorm", "shared_head.norm"):
            table[f"{name}.weight"] = Spec("MTP head", (D,))
    return table


@lru_cache(maxsize=16)
def _expert(c: TextConfig, mtp: bool) -> dict[str, Spec]:
    role = "routed experts, MTP" if mtp else "routed experts, text"
    width = c.moe_intermediate_size
    rows, columns = (
        Cut("expert rows", 0, width, 1, "expert columns"),
        Cut("expert columns", 1, width, 1, "expert columns"),
    )
    forms = ("NVFP4", "BF16") if mtp else ("NVFP4",)
    return {
        leaf: Spec(role, shape, forms, "BF16", cut, "expert", quantised=mtp)
        for leaf, shape, cut in (
            ("gate_proj.weight", (width, c.hidden_size), rows),
            ("up_proj.weight", (width, c.hidden_size), rows),
            ("down_proj.weight", (c.hidden_size, width), columns),
        )
    }


@lru_cache(maxsize=16)
def _globals(c: TextConfig) -> dict[str, Spec]:
    V, D = c.vocab_size, c.hidden_size
    rows = Cut("vocabulary rows", 0, V, 1, "vocabulary rows", vocabulary=True)
    return {
        f"{PREFIX}embed_tokens.weight": Spec("embed", (V, D), cut=rows),
        f"{PREFIX}norm.weight": Spec("final norm", (D,)),
        "lm_head.weight": Spec("lm_head", (V, D), cut=rows),
    }


@lru_cache(maxsize=16)
def _vision(v: VisionConfig) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """(tables of one block, of everything else); all BF16, replicated."""
    D, F, out, wide = v.hidden_size, v.intermediate_size, v.out_hidden_size, v.projection_intermediate_size
    m, p = v.spatial_merge_size, v.patch_size
    block = {
        "norm1.weight": (D,), "attn.qkv.weight": (3 * D, D), "attn.qkv.bias": (3 * D,),
        "attn.q_norm.weight": (v.head_dim,), "attn.k_norm.weight": (v.head_dim,),
        "attn.proj.weight": (D, D), "attn.proj.bias": (D,), "norm2.weight": (D,),
        "mlp.gate_proj.weight": (F, D), "mlp.gate_proj.bias": (F,), "mlp.up_proj.weight": (F, D),
        "mlp.up_proj.bias": (F,), "mlp.down_proj.weight": (D, F), "mlp.down_proj.bias": (D,),
    }  # fmt: skip
    rest = {
        "patch_embed.proj.weight": (D, v.in_channels, v.temporal_patch_size, p, p), "patch_embed.proj.bias": (D,),
        "post_layernorm.weight": (D,), "downsample.weight": (out, D, m, m), "downsample.bias": (out,),
        "merger.proj.weight": (out, out), "merger.post_projection_norm.weight": (out,),
        "merger.post_projection_norm.bias": (out,), "merger.gate_proj.weight": (wide, out),
        "merger.up_proj.weight": (wide, out), "merger.down_proj.weight": (out, wide),
    }  # fmt: skip
    return {k: Spec("vision", s) for k, s in block.items()}, {k: Spec("vision", s) for k, s in rest.items()}


def _layer_table(c: TextConfig, layer: int, rank: int) -> dict[str, Spec]:
    return _layer(
        c, c.layer_kind(layer), c.is_sparse(layer), c.indexer_type(layer) == "full", layer in c.mtp_layers, rank
    )


def layer_weights(config: Config, layer: int, rank: int) -> Iterator[Weight]:
    """The weights of one layer (or MTP block), mixer before feed-forward, experts last and in order."""
    c = config.text
    stem = f"{PREFIX}layers.{layer}."
    for leaf, spec in _layer_table(c, layer, rank).items():
        yield Weight(stem + leaf, spec, layer)
    if c.is_sparse(layer):
        table = _expert(c, layer in c.mtp_layers)
        for expert in range(c.n_routed_experts):
            for leaf, spec in table.items():
                yield Weight(f"{stem}mlp.experts.{expert}.{leaf}", spec, layer, expert)


def weights(config: Config, rank: int) -> Iterator[Weight]:
    """Every weight in loading order: globals, text layers, MTP block, vision tower."""
    for name, spec in _globals(config.text).items():
        yield Weight(name, spec)
    for layer in range(config.text.num_hidden_layers + config.text.num_nextn_predict_layers):
        yield from layer_weights(config, layer, rank)
    if config.vision is not None:
        block, rest = _vision(config.vision)
        for leaf, spec in rest.items():
            yield Weight(f"model.visual.{leaf}", spec)
        for n in range(config.vision.depth):
            for leaf, spec in block.items():
                yield Weight(f"model.visual.blocks.{n}.{leaf}", spec)


def find(config: Config, name: str, rank: int = 1) -> tuple[Weight, str]:
    """(weight, component) of a tensor name, decided by whole components and canonical indices, never by a substring.

    Raises ForeignFormatError for another quantisation format's names and UnknownTensorError for everything else that is
    not in the table.
    """
    leaf = name.rsplit(".", 1)[-1]
    if leaf in FOREIGN:
        raise E.ForeignFormatError(f"{name[:200]}: a tensor of {FOREIGN[leaf]}, expected ModelOpt's NVFP4 names")
    for candidate in (name, name.rsplit(".", 1)[0] + ".weight"):
        weight = _find(config, candidate, rank)
        if weight is not None and candidate == name:
            return weight, "value"
        if weight is not None and leaf in SIBLINGS and "NVFP4" in weight.spec.forms:
            return weight, SIBLINGS[leaf]
    raise E.UnknownTensorError(f"{name[:200]}: the config has no place for this tensor")


def _find(config: Config, name: str, rank: int) -> Weight | None:
    c = config.text
    if name in _globals(c):
        return Weight(name, _globals(c)[name])
    if name.startswith("model.visual.") and config.vision is not None:
        block, rest = _vision(config.vision)
        leaf = name.removeprefix("model.visual.")
        spec = rest.get(leaf)
        if spec is None and leaf.startswith("blocks."):
            index, _, inner = leaf.removeprefix("blocks.").partition(".")
            spec = block.get(inner) if _index(index, config.vision.depth) is not None else None
        return None if spec is None else Weight(name, spec)
    if not name.startswith(f"{PREFIX}layers."):
        return None
    index, _, leaf = name.removeprefix(f"{PREFIX}layers.").partition(".")
    layer = _index(index, c.num_hidden_layers + c.num_nextn_predict_layers)
    if layer is None:
        return None
    spec = _layer_table(c, layer, rank).get(leaf)
    if spec is not None:
        return Weight(name, spec, layer)
    if not leaf.startswith("mlp.experts.") or not c.is_sparse(layer):
        return None
    number, _, inner = leaf.removeprefix("mlp.experts.").partition(".")
    expert = _index(number, c.n_routed_experts)
    spec = _expert(c, layer in c.mtp_layers).get(inner)
    return None if expert is None or spec is None else Weight(name, spec, layer, expert)


def _index(text: str, count: int) -> int | None:
    return int(text) if _INDEX.fullmatch(text) and int(text) < count else None


def gate_rank(config: Config, tensors: Mapping[str, TensorInfo]) -> int:
    """R, the rows of the first KDA layer's f_a_proj; `match` then holds every other layer to it."""
    for layer in config.text.kda_layers:
        name = f"{PREFIX}layers.{layer}.self_attn.f_a_proj.weight"
        if name not in tensors:
            raise E.MissingTensorError(f"{name}: absent")
        shape = tensors[name].shape
        if len(shape) != 2 or not 0 < shape[0] <= config.text.linear_num_heads * config.text.linear_head_dim:
            raise E.WrongShapeError(f"{name}: shape {list(shape)}, expected [gate rank, {config.text.hidden_size}]")
        return shape[0]
    return 1


def match(config: Config, tensors: Mapping[str, TensorInfo]) -> list[Stored]:
    """Every weight with its form, or the first departure: a missing, unknown, foreign, misshapen or mistyped tensor."""
    rank = gate_rank(config, tensors)
    out: list[Stored] = []
    used = 0
    for weight in weights(config, rank):
        item = _form(weight, tensors)
        for component, name in item.names().items():
            _check(item, component, name, tensors)
        used += len(item.names())
        out.append(item)
    if used != len(tensors):
        taken = {name for item in out for name in item.names().values()}
        for name in tensors:
            if name not in taken:
                weight, component = find(config, name, rank)
                raise E.MissingScaleError(f"{name}: a {component} beside {weight.name}, which is not packed")
    return out


def _form(weight: Weight, tensors: Mapping[str, TensorInfo]) -> Stored:
    info = tensors.get(weight.name)
    stem = weight.name.removesuffix("weight")
    if info is None:
        if "NVFP4" in weight.spec.forms and stem + "weight_scale" in tensors:
            raise E.MissingScaleError(f"{weight.name}: absent, though its weight_scale is there")
        raise E.MissingTensorError(f"{weight.name}: absent, expected {' or '.join(weight.spec.forms)}")
    if info.dtype == "U8" and "NVFP4" in weight.spec.forms:
        for leaf in ("weight_scale", "weight_scale_2"):
            if stem + leaf not in tensors:
                raise E.MissingScaleError(f"{weight.name}: packed (U8), but {leaf} is absent")
        return Stored(weight, "NVFP4", stem + "input_scale" in tensors)
    if info.dtype in weight.spec.forms:
        return Stored(weight, info.dtype)
    expected = " or ".join("U8 with scales" if form == "NVFP4" else form for form in weight.spec.forms)
    raise E.WrongDtypeError(f"{weight.name}: dtype {info.dtype}, expected {expected}")


def _check(item: Stored, component: str, name: str, tensors: Mapping[str, TensorInfo]) -> None:
    info = tensors[name]
    dtype, shape = expected(item, component)
    if info.dtype != dtype:
        raise E.WrongDtypeError(f"{name}: dtype {info.dtype}, expected {dtype}")
    if 0 in info.shape:
        raise E.EmptyTensorError(f"{name}: shape {list(info.shape)} has no elements, expected {list(shape)}")
    if info.shape != shape and not (component.endswith(("_2", "input_scale")) and info.shape == (1,)):
        raise E.WrongShapeError(f"{name}: shape {list(info.shape)}, expected {list(shape)}")


def expected(item: Stored, component: str) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of one stored tensor. Raises WrongShapeError for a packed width that is no multiple of 16."""
    shape = item.weight.shape
    if component == "value":
        return item.form, shape
    if component in ("weight_scale_2", "input_scale"):
        return "F32", ()
    if shape[1] % BLOCK:
        raise E.WrongShapeError(f"{item.weight.name}: packed, but its {shape[1]} columns are no multiple of {BLOCK}")
    return ("U8", (shape[0], shape[1] // 2)) if component == "codes" else ("F8_E4M3", (shape[0], shape[1] // BLOCK))


def export_tensors(config: Config, export: str, rank: int) -> dict[str, TensorInfo]:
    """The tensors an export of this config would have, from shapes alone; `export` is "nvidia" or "libertai"."""
    nvidia = {"nvidia": True, "libertai": False}[export]
    out: dict[str, TensorInfo] = {}
    for weight in weights(config, rank):
        leaf, role = weight.name.rsplit(".", 1)[-1], weight.role
        form = weight.spec.forms[0]
        if role == "dense MLP" or role == "routed experts, MTP":
            form = "NVFP4" if (role == "dense MLP") == nvidia else "BF16"
        elif leaf.startswith("hc_"):
            form = "BF16" if nvidia or leaf.endswith("_fn") else "F32"
        elif "F32" in weight.spec.forms and nvidia:
            form = "F32"
        item = Stored(weight, form, input_scale=nvidia)
        for component, name in item.names().items():
            out[name] = TensorInfo(*expected(item, component))
    return out
