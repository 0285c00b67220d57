"""`glm53 golden`: rewrite the golden files, check them bitwise, check them on other machines' arithmetic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from conformance.goldens import arm64, lanes, verify
from conformance.goldens.lanes import ROOT, Outcome
from conformance.processes import cores
from tools.options import Json, Quiet
from tools.output import check_folder, check_outputs, write_json
from tools.progress import step_bar

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Rewrite or check the golden files, bitwise.\n\nExample: glm53 golden verify",
)
GOLDEN = ROOT / "golden"

Directory = Annotated[Path, typer.Option(metavar="DIR", help="Where the golden files are.")]
Only = Annotated[str, typer.Option(metavar="GLOB", help="Only the cases with such names, e.g. 'trace-odd-*'.")]


class Lane(StrEnum):
    features = "features"
    blas = "blas"
    numpy = "numpy"
    arm64 = "arm64"


STEPS = {Lane.features: 2, Lane.blas: 6, Lane.numpy: 2, Lane.arm64: 3}
"""Runs of a lane on the machines we know, for the progress bar."""


@app.command("verify")
def verify_command(
    directory: Directory = GOLDEN, only: Only = "*", json_file: Json = None, quiet: Quiet = False
) -> None:
    """Make everything again and compare bit for bit; missing, unused and edited files fail too.

    Example: glm53 golden verify --only 'trace-tiny-nvidia-*'
    """
    check_outputs({"--json": json_file})
    total = len(verify.chosen(only))
    with step_bar("golden files", quiet) as advance:
        verdict = verify.verify(directory, only=only, workers=cores(), progress=lambda name: advance(total))
    write_json(json_file, asdict(verdict))
    for finding in verdict.findings:
        for line in finding.lines():
            typer.echo(line)
    if not quiet:
        for name, digest in verdict.digests.items():
            typer.echo(f"{digest}  {name}")
        typer.echo(f"{verdict.digest}  all, expected {verdict.expected_digest}")
    if not verdict.sound:
        typer.echo(f"golden verify: {len(verdict.findings)} of what {directory.name}/ holds is not what it was")
        raise typer.Exit(1)


@app.command("regen")
def regen_command(
    reason: Annotated[str, typer.Option(help="Why the goldens change; recorded in the manifest. Required.")] = "",
    directory: Directory = GOLDEN,
    only: Only = "*",
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Make everything again, write what changed, record why, and show which tensors changed and by how many ulp.

    Example: glm53 golden regen --reason "the router breaks ties by index"
    """
    check_outputs({"--json": json_file})
    check_folder("--directory", directory)
    total = len(verify.chosen(only))
    with step_bar("golden files", quiet) as advance:
        result = verify.regen(directory, reason, only=only, progress=lambda name: advance(total))
    write_json(json_file, asdict(result))
    for finding in result.changed:
        for line in finding.lines(most=12):
            typer.echo(line)
    for file in result.removed:
        typer.echo(f"{file}: removed, nothing makes it any more")
    typer.echo(
        f"{len(result.changed)} cases changed, {len(result.written)} files written; sha256 of all {result.digest}"
    )


@app.command("portable")
def portable_command(
    lane: Annotated[
        list[Lane] | None, typer.Option(help="Which lanes; all four when not given. May be repeated.")
    ] = None,
    directory: Directory = GOLDEN,
    workdir: Annotated[Path, typer.Option(metavar="DIR", help="Where interpreters and packages are kept.")] = ROOT
    / ".tox"
    / "golden-lanes",
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Verify under other arithmetic: SIMD features off, other BLAS kernels and threads, other NumPy, emulated aarch64.

    The lanes `numpy` and `arm64` fetch packages with pip and apt-get into the work directory.

    Example: glm53 golden portable --lane features --lane blas
    """
    check_outputs({"--json": json_file})
    outcomes: list[Outcome] = []
    wanted = lane or list(Lane)
    total = sum(STEPS[name] for name in set(wanted))
    with step_bar("lanes", quiet) as advance:
        for outcome in _outcomes(wanted, directory, workdir, lambda label: advance(total)):
            outcomes.append(outcome)
            if outcome.problem or not quiet:
                typer.echo(outcome.line())
    write_json(json_file, json.loads(json.dumps([asdict(outcome) for outcome in outcomes])))
    failed = [outcome for outcome in outcomes if outcome.problem]
    digests = {outcome.digest for outcome in outcomes if outcome.digest}
    typer.echo(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")
    if failed or len(digests) != 1:
        raise typer.Exit(1)


def _outcomes(wanted: list[Lane], directory: Path, workdir: Path, progress: Any) -> Iterator[Outcome]:
    workdir.mkdir(parents=True, exist_ok=True)
    for lane in dict.fromkeys(wanted):
        if lane is Lane.features:
            yield from lanes.features(directory, progress)
        elif lane is Lane.blas:
            yield from lanes.blas(directory, progress)
        elif lane is Lane.numpy:
            yield from lanes.numpy(directory, workdir, progress)
        else:
            yield from arm64.arm64(directory, workdir, progress)
