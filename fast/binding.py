"""What becomes of every stored weight on one rank: decided from shapes, dtypes and the mesh before a byte is read.

    action     disk                        operand
    adopt      as the operand              the bytes themselves, in their slot
    packed     codes, scales, scale_2      the bytes themselves, three slots
    round      F32 convolution             BF16, to nearest even
    widen      BF16 mHC base, scale        F32
    quantise   BF16 expert (MTP block)     NVFP4; never resident as BF16: one projection at a time goes through host
                                           memory, its scale_2 from the whole projection whatever the rank's part

`Section`s are what is loaded together: the globals, each layer, the vision tower. `input_scale` tensors are accepted by
the layout and not read: weight-only arithmetic has no use for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fast import errors as E
from fast.config import Config
from fast.layout import Stored
from fast.nvfp4 import BLOCK, encode_workspace
from fast.sharding import Cutter, Mesh, Slice, component_slice
from fast.store import Packing, Part, pack

MIXER_ROLES = ("KDA", "DSA", "DSA indexer")
MLP_ROLES = ("dense MLP", "router", "shared expert", "routed experts, text", "routed experts, MTP")
OPERANDS = {"BF16": torch.bfloat16, "F32": torch.float32}
SCALARS = "weight_scale_2"


@dataclass(frozen=True, slots=True)
class Binding:
    stored: Stored
    cut: Slice
    """The rank's part of the logical weight."""
    action: str
    parts: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """{component: (dtype, shape)} of the operand: `value`, or `codes`, `weight_scale` and `weight_scale_2`."""

    @property
    def name(self) -> str:
        return self.stored.weight.name

    @property
    def role(self) -> str:
        return self.stored.weight.role

    def nbytes(self, component: str) -> int:
        dtype, shape = self.parts[component]
        return dtype.itemsize * math.prod(shape)

    def source_bytes(self) -> int:
        """Bytes on disk that pass through host memory to become the operand: none where they are the operand."""
        if self.action == "quantise":
            return 2 * math.prod(self.stored.weight.shape)
        if self.action in ("round", "widen"):
            return (4 if self.action == "round" else 2) * math.prod(self.cut.shape(self.stored.weight.shape))
        return 0

    def staging(self, *, on_host: bool) -> int:
        """Host bytes held while the operand is made: its source, temporaries and, unless slots are host memory
        (`on_host`), the finished operand on its way to the device."""
        if not self.source_bytes():
            return 0
        operand = sum(self.nbytes(component) for component in self.parts)
        if self.action == "quantise":
            return self.source_bytes() + encode_workspace(*self._local()) + (0 if on_host else operand)
        return self.source_bytes() + operand

    def _local(self) -> tuple[int, int]:
        rows, half = self.parts["codes"][1]
        return rows, 2 * half


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    layer: int | None
    bindings: tuple[Binding, ...]


def bind_plan(
    config: Config, stored: Iterable[Stored], mesh: Mesh, *, mtp: bool = False, vision: bool = False
) -> tuple[Section, ...]:
    """The sections of one rank, in loading order. Raises ShardingError of some kind, also for what other ranks hold."""
    cutter = Cutter(mesh, config.text.n_routed_experts)
    wanted: dict[str, tuple[int | None, list[Binding]]] = {}
    shapes: dict[tuple[int, str], Binding] = {}
    for item in stored:
        weight = item.weight
        cut = cutter.of(item)
        if (weight.role == "vision" and not vision) or (weight.layer in config.text.mtp_layers and not mtp):
            continue
        name = "vision" if weight.role == "vision" else "globals" if weight.layer is None else f"layer {weight.layer}"
        if cut is not None:
            key = (id(weight.spec), item.form)
            like = shapes.get(key)
            if like is None:
                like = shapes[key] = _binding(item, cut)
            binding = Binding(item, cut, like.action, like.parts)
            wanted.setdefault(name, (weight.layer, []))[1].append(binding)
    return tuple(Section(name, layer, tuple(items)) for name, (layer, items) in wanted.items())


def _binding(item: Stored, cut: Slice) -> Binding:
    weight = item.weight
    if item.form != "NVFP4" and not weight.quantised:
        operand = weight.spec.operand
        action = "adopt" if item.form == operand else "round" if item.form == "F32" else "widen"
        return Binding(item, cut, action, {"value": (OPERANDS[operand], cut.shape(weight.shape))})
    rows, cols = weight.shape
    if cols % BLOCK:
        raise E.WrongShapeError(f"{weight.name}: {cols} columns, no multiple of the {BLOCK}-column blocks of NVFP4")
    parts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for component, shape in (("codes", (rows, cols // 2)), ("weight_scale", (rows, cols // BLOCK))):
        parts[component] = (torch.uint8, component_slice(cut, component).shape(shape))
    parts[SCALARS] = (torch.float32, ())
    return Binding(item, cut, "packed" if item.form == "NVFP4" else "quantise", parts)


def blocks(section: Section) -> list[list[Part]]:
    """The section's parts for `pack`: fused weights side by side, an expert's six parts together, all scale_2 of the
    section last, in one run per projection, so that a bank's scales are one vector."""
    out: list[list[Part]] = []
    scalars: dict[str, list[Part]] = {}
    last: tuple[object, ...] | None = None
    for b in section.bindings:
        weight = b.stored.weight
        group = (weight.spec.block, weight.expert)
        if weight.spec.block is None or group != last:
            out.append([])
        last = group
        for component in b.parts:
            if component == SCALARS:
                run = weight.name.rsplit(".", 2)[-2] if weight.expert is not None else weight.name
                scalars.setdefault(run, []).append(Part((weight.name, SCALARS), 4, align=4))
            else:
                out[-1].append(Part((weight.name, component), b.nbytes(component)))
    order = {"codes": 0, "weight_scale": 1, "value": 0}
    for block in out:
        block.sort(key=lambda part: order[part.key[1]])
    if scalars:
        out.append([part for run in scalars.values() for part in run])
    return out


def packing(sections: Iterable[Section]) -> Packing:
    return pack([blocks(section) for section in sections])
