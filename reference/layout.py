"""Every tensor of a checkpoint: name, role, dtype and shape, for each way this model is stored.

Four layouts of one model (`exports.md`, section 2):
    nvidia, libertai    the NVFP4 exports
    bf16                every weight BF16, what the exports are made from
    fp8                 the original: E4M3 with one FP32 scale per 128 x 128 block, `weight_scale_inv`, multiplied

One table row describes one name pattern. Dimensions are letters of `dimensions`; a tensor stored as NVFP4 expands into
`.weight` U8 [out, in/2], `.weight_scale` E4M3 [out, in/16], `.weight_scale_2` F32 [] and, for nvidia, `.input_scale`
F32 []. The gate rank R is no config key: it is the row count of `f_a_proj`, so the caller supplies it.

A weight's dtype says how it is stored, not the export it sits in (exports.md 6, 19 and 37): in a checkpoint each tensor
may be as either export has it, `input_scale` may be there or not (no weight-only maths reads it), and a scale of one
element may have shape [1].
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from reference import errors as e
from reference.config import DSA, KDA, ModelConfig, TextConfig

EXPORTS = ("nvidia", "libertai")
LAYOUTS = (*EXPORTS, "bf16", "fp8")
TEXT = "model.language_model."
VISION = "model.visual."
PACKED_SUFFIXES = ("weight", "weight_scale", "weight_scale_2", "input_scale")
FOREIGN_SUFFIXES = ("weight_packed", "weight_global_scale", "input_global_scale", "weight_zero_point")
ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
FP8_BLOCK = 128
GROUP = 16


class Row(NamedTuple):
    """`place`: which layers have it. `stored`: dtype per layout, as in `STORED`."""

    family: str
    place: str
    leaf: str
    shape: str
    stored: str = "bf16"


# dtype in (nvidia, libertai, bf16, fp8); "pack" is NVFP4, "pack+" with input_scale, "block" is block FP8.
STORED = {
    "bf16": ("BF16", "BF16", "BF16", "BF16"),
    "f32": ("F32", "F32", "F32", "F32"),
    "conv": ("F32", "BF16", "BF16", "BF16"),
    "hc": ("BF16", "F32", "F32", "F32"),
    "fp8": ("BF16", "BF16", "BF16", "block"),
    "dense": ("pack+", "BF16", "BF16", "block"),
    "expert": ("pack+", "pack", "BF16", "block"),
    "mtp expert": ("BF16", "pack", "BF16", "block"),
}

ROWS = (
    Row("embed", "global", "embed_tokens.weight", "V D"),
    Row("final norm", "global", "norm.weight", "D"),
    Row("lm_head", "global", "lm_head.weight", "V D"),
    Row("norms", "block", "input_layernorm.weight", "D"),
    Row("norms", "block", "post_attention_layernorm.weight", "D"),
    Row("KDA", "kda", "self_attn.q_proj.weight", "Hd D"),
    Row("KDA", "kda", "self_attn.k_proj.weight", "Hd D"),
    Row("KDA", "kda", "self_attn.v_proj.weight", "Hd D"),
    Row("KDA", "kda", "self_attn.q_conv1d.weight", "Hd 1 K", "conv"),
    Row("KDA", "kda", "self_attn.k_conv1d.weight", "Hd 1 K", "conv"),
    Row("KDA", "kda", "self_attn.v_conv1d.weight", "Hd 1 K", "conv"),
    Row("KDA", "kda", "self_attn.f_a_proj.weight", "R D"),
    Row("KDA", "kda", "self_attn.f_b_proj.weight", "Hd R"),
    Row("KDA", "kda", "self_attn.g_a_proj.weight", "R D"),
    Row("KDA", "kda", "self_attn.g_b_proj.weight", "Hd R"),
    Row("KDA", "kda", "self_attn.b_proj.weight", "H D"),
    Row("KDA", "kda", "self_attn.A_log", "H", "f32"),
    Row("KDA", "kda", "self_attn.dt_bias", "Hd", "f32"),
    Row("KDA", "kda", "self_attn.o_norm.weight", "d"),
    Row("KDA", "kda", "self_attn.o_proj.weight", "D Hd"),
    Row("DSA", "dsa", "self_attn.q_a_proj.weight", "Q D", "fp8"),
    Row("DSA", "dsa", "self_attn.q_b_proj.weight", "aN Q", "fp8"),
    Row("DSA", "dsa", "self_attn.kv_a_proj_with_mqa.weight", "L D", "fp8"),
    Row("DSA", "dsa", "self_attn.o_proj.weight", "D aO", "fp8"),
    Row("DSA", "dsa", "self_attn.q_a_layernorm.weight", "Q"),
    Row("DSA", "dsa", "self_attn.kv_a_layernorm.weight", "L"),
    Row("DSA", "dsa", "self_attn.kv_b_proj.weight", "aNO L"),
    Row("DSA indexer", "indexer", "self_attn.indexer.wq_b.weight", "hp Q"),
    Row("DSA indexer", "indexer", "self_attn.indexer.wk.weight", "p D"),
    Row("DSA indexer", "indexer", "self_attn.indexer.k_norm.weight", "p"),
    Row("DSA indexer", "indexer", "self_attn.indexer.k_norm.bias", "p"),
    Row("DSA indexer", "indexer", "self_attn.indexer.weights_proj.weight", "h D"),
    Row("DSA indexer", "indexer", "self_attn.indexer.index_kpool_compress_gate", "p D"),
    Row("DSA indexer", "indexer", "self_attn.indexer.index_kpool_compress_ape", "S p"),
    Row("mHC", "text", "hc_attn_fn", "M CD"),
    Row("mHC", "text", "hc_attn_base", "M", "hc"),
    Row("mHC", "text", "hc_attn_scale", "3", "hc"),
    Row("mHC", "text", "hc_ffn_fn", "M CD"),
    Row("mHC", "text", "hc_ffn_base", "M", "hc"),
    Row("mHC", "text", "hc_ffn_scale", "3", "hc"),
    Row("dense MLP", "dense", "mlp.gate_proj.weight", "F D", "dense"),
    Row("dense MLP", "dense", "mlp.up_proj.weight", "F D", "dense"),
    Row("dense MLP", "dense", "mlp.down_proj.weight", "D F", "dense"),
    Row("router", "moe", "mlp.gate.weight", "E D"),
    Row("router", "moe", "mlp.gate.e_score_correction_bias", "E", "f32"),
    Row("shared expert", "moe", "mlp.shared_experts.gate_proj.weight", "nI D", "fp8"),
    Row("shared expert", "moe", "mlp.shared_experts.up_proj.weight", "nI D", "fp8"),
    Row("shared expert", "moe", "mlp.shared_experts.down_proj.weight", "D nI", "fp8"),
    Row("routed experts, text", "experts", "mlp.experts.E.gate_proj.weight", "I D", "expert"),
    Row("routed experts, text", "experts", "mlp.experts.E.up_proj.weight", "I D", "expert"),
    Row("routed experts, text", "experts", "mlp.experts.E.down_proj.weight", "D I", "expert"),
    Row("routed experts, MTP", "mtp experts", "mlp.experts.E.gate_proj.weight", "I D", "mtp expert"),
    Row("routed experts, MTP", "mtp experts", "mlp.experts.E.up_proj.weight", "I D", "mtp expert"),
    Row("routed experts, MTP", "mtp experts", "mlp.experts.E.down_proj.weight", "D I", "mtp expert"),
    Row("MTP head", "mtp", "eh_proj.weight", "D 2D"),
    Row("MTP head", "mtp", "enorm.weight", "D"),
    Row("MTP head", "mtp", "hnorm.weight", "D"),
    Row("MTP head", "mtp", "shared_head.norm.weight", "D"),
    Row("vision", "vision block", "norm1.weight", "v"),
    Row("vision", "vision block", "attn.qkv.weight", "3v v"),
    Row("vision", "vision block", "attn.qkv.bias", "3v"),
    Row("vision", "vision block", "attn.q_norm.weight", "vd"),
    Row("vision", "vision block", "attn.k_norm.weight", "vd"),
    Row("vision", "vision block", "attn.proj.weight", "v v"),
    Row("vision", "vision block", "attn.proj.bias", "v"),
    Row("vision", "vision block", "norm2.weight", "v"),
    Row("vision", "vision block", "mlp.gate_proj.weight", "vF v"),
    Row("vision", "vision block", "mlp.gate_proj.bias", "vF"),
    Row("vision", "vision block", "mlp.up_proj.weight", "vF v"),
    Row("vision", "vision block", "mlp.up_proj.bias", "vF"),
    Row("vision", "vision block", "mlp.down_proj.weight", "v vF"),
    Row("vision", "vision block", "mlp.down_proj.bias", "v"),
    Row("vision", "vision", "patch_embed.proj.weight", "v vc vt vp vp"),
    Row("vision", "vision", "patch_embed.proj.bias", "v"),
    Row("vision", "vision", "post_layernorm.weight", "v"),
    Row("vision", "vision", "downsample.weight", "vo v vm vm"),
    Row("vision", "vision", "downsample.bias", "vo"),
    Row("vision", "vision", "merger.proj.weight", "vo vo"),
    Row("vision", "vision", "merger.post_projection_norm.weight", "vo"),
    Row("vision", "vision", "merger.post_projection_norm.bias", "vo"),
    Row("vision", "vision", "merger.gate_proj.weight", "vP vo"),
    Row("vision", "vision", "merger.up_proj.weight", "vP vo"),
    Row("vision", "vision", "merger.down_proj.weight", "vo vP"),
)
FAMILIES = tuple(dict.fromkeys(row.family for row in ROWS))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as stored. `role` is the name with indices replaced by N (layer), E (expert), B (vision block).

    `packed` is the name of the weight this tensor is a part of when that weight is NVFP4, else None.
    """

    name: str
    role: str
    family: str
    layer: int | None
    expert: int | None
    dtype: str
    shape: tuple[int, ...]
    packed: str | None = None

    @property
    def nbytes(self) -> int:
        size = ITEM_BYTES[self.dtype]
        for length in self.shape:
            size *= length
        return size


