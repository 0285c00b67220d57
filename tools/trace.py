"""`glm53 trace`: run an engine over a checkpoint and write what it computed."""

import dataclasses
import difflib
import fnmatch
import os
import re
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from conformance import rank_traces
from conformance.engines import registry
from conformance.engines.base import check_tokens
from conformance.taps import expected
from conformance.trace import Schedule, Trace
from reference.config import load
from tools.errors import UsageError, check_seed
from tools.options import Arithmetic, Device, Directory, Ep, Further, Json, Quiet, Tokens, Tp
from tools.output import check_folder, check_outputs, write_json
from tools.progress import step_bar
from tools.tokens import tokens_of

LAYER_OUT = re.compile(r"layers\.\d+\.out")


def trace(
    directory: Path,
    engine: str,
    tokens: np.ndarray,
    schedule: Schedule,
    out: Path,
    *,
    taps: str = "*",
    options: dict[str, Any] | None = None,
    ranks: Path | None = None,
    quiet: bool = False,
) -> Trace:
    """Run and save; returns the trace. `ranks` is a folder for the traces of single ranks.

    Raises an `InputError`, or `UsageError` when `out` or `ranks` cannot be written.
    """
    runner: Any = registry.create(engine)
    runner.open(directory, **(options or {}))
    several = hasattr(runner, "run_ranks") and runner.mesh.world > 1
    if ranks is not None and not several:
        raise UsageError(f"--ranks {ranks}: the run has one rank; give --tp N or --ep N and an engine that takes them")
    with step_bar(f"{engine} on {directory.name}", quiet) as advance:
        if hasattr(runner, "watch"):
            calls = len(schedule.prefill) + schedule.decode
            total = calls * runner.config.text.num_hidden_layers
            runner.watch = lambda name: advance(total) if LAYER_OUT.fullmatch(name) else None
        parts = runner.run_ranks(tokens, schedule, taps) if several else [runner.run(tokens, schedule, taps)]
    made = rank_traces.joined(parts) if several else parts[0]
    for option, path in (("--ranks", ranks), ("--out", out)):
        try:
            if option == "--out":
                made.save(out)
            elif ranks is not None:
                rank_traces.save(parts, ranks)
        except OSError as error:
            raise UsageError(f"{option} {path}: cannot be written: {error.strerror or error}") from None
    return made


