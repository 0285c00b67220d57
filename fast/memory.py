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
from torch import Tensor

from fast import reader
from fast.binding import Section, bind_plan, packing
from fast.config import Config, TextConfig
from fast.errors import DoesNotFitError, HardwareError
from fast.layout import match
from fast.ledger import Ledger
from fast.sharding import Mesh, component_slice
from fast.shards import TensorInfo
from fast.strictjson import Section as Keys
from fast.strictjson import decode, read_small

GIB = 1 << 30
SCORE_TILE = 64 << 20
"""Bytes of indexer scores alive at a time: they are made in tiles of rows, whatever the context."""

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
    keys = Keys(decode(read_small(Path(name)), name), name)
    visible, free = (int(keys.positive(key) * GIB) for key in ("visible_gib", "free_gib"))
    if free > visible:
        raise HardwareError(f"{name}: free_gib exceeds visible_gib")
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


def workspace_layout(
    config: Config, mesh: Mesh, rows: int, context: int, gate_rank: int, *, logit_rows: int
) -> dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """{kind: {buffer: (dtype, shape)}} for calls of at most `rows` tokens. One set serves all layers of its kind; the
    rows of routed experts are at worst all on this rank."""
    c = config.text
    b, f, i = torch.bfloat16, torch.float32, torch.int32
    D, C, E, k = c.hidden_size, c.hc_mult, c.n_routed_experts, c.num_experts_per_tok
    Hk, dk = c.linear_num_heads // mesh.tp, c.linear_head_dim
    H, L, h, p = c.num_attention_heads // mesh.tp, c.kv_lora_rank, c.index_n_heads, c.index_head_dim
    F, S = c.intermediate_size // mesh.tp, c.shared_intermediate_size // mesh.tp
    wide = c.moe_intermediate_size // mesh.expert_tp
    pools = max(1, context // c.index_kpool)
    tile = max(1, min(rows, SCORE_TILE // (4 * pools)))
    width = c.index_topk + c.index_kpool - 1
    layout: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {
        "stack": {
            "streams": (b, (2, rows, C, D)),
            "mix": (f, (rows, c.hc_rows)),
            "x": (b, (rows, D)),
            "out": (f, (rows, D)),
        },
        "KDA": {
            "raw": (b, (rows, 3 * Hk * dk)),
            "qkv": (b, (rows, 3 * Hk * dk)),
            "low": (b, (rows, 2 * gate_rank)),
            "decay": (f, (rows, Hk, dk)),
            "beta": (f, (rows, Hk)),
            "gate": (b, (rows, Hk * dk)),
            "core": (b, (rows, Hk * dk)),
        },
        "DSA": {
            "q_resid": (b, (rows, c.q_lora_rank)),
            "latent": (b, (rows, L)),
            "q": (b, (rows, H * c.qk_head_dim)),
            "absorbed": (b, (rows, H, L)),
            "context": (b, (rows, H, L)),
            "core": (b, (rows, H * c.v_head_dim)),
            "index q": (b, (rows, h, p)),
            "index k": (b, (rows, 2, p)),
            "index weights": (f, (rows, h)),
            "scores": (f, (tile, pools)),
            "selected": (i, (rows, width)),
        },
        "dense": {"gate_up": (b, (rows, 2 * F)), "product": (b, (rows, F))} if c.first_k_dense_replace else {},
        "MoE": {
            "router": (f, (2, rows, E)),
            "chosen": (i, (rows, k)),
            "chosen weights": (f, (rows, k)),
            "gathered": (b, (rows * k, D)),
            "gate_up": (b, (rows * k, 2 * wide)),
            "product": (b, (rows * k, wide)),
            "routed": (f, (rows, D)),
            "shared gate_up": (b, (rows, 2 * S)),
            "shared product": (b, (rows, S)),
        },
        "head": {"logits": (f, (logit_rows, c.vocab_size // (mesh.tp if mesh.vocab != "replicated" else 1)))},
    }
    return {kind: buffers for kind, buffers in layout.items() if buffers}


class Workspaces:
    """The buffers of `workspace_layout` in memory, one allocation per kind, entered in the ledger."""

    def __init__(
        self,
        layout: Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]],
        device: str | torch.device,
        ledger: Ledger,
    ) -> None:
        self._views: dict[tuple[str, str], Tensor] = {}
        for kind, buffers in layout.items():
            offsets, size = {}, 0
            for name, (dtype, shape) in buffers.items():
                offsets[name] = size
                size += _aligned(dtype.itemsize * math.prod(shape))
            flat = torch.empty(size, dtype=torch.uint8, device=device)
            ledger.charge(f"workspace {kind}", kind, "workspace", size)
            for name, (dtype, shape) in buffers.items():
                n = dtype.itemsize * math.prod(shape)
                self._views[kind, name] = flat[offsets[name] : offsets[name] + n].view(dtype).view(shape)

    def get(self, kind: str, name: str, rows: int) -> Tensor:
        """The first `rows` rows of a buffer. Raises DoesNotFitError when more are asked for than were planned."""
        view = self._views[kind, name]
        if rows > view.shape[0]:
            raise DoesNotFitError(f"workspace {kind} {name}: {rows} rows, planned for {view.shape[0]}")
        return view[:rows]


def workspace_bytes(layout: Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]) -> dict[str, int]:
    return {
        kind: sum(_aligned(dtype.itemsize * math.prod(shape)) for dtype, shape in buffers.values())
        for kind, buffers in layout.items()
    }


def _aligned(n: int) -> int:
    return -(-n // 256) * 256


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
    """Everything one rank holds while loading and while serving one sequence of `context` tokens."""
    weights = weights_plan(config, tensors, mesh, mtp=mtp, vision=vision, on_host=False)
    loading = weights.peak if machine.unified else weights.peak_device

    def scratch(n: int) -> dict[str, int]:
        rows = max(min(prefill_rows, n), drafts + 1)
        return workspace_bytes(workspace_layout(config, mesh, rows, n, gate_rank, logit_rows=logit_rows or rows))

    def serving(n: int) -> int:
        state = state_bytes(config, mesh, n, drafts=drafts, mtp=mtp)
        return weights.resident + sum(scratch(n).values()) + sum(state.values())

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
        state=state_bytes(config, mesh, context, drafts=drafts, mtp=mtp),
        workspaces=scratch(context),
        serving=serving(context),
        peak=peak,
        headroom=machine.free - peak,
        max_context=longest,
    )
