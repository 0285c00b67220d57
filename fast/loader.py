"""From a checkpoint directory to the operands of one rank.

    weights = load(directory, device="cpu", tp=1, ep=1, rank=0, mtp=False, vision=False, vocab="replicated")

    weights.config                      fast.config.Config
    weights.tensor(name)                operand of an unpacked weight: BF16; F32 for A_log, dt_bias,
                                        e_score_correction_bias and mHC base and scale; convolutions are BF16
    weights.is_packed(name)             whether the weight (with or without ".weight") is NVFP4 here
    weights.packed(prefix)              Packed of a packed linear, e.g. ".." + "layers.0.mlp.gate_proj"
    weights.linear(prefix)              whichever of the two the weight is
    weights.experts(layer)              ExpertBank: this rank's routed experts
    weights.operands(name)              what was bound: {"value"} or {"codes", "scale", "scale_2"}
    weights.fused(names)                the rows of several weights as one matrix, where they lie back to back
    weights.mesh, .ledger, .log, .fingerprint

Every tensor is checked before any is read: names, dtypes, shapes, byte ranges, files. What a weight becomes follows
from its dtype on disk and the config (`fast.binding`). Bytes that are already as the model wants them are read straight
into their slab and the operand is a view of that storage. On an error nothing is returned and nothing stays allocated.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fast import config as configs
from fast import errors as E
from fast import layout, nvfp4
from fast.binding import MIXER_ROLES, MLP_ROLES, SCALARS, Binding, Section, bind_plan, packing
from fast.config import Config
from fast.ledger import Ledger
from fast.loadlog import LoadLog, Progress
from fast.nvfp4 import Packed
from fast.sharding import Mesh, Slice, component_slice
from fast.shards import Directory, open_directory
from fast.store import Store, storage_dtype

WHOLE = Slice("replicated")


@dataclass(frozen=True, slots=True)
class ExpertBank:
    """The routed experts of one layer on this rank: ids first .. first + count - 1 of total.

    `gate`, `up`, `down` are lists of Packed, by local expert; each tensor is a view of a slab. gate and up of one
    expert keep their own scale_2.
    """

    gate: list[Packed]
    up: list[Packed]
    down: list[Packed]
    first: int
    count: int
    total: int

    def pointers(self) -> Tensor:
        """int64 [3, count, 2] on the experts' device: addresses of codes and of scales of gate, up and down."""
        device = self.gate[0].codes.device
        table = [[[w.codes.data_ptr(), w.scale.data_ptr()] for w in bank] for bank in (self.gate, self.up, self.down)]
        return torch.tensor(table, dtype=torch.int64).to(device)

    def scale_2(self) -> Tensor:
        """f32 [3, count]: scale_2 of gate, up and down; a view where they lie in this order, as after `load`."""
        scalars = [w.scale_2 for bank in (self.gate, self.up, self.down) for w in bank]
        first = scalars[0]
        if all(s.data_ptr() == first.data_ptr() + 4 * i for i, s in enumerate(scalars)):
            return first.as_strided((3, self.count), (self.count, 1))
        return torch.stack(scalars).view(3, self.count)


