"""`glm53 conform`: the whole suite against one checkpoint directory, whatever its size.

The trace of a run goes to a file and is read back piece by piece; the reference decodes one layer's weights at a time
and draws its samples in portions, so memory follows the widest layer, not the checkpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from conformance import suite
from conformance.engines import registry
from conformance.judge import Rebase, Result
from conformance.judge.rebase import FALSE_ALARM, SAMPLES
from conformance.report import html, machine, terminal
from reference.checkpoint import Checkpoint, open_checkpoint
from tools.errors import UsageError, check_seed
from tools.options import Arithmetic, Device, Directory, Ep, Further, Html, Json, Quiet, Samples, Tokens, Tp
from tools.output import check_outputs, guarded
from tools.progress import step_bar
from tools.tokens import tokens_of
from tools.trace import engine_options


def conform(
    directory: Path,
    engine: str,
    *,
    tokens: np.ndarray | None = None,
    options: dict[str, Any] | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
    false_alarm: float = FALSE_ALARM,
    quiet: bool = False,
) -> list[Result]:
    """One result per case of the suite; `tokens` stand in for the suite's text.

    Raises an `InputError` for a bad checkpoint, engine or token, `UsageError` when the tokens suffice for no case.
    """
    checkpoint = open_checkpoint(directory)
    runner: Any = registry.create(engine)
    runner.open(directory, **(options or {}))
    ids = suite.prompt(checkpoint) if tokens is None else tokens
    cases = [case for case in suite.CASES if suite.fits(case, ids)]
    if not cases:
        raise UsageError(f"{len(ids)} tokens are too few: the shortest case decodes {suite.DECODED} after a prefill")
    judge = Rebase(checkpoint, samples=samples, seed=seed, false_alarm=false_alarm)
    with _progress(checkpoint, len(cases), quiet) as advance:
        return list(suite.conform(runner, checkpoint, ids, cases, judge=judge, asked=options, progress=advance))


@contextmanager
def _progress(checkpoint: Checkpoint, cases: int, quiet: bool) -> Iterator[Any]:
    layers = checkpoint.config.text.num_hidden_layers
    with step_bar(f"conform {checkpoint.directory.name}", quiet) as advance:
        yield lambda name: advance(layers * cases) if name.endswith(".mlp.out") else None


def command(
    directory: Directory,
    engine: Annotated[str, typer.Option(help="reference, fast, transformers, or package.module:Class.")] = "fast",
    tokens: Tokens = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to run; default: the suite's own.")] = None,
    arithmetic: Arithmetic = None,
    tp: Tp = None,
    ep: Ep = None,
    device: Device = None,
    option: Further = None,
    samples: Samples = SAMPLES,
    seed: Annotated[int, typer.Option(help="Seed of those samples.")] = 0,
    html_file: Html = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Run the whole suite against one checkpoint directory; exit 1 when the engine departs from the reference.

    Example: glm53 conform /models/GLM-5.3-Flash-NVFP4 --engine fast --device cuda --html report.html
    """
    check_outputs({"--html": html_file, "--json": json_file}, reads=[tokens], keeps=[directory])
    check_seed(seed)
    ids = None if tokens is None and prompt is None else tokens_of(tokens, prompt, directory)
    options = engine_options(option or [], arithmetic=arithmetic, tp=tp, ep=ep, device=device)
    results = conform(directory, engine, tokens=ids, options=options, samples=samples, seed=seed, quiet=quiet)
    for path, write in ((html_file, html.write), (json_file, machine.write)):
        if path is not None:
            guarded("--html" if path is html_file else "--json", path, partial(write, results, path))
    if not quiet:
        terminal.print_report(results, terminal.default_console(quiet))
    raise typer.Exit(0 if all(result.passed for result in results) else 1)
