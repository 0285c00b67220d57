"""The engine's table of tensors: the released files to the tensor and the byte, and no name that only looks right."""

import csv
import functools
import json
import re
from pathlib import Path

import pytest

from conformance.checkpoints import geometry
from conformance.checkpoints.configs import config_json
from fast import config, layout
from fast import errors as e

T = layout.PREFIX
TABLE = Path(__file__).parents[1] / "reference" / "released_tensors.tsv"
TOTALS = {"libertai": (113_074, 194_644_803_576, 407), "nvidia": (147_661, 204_419_110_596, 419)}
COLUMNS = {"nvidia": 3, "libertai": 4}
EXPORTS = pytest.mark.parametrize("export", TOTALS)


@functools.cache
def released(export):
    parsed = config.parse(json.loads(config_json(geometry("full").config, export)))
    return parsed, layout.export_tensors(parsed, export, 128)


def pattern(name):
    """The name with its indices as letters, as the published table writes it."""
    name = re.sub(r"(?<=layers\.)\d+", "N", name)
    name = re.sub(r"(?<=experts\.)\d+", "E", name)
    return re.sub(r"(?<=blocks\.)\d+", "B", name)


@EXPORTS
def test_counts_and_bytes_close(export):
    _, tensors = released(export)
    count, total, patterns = TOTALS[export]
    assert len(tensors) == count
    assert sum(info.nbytes for info in tensors.values()) == total
    assert len({name if name.startswith("model.visual.") else pattern(name) for name in tensors}) == patterns


@EXPORTS
def test_every_published_row(export):
    """Name pattern, instances, dtype, shape and family of every row, and no row left over."""
    parsed, tensors = released(export)
    found: dict[tuple[str, str, str], int] = {}
    for name, info in tensors.items():
        role = layout.find(parsed, name, 128)[0].role
        key = (role, pattern(name).replace(T, "~"), f"{info.dtype}[{','.join(map(str, info.shape))}]")
        found[key] = found.get(key, 0) + 1
    published: dict[tuple[str, str, str], int] = {}
    with TABLE.open(encoding="utf-8") as file:
        for row in csv.reader((line for line in file if not line.startswith("#")), delimiter="\t"):
            if row[COLUMNS[export]] != "-":
                key = (row[0].replace("layer 45", "MTP"), row[1], row[COLUMNS[export]])
                published[key] = published.get(key, 0) + int(row[2])
    assert found == published


@EXPORTS
@pytest.mark.parametrize("name", ["tiny", "odd", "one-layer"])
def test_match_accepts_what_find_finds(export, name):
    """Each weight once, each tensor in one weight, and `find` agrees with the enumeration."""
    shape = geometry(name, experts=8) if name == "one-layer" else geometry(name)
    parsed = config.parse(json.loads(config_json(shape.config, export)))
    tensors = layout.export_tensors(parsed, export, shape.gate_rank)
    stored = layout.match(parsed, tensors)
    names = [tensor for item in stored for tensor in item.names().values()]
    assert sorted(names) == sorted(tensors)
    for item in stored:
        for component, tensor in item.names().items():
            wanted = "value" if component == "codes" else component
            assert layout.find(parsed, tensor, shape.gate_rank) == (item.weight, wanted)
    assert {item.weight.role for item in stored} == set(layout.ROLES)
    assert layout.gate_rank(parsed, tensors) == shape.gate_rank


UNKNOWN = [
    f"{T}layers.03.mlp.gate.weight",
    f"{T}layers.+3.mlp.gate.weight",
    f"{T}layers. 3.mlp.gate.weight",
    f"{T}layers.46.mlp.gate.weight",
    f"{T}layers.3.mlp.gate.weight_scale",
    f"{T}layers.3.mlp.experts.288.gate_proj.weight",
    f"{T}layers.3.mlp.experts.1_0.gate_proj.weight",
    f"{T}layers.3.mlp.experts.0.gate_proj",
    f"{T}layers.3.mlp.experts.0.gate_up_proj.weight",
    f"{T}layers.0.mlp.experts.0.gate_proj.weight",
    f"{T}layers.0.self_attn.q_a_proj.weight",
    f"{T}layers.3.self_attn.A_log",
    f"{T}layers.45.hc_attn_fn",
    f"{T}layers.45.embed_tokens.weight",
    f"{T}layers.0.self_attn.q_proj.weight_scale",
    f"{T}layers.3.mlp.shared_experts.gate_proj.weight_scale_2",
    f"{T}layers.3.mlp.shared_experts.0.gate_proj.weight",
    f"{T}layers.0.self_attn.q_proj.weight.weight",
    f"{T}norm",
    "model.norm.weight",
    "model.layers.0.input_layernorm.weight",
    "model.visual.blocks.24.norm1.weight",
    "model.visual.blocks.0.mlp.gate_proj.weight_scale",
    "mtp.enorm.weight",
    "lm_head",
    "",
]


@pytest.mark.parametrize("name", UNKNOWN, ids=lambda n: n.removeprefix(T) or "empty")
def test_names_that_only_look_right(name):
    with pytest.raises(e.UnknownTensorError):
        layout.find(released("nvidia")[0], name, 128)


@pytest.mark.parametrize("leaf", layout.FOREIGN)
def test_other_formats_are_named(leaf):
    with pytest.raises(e.ForeignFormatError, match=layout.FOREIGN[leaf]):
        layout.find(released("nvidia")[0], f"{T}layers.3.mlp.experts.0.gate_proj.{leaf}", 128)


def test_a_shared_layer_has_no_indexer():
    parsed = config.parse(geometry("odd").config)
    tensors = layout.export_tensors(parsed, "nvidia", 12)
    with_indexer = {int(n.split(".")[3]) for n in tensors if ".indexer." in n}
    assert with_indexer == {1, 4, 7}


def test_scales_beside_a_weight_that_is_not_packed():
    parsed = config.parse(geometry("tiny").config)
    tensors = layout.export_tensors(parsed, "libertai", 16)
    tensors[f"{T}layers.0.mlp.gate_proj.weight_scale"] = tensors[f"{T}layers.3.mlp.experts.0.gate_proj.weight_scale"]
    with pytest.raises(e.MissingScaleError, match=r"weight_scale beside .*gate_proj\.weight, which is not packed"):
        layout.match(parsed, tensors)
