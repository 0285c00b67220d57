"""A progress bar on stderr that is silent when stderr is not a terminal or when asked to be quiet."""

from collections.abc import Callable, Iterator, Sequence
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


@contextmanager
def token_bar(label: str, total: int, quiet: bool = False) -> Iterator[Callable[[int, Sequence[float]], None]]:
    """Yields `advance(tokens, acceptance)`: tokens that came, and the share of accepted drafts per position so far."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[drafts]}"),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task(label, total=total, rate="", drafts="")

        def advance(tokens: int, acceptance: Sequence[float]) -> None:
            progress.advance(task, tokens)
            speed = progress.tasks[0].speed
            shares = " ".join(f"{share:.0%}" for share in acceptance)
            progress.update(
                task,
                rate=f"{speed:.1f} tokens/s" if speed else "",
                drafts=f"accepted {shares}" if shares else "",
            )

        yield advance
