"""The tensor tables against the published counts, byte totals and every published pattern of the released model."""

import math
from collections import Counter
from pathlib import Path

import pytest

from conformance.checkpoints import geometry
from reference import config, layout
from reference import errors as e

FULL = config.parse(geometry("full").config)
RELEASED = Path(__file__).with_name("released_tensors.tsv")

# exports.md 2.12: tensors and bytes of each family.
PUBLISHED = {
    "libertai": {
        "embed": (1, 1_268_776_960),
        "final norm": (1, 8_192),
        "lm_head": (1, 1_268_776_960),
        "norms": (92, 753_664),
        "KDA": (510, 9_366_356_992),
        "DSA": (84, 2_818_621_440),
        "DSA indexer": (84, 179_324_928),
        "mHC": (270, 70_788_600),
        "dense MLP": (9, 905_969_664),
        "router": (86, 101_499_264),
        "shared expert": (129, 2_164_260_864),
        "routed experts, text": (108_864, 171_228_411_648),
        "routed experts, MTP": (2_592, 4_076_866_944),
        "MTP head": (4, 67_133_440),
        "vision": (347, 1_127_254_016),
    },
    "nvidia": {
        "embed": (1, 1_268_776_960),
        "final norm": (1, 8_192),
        "lm_head": (1, 1_268_776_960),
        "norms": (92, 753_664),
        "KDA": (510, 9_373_041_664),
        "DSA": (84, 2_818_621_440),
        "DSA indexer": (84, 179_324_928),
        "mHC": (270, 70_783_740),
        "dense MLP": (36, 254_804_040),
        "router": (86, 101_499_264),
        "shared expert": (129, 2_164_260_864),
        "routed experts, text": (145_152, 171_228_556_800),
        "routed experts, MTP": (864, 14_495_514_624),
        "MTP head": (4, 67_133_440),
        "vision": (347, 1_127_254_016),
    },
}
TOTALS = {
    "nvidia": (147_661, 204_419_110_596),
    "libertai": (113_074, 194_644_803_576),
    "fp8": (76_108, 328_326_771_576),
    "bf16": (38_770, 642_646_653_816),
}


def specs(name="full", export="nvidia", **reductions):
    chosen = geometry(name, **reductions)
    return {spec.name: spec for spec in layout.tensors(config.parse(chosen.config), export, chosen.gate_rank)}


@pytest.mark.parametrize("export", TOTALS)
def test_released_totals(export):
    families = layout.totals(layout.tensors(FULL, export, 128))
    assert (sum(n for n, _ in families.values()), sum(b for _, b in families.values())) == TOTALS[export]
    assert families == PUBLISHED.get(export, families)


@pytest.mark.parametrize(("export", "column"), [("nvidia", 3), ("libertai", 4), ("fp8", 5)])
def test_every_published_pattern(export, column):
    found: Counter[tuple[str, str]] = Counter()
    stored: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    for spec in layout.tensors(FULL, export, 128):
        role = spec.role.replace(layout.TEXT, "~")
        key = (spec.family, role)
        found[key] += 1
        assert stored.setdefault(key, (spec.dtype, spec.shape)) == (spec.dtype, spec.shape)
        assert layout.classify(spec.name) == (spec.role, spec.layer, spec.expert)
    published = {}
    for line in RELEASED.read_text().splitlines():
        fields = line.split("\t")
        if line.startswith("#") or fields[column] == "-":
            continue
        dtype, shape = fields[column].rstrip("]").split("[")
        published[fields[0], fields[1]] = (int(fields[2]), dtype, tuple(int(n) for n in shape.split(",") if n))
    assert {key: (found[key], *stored[key]) for key in found} == published


def test_pattern_counts():
    # exports.md counts one pattern per vision tensor, 347, where this table has 25.
    for export, published in (("libertai", 407), ("nvidia", 419)):
        patterns = {spec.role for spec in layout.tensors(FULL, export, 128)}
        assert len([role for role in patterns if not role.startswith(layout.VISION)]) + 347 == published


def test_mtp_block():
    for export, count, size in (("libertai", 2617, 4_446_537_728), ("nvidia", 889, None)):
        block = [spec for spec in layout.tensors(FULL, export, 128) if spec.layer == 45]
        assert len(block) == count
        assert size in (None, sum(spec.nbytes for spec in block))
        assert not [spec for spec in block if ".hc_" in spec.name]


def test_shared_layer_has_no_indexer_and_gate_rank_is_free():
    odd = specs("odd")
    prefix = f"{layout.TEXT}layers."
    indexers = {spec.layer for name, spec in odd.items() if ".indexer." in name}
    assert indexers == {1, 4, 7}
    assert odd[f"{prefix}0.self_attn.f_a_proj.weight"].shape == (12, 112)
    assert odd[f"{prefix}0.self_attn.g_b_proj.weight"].shape == (96, 12)
    assert odd[f"{prefix}0.hc_attn_fn"].shape == (15, 336)
    assert odd[f"{prefix}1.self_attn.kv_b_proj.weight"].shape == (6 * 44, 24)
    assert odd[f"{prefix}1.self_attn.indexer.index_kpool_compress_ape"].shape == (8, 20)


def test_text_only_and_no_mtp():
    raw = geometry("tiny").config
    bare = raw | {"vision_config": None, "text_config": raw["text_config"] | {"num_nextn_predict_layers": 0}}
    names = [spec.name for spec in layout.tensors(config.parse(bare), "nvidia", 16)]
    assert not [name for name in names if name.startswith(layout.VISION) or ".layers.9." in name]


def test_columns_must_divide_into_blocks():
    raw = geometry("tiny").config
    narrow = raw | {"text_config": raw["text_config"] | {"moe_intermediate_size": 40}}
    with pytest.raises(e.ConfigValueError, match="40 columns do not divide into NVFP4 blocks of 16"):
        list(layout.tensors(config.parse(narrow), "libertai", 16))


def test_parts_of_a_packed_weight():
    found = specs("tiny", "nvidia")
    name = f"{layout.TEXT}layers.3.mlp.experts.2.down_proj.weight"
    parts = {spec.name: (spec.dtype, spec.shape) for spec in found.values() if spec.packed == name}
    assert parts == {
        name: ("U8", (128, 32)),
        f"{name}_scale": ("F8_E4M3", (128, 4)),
        f"{name}_scale_2": ("F32", ()),
        f"{name.removesuffix('weight')}input_scale": ("F32", ()),
    }
    assert all(spec.nbytes == math.prod(spec.shape) * layout.ITEM_BYTES[spec.dtype] for spec in found.values())


NAMES = [
    (
        "model.language_model.layers.45.mlp.experts.287.up_proj.weight_scale",
        ("~layers.N.mlp.experts.E.up_proj.weight_scale", 45, 287),
    ),
    (
        "model.language_model.layers.3.mlp.shared_experts.up_proj.weight",
        ("~layers.N.mlp.shared_experts.up_proj.weight", 3, None),
    ),
    ("model.visual.blocks.23.mlp.gate_proj.bias", ("model.visual.blocks.B.mlp.gate_proj.bias", None, None)),
    ("lm_head.weight", ("lm_head.weight", None, None)),
    ("layers.1", ("layers.1", None, None)),
    (f"x.layers.{'9' * 5000}.y", (f"x.layers.{'9' * 5000}.y", None, None)),
    ("", ("", None, None)),
]


@pytest.mark.parametrize(("name", "expected"), NAMES, ids=lambda value: str(value)[:40])
def test_classify(name, expected):
    role, layer, expert = layout.classify(name)
    assert (role.replace(layout.TEXT, "~"), layer, expert) == expected
