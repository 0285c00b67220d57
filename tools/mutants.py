"""`glm53 mutants`: inject every catalogued fault into the fast engine and report what the judge caught, and where."""

from fnmatch import fnmatchcase
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from conformance.mutants import catalogue, page, runner
from conformance.mutants.record import Mutant
from conformance.mutants.runner import Outcome
from conformance.report import terminal
from tools.errors import UsageError
from tools.options import Html, Json, Quiet
from tools.output import write_json
from tools.progress import step_bar


def select(only: str | None, fast: bool) -> list[Mutant]:
    """Raises UsageError when nothing is left."""
    found = [m for m in catalogue.mutants() if (m.fast or not fast) and (only is None or fnmatchcase(m.name, only))]
    if not found:
        raise UsageError(f"--only {only}: no mutant of {len(catalogue.mutants())} has such a name")
    return found


def print_scores(outcomes: list[Outcome], console: Console) -> None:
    table = Table("class", *(("mutants", "caught", "missed", "localised", "equivalent")), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for line in runner.scores(outcomes):
        cells = (line.mutants, line.caught, line.missed, line.localised, line.equivalent)
        table.add_row(
            line.fault, *map(str, cells), style="red" if line.wrong else "bold" if line.fault == "all" else ""
        )
    console.print(table)
    for outcome in outcomes:
        if not outcome.good or (outcome.equivalent is None and not outcome.localised):
            console.print(page.finding(outcome), soft_wrap=True, highlight=False, markup=False, style="red")
    verdict = "pass" if runner.passed(outcomes) else "FAIL"
    seconds = sum(outcome.seconds for outcome in outcomes)
    console.print(f"{verdict}: {len(outcomes)} mutants, {seconds:.0f} s of work", highlight=False)


def command(
    only: Annotated[str | None, typer.Option(metavar="GLOB", help="Only mutants whose name matches.")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Only the few of each class that CI runs.")] = False,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Processes; one per core if not given.")] = None,
    json_file: Json = None,
    html_file: Html = None,
    quiet: Quiet = False,
) -> None:
    """Every fault in turn; fails when one is missed, or when fewer than 95 % are named at their place.

    Example: glm53 mutants --only 'kda-*' --html mutants.html
    """
    chosen = select(only, fast)
    outcomes: list[Outcome] = []
    with step_bar("mutants", quiet) as advance:
        for outcome in runner.run(chosen, workers):
            outcomes.append(outcome)
            advance(len(chosen))
    place = {mutant.name: index for index, mutant in enumerate(chosen)}
    outcomes.sort(key=lambda outcome: place[outcome.name])
    write_json(json_file, runner.to_dict(outcomes))
    if html_file is not None:
        try:
            html_file.write_text(page.render(outcomes), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--html {html_file}: cannot be written: {error.strerror or error}") from None
    if not quiet:
        print_scores(outcomes, terminal.default_console(quiet))
    raise typer.Exit(0 if runner.passed(outcomes) else 1)
