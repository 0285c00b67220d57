"""What a rank needs in memory, from shapes alone, and the scratch it shares between layers.

`weights_plan` walks the same sections as the loader, so after a real load the ledger equals it to the byte: slabs by
role, alignment, the peak with its staging. `plan` adds recurrent state, caches and workspaces and compares the sum with
a machine.

Caches are counted by DSA layers: a layer's slot is its ordinal among them (`TextConfig.kv_slot`), the MTP block owns a
cache of its own. Workspaces are one per kind of layer, not one per layer, as large as the larger of a prefill window
and a verification needs; they are taken before the cache is sized.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fast import decoder, reader
from fast.binding import Section, bind_plan, packing
from fast.config import Config, TextConfig
from fast.errors import HardwareError
from fast.layout import match
from fast.ledger import Ledger
from fast.scratch import Arena, aligned
from fast.sharding import Mesh, component_slice
from fast.shards import TensorInfo
from fast.strictjson import Section as Keys
from fast.strictjson import decode, naming, read_small

GIB = 1 << 30
TEMPORARIES = 512 << 20
"""Bound on what one op holds besides its results, whatever the rows and the context: all work in tiles."""

VERIFY_ROWS = 8
STORAGE = 2


@dataclass(frozen=True, slots=True)
class Hardware:
    name: str
    visible: int
    free: int
    unified: bool


HARDWARE = {
    "gb10": Hardware("gb10", int(121.7 * GIB), 102 * GIB, unified=True),
    "h200": Hardware("h200", 139 * GIB, 138 * GIB, unified=False),
}


def hardware(name: str) -> Hardware:
    """A known machine, or a JSON file {"name", "visible_gib", "free_gib", "unified"}. Raises HardwareError and what
    `strictjson` raises."""
    if name.lower() in HARDWARE:
        return HARDWARE[name.lower()]
    if not Path(name).is_file():
        raise HardwareError(f"hardware {name!r}: expected {', '.join(HARDWARE)} or a JSON file")
    data = read_small(Path(name))
    with naming(Path(name)):
        keys = Keys(decode(data), "")
        visible, free = (int(keys.positive(key) * GIB) for key in ("visible_gib", "free_gib"))
        if free > visible:
            raise HardwareError("free_gib exceeds visible_gib")
        return Hardware(str(keys.need("name")), visible, free, keys.flag("unified"))


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    """One rank's weights. `roles` are operand bytes; with `alignment` they make the slabs, `resident`."""

    roles: dict[str, int]
    alignment: int
    resident: int
    tensors: int
    bytes_read: int
    staging: int
    """Largest host working set of one conversion."""
    deferred: int
    """Bytes that this rank's part of the BF16 experts would take; they are quantised on their way, never resident."""
    peak: int
    peak_device: int
    peak_host: int


def weights_plan(
    config: Config, tensors: Mapping[str, TensorInfo], mesh: Mesh, *, mtp: bool, vision: bool, on_host: bool = True
) -> WeightsPlan:
    """From headers (or `layout.export_tensors`) to bytes. `on_host` says that the device is the host, as on a CPU."""
    sections = bind_plan(config, match(config, tensors), mesh, mtp=mtp, vision=vision)
    packed = packing(sections)
    roles: Counter[str] = Counter()
    count = 0
    for section in sections:
        for b in section.bindings:
            roles[b.role] += sum(b.nbytes(component) for component in b.parts)
            count += len(b.parts)
    device = sum(packed.slabs)
    window = reader.window(tensors)
    peak = peak_host = window
    for section, reached in zip(sections, packed.section_slabs, strict=True):
        staged = max((b.staging(on_host=on_host) for b in section.bindings), default=0)
        peak_host = max(peak_host, window + staged)
        peak = max(peak, window + staged + sum(packed.slabs[:reached]))
    made = [b for section in sections for b in section.bindings]
    return WeightsPlan(
        roles=dict(roles),
        alignment=device - sum(roles.values()),
        resident=device,
        tensors=count,
        bytes_read=sum(_bytes_read(section, tensors) for section in sections),
        staging=max((b.staging(on_host=on_host) for b in made), default=0),
        deferred=sum(2 * math.prod(b.cut.shape(b.stored.weight.shape)) for b in made if b.action == "quantise"),
        peak=peak,
        peak_device=device,
        peak_host=peak_host,
    )


def _bytes_read(section: Section, tensors: Mapping[str, TensorInfo]) -> int:
    """What the reader passes over: the rank's rows, or whole rows where it needs some columns of each, or a whole
    projection where its scale_2 is to be found."""
    total = 0
    for b in section.bindings:
        for component, name in b.stored.names().items():
            info = tensors[name]
            cut = component_slice(b.cut, component)
            if component == "input_scale":
                continue
            if cut.axis == 0 and b.action != "quantise":
                total += info.nbytes * (cut.stop - cut.start) // info.shape[0]
            else:
                total += info.nbytes
    return total


