"""`glm53 plan`: the memory of every rank, from shapes alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from conformance.checkpoints.geometry import geometry as geometries
from fast import config as configs
from fast import layout, memory
from fast.config import Config
from fast.linear import ROWS
from fast.sharding import Mesh
from fast.shards import TensorInfo, open_directory
from tools.errors import UsageError
from tools.options import Json, Quiet
from tools.output import check_outputs, write_json
from tools.progress import step_bar

EXPORTS = ("nvidia", "libertai")
CONTEXT = 32768


def source(
    checkpoint: Path | None, export: str | None, geometry: str
) -> tuple[Config, dict[str, TensorInfo], int, str]:
    """(config, tensors, gate rank, title) of a directory's headers or of an export of a geometry. Raises InputError."""
    if checkpoint is not None:
        if export is not None:
            raise UsageError(f"--export {export}: --checkpoint {checkpoint} tells its own, give one of the two")
        config = configs.load(checkpoint)
        directory = open_directory(checkpoint, lambda name: layout.find(config, name) and None)
        directory.close()
        return config, directory.tensors, layout.gate_rank(config, directory.tensors), str(checkpoint)
    if export not in EXPORTS:
        found = "missing" if export is None else f"found {export}"
        raise UsageError(f"--export: {found}, expected {' or '.join(EXPORTS)}, or --checkpoint DIR")
    shape = geometries(geometry)
    config = configs.parse(shape.config)
    tensors = layout.export_tensors(config, export, shape.gate_rank)
    return config, tensors, shape.gate_rank, f"{export} {geometry}"


def plan(
    config: Config,
    tensors: dict[str, TensorInfo],
    gate_rank: int,
    *,
    tp: int = 1,
    ep: int = 1,
    vocab: str = "replicated",
    context: int | None = None,
    drafts: int = 0,
    vision: bool = False,
    hardware: str = "gb10",
    prefill_rows: int = 2048,
    logit_rows: int | None = None,
    progress: Callable[[int], None] = lambda ranks: None,
) -> list[memory.Plan]:
    """One plan per rank. Raises InputError for sizes that do not divide and hardware that is not known.

    `context` None is `CONTEXT`, or all that the model has positions for. `progress(ranks)` is called after each rank.
    """
    most = config.text.max_position_embeddings
    context = min(CONTEXT, most) if context is None else context
    if not 1 <= context <= most:
        raise UsageError(f"--context {context}: expected 1 .. {most}")
    if not 0 <= drafts < ROWS:
        raise UsageError(f"--mtp {drafts}: expected 0 .. {ROWS - 1}")
    if drafts and not config.text.mtp_layers:
        raise UsageError(f"--mtp {drafts}: this config has no MTP block")
    machine = memory.hardware(hardware)
    plans = []
    world = Mesh(tp, ep, 0, vocab).world
    for rank in range(world):
        plans.append(
            memory.plan(
                config,
                tensors,
                Mesh(tp, ep, rank, vocab),
                machine,
                gate_rank=gate_rank,
                context=context,
                drafts=drafts,
                mtp=drafts > 0,
                vision=vision,
                prefill_rows=prefill_rows,
                logit_rows=logit_rows,
            )
        )
        progress(world)
    return plans


def show(plans: list[memory.Plan], title: str, console: Console) -> None:
    """The fullest rank in detail, all ranks in one line each."""
    worst = max(plans, key=lambda p: p.peak)
    weights = worst.weights
    table = Table(title=f"{title}: rank {worst.mesh.rank} of {worst.mesh.world}", title_justify="left", box=None)
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("GiB", justify="right")

    def row(what: str, n: int, style: str = "") -> None:
        table.add_row(what, f"{n:,}", f"{n / memory.GIB:.3f}", style=style)

    for role, n in weights.roles.items():
        row(role, n)
    row("alignment in slabs", weights.alignment)
    row("weights", weights.resident, "bold")
    for part in (worst.state, {f"workspace {kind}": n for kind, n in worst.workspaces.items()}):
        for name, n in part.items():
            row(name, n)
    row("serving", worst.serving, "bold")
    row("peak while loading, device", weights.peak_device)
    row("peak while loading, host part", weights.peak_host)
    row("largest conversion while loading", weights.staging)
    if weights.deferred:
        row("BF16 experts quantised on the way, never resident", weights.deferred)
    row("read from disk", weights.bytes_read)
    row(f"free on {worst.hardware.name}", worst.hardware.free)
    row("headroom", worst.headroom, "bold" if worst.fits else "bold red")
    console.print(table)
    for p in plans:
        fits = "fits" if p.fits else "does not fit"
        console.print(
            f"rank {p.mesh.rank}: {p.weights.tensors:,} tensors, weights {p.weights.resident / memory.GIB:.2f} GiB, "
            f"peak {p.peak / memory.GIB:.2f} GiB, headroom {p.headroom / memory.GIB:.2f} GiB, {fits}; "
            f"longest context {p.max_context:,}",
            highlight=False,
            soft_wrap=True,
        )


def as_json(plans: list[memory.Plan], title: str) -> dict[str, Any]:
    return {"source": title, "ranks": [p.as_dict() for p in plans], "fits": all(p.fits for p in plans)}


def command(
    export: Annotated[str | None, typer.Option(help="nvidia or libertai.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(metavar="DIR", help="Read the headers of a real one.")] = None,
    geometry: Annotated[str, typer.Option(help="tiny, odd, one-layer or full.")] = "full",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel ranks; max(tp, ep) ranks in all.")] = 1,
    vocab: Annotated[str, typer.Option(help="replicated, head (lm_head split) or split.")] = "replicated",
    context: Annotated[
        int | None, typer.Option(metavar="N", help=f"Tokens of the one sequence; default {CONTEXT} where they fit.")
    ] = None,
    mtp: Annotated[int, typer.Option(metavar="K", help="Drafts a step; loads the MTP block.")] = 0,
    vision: Annotated[bool, typer.Option("--vision", help="Bind the vision tower too.")] = False,
    hardware: Annotated[str, typer.Option(help="gb10, h200 or a JSON file.")] = "gb10",
    prefill_rows: Annotated[int, typer.Option(min=1, help="Tokens of one prefill window.")] = 2048,
    logit_rows: Annotated[
        int | None, typer.Option(min=1, help="Rows of logits kept; default: all of a window.")
    ] = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Memory per rank: weights by role, state, caches, workspaces, the peak while loading; exit 1 when it does not fit.

    Example: glm53 plan --export nvidia --tp 2 --ep 2 --context 32768 --mtp 3 --hardware gb10
    """
    check_outputs({"--json": json_file}, keeps=[checkpoint])
    config, tensors, gate_rank, title = source(checkpoint, export, geometry)
    with step_bar(f"planning {title}", quiet) as advance:
        plans = plan(
            config,
            tensors,
            gate_rank,
            tp=tp,
            ep=ep,
            vocab=vocab,
            context=context,
            drafts=mtp,
            vision=vision,
            hardware=hardware,
            prefill_rows=prefill_rows,
            logit_rows=logit_rows,
            progress=advance,
        )
    write_json(json_file, as_json(plans, title))
    if not quiet:
        show(plans, f"{title}, tp {tp}, ep {ep}, context {plans[0].context:,}", Console())
    if not all(p.fits for p in plans):
        raise typer.Exit(1)
