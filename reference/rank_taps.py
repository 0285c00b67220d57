"""From the taps and states of all ranks to those of the whole model, and back (model.md section 5, `sharding.Mesh`).

A tap follows the tensors that make it (rules as in `reference.sharding`):

    heads       attn.q .k .v .g .core [.., T, H, d], attn.beta [.., T, H], attn.state [.., H, d, d]: rank r of a TP
                group holds the r-th range of H/tp heads, as it does of channel, query and key-value rows
    channels    attn.conv_state [.., K-1, 3*H*d]: the same heads' channels of q, then of k, then of v
    sum         routed.out: a partial sum on every rank; shared.out: one on every rank of the first TP group, no tap
                on the others
    replicated  everything else, attn.out and mlp.out (after the all-reduce) included: the same bits on every rank

TP groups after the first repeat the mixers of the first, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from reference.errors import InputError
from reference.sharding import Mesh
from reference.state import DsaState, KdaState

HEAD_AXIS = {
    **{f"attn.{name}": -2 for name in ("q", "k", "v", "g", "core")},
    "attn.beta": -1,
    "attn.state": -3,
}
AXES = {"attn.beta": 2} | {f"attn.{name}": 3 for name in ("q", "k", "v", "g", "core", "state")}
"""The least number of axes of a tap that joins by heads."""
CHANNELS = "attn.conv_state"
SUMS = ("routed.out", "shared.out")


class RankDisagreementError(InputError):
    """Two ranks hold different bits of what both must hold."""


class RankShapeError(InputError):
    """The parts of one tap do not join: by their shapes, by their dtypes, or because some rank has none."""


def rule_of(name: str) -> str:
    """ "heads", "channels", "sum" or "replicated" for a tap, with or without `layers.i.` or `mtp.` before it."""
    leaf = _leaf(name)
    if leaf in HEAD_AXIS:
        return "heads"
    return "channels" if leaf == CHANNELS else "sum" if leaf in SUMS else "replicated"


def ranks_with(name: str, mesh: Mesh) -> range:
    """The ranks that have this tap."""
    return range(mesh.tp if _leaf(name) == "shared.out" else mesh.world)


def join(name: str, found: Sequence[np.ndarray | None], mesh: Mesh) -> np.ndarray:
    """The whole tap from what ranks 0, 1, .. have of it; the dtype stays, sums are float64 and taken in rank order.

    None stands for no such tap; ranks that `ranks_with` does not name are not looked at. Only the sizes of `mesh`
    matter. Raises `RankShapeError`, `RankDisagreementError`.
    """
    if len(found) != mesh.world:
        raise RankShapeError(f"{name}: {len(found)} ranks, expected {mesh.world} of tp {mesh.tp}, ep {mesh.ep}")
    parts = []
    for rank in ranks_with(name, mesh):
        part = found[rank]
        if part is None:
            raise RankShapeError(f"{name}: absent on rank {rank}")
        parts.append(np.asarray(part))
    for rank, part in enumerate(parts):
        if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
            raise RankShapeError(
                f"{name}: {part.dtype} {list(part.shape)} on rank {rank}, {parts[0].dtype} {list(parts[0].shape)} on 0"
            )
    rule, leaf, shape = rule_of(name), _leaf(name), parts[0].shape
    if len(shape) < AXES.get(leaf, 0):
        raise RankShapeError(f"{name}: {list(shape)} on every rank, expected {AXES[leaf]} axes, one of them heads")
    if rule == "channels" and (len(shape) < 2 or shape[-1] % 3):
        raise RankShapeError(f"{name}: {list(shape)} on every rank, expected a last axis of as many q, k and v")
    if rule == "sum":
        if parts[0].dtype.kind not in "fV":
            raise RankShapeError(f"{name}: {parts[0].dtype} on every rank, expected floating point to add")
        out = parts[0].astype(np.float64)
        for part in parts[1:]:
            out = out + part.astype(np.float64)
        return out
    distinct = 1 if rule == "replicated" else mesh.tp
    for rank in range(distinct, mesh.world):
        agree(name, parts[rank % distinct], parts[rank], rank % distinct, rank)
    if rule == "replicated" or mesh.tp == 1:
        return parts[0]
    if rule == "heads":
        return np.concatenate(parts[: mesh.tp], axis=HEAD_AXIS[leaf])
    return join_channels(parts[: mesh.tp])


def agree(name: str, one: np.ndarray, other: np.ndarray, rank: int, other_rank: int) -> None:
    """Raises `RankDisagreementError`, with the first place, unless both hold the same bits."""
    if one.shape == other.shape and one.tobytes() == other.tobytes():
        return
    where = ""
    if one.shape == other.shape:
        width = one.dtype.itemsize
        bits = [np.frombuffer(x.tobytes(), np.uint8).reshape(-1, width) for x in (one, other)]
        flat = int(np.flatnonzero((bits[0] != bits[1]).any(axis=1))[0])
        at = tuple(int(i) for i in np.unravel_index(flat, one.shape))
        where = f" at {list(at)}: {one[at]} and {other[at]}"
    raise RankDisagreementError(f"{name}: ranks {rank} and {other_rank} differ{where}")


def join_channels(parts: Sequence[np.ndarray]) -> np.ndarray:
    """[.., K-1, 3*n] per rank -> [.., K-1, 3*n*tp]: all of q, then all of k, then all of v."""
    split = [part.reshape(*part.shape[:-1], 3, part.shape[-1] // 3) for part in parts]
    joined = np.concatenate(split, axis=-1)
    return joined.reshape(*joined.shape[:-2], 3 * joined.shape[-1])


def state_part(state: KdaState | DsaState, mesh: Mesh) -> KdaState | DsaState:
    """What `mesh.rank` remembers of a layer: the matrices and conv inputs of its heads, all of a DSA layer."""
    if isinstance(state, DsaState):
        return DsaState(**vars(state))
    part, parts = mesh.place(routed=False)
    H = state.matrix.shape[-3]
    heads = slice(part * H // parts, (part + 1) * H // parts)
    conv = state.conv.reshape(*state.conv.shape[:-1], 3, H, -1)[..., heads, :]
    return KdaState(state.matrix[..., heads, :, :], conv.reshape(*state.conv.shape[:-1], -1), state.length)


def join_state(name: str, states: Sequence[KdaState | DsaState], mesh: Mesh) -> KdaState | DsaState:
    """The layer's state from those of all ranks. `name`: the layer, for messages. Raises `RankDisagreementError`."""
    first = states[0]
    for rank, state in enumerate(states):
        if state.length != first.length:
            raise RankDisagreementError(f"{name}: {state.length} tokens on rank {rank}, {first.length} on rank 0")
    if isinstance(first, KdaState):
        matrix = join(f"{name}.attn.state", [state.matrix for state in states if isinstance(state, KdaState)], mesh)
        conv = join(f"{name}.attn.conv_state", [state.conv for state in states if isinstance(state, KdaState)], mesh)
        return KdaState(matrix, conv, first.length)
    for item, value in vars(first).items():
        if isinstance(value, np.ndarray):
            for rank, state in enumerate(states):
                agree(f"{name}.{item}", value, getattr(state, item), 0, rank)
    return first


def _leaf(name: str) -> str:
    return re.sub(r"^(layers\.\d+|mtp)\.", "", name)
