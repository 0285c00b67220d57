"""Traces of single ranks: a folder of them, and the one trace of the whole model that they make.

A rank's trace is an ordinary trace whose metadata also hold `rank` (0, 1, ..; `tp` and `ep` say how many there are) and
whose taps are what that rank held: its heads, its partial sums. How taps join follows from the plan
(`reference.rank_taps`). What ranks should hold alike and do not is kept in the joined trace, under the metadata key
`rank_disagreements`, as an object of tap -> what differs; the judge reports each as a failure of that tap.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from conformance.errors import RankTraceError
from conformance.trace import PARTIAL_SUMS, REQUIRED_METADATA, Trace
from reference.errors import MeshError
from reference.rank_taps import RankDisagreementError, RankShapeError, join, ranks_with
from reference.sharding import Mesh

KEY = "rank_disagreements"
SUFFIXES = (".trace", ".safetensors")
COMMON = (*(key for key in REQUIRED_METADATA if key != "checkpoint"), PARTIAL_SUMS)
"""Metadata that are the same on all ranks. What a checkpoint's directory is called is a matter of the host."""


def load(folder: str | os.PathLike[str]) -> list[Trace]:
    """The traces in a folder, in rank order. Raises RankTraceError, and what `Trace.load` raises."""
    folder = Path(folder)
    found: dict[int, tuple[Path, Trace]] = {}
    for path in sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES):
        trace = Trace.load(path)
        text = trace.metadata.get("rank", "")
        if not re.fullmatch(r"[0-9]{1,6}", text):
            raise RankTraceError(f"{path}: metadata rank is {text!r}, expected the number of a rank")
        rank = int(text)
        if rank in found:
            raise RankTraceError(f"{path}: rank {rank}, as {found[rank][0].name} is")
        found[rank] = path, trace
    if not found:
        raise RankTraceError(f"{folder}: holds no rank trace ({' or '.join(SUFFIXES)})")
    first_path, first = found[min(found)]
    mesh = _mesh(first, str(first_path))
    if sorted(found) != list(range(mesh.world)):
        raise RankTraceError(
            f"{folder}: ranks {sorted(found)}, expected 0 to {mesh.world - 1} of tp {mesh.tp}, ep {mesh.ep}"
        )
    for path, trace in found.values():
        for key in COMMON:
            have, want = trace.metadata.get(key), first.metadata.get(key)
            if have != want:
                raise RankTraceError(f"{path}: metadata {key} is {have!r}, {want!r} in {first_path.name}")
    return [found[rank][1] for rank in range(mesh.world)]


def save(traces: Sequence[Trace], folder: str | os.PathLike[str]) -> None:
    """`rank-0.trace`, `rank-1.trace`, .. in a folder, which is made where it is missing."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for trace in traces:
        trace.save(folder / f"rank-{trace.metadata['rank']}.trace")


def joined(traces: Sequence[Trace]) -> Trace:
    """The whole model's trace, from those of all ranks in rank order.

    Where ranks differ in what they should hold alike, or lack a tap that others have, the tap of the first rank that
    has it stands, and the difference is told in the metadata.
    """
    mesh = _mesh(traces[0], "trace")
    if len(traces) != mesh.world:
        raise RankTraceError(f"{len(traces)} traces, expected {mesh.world} of tp {mesh.tp}, ep {mesh.ep}")
    names = dict.fromkeys(name for trace in traces for name in trace.taps)
    taps: dict[str, np.ndarray] = {}
    apart: dict[str, str] = {}
    for name in names:
        found = [trace.taps.get(name) for trace in traces]
        try:
            taps[name] = join(name, found, mesh)
        except RankDisagreementError as error:
            apart[name] = str(error).removeprefix(f"{name}: ")
        except RankShapeError as error:
            apart[name] = f"ranks do not join: {str(error).removeprefix(f'{name}: ')}"
        if name in apart:
            taps[name] = next(part for part in found if part is not None)
    for name in names:
        extra = [r for r in range(mesh.world) if r not in ranks_with(name, mesh) and name in traces[r].taps]
        if extra and name not in apart:
            apart[name] = f"ranks {', '.join(map(str, extra))} have a part that belongs to no sum"
    metadata = {key: value for key, value in traces[0].metadata.items() if key != "rank"}
    return Trace(metadata | ({KEY: json.dumps(apart)} if apart else {}), taps)


def disagreements(trace: Trace) -> dict[str, str]:
    """tap -> what its ranks disagree in; empty for most traces. Raises RankTraceError for any other value."""
    text = trace.metadata.get(KEY, "{}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise RankTraceError(f"metadata {KEY} is {text[:80]!r}, expected an object of strings")
    if not "".join([*found, *found.values()]).isprintable():
        raise RankTraceError(f"metadata {KEY} is {text[:80]!r}, expected printable text")
    return found


def of_path(path: Path) -> Trace:
    """A trace file, or a folder of rank traces, joined. What `disagreements` raises, it raises with the file's name.

    Raises RankTraceError for the trace of one rank of several: its heads and partial sums are not the model's.
    """
    trace = joined(load(path)) if path.is_dir() else Trace.load(path)
    world = max(int(trace.metadata["tp"]), int(trace.metadata["ep"]))
    if "rank" in trace.metadata and world > 1:
        raise RankTraceError(f"{path}: rank {trace.metadata['rank']} of {world}, expected the folder with all of them")
    try:
        disagreements(trace)
    except RankTraceError as error:
        raise RankTraceError(f"{path}: {error}") from None
    return trace


def _mesh(trace: Trace, where: str) -> Mesh:
    """Raises RankTraceError for sizes that make no mesh."""
    try:
        return Mesh(int(trace.metadata["tp"]), int(trace.metadata["ep"]))
    except MeshError as error:
        raise RankTraceError(f"{where}: {error}") from None
