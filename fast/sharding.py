"""Which part of every tensor a rank holds.

A mesh has `tp` and `ep` ranks of which one divides the other, and max(tp, ep) ranks in all. Mixers, dense MLPs and the
shared expert are cut into `tp` parts, the routed experts into `ep` contiguous ranges; where tp > ep the tp/ep ranks of
one range cut its experts by width, and where ep > tp the ep/tp groups of tp ranks repeat the mixers. Ranks that share
a cut are neighbours:

    rank r:  tp_rank = r mod tp,  expert range = r div (world/ep),  part of an expert = r mod (world/ep)

What a cut may be is a property of the tensor (`Cut`, set in `fast.layout`): `parts` indivisible pieces of `unit` rows
or columns. A packed weight cut by columns is cut on its 16-column blocks, codes and scales together, and keeps the
whole tensor's weight_scale_2. After a tensor cut by columns the partial products are summed: over `tp` ranks for
mixers, dense and shared MLPs, over all ranks for routed experts. Only ranks 0 .. tp-1 add the shared expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fast.errors import IndivisibleError, MeshError, RankRangeError, TooManyRanksError
from fast.layout import Stored, Weight

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes and place of one rank. Raises RankRangeError, MeshError."""

    tp: int = 1
    ep: int = 1
    rank: int = 0
    vocab: str = "replicated"
    """What is cut by vocabulary rows into `tp` parts: nothing, "head" (lm_head), or "split" (embedding too)."""

    def __post_init__(self) -> None:
        if self.vocab not in ("replicated", "head", "split"):
            raise MeshError(f"vocab {self.vocab!r}: expected replicated, head or split")
        if self.tp < 1 or self.ep < 1:
            raise RankRangeError(f"tp {self.tp}, ep {self.ep}: expected at least 1 each")
        if self.world % self.tp or self.world % self.ep:
            raise MeshError(f"tp {self.tp} and ep {self.ep}: neither divides the other")
        if not 0 <= self.rank < self.world:
            raise RankRangeError(f"rank {self.rank}: expected 0 .. {self.world - 1} for tp {self.tp}, ep {self.ep}")

    @property
    def world(self) -> int:
        return max(self.tp, self.ep)

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def tp_group(self) -> range:
        """The ranks whose partial mixer, dense and shared outputs are summed with this rank's."""
        first = self.rank - self.tp_rank
        return range(first, first + self.tp)

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert."""
        return self.world // self.ep

    @property
    def expert_tp_rank(self) -> int:
        return self.rank % self.expert_tp

    @property
    def ep_rank(self) -> int:
        return self.rank // self.expert_tp

    @property
    def adds_shared(self) -> bool:
        """Whether this rank's part of the shared expert goes into the sum over all ranks: it is there once."""
        return self.rank < self.tp

    def experts(self, total: int) -> range:
        """This rank's expert ids: the first `total mod ep` ranges hold one more. Raises TooManyRanksError."""
        if self.ep > total:
            raise TooManyRanksError(f"ep {self.ep}: more ranges than the {total} routed experts")
        base, more = divmod(total, self.ep)
        first = self.ep_rank * base + min(self.ep_rank, more)
        return range(first, first + base + (self.ep_rank < more))


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one stored tensor: [start, stop) of `axis`, or all of it where `axis` is None."""

    rule: str
    axis: int | None = None
    start: int = 0
    stop: int = 0
    all_reduce: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.axis is None:
            return shape
        return (*shape[: self.axis], self.stop - self.start, *shape[self.axis + 1 :])


def weight_slice(weight: Weight, mesh: Mesh, *, packed: bool, experts: int) -> Slice | None:
    """The part of the logical weight [out, in] that `mesh.rank` holds, None when another rank holds its expert.

    `packed` says that the operand is (or becomes) NVFP4. Raises IndivisibleError with the numbers, TooManyRanksError.
    """
    if weight.expert is not None and weight.expert not in mesh.experts(experts):
        return None
    return cut_slice(weight, mesh, packed=packed)


def cut_slice(weight: Weight, mesh: Mesh, *, packed: bool) -> Slice:
    """As `weight_slice`, of a weight that is here: the same for all weights of one `Spec`."""
    cut = weight.cut
    if weight.expert is not None:
        size, rank = mesh.expert_tp, mesh.expert_tp_rank
    elif cut.vocabulary:
        divided = mesh.vocab == "split" or (mesh.vocab == "head" and weight.role == "lm_head")
        size, rank = (mesh.tp, mesh.tp_rank) if divided else (1, 0)
    else:
        size, rank = mesh.tp, mesh.tp_rank
    summed = cut.axis == 1 and (size > 1 or (weight.expert is not None and mesh.world > 1))
    if cut.axis is None or size == 1:
        return Slice(cut.rule, all_reduce=summed)
    if cut.parts % size:
        raise IndivisibleError(f"{weight.name}: {cut.parts} {cut.what} do not divide among {size} ranks")
    width = cut.parts // size * cut.unit
    if packed and cut.axis == 1 and width % BLOCK:
        raise IndivisibleError(
            f"{weight.name}: {cut.parts * cut.unit} columns among {size} ranks are {width} each, "
            f"no multiple of the {BLOCK}-column blocks of NVFP4"
        )
    return Slice(cut.rule, cut.axis, rank * width, (rank + 1) * width, summed)


class Cutter:
    """`weight_slice` for many weights of one mesh, each kind of weight worked out once."""

    def __init__(self, mesh: Mesh, experts: int) -> None:
        self.mesh, self.local = mesh, mesh.experts(experts)
        self._cuts: dict[tuple[int, bool], Slice] = {}

    def of(self, item: Stored) -> Slice | None:
        """Raises for a weight that cannot be cut, also when it is another rank's."""
        weight = item.weight
        packed = item.form == "NVFP4" or weight.quantised
        key = (id(weight.spec), packed)
        cut = self._cuts.get(key)
        if cut is None:
            cut = self._cuts[key] = cut_slice(weight, self.mesh, packed=packed)
        return None if weight.expert is not None and weight.expert not in self.local else cut


def component_slice(whole: Slice, component: str) -> Slice:
    """The part of one stored tensor of a weight: codes hold two columns a byte, scales a block, scalars all."""
    if whole.axis is None:
        return whole
    if component in ("weight_scale_2", "input_scale"):
        return Slice(whole.rule, all_reduce=whole.all_reduce)
    if whole.axis == 0 or component == "value":
        return whole
    per = {"codes": 2, "weight_scale": BLOCK}[component]
    return Slice(whole.rule, 1, whole.start // per, whole.stop // per, whole.all_reduce)


def plan(stored: Iterable[Stored], mesh: Mesh, experts: int) -> dict[str, Slice | None]:
    """{checkpoint tensor name: its Slice on this rank, or None}, for every tensor of a matched checkpoint."""
    cutter = Cutter(mesh, experts)
    out: dict[str, Slice | None] = {}
    for item in stored:
        whole = cutter.of(item)
        for component, name in item.names().items():
            out[name] = None if whole is None else component_slice(whole, component)
    return out


def check(stored: Iterable[Stored], mesh: Mesh, experts: int) -> None:
    """Raises as `weight_slice` does for the first weight that cannot be cut, whatever rank holds it."""
    cutter = Cutter(mesh, experts)
    for item in stored:
        cutter.of(item)
