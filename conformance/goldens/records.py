"""Lines of text: which part of a tensor a rank holds, what a config is refused for, what a checkpoint's bytes are."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from conformance.checkpoints import geometry
from conformance.checkpoints.configs import config_json
from conformance.goldens.case import Case, Made, Workspace
from reference import config as configs
from reference.errors import InputError
from reference.layout import TensorSpec, tensors
from reference.sharding import Mesh, Part, part_of

SEED = 7
EXPORTS = ("nvidia", "libertai")
STORED_MESHES = {"tiny": ((1, 1), (2, 1), (1, 2), (4, 4), (2, 4)), "odd": ((1, 1), (2, 1), (1, 3), (3, 3))}
REAL_RANKS = (Mesh(4, 4, 3), Mesh(2, 8, 5))


def _specs(name: str, export: str) -> tuple[configs.ModelConfig, list[TensorSpec]]:
    chosen = geometry(name)
    parsed = configs.parse(json.loads(config_json(chosen.config, export)))
    return parsed, list(tensors(parsed, export, chosen.gate_rank))


def _describe(part: Part | None) -> str:
    if part is None:
        return "on another rank"
    where = "whole" if part.axis is None else f"axis {part.axis} {part.start}:{part.stop}"
    return f"{part.rule}, {where}" + (f", summed over {','.join(map(str, part.reduced))}" if part.reduced else "")


def plan_lines(specs: Iterable[TensorSpec], text: configs.TextConfig, meshes: Iterable[Mesh]) -> Iterator[str]:
    """One line per rank and tensor; runs of layers and experts that read the same become one line."""
    specs = sorted(specs, key=lambda spec: (spec.role, spec.layer or 0, spec.expert or 0))
    for mesh in meshes:
        before = first = last = ""
        for spec in specs:
            try:
                what = _describe(part_of(spec, text, mesh))
            except InputError as error:
                what = f"{type(error).__name__}: {re.sub(r'[.][0-9]+[.]', '.N.', str(error))}"
            line = f"tp {mesh.tp} ep {mesh.ep} rank {mesh.rank}: {spec.role} {spec.dtype} {list(spec.shape)}: {what}"
            if line != before:
                if before:
                    yield f"{before} [{first} .. {last}]"
                before, first = line, _place(spec)
            last = _place(spec)
        yield f"{before} [{first} .. {last}]"


def _place(spec: TensorSpec) -> str:
    return "/".join(str(n) for n in (spec.layer, spec.expert) if n is not None) or "global"


def _all_ranks(meshes: Iterable[tuple[int, int]]) -> tuple[Mesh, ...]:
    return tuple(Mesh(tp, ep, rank) for tp, ep in meshes for rank in range(max(tp, ep)))


def _plans(name: str, export: str, meshes: tuple[Mesh, ...]) -> Callable[[Workspace], Made]:
    def build(workspace: Workspace) -> Made:
        parsed, specs = _specs(name, export)
        return Made(lines=tuple(plan_lines(specs, parsed.text, meshes)))

    return build


Edit = Callable[[dict[str, Any]], None]


def _put(path: str, value: Any) -> Edit:
    """Set (or with `...` remove) the key at a dotted path."""

    def edit(raw: dict[str, Any]) -> None:
        *parents, key = path.split(".")
        place: Any = raw
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list) else place[parent]
        if value is ...:
            del place[key]
        elif isinstance(place, list):
            place[int(key)] = value
        else:
            place[key] = value

    return edit


TEXT_KEYS = "text_config."
LINEAR = "text_config.linear_attn_config."
REFUSED: tuple[tuple[str, Any], ...] = (
    *(
        (TEXT_KEYS + key, ...)
        for key in ("hidden_size", "index_kpool", "index_topk", "swiglu_limit", "hc_mult", "hc_eps")
    ),
    *((TEXT_KEYS + key, ...) for key in ("rms_norm_eps", "n_group", "routed_scaling_factor", "num_hidden_layers")),
    (LINEAR + "gate_lower_bound", ...),
    (LINEAR + "kda_layers", ...),
    ("text_config", ...),
    ("model_type", "glm4_moe"),
    (TEXT_KEYS + "scoring_func", "softmax"),
    (TEXT_KEYS + "topk_method", "greedy"),
    (TEXT_KEYS + "hidden_act", "gelu"),
    (TEXT_KEYS + "mhc", False),
    (TEXT_KEYS + "mla_use_nope", False),
    (TEXT_KEYS + "index_kpool_compress", False),
    (TEXT_KEYS + "hidden_size", "4096"),
    (TEXT_KEYS + "hidden_size", 0),
    (TEXT_KEYS + "hidden_size", -1),
    (TEXT_KEYS + "hidden_size", 128.0),
    (TEXT_KEYS + "hc_eps", -1e-6),
    (TEXT_KEYS + "num_experts_per_tok", 17),
    (TEXT_KEYS + "index_topk", 30),
    (TEXT_KEYS + "indexer_types.3", "half"),
    (TEXT_KEYS + "layer_types.3", "linear_attention"),
    (TEXT_KEYS + "layer_types.4", "sliding_attention"),
    (TEXT_KEYS + "mlp_layer_types.2", "sparse"),
    (LINEAR + "kda_layers", [0, 1, 2, 3, 4, 5, 6, 8]),
    (LINEAR + "kda_layers", [0, 1, 2, 4, 5, 6]),
    (LINEAR + "full_attn_layers", [3, 9]),
    (LINEAR + "full_attn_layers", [4, 8]),
    ("quantization_config.quant_algo", "FP8"),
    ("quantization_config.config_groups.group_0.weights.group_size", 32),
    ("tie_word_embeddings", True),
)


def refusals(workspace: Workspace) -> Made:
    """Per change to the tiny config: the class and the message, or that it is taken, and with what left unread."""
    lines = []
    for export in EXPORTS:
        sound = json.loads(config_json(geometry("tiny").config, export))
        for path, value in REFUSED:
            raw = copy.deepcopy(sound)
            _put(path, value)(raw)
            what = "removed" if value is ... else f"= {json.dumps(value)}"
            lines.append(f"{export}: {path} {what}: {_verdict(raw)}")
    return Made(lines=tuple(lines))


def _verdict(raw: dict[str, Any]) -> str:
    try:
        parsed = configs.parse(raw)
    except InputError as error:
        return f"{type(error).__name__}: {error}"
    return f"accepted, unread {list(parsed.unread)}"


def checkpoint_files(workspace: Workspace) -> Made:
    """sha256 and name of every file of the synthetic checkpoints that the traces are made from."""
    lines = []
    for name in ("tiny", "odd"):
        for export in EXPORTS:
            for path in sorted(workspace.checkpoint(name, export, SEED).iterdir()):
                lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name} {export} {path.name}")
    return Made(lines=tuple(lines))


def cases() -> list[Case]:
    found = [
        Case("config-refusals", refusals, ".txt", 0, {"what": "configs and what they are refused for"}, computed=False),
        Case("checkpoint-files", checkpoint_files, ".txt", SEED, {"what": "sha256 of every synthetic checkpoint file"}),
    ]
    plans = [(name, _all_ranks(meshes), ".txt") for name, meshes in STORED_MESHES.items()]
    for name, ranks, suffix in (*plans, ("full", REAL_RANKS, "")):
        for export in EXPORTS:
            settings = {
                "geometry": name,
                "export": export,
                "tp, ep, rank": [[mesh.tp, mesh.ep, mesh.rank] for mesh in ranks],
            }
            build = _plans(name, export, ranks)
            found.append(Case(f"plan-{name}-{export}", build, suffix, 0, settings, computed=False))
    return found