@dataclass(frozen=True, slots=True)
class Weights:
    config: Config
    mesh: Mesh
    ledger: Ledger
    log: LoadLog
    store: Store = field(repr=False)
    fingerprint: str
    """SHA-256 over config.json and all headers: equal on ranks that read the same checkpoint."""
    _values: dict[str, Tensor] = field(repr=False)
    _packed: dict[str, Packed] = field(repr=False)

    def tensor(self, name: str) -> Tensor:
        return self._values[name]

    def is_packed(self, name: str) -> bool:
        return name.removesuffix(".weight") in self._packed

    def packed(self, prefix: str) -> Packed:
        return self._packed[prefix]

    def linear(self, prefix: str) -> Tensor | Packed:
        """The operand of a linear by its name without ".weight"."""
        return self._packed[prefix] if prefix in self._packed else self._values[f"{prefix}.weight"]

    def names(self) -> list[str]:
        """Checkpoint names of everything bound on this rank, packed weights under their ".weight"."""
        return [*self._values, *(f"{prefix}.weight" for prefix in self._packed)]

    def experts(self, layer: int) -> ExpertBank:
        total = self.config.text.n_routed_experts
        local = self.mesh.experts(total)
        stem = f"{layout.PREFIX}layers.{layer}.mlp.experts"
        gate, up, down = (
            [self._packed[f"{stem}.{e}.{leaf}"] for e in local] for leaf in ("gate_proj", "up_proj", "down_proj")
        )
        return ExpertBank(gate, up, down, local.start, len(local), total)

    def operands(self, name: str) -> dict[str, Tensor]:
        packed = self._packed.get(name.removesuffix(".weight"))
        if packed is None:
            return {"value": self._values[name]}
        return {"codes": packed.codes, "scale": packed.scale, "scale_2": packed.scale_2}

    def fused(self, names: Sequence[str]) -> Tensor | None:
        """[sum of rows, cols] over `names` without a copy, or None where they do not lie back to back."""
        parts = [self._values[name] for name in names]
        first = parts[0]
        at = first.data_ptr()
        for part in parts:
            same = part.dtype == first.dtype and part.shape[1:] == first.shape[1:]
            if (
                not same
                or part.data_ptr() != at
                or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            ):
                return None
            at += part.nbytes
        return first.as_strided((sum(p.shape[0] for p in parts), *first.shape[1:]), first.stride())


def load(
    directory: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    tp: int = 1,
    ep: int = 1,
    rank: int = 0,
    mtp: bool = False,
    vision: bool = False,
    vocab: str = "replicated",
    progress: bool = True,
) -> Weights:
    """Load one rank's operands. Raises an InputError of `fast.errors` for anything wrong with the input."""
    config = configs.load(directory)
    mesh = Mesh(tp, ep, rank, vocab)
    checked = open_directory(directory, lambda name: void(layout.find(config, name)))
    try:
        store = Store(checked, device)
    except BaseException:
        checked.close()
        raise
    try:
        return bind(config, store, mesh, mtp=mtp, vision=vision, progress=progress)
    finally:
        store.close()


def void(_: object) -> None:
    return None


def bind(
    config: Config, store: Store, mesh: Mesh, *, mtp: bool = False, vision: bool = False, progress: bool = False
) -> Weights:
    """Bind a store's tensors: from disk, or from the store where something has already made them resident.

    On an error the store holds nothing any more, and its ledger is as if it had never held anything but the window.
    """
    try:
        return _bound(config, store, mesh, mtp=mtp, vision=vision, progress=progress)
    except BaseException:
        store.discard()
        raise


def _bound(config: Config, store: Store, mesh: Mesh, *, mtp: bool, vision: bool, progress: bool) -> Weights:
    stored = layout.match(config, store.directory.tensors)
    sections = bind_plan(config, stored, mesh, mtp=mtp, vision=vision)
    loader = _Loader(config, store, sections)
    log = LoadLog(rank=mesh.rank)
    start = time.perf_counter()
    with Progress("loading", loader.bytes_planned(), enabled=progress) as bar:
        for index, section in enumerate(sections):
            store.reach(loader.packing.section_slabs[index])
            loader.load(section, log)
            bar.update(store.reader.bytes_read)
    log.pruned = store.prune(lambda name: not mtp and keep_after_load(config, name))
    log.finish(time.perf_counter() - start, store.reader.bytes_read, store.ledger)
    return Weights(
        config, mesh, store.ledger, log, store, fingerprint(config, store.directory), loader.values, loader.packed
    )


def keep_after_load(config: Config, name: str) -> bool:
    """Whether the prune leaves a tensor that nobody has bound: the MTP block, while it is yet to be bound, and nothing
    else. The name is taken apart by the layout, so "layers.45x", "layers.045" or "xlayers.45" are not the MTP block."""
    try:
        weight, _ = layout.find(config, name)
    except E.LayoutError:
        return False
    return weight.layer is not None and weight.layer in config.text.mtp_layers


