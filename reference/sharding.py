"""Which part of every stored tensor a rank holds under tensor (TP) and expert (EP) parallelism.

A mesh of `tp` and `ep` has max(tp, ep) ranks, and one of the two divides the other. Mixers, dense MLPs and the shared
expert are divided among `tp` ranks; routed experts go in `ep` contiguous ranges, the first (E mod ep) of them one
longer, each range to world/ep neighbouring ranks that divide its experts by width. Where ep > tp, the groups of tp
neighbouring ranks hold the same mixers.

    rank r:  r mod tp in its TP group;  range r div (world/ep), and r mod (world/ep) within it

Rules (model.md section 5, exports.md 4.1):
    replicated          norms, mHC, router, f_a, g_a, o_norm, q_a, kv_a, the whole indexer, embeddings, MTP head, vision
    head rows           one row per KDA head: b_proj, A_log
    channel rows        the channels of whole KDA heads: q, k, v, conv, f_b, g_b, dt_bias
    query rows          the rows of whole DSA heads: q_b_proj
    key-value rows      the rows of whole DSA heads, keys and values together: kv_b_proj
    head columns        o_proj, the columns of whole heads
    width rows          gate and up of dense, shared and routed MLPs
    width columns       down of the same
Partial sums follow a division by columns: they are added over the TP group, for routed experts over all ranks. Codes
and block scales of a packed weight divide together, columns at multiples of 16; weight_scale_2 and input_scale are
those of the whole tensor on every rank that holds a part.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from reference.config import TextConfig
from reference.errors import DivisionError, MeshError
from reference.layout import GROUP, TensorSpec

REPLICATED = "replicated"
LEAVES = {
    ("KDA", "b_proj.weight"): "head rows",
    ("KDA", "A_log"): "head rows",
    **{("KDA", f"{which}_proj.weight"): "channel rows" for which in ("q", "k", "v", "f_b", "g_b")},
    **{("KDA", f"{which}_conv1d.weight"): "channel rows" for which in ("q", "k", "v")},
    ("KDA", "dt_bias"): "channel rows",
    ("KDA", "o_proj.weight"): "head columns",
    ("DSA", "q_b_proj.weight"): "query rows",
    ("DSA", "kv_b_proj.weight"): "key-value rows",
    ("DSA", "o_proj.weight"): "head columns",
}
MLP_FAMILIES = ("dense MLP", "shared expert", "routed experts, text", "routed experts, MTP")
COLUMNS_PER_ITEM = {"U8": 2, "F8_E4M3": GROUP}


@dataclass(frozen=True)
class Mesh:
    """Sizes of both kinds of parallelism and one rank of it. Raises `MeshError`."""

    tp: int = 1
    ep: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if min(self.tp, self.ep) < 1 or self.world % self.tp or self.world % self.ep:
            raise MeshError(f"tp {self.tp}, ep {self.ep}: both must be at least 1, and one must divide the other")
        if not 0 <= self.rank < self.world:
            raise MeshError(f"rank {self.rank} is not in 0..{self.world - 1} of tp {self.tp}, ep {self.ep}")

    @property
    def world(self) -> int:
        return max(self.tp, self.ep)

    @property
    def ranks_per_expert(self) -> int:
        return self.world // self.ep

    def place(self, routed: bool) -> tuple[int, int]:
        """(part, parts) of this rank in the division of a tensor."""
        parts = self.ranks_per_expert if routed else self.tp
        return self.rank % parts, parts

    def tp_ranks(self) -> range:
        """The TP group of this rank, in the order in which partial sums are added."""
        first = self.rank // self.tp * self.tp
        return range(first, first + self.tp)

    def adds_shared_expert(self) -> bool:
        """The shared expert enters the sum over all ranks once: from the first TP group."""
        return self.rank < self.tp

    def experts(self, total: int) -> range:
        """The experts of this rank. Raises `DivisionError` with fewer experts than ranges."""
        if total < self.ep:
            raise DivisionError(f"{total} routed experts do not fill ep {self.ep} ranges")
        owner = self.rank // self.ranks_per_expert
        short, longer = divmod(total, self.ep)
        start = owner * short + min(owner, longer)
        return range(start, start + short + (1 if owner < longer else 0))


@dataclass(frozen=True)
class Part:
    """[start, stop) along `axis` of a tensor as stored, or all of it (`axis` None); then `reduced` over these ranks."""

    rule: str
    axis: int | None
    start: int
    stop: int
    reduced: tuple[int, ...] = ()

    def of(self, stored: np.ndarray) -> np.ndarray:
        """This part of the stored array (packed codes count bytes, block scales count blocks)."""
        if self.axis is None:
            return stored
        assert 0 <= self.start < self.stop <= stored.shape[self.axis]
        return stored[self.start : self.stop] if self.axis == 0 else stored[:, self.start : self.stop]


def rule_of(spec: TensorSpec) -> str:
    """The rule of a tensor, by its family and the last components of its name."""
    if spec.family in MLP_FAMILIES:
        return "width columns" if ".down_proj." in spec.name else "width rows"
    if spec.family in ("KDA", "DSA"):
        return LEAVES.get((spec.family, spec.name.partition(".self_attn.")[2]), REPLICATED)
    return REPLICATED


def pieces(spec: TensorSpec, text: TextConfig) -> int:
    """How many indivisible pieces the divided axis has: heads, or rows or columns of an MLP's width."""
    if spec.family == "KDA":
        return text.linear_num_heads
    if spec.family == "DSA":
        return text.num_attention_heads
    if spec.family == "dense MLP":
        return text.intermediate_size
    return text.moe_intermediate_size * (text.n_shared_experts if spec.family == "shared expert" else 1)