def dimensions(config: ModelConfig, gate_rank: int) -> dict[str, int]:
    """The letters of `ROWS`: those of the README's glossary, products written side by side, `v*` for the tower."""
    t = config.text
    letters = {
        "1": 1,
        "3": 3,
        "V": t.vocab_size,
        "D": t.hidden_size,
        "2D": 2 * t.hidden_size,
        "CD": t.hc_mult * t.hidden_size,
        "M": (2 + t.hc_mult) * t.hc_mult,
        "H": t.linear_num_heads,
        "d": t.linear_head_dim,
        "Hd": t.linear_num_heads * t.linear_head_dim,
        "K": t.short_conv_kernel_size,
        "R": gate_rank,
        "Q": t.q_lora_rank,
        "L": t.kv_lora_rank,
        "aN": t.num_attention_heads * t.qk_nope_head_dim,
        "aO": t.num_attention_heads * t.v_head_dim,
        "aNO": t.num_attention_heads * (t.qk_nope_head_dim + t.v_head_dim),
        "h": t.index_n_heads,
        "p": t.index_head_dim,
        "hp": t.index_n_heads * t.index_head_dim,
        "S": t.index_kpool,
        "F": t.intermediate_size,
        "I": t.moe_intermediate_size,
        "E": t.n_routed_experts,
        "nI": t.n_shared_experts * t.moe_intermediate_size,
    }
    if (v := config.vision) is not None:
        letters |= {
            "v": v.hidden_size,
            "3v": 3 * v.hidden_size,
            "vd": v.hidden_size // v.num_heads,
            "vF": v.intermediate_size,
            "vo": v.out_hidden_size,
            "vP": v.projection_intermediate_size,
            "vc": v.in_channels,
            "vt": v.temporal_patch_size,
            "vp": v.patch_size,
            "vm": v.spatial_merge_size,
        }
    return letters


