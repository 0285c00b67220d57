"""The report as text. Its first line, when something failed, is `first divergence: TAP ...`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conformance.judge.result import Result, TapRow
from conformance.report import view
from conformance.report.hints import hints
from conformance.report.numbers import count, decimal, percent, plural, ratio

SHOWN_TAPS = 8
SHOWN_VALUES = 4
SHOWN_TENSORS = 8
SHOWN_PROBLEMS = 8


def print_report(results: Sequence[Result], console: Console | None = None) -> None:
    """Print every run: the finding, the figures, the failing (or closest) steps with values, and what was not covered.

    No runs at all is a failure and says so.
    """
    console = console or default_console()
    if not results:
        console.print("[bold red]FAIL[/] nothing was compared", soft_wrap=True)
    for result in results:
        _print(result, console)
    if len(results) > 1:
        console.print(escape(_summary(results)), soft_wrap=True)


def default_console(quiet: bool = False) -> Console:
    """As wide as the terminal; 120 columns where there is none, since a log cuts nothing.

    Highlighting is left out: it takes the square of the length of a word, and what a trace says may be one long word.
    """
    console = Console(quiet=quiet, highlight=False)
    return console if console.is_terminal else Console(quiet=quiet, highlight=False, width=120)


def _print(result: Result, console: Console) -> None:
    console.print(escape(_first_line(result)), style="bold green" if result.passed else "bold red", soft_wrap=True)
    for hint in hints(result):
        console.print(escape(f"  {hint}"), soft_wrap=True)
    console.print(
        escape(
            f"  engine {result.engine} {result.engine_version} on {result.checkpoint} ({result.export}, "
            f"{result.arithmetic}), {plural(len(result.tokens), 'token')}, schedule {result.schedule}"
        ),
        soft_wrap=True,
    )
    figures = Table.grid(padding=(0, 2))
    for tile in view.tiles(result):
        figures.add_row(f"  {tile.label}", f"[{'red' if tile.failed else 'bold'}]{tile.value}[/]", escape(tile.note))
    console.print(figures)
    fatal = [problem for problem in result.problems if problem.fatal]
    for problem in fatal[:SHOWN_PROBLEMS]:
        console.print(f"  [red]{escape(problem.kind)}[/] {escape(problem.message)}", soft_wrap=True)
    if len(fatal) > SHOWN_PROBLEMS:
        console.print(f"  and {plural(len(fatal) - SHOWN_PROBLEMS, 'more problem')}")
    failing = result.failing_taps()
    _tap_table(result, failing, console)
    for row in failing[:SHOWN_VALUES]:
        _values(row, console)
    for tensor in [row for row in result.tensors if not row.passed][:SHOWN_TENSORS]:
        console.print(
            f"  [red]operand[/] {escape(tensor.name)} ({tensor.part}): {count(tensor.differing)} of "
            f"{plural(tensor.compared, 'element')} differ; {escape(tensor.message or tensor.rule)}",
            soft_wrap=True,
        )
    _coverage(result, console)


def _summary(results: Sequence[Result]) -> str:
    """Of several runs: how many failed, and where each of those diverged first."""
    failed = [result for result in results if not result.passed]
    if not failed:
        return f"PASS all {len(results)} runs"
    places = dict.fromkeys(result.first_divergence.tap for result in failed if result.first_divergence is not None)
    where = f", first at {', '.join(places)}" if places else ""
    return f"FAIL {len(failed)} of {len(results)} runs{where}"


def _first_line(result: Result) -> str:
    if result.first_divergence is not None:
        return result.first_divergence.line
    return f"{'PASS' if result.passed else 'FAIL'} {view.verdict(result)}"


def _tap_table(result: Result, failing: list[TapRow], console: Console) -> None:
    rows = failing or sorted(result.taps, key=lambda row: -view.severity(row))
    if not rows:
        return
    table = Table(
        title="failing steps, in dataflow order" if failing else "steps closest to their bound",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1),
    )
    table.add_column("tap", no_wrap=True)
    table.add_column("worst check", no_wrap=True)
    for name in ("max", "p99.9", "median", "bias", "worst row", "outside"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows[:SHOWN_TAPS]:
        table.add_row(
            escape(row.tap),
            f"{ratio(view.severity(row))} {escape(view.worst_check(row).name)}",
            ratio(row.max_ratio),
            ratio(row.p999_ratio),
            ratio(row.median_ratio),
            percent(row.bias),
            "–" if row.worst_row is None else str(row.worst_row),
            f"{count(row.failing)} / {count(row.compared)}",
        )
    console.print(table)
    if len(rows) > SHOWN_TAPS and failing:
        console.print(f"  and {plural(len(rows) - SHOWN_TAPS, 'more failing step')}")


def _values(row: TapRow, console: Console) -> None:
    console.print(f"  [red]{escape(row.tap)}[/] {escape(row.message)}", soft_wrap=True)
    for value in () if row.flips else row.values[:SHOWN_VALUES]:
        where = ", ".join(str(axis) for axis in value.index)
        console.print(
            escape(
                f"    [{where}] expected {decimal(value.expected)} ({value.expected_hex}), actual "
                f"{decimal(value.actual)} ({value.actual_hex}), error {ratio(value.error)} is {ratio(value.ratio)} "
                f"of the allowed {ratio(value.allowed)}"
            ),
            soft_wrap=True,
        )
    for flip in [flip for flip in row.flips if not flip.excused][:SHOWN_VALUES]:
        console.print(
            f"    token {flip.token}: chose {flip.chosen}, expected {flip.expected}; the scores differ by "
            f"{ratio(flip.gap)}, {ratio(flip.allowed)} is allowed",
            soft_wrap=True,
        )


def _coverage(result: Result, console: Console) -> None:
    coverage = result.coverage
    line = (
        f"  covered: {count(coverage.taps_compared)} of {plural(coverage.taps_known, 'tap')}, "
        f"{count(coverage.tensors_compared)} of {plural(coverage.tensors_known, 'operand')}"
    )
    console.print(line, soft_wrap=True)
    for label, names in (("not in the trace", coverage.taps_missing), ("known to no table", coverage.taps_unknown)):
        if names:
            shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
            console.print(f"  {label}: {escape(shown)}", soft_wrap=True)
