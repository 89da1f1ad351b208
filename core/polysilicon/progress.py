"""How long work tells how far it is."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int, int], None]
"""Takes the bytes that are done and those in total."""

Progress = Callable[[str], AbstractContextManager[Advance]]
"""Takes a label and gives, for a `with`, an `Advance`."""


@contextmanager
def no_progress(label: str) -> Iterator[Advance]:
    """Progress that nobody sees."""
    yield lambda done, total: None


@contextmanager
def bar(label: str) -> Iterator[Advance]:
    """A bar on stderr while that is a terminal; silent otherwise."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task(label, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