def places(text: TextConfig, layer: int) -> frozenset[str]:
    """The values of `Row.place` that apply to a layer (the MTP block included)."""
    if layer == text.mtp_layer:
        return frozenset(("block", DSA, "indexer", "moe", "mtp experts", "mtp"))
    kind = text.layer_kinds[layer]
    found = {"block", "text", kind}
    found |= {"moe", "experts"} if text.is_sparse(layer) else {"dense"}
    if kind != KDA and text.indexer(layer) == "full":
        found.add("indexer")
    return frozenset(found)


def tensors(
    config: ModelConfig, layout: str, gate_rank: int, found: Mapping[str, str] | None = None
) -> Iterator[TensorSpec]:
    """Every tensor of `layout`, layer by layer, the parts of a packed weight side by side, the vision tower last.

    `found` maps names to dtypes: a weight that is there as the other export stores it is yielded in that form, and
    `input_scale` where it is found.

    Raises `ConfigValueError` where a packed weight's columns do not divide into blocks of 16.
    """
    column = LAYOUTS.index(layout)
    letters = dimensions(config, gate_rank)
    text = config.text

    def expand(row: Row, prefix: str, generic: str, layer: int | None, expert: int | None) -> Iterator[TensorSpec]:
        name, role = prefix + row.leaf, generic + row.leaf
        if expert is not None:
            name = name.replace(".experts.E.", f".experts.{expert}.")
        shape = tuple(letters[letter] for letter in row.shape.split())
        form = STORED[row.stored][column] if found is None else _form(row, name, column, found)
        for suffix, dtype, stored in _parts(name, form, shape):
            packed = name if suffix and layout in EXPORTS else None
            end = suffix.removeprefix("weight")
            if suffix == "input_scale":
                name_, role_ = name.removesuffix("weight") + suffix, role.removesuffix("weight") + suffix
            else:
                name_, role_ = name + end, role + end
            yield TensorSpec(name_, role_, row.family, layer, expert, dtype, stored, packed)

    for row in _rows("global"):
        prefix = "" if row.family == "lm_head" else TEXT
        yield from expand(row, prefix, prefix, None, None)
    for layer in range(text.num_hidden_layers + bool(text.num_nextn_predict_layers)):
        prefix, generic = f"{TEXT}layers.{layer}.", f"{TEXT}layers.N."
        here = places(text, layer)
        for row in ROWS:
            if row.place in here and ".experts.E." not in row.leaf:
                yield from expand(row, prefix, generic, layer, None)
        experts = [row for row in ROWS if row.place in here and ".experts.E." in row.leaf]
        for expert in range(text.n_routed_experts if experts else 0):
            for row in experts:
                yield from expand(row, prefix, generic, layer, expert)
    if config.vision is not None:
        for block in range(config.vision.depth):
            for row in _rows("vision block"):
                yield from expand(row, f"{VISION}blocks.{block}.", f"{VISION}blocks.B.", None, None)
        for row in _rows("vision"):
            yield from expand(row, VISION, VISION, None, None)