def state_bytes(config: Config, mesh: Mesh, context: int, *, drafts: int = 0, mtp: bool = False) -> dict[str, int]:
    """Recurrent state and caches of one sequence. With drafts a KDA layer also keeps its entry state and the inputs of
    the rows under verification, from which a rejection is replayed."""
    c = config.text
    H, d, n = c.linear_num_heads // mesh.tp, c.linear_head_dim, c.short_conv_kernel_size
    matrix, history = 4 * H * d * d, STORAGE * (n - 1) * 3 * H * d
    rows = drafts + 1 if drafts else 0
    replay = rows * (4 * (3 * H * d + H) + history) + (matrix + history if drafts else 0)
    latent, pools, tails = cache_bytes(c, context)
    indexed = sum(kind == "full" for kind in c.indexer_types)
    out = {
        "KDA state": len(c.kda_layers) * matrix,
        "KDA convolution": len(c.kda_layers) * history,
        "KDA replay": len(c.kda_layers) * replay,
        "latent cache": len(kv_slots(c)) * latent,
        "pool keys": indexed * pools,
        "index tails": indexed * tails,
    }
    if mtp:
        out["MTP cache"] = latent + pools + tails
    return {name: n for name, n in out.items() if n}


def kv_slots(c: TextConfig) -> dict[int, int]:
    """{DSA layer: its slot in the cache}."""
    return {layer: c.kv_slot(layer) for layer in c.full_attn_layers}


def cache_bytes(c: TextConfig, context: int) -> tuple[int, int, int]:
    """(latents, pool keys, keys and gates of recent tokens) of one DSA layer, replicated on every rank."""
    slots = c.index_kpool
    ring = slots * math.ceil((slots + VERIFY_ROWS) / slots)
    p = c.index_head_dim
    return STORAGE * context * c.kv_lora_rank, STORAGE * (context // slots) * p, 2 * STORAGE * ring * p


@dataclass(frozen=True, slots=True)
class Buffer:
    """An intermediate result of a layer; `passing` ones make room again for what comes after them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    passing: bool = False

    @property
    def nbytes(self) -> int:
        return aligned(self.dtype.itemsize * math.prod(self.shape))


Layout = dict[str, dict[str, Buffer]]


def workspace_layout(
    config: Config, mesh: Mesh, rows: int, gate_rank: int, *, mtp: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Layout:
    """{kind: {buffer}} of calls of at most `rows` tokens, in the order in which a layer makes them.

    One set serves all layers of its kind. The rows of one expert are at worst all rows.
    """
    c = config.text
    b, f = dtype, torch.float32
    D, C, k = c.hidden_size, c.hc_mult, c.num_experts_per_tok
    H, wide = c.linear_num_heads // mesh.tp, c.linear_num_heads // mesh.tp * c.linear_head_dim
    heads, p = c.num_attention_heads // mesh.tp, c.index_head_dim
    F, S = c.intermediate_size // mesh.tp, c.shared_intermediate_size // mesh.tp
    per_expert = c.moe_intermediate_size // mesh.expert_tp
    mixed, whole, routed = (b if n == 1 else f for n in (mesh.tp, mesh.world, mesh.expert_tp))

    def of(dtype: torch.dtype, *width: int, passing: bool = False) -> Buffer:
        return Buffer(dtype, (rows, *width), passing)

    entry, leave = {"collapsed": of(b, D), "x": of(b, D)}, {"mixed": of(b, C, D)}
    layout = {
        "stack": {"streams": of(b, C, D)},
        "KDA": {
            **entry,
            "raw": of(b, 3 * wide),
            "projection": of(b, wide, passing=True),
            "qkv": of(b, 3 * wide),
            "f low": of(b, gate_rank),
            "f": of(b, wide),
            "decay": of(f, wide),
            "beta": of(b, H),
            "k": of(f, wide),
            "v": of(f, wide),
            "q": of(f, wide),
            "unit q": of(f, wide, passing=True),
            "sums": of(f, wide),
            "core": of(b, wide),
            "g low": of(b, gate_rank),
            "g": of(b, wide),
            "gated": of(b, wide),
            "out": of(mixed, D),
            **leave,
        },
        "DSA": {
            **entry,
            "q_a": of(b, c.q_lora_rank),
            "q_resid": of(b, c.q_lora_rank),
            "kv_a": of(b, c.kv_lora_rank),
            "latent": of(b, c.kv_lora_rank),
            "index key": of(b, p),
            "index gate": of(b, p),
            "index q": of(b, c.index_n_heads * p),
            "index weights": of(b, c.index_n_heads),
            "q": of(b, heads * c.qk_head_dim),
            "core": of(b, heads, c.v_head_dim),
            "out": of(mixed, D),
            **leave,
        },
        "dense": {**entry, "gate": of(b, F), "up": of(b, F), "product": of(b, F), "out": of(mixed, D), **leave},
        "MoE": {
            **entry,
            "contributions": Buffer(routed, (rows * k, D)),
            "expert": of(
                torch.uint8,
                sum(n * t.itemsize for n, t in ((D, b), *((per_expert, b),) * 3, (D, routed))),
                passing=True,
            ),
            "routed": of(f, D),
            **(
                {"shared gate": of(b, S), "shared up": of(b, S), "shared product": of(b, S), "shared": of(whole, D)}
                if mesh.adds_shared
                else {}
            ),
            **leave,
        },
    }
    sparse = c.num_hidden_layers > c.first_k_dense_replace
    there = {"KDA": c.kda_layers, "DSA": c.full_attn_layers or mtp, "dense": c.first_k_dense_replace}
    there["MoE"] = sparse or mtp
    return {kind: buffers for kind, buffers in layout.items() if there.get(kind, True)}


def workspace_bytes(layout: Layout) -> dict[str, int]:
    """What each kind needs at most at a time."""
    out = {}
    for kind, buffers in layout.items():
        used = most = 0
        for buffer in buffers.values():
            most = max(most, used + buffer.nbytes)
            used += 0 if buffer.passing else buffer.nbytes
        out[kind] = most
    return out


def workspaces(layout: Layout, device: str | torch.device, ledger: Ledger) -> tuple[dict[str, Arena], list[int]]:
    """One allocation per kind, and their tickets in the ledger."""
    arenas, tickets = {}, []
    for kind, size in workspace_bytes(layout).items():
        arenas[kind] = Arena(kind, size, device)
        tickets.append(ledger.charge(f"workspace {kind}", kind, "workspace", size))
    return arenas, tickets


@dataclass(frozen=True, slots=True)
class Plan:
    mesh: Mesh
    context: int
    hardware: Hardware
    weights: WeightsPlan
    state: dict[str, int]
    workspaces: dict[str, int]
    serving: int
    """Weights, state, caches and workspaces together."""
    peak: int
    """The larger of serving and the peak while loading, in the memory the hardware counts."""
    headroom: int
    max_context: int
    """The longest context, up to the model's own, with which everything fits; 0 when nothing does."""

    @property
    def fits(self) -> bool:
        return self.headroom >= 0

    def as_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self))) | {"fits": self.fits}