def job_of(
    directory: Path, tokens: np.ndarray, schedule: Schedule, folder: Path, taps: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """What `torchrun .. -m fast.worker FILE` runs, on hosts that this command does not reach.

    Raises UsageError for an option that ranks lack, and an `InputError` for all that every rank would refuse.
    """
    from fast.session import refuse
    from fast.worker import FED, Job, checked

    known = sorted(item.name for item in dataclasses.fields(Job) if item.name not in FED)
    for key in settings:
        if key not in known:
            raise UsageError(f"--job: ranks have no option {key}; they have {', '.join(known)}")
    ids = check_tokens(tokens, load(directory).text.vocab_size).tolist()
    feeding = {"tokens": ids, "prefill": list(schedule.prefill), "pad": schedule.pad, "taps": taps}
    job = checked({"directory": str(directory), "folder": str(folder), **feeding, **settings}, "--job")
    refuse(job, here=False)
    return dataclasses.asdict(job)


def check_ranks(ranks: Path, out: Path | None, directory: Path) -> None:
    """Refuse, before the run, a folder for rank traces that cannot be one. Raises UsageError."""
    place = ranks
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    check_folder("--ranks", place)
    where = os.path.realpath(ranks)
    if where == os.path.realpath(directory):
        raise UsageError(f"--ranks {ranks}: is the checkpoint, expected a folder for rank traces alone")
    if out is not None and os.path.realpath(out.parent) == where:
        raise UsageError(f"--out {out}: lies in the folder of --ranks, which holds rank traces alone")


def check_taps(taps: str, directory: Path, tokens: int) -> None:
    """Raises UsageError for a glob that names no tap of the model: a name misspelt would be a trace without it."""
    known = expected(load(directory), tokens)
    for glob in filter(None, taps.split(",")):
        if not fnmatch.filter(known, glob):
            close = difflib.get_close_matches(glob, known, n=1)
            raise UsageError(
                f"--taps {glob}: matches no tap of this model" + (f", but {close[0]} is one" if close else "")
            )


def engine_options(pairs: list[str], **named: Any) -> dict[str, Any]:
    """Options for `Engine.open`: the named ones that were given, then `--option KEY=VALUE` (numbers become int)."""
    options = {key: value for key, value in named.items() if value is not None}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--option {pair}: expected KEY=VALUE")
        options[key] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return options


def summary(made: Trace, out: Path, seconds: float) -> dict[str, Any]:
    """What `--json` shows."""
    return {
        "file": str(out),
        "metadata": made.metadata,
        "tokens": len(made.tokens),
        "seconds": round(seconds, 3),
        "bytes": out.stat().st_size,
        "taps": {name: {"dtype": str(tap.dtype), "shape": list(tap.shape)} for name, tap in made.taps.items()},
    }


def command(
    directory: Directory,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Trace file to write.")] = None,
    engine: Annotated[str, typer.Option(help="reference, fast, transformers, file or package.module:Class.")] = "fast",
    tokens: Tokens = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to run instead of --tokens.")] = None,
    arithmetic: Arithmetic = None,
    seed: Annotated[int | None, typer.Option(help="Seed of stochastic arithmetic.")] = None,
    tp: Tp = None,
    ep: Ep = None,
    device: Device = None,
    prefill_chunk: Annotated[int | None, typer.Option(metavar="N", help="Prefill in chunks of N tokens.")] = None,
    decode: Annotated[int, typer.Option(metavar="N", help="Feed the last N tokens one at a time.")] = 0,
    pad: Annotated[int, typer.Option(metavar="N", help="Left padding before the first token.")] = 0,
    mtp: Annotated[int | None, typer.Option(metavar="K", help="Drafts after the input; adds the taps mtp.*.")] = None,
    ranks: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --tp or --ep: also write each rank's own trace here.")
    ] = None,
    job_file: Annotated[
        Path | None,
        typer.Option("--job", metavar="FILE", help="Run nothing: write what torchrun starts as fast ranks on hosts."),
    ] = None,
    taps: Annotated[str, typer.Option(metavar="GLOB", help="Taps to keep; several globs with commas.")] = "*",
    option: Further = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Run an engine and write its trace.

    Ranks that differ in what they must hold alike are named; the exit status is then 1, and `glm53 diff` says the same.

    Example: glm53 trace tiny --engine fast --prompt "Hello, world." --decode 4 --out fast.trace
    """
    check_outputs({"--out": out, "--json": json_file, "--job": job_file}, reads=[tokens], keeps=[directory])
    check_seed(seed)
    if ranks is not None:
        check_ranks(ranks, out, directory)
    ids = tokens_of(tokens, prompt, directory)
    check_taps(taps, directory, len(ids))
    schedule = Schedule.of(len(ids), decode=decode, chunk=prefill_chunk, pad=pad)
    options = engine_options(option or [], arithmetic=arithmetic, seed=seed, tp=tp, ep=ep, device=device, mtp=mtp)
    if job_file is not None:
        settings = {"drafts" if key == "mtp" else key: value for key, value in options.items()}
        if engine != "fast":
            raise UsageError(f"--job {job_file}: engine {engine} has no ranks that torchrun starts, fast has")
        write_json(job_file, job_of(directory, ids, schedule, ranks or Path("ranks"), taps, settings), "--job")
        return
    if out is None:
        raise UsageError("--out FILE is missing")
    started = time.perf_counter()
    made = trace(directory, engine, ids, schedule, out, taps=taps, options=options, ranks=ranks, quiet=quiet)
    result = summary(made, out, time.perf_counter() - started)
    write_json(json_file, result)
    if not quiet:
        typer.echo(f"{out}: {len(made.taps)} taps of {result['tokens']} tokens, {result['bytes']:,} bytes")
    apart = rank_traces.disagreements(made)
    for name, why in apart.items():
        typer.echo(f"{name}: {why}", err=True)
    if apart:
        raise typer.Exit(1)