def fingerprint(config: Config, directory: Directory) -> str:
    digest = hashlib.sha256(config.sha256.encode())
    for name in sorted(directory.tensors):
        info = directory.tensors[name]
        digest.update(f"{name}\0{info.dtype}\0{info.shape}\0{info.shard}\0{info.begin}\n".encode())
    return digest.hexdigest()


class _Loader:
    """Executes the sections: reads, converts, places."""

    def __init__(self, config: Config, store: Store, sections: Sequence[Section]) -> None:
        self.config, self.store = config, store
        self.sections = sections
        self.values: dict[str, Tensor] = {}
        self.packed: dict[str, Packed] = {}
        self.on_host = store.device.type == "cpu"
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.packing = packing(self._placed(section) for section in sections)
        store.reserve(self.packing)

    def _placed(self, section: Section) -> Section:
        """The section without what is bound where it already lies."""
        return Section(section.name, section.layer, tuple(b for b in section.bindings if not self._lies(b)))

    def _lies(self, b: Binding) -> bool:
        """Whether the whole operand is resident as it is on disk."""
        names = [n for c, n in b.stored.names().items() if c != "input_scale"]
        as_is = b.action in ("adopt", "packed") and b.cut.axis is None
        return as_is and all(name in self.store.resident for name in names)

    def bytes_planned(self) -> int:
        tensors = self.store.directory.tensors
        return sum(tensors[n].nbytes for s in self.sections for b in s.bindings for n in b.stored.names().values())

    def load(self, section: Section, log: LoadLog) -> None:
        """Bind a section in file order; the log gets the time split into reading, mixer and MLP."""
        tensors = self.store.directory.tensors
        times = {"read": 0.0, "mixer": 0.0, "mlp": 0.0, "other": 0.0}
        before = self.store.reader.bytes_read
        staged = self._stage(section)
        try:
            for b in sorted(section.bindings, key=lambda b: (tensors[b.name].shard, tensors[b.name].begin)):
                start, read = time.perf_counter(), self.store.reader.seconds
                self._bind(b)
                reading = self.store.reader.seconds - read
                times["read"] += reading
                kind = "mixer" if b.role in MIXER_ROLES else "mlp" if b.role in MLP_ROLES else "other"
                times[kind] += time.perf_counter() - start - reading
            read = self.store.reader.seconds
            self.store.reader.flush()
            times["read"] += self.store.reader.seconds - read
            start = time.perf_counter()
            self._check_scales(section)
            times["mlp"] += time.perf_counter() - start
        finally:
            self.buffer = torch.empty(0, dtype=torch.uint8)
            self.store.ledger.release(staged)
        log.add(section.name, self.store.reader.bytes_read - before, **times)

    def _bind(self, b: Binding) -> None:
        if b.action == "packed":
            self._bind_packed(b)
        elif b.action == "quantise":
            self._quantise(b)
        elif self._lies(b):
            self.values[b.name] = self.store.bind(b.name)
        elif b.action == "adopt" and b.name not in self.store.resident:
            slot = self.packing.slots[b.name, "value"]
            self.values[b.name] = self.store.adopt(b.name, b.role, slot, b.cut)
        else:
            self._convert(b)

    def _bind_packed(self, b: Binding) -> None:
        names, parts = b.stored.names(), {}
        lies = self._lies(b)
        for component, (_, shape) in b.parts.items():
            name = names[component]
            cut = component_slice(b.cut, component)
            slot = None if lies else self.packing.slots[b.name, component]
            if slot is None:
                part = self.store.bind(name)
            elif name in self.store.resident:
                part = self._copy(b, component, _part(self.store.resident[name].tensor, cut))
                self.store.supersede(name)
            else:
                part = self.store.adopt(name, b.role, slot, cut, scanned=component != SCALARS)
            parts[component] = part.view(shape)
        self.packed[b.name.removesuffix(".weight")] = Packed(parts["codes"], parts["weight_scale"], parts[SCALARS])

    def _copy(self, b: Binding, component: str, source: Tensor) -> Tensor:
        """Put a tensor into its slot, cast to the operand's dtype (to nearest even)."""
        dtype, shape = b.parts[component]
        slot = self.packing.slots[b.name, component]
        out = self.store.place(slot, dtype, shape)
        self.store.take(f"{b.name}:{component}", b.role, slot)
        out.copy_(source.view(shape))
        return out

    def _convert(self, b: Binding) -> None:
        """A cast, or a slice of something resident."""
        if b.name in self.store.resident:
            source = _part(self.store.resident[b.name].tensor, b.cut)
            self.store.supersede(b.name)
        else:
            source = self._from_disk(b.name, b.cut)
        operand = source.to(b.parts["value"][0])
        nvfp4.check_finite(operand, f"{b.name} as {operand.dtype}")
        self.values[b.name] = self._copy(b, "value", operand)

    def _quantise(self, b: Binding) -> None:
        """A BF16 expert projection: scale_2 from all of it, then the rank's rows and columns, a few rows at a time."""
        if b.name in self.store.resident:
            source = self.store.resident[b.name].tensor
            self.store.supersede(b.name)
        else:
            source = self._from_disk(b.name, WHOLE)
        parts: dict[str, Tensor] = {}
        for component, (dtype, shape) in b.parts.items():
            slot = self.packing.slots[b.name, component]
            self.store.take(f"{b.name}:{component}", b.role, slot)
            parts[component] = self.store.place(slot, dtype, shape)
        out = Packed(parts["codes"], parts["weight_scale"], parts[SCALARS])
        scale_2 = nvfp4.tensor_scale(nvfp4.amax(source))
        there = source.device == out.codes.device
        codes, scale = (t if there else torch.empty_like(t, device=source.device) for t in (out.codes, out.scale))
        nvfp4.encode_all(_part(source, b.cut), scale_2, codes, scale)
        if not there:
            out.codes.copy_(codes)
            out.scale.copy_(scale)
        out.scale_2.copy_(scale_2)
        self.packed[b.name.removesuffix(".weight")] = out

    def _stage(self, section: Section) -> int:
        """Enter the section's largest conversion and allocate the host buffer its source goes through."""
        made = [b for b in section.bindings if b.name not in self.store.resident]
        size = max((b.source_bytes() for b in made), default=0)
        self.buffer = torch.empty(size, dtype=torch.uint8)
        n = max((b.staging(on_host=self.on_host) for b in made), default=0)
        return self.store.ledger.charge(f"{section.name}:staging", "conversion", "staging", n, "host")

    def _from_disk(self, name: str, cut: Slice) -> Tensor:
        """(A slice of) a tensor in the host buffer, until the next one."""
        info = self.store.directory.tensors[name]
        shape, dtype = cut.shape(info.shape), storage_dtype(info.dtype)
        out = self.buffer[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
        self.store.reader.read(name, out, cut)
        self.store.reader.flush()
        return out

    def _check_scales(self, section: Section) -> None:
        """One transfer for all scale_2 of a section; a zero is looked into."""
        prefixes = [b.name.removesuffix(".weight") for b in section.bindings if b.action == "packed"]
        if not prefixes:
            return
        values = torch.stack([self.packed[p].scale_2 for p in prefixes]).cpu()
        good = nvfp4.is_multiplier(values)
        for index in torch.nonzero(~good)[:, 0].tolist():
            packed = self.packed[prefixes[index]]
            nvfp4.check_scale_2(packed.scale_2, packed.codes, f"{prefixes[index]}.weight_scale_2")


def _part(tensor: Tensor, cut: Slice) -> Tensor:
    if cut.axis is None:
        return tensor
    return tensor.narrow(cut.axis, cut.start, cut.stop - cut.start)