def part_of(spec: TensorSpec, text: TextConfig, mesh: Mesh) -> Part | None:
    """The part of a stored tensor that `mesh.rank` holds; None for an expert of another rank.

    Raises `DivisionError` with the numbers.
    """
    rule, routed = rule_of(spec), spec.expert is not None
    if spec.expert is not None and spec.expert not in mesh.experts(text.n_routed_experts):
        return None
    index, parts = mesh.place(routed)
    group = tuple(range(mesh.world)) if routed else tuple(mesh.tp_ranks())
    reduced = group if rule.endswith("columns") and len(group) > 1 else ()
    if rule == REPLICATED or parts == 1 or not spec.shape:
        return Part(rule, None, 0, 0, reduced)
    total = pieces(spec, text)
    what = "heads" if spec.family in ("KDA", "DSA") else rule.partition(" ")[2]
    if total % parts:
        raise DivisionError(f"{spec.name}: {total} {what} do not divide among {parts} ranks")
    axis = 1 if rule.endswith("columns") else 0
    length = spec.shape[axis]
    if axis == 1 and (spec.packed is not None or routed):
        # Routed experts that are stored as BF16 are cut where their NVFP4 form can be.
        if total // parts % GROUP:
            raise DivisionError(
                f"{spec.name}: {total} columns among {parts} ranks are {total // parts} each, "
                f"not a multiple of the {GROUP}-column blocks"
            )
        assert length * (COLUMNS_PER_ITEM[spec.dtype] if spec.packed else 1) == total
    assert length % parts == 0
    return Part(rule, axis, index * length // parts, (index + 1) * length // parts, reduced)


def plan(specs: Iterable[TensorSpec], text: TextConfig, mesh: Mesh) -> dict[str, Part | None]:
    """name -> part, for every tensor of a layout. Raises `DivisionError`."""
    return {spec.name: part_of(spec, text, mesh) for spec in specs}


def join(parts: list[np.ndarray], axis: int | None) -> np.ndarray:
    """The whole tensor from the parts of all ranks of a division, in rank order; copies must be equal."""
    if axis is None:
        assert all(np.array_equal(part, parts[0]) for part in parts)
        return parts[0]
    return np.concatenate(parts, axis)
