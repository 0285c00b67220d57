"""A progress bar on stderr that is silent when stderr is not a terminal or when asked to be quiet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def byte_bar(label: str, total: int, quiet: bool = False) -> Iterator[Callable[[str, int], None]]:
    """Yields `advance(name, bytes)`; a non-empty name is shown beside the bar."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[name]}"),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task(label, total=total, name="")

        def advance(name: str, size: int) -> None:
            progress.advance(task, size)
            if name:
                progress.update(task, name=name)

        yield advance


@contextmanager
def step_bar(label: str, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields `advance(total)`: one step of `total` is done. Nothing is shown before the first step."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task(label, total=None)

        def advance(total: int) -> None:
            progress.update(task, total=total, advance=1)

        yield advance