def plan(
    config: Config,
    tensors: Mapping[str, TensorInfo],
    mesh: Mesh,
    machine: Hardware,
    *,
    gate_rank: int,
    context: int,
    drafts: int = 0,
    mtp: bool = False,
    vision: bool = False,
    prefill_rows: int = 2048,
    logit_rows: int | None = None,
) -> Plan:
    """Everything one rank holds while loading and while serving one sequence of `context` tokens.

    Where the kernels of calls of few tokens cover the geometry (`fast.decoder`, one rank), the caches are theirs and
    their steps count as a workspace.
    """
    weights = weights_plan(config, tensors, mesh, mtp=mtp, vision=vision, on_host=False)
    loading = weights.peak if machine.unified else weights.peak_device

    text = config.text
    kernels = mesh.world == 1 and decoder.unsupported_config(text, {gate_rank} if text.kda_layers else set()) is None

    def state(n: int) -> dict[str, int]:
        found = state_bytes(config, mesh, n, drafts=drafts, mtp=mtp)
        if kernels:
            found |= state_bytes(config, mesh, decoder.room_for(text, n), drafts=drafts)
        return found

    def scratch(n: int) -> dict[str, int]:
        rows = max(min(prefill_rows, n), drafts + 1)
        shared = workspace_bytes(workspace_layout(config, mesh, rows, gate_rank, mtp=mtp))
        vocabulary = config.text.vocab_size // (1 if mesh.vocab == "replicated" else mesh.tp)
        if kernels:
            shared["decode steps"] = decoder.step_bytes(text, decoder.room_for(text, n))
        return shared | {"logits": 4 * (logit_rows or rows) * vocabulary, "temporaries": TEMPORARIES}

    def serving(n: int) -> int:
        return weights.resident + sum(scratch(n).values()) + sum(state(n).values())

    longest, step = 0, 1 << config.text.max_position_embeddings.bit_length()
    while step := step // 2:
        n = longest + step
        if n <= config.text.max_position_embeddings and max(serving(n), loading) <= machine.free:
            longest = n
    peak = max(serving(context), loading)
    return Plan(
        mesh=mesh,
        context=context,
        hardware=machine,
        weights=weights,
        state=state(context),
        workspaces=scratch(context),
        serving=serving(context),
        peak=peak,
        headroom=machine.free - peak,
        max_context=longest,
    )
