"""`glm53 diff`: judge a trace against the reference, two traces against each other, or say what a trace lacks."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from conformance import advice, judge, pairwise, rank_traces
from conformance.engines.file import belongs
from conformance.errors import TraceMismatchError
from conformance.judge.rebase import SAMPLES
from conformance.report import html, machine, terminal
from conformance.trace import Trace
from reference.checkpoint import Checkpoint, open_checkpoint
from tools.errors import UsageError, check_seed
from tools.options import Html, Json, Quiet, Samples
from tools.output import check_outputs, guarded, write_json
from tools.progress import step_bar


def diff(
    files: list[Path], directory: Path, *, seed: int = 0, samples: int = SAMPLES, quiet: bool = False
) -> tuple[list[judge.Result], list[pairwise.Pair]]:
    """One result per trace, and for two traces the pairs of their taps. Raises an `InputError`."""
    checkpoint = open_checkpoint(directory)
    traces = [rank_traces.of_path(file) for file in files]
    pairs = pairwise.compare(*traces) if len(traces) == 2 else []
    owner = judge.Rebase(checkpoint, samples=samples, seed=seed)
    return [
        _judge(trace, checkpoint, owner, file.name, quiet) for file, trace in zip(files, traces, strict=True)
    ], pairs


def _judge(trace: Trace, checkpoint: Checkpoint, owner: judge.Rebase, name: str, quiet: bool) -> judge.Result:
    with step_bar(f"judging {name}", quiet) as advance:
        return judge.compare(trace, checkpoint, judge=owner, progress=lambda _: advance(len(trace.taps)))


def check(file: Path, directory: Path | None) -> advice.Advice:
    """What a trace lacks. Raises an `InputError` for a file that cannot be read at all."""
    trace = rank_traces.of_path(file)
    if directory is None:
        return advice.advise(trace)
    checkpoint = open_checkpoint(directory)
    found = advice.advise(trace, checkpoint.config)
    faults = [f"tap {name}: {why}" for name, why in rank_traces.disagreements(trace).items()]
    try:
        belongs(trace, config_sha256=checkpoint.config.sha256, export=checkpoint.export, source=str(file))
    except TraceMismatchError as error:
        faults.insert(0, str(error))
    return replace(found, faults=(*faults, *found.faults))


def print_advice(file: Path, found: advice.Advice, console: Console) -> None:
    """First what is wrong, then how far a fault can be localised, then what is missing and how to add it."""

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)

    for fault in found.faults:
        line(f"fault: {fault}", "red")
    for name, hint in found.unknown.items():
        line(f"unknown: {name}: {hint}", "red")
    if found.localises:
        verdict = "sound" if found.usable else "not usable as it is"
        line(f"{file}: {verdict}; a fault can be named to {found.localises}", "bold")
    else:
        line(f"{file}: readable; give --checkpoint DIR to check names, axes and dtypes", "bold")
    for state in found.groups:
        whole = state.present == state.known if state.known is not None else state.present > 0
        line(f"  {state.group.title}: {state.present}{'' if state.known is None else f' of {state.known}'} taps")
        if whole:
            continue
        line(f"    with them {state.group.buys}")
        line(f"    how: {state.group.how}")
        for name, (lacking, axes, dtype) in state.missing.items():
            line(f"    {name} {axes} {dtype}" + ("" if lacking == 1 else f" ({lacking} layers)"))


def print_pairs(pairs: list[pairwise.Pair], console: Console) -> None:
    """The first tap that differs, and the farthest ones."""
    apart = [pair for pair in pairs if pair.fault or pair.rows]
    if not apart:
        console.print(f"the two traces agree bit for bit in {len(pairs)} taps", highlight=False)
        return
    console.print(
        f"the two traces: {len(apart)} of {len(pairs)} taps differ, first {apart[0].tap}",
        soft_wrap=True,
        highlight=False,
    )
    for pair in sorted(apart, key=lambda pair: -pair.relative_l2)[:8]:
        where = f" at {list(pair.worst)}" if pair.worst else ""
        text = (
            pair.fault or f"relative L2 {pair.relative_l2:.3g}, largest {pair.max_error:.3g}{where}, {pair.rows} rows"
        )
        console.print(f"  {pair.tap}: {text}", soft_wrap=True, highlight=False, markup=False)


def command(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TRACE [TRACE2]", help="Trace file or folder of rank traces to judge, or two."),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(metavar="DIR", help="Checkpoint the trace was made with.")] = None,
    check_file: Annotated[
        Path | None, typer.Option("--check", metavar="FILE", help="Only say what this trace lacks and how to add it.")
    ] = None,
    html_file: Html = None,
    json_file: Json = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples that bounds are computed from.")] = 0,
    samples: Samples = SAMPLES,
    quiet: Quiet = False,
) -> None:
    """Compare a trace with the reference: per tensor, per layer (rebased) and per token.

    Example: glm53 diff fast.trace --checkpoint tiny --html report.html
    """
    files = traces or []
    console = terminal.default_console(quiet)
    check_outputs({"--html": html_file, "--json": json_file}, reads=[*files, check_file], keeps=[checkpoint])
    check_seed(seed)
    if check_file is not None:
        if files:
            raise UsageError(f"--check {check_file}: takes no further trace, found {files[0]}")
        found = check(check_file, checkpoint)
        write_json(json_file, advice_json(found))
        print_advice(check_file, found, console)
        raise typer.Exit(0 if found.usable else 1)
    if not 1 <= len(files) <= 2:
        raise UsageError(f"give one or two traces, found {len(files)}")
    if checkpoint is None:
        raise UsageError("--checkpoint DIR is missing: the reference needs the weights")
    results, pairs = diff(files, checkpoint, seed=seed, samples=samples, quiet=quiet)
    for path, write in ((html_file, html.write), (json_file, machine.write)):
        if path is not None:
            guarded("--html" if path is html_file else "--json", path, partial(write, results, path, pairs))
    if not quiet:
        terminal.print_report(results, console)
        if len(files) == 2:
            print_pairs(pairs, console)
    raise typer.Exit(0 if all(result.passed for result in results) else 1)


def advice_json(found: advice.Advice) -> dict[str, Any]:
    """What `--check --json` writes."""
    return {"usable": found.usable} | asdict(found)