def _rows(place: str) -> tuple[Row, ...]:
    return tuple(row for row in ROWS if row.place == place)


def _form(row: Row, name: str, column: int, found: Mapping[str, str]) -> str:
    """How a weight is stored: as the layout says unless its dtype is that of the other export."""
    own = STORED[row.stored][column]
    if row.stored in ("bf16", "f32"):
        return own
    forms = (own, *STORED[row.stored][: len(EXPORTS)])
    form = next((form for form in forms if found.get(name) == ("U8" if form.startswith("pack") else form)), own)
    if not form.startswith("pack") or name not in found:
        return form
    return "pack+" if name.removesuffix("weight") + "input_scale" in found else "pack"


def _parts(name: str, stored: str, shape: tuple[int, ...]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(suffix, dtype, shape) of each stored tensor of one weight; suffix "" for a weight stored as itself."""
    if stored in ITEM_BYTES:
        yield "", stored, shape
        return
    rows, columns = shape
    if stored == "block":
        yield "weight", "F8_E4M3", shape
        yield "weight_scale_inv", "F32", (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        return
    if columns % GROUP:
        raise e.ConfigValueError(f"{name}: {columns} columns do not divide into NVFP4 blocks of {GROUP}")
    yield "weight", "U8", (rows, columns // 2)
    yield "weight_scale", "F8_E4M3", (rows, columns // GROUP)
    yield "weight_scale_2", "F32", ()
    if stored == "pack+":
        yield "input_scale", "F32", ()


_NUMBERS = re.compile(r"(?<=\.layers\.)(\d{1,9})(?=\.)|(?<=\.experts\.)(\d{1,9})(?=\.)|(?<=\.blocks\.)(\d{1,9})(?=\.)")


def classify(name: str) -> tuple[str, int | None, int | None]:
    """(role, layer, expert) of any name: whole index components replaced by N, E, B. Says nothing about validity."""
    layer = expert = None

    def generic(match: re.Match[str]) -> str:
        nonlocal layer, expert
        if match[1] is not None:
            layer = int(match[1])
            return "N"
        if match[2] is not None:
            expert = int(match[2])
            return "E"
        return "B"

    return _NUMBERS.sub(generic, name), layer, expert


def totals(specs: Iterator[TensorSpec]) -> dict[str, tuple[int, int]]:
    """family -> (tensors, bytes), families in table order."""
    found = {family: [0, 0] for family in FAMILIES}
    for spec in specs:
        entry = found[spec.family]
        entry[0] += 1
        entry[1] += spec.nbytes
    return {family: (count, size) for family, (count, size) in found.items()}
