"""How long work tells how far it is."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int, int], None]
"""Takes the bytes that are done and those in total."""

Progress = Callable[[str], AbstractContextManager[Advance]]
"""Takes a label and gives, for a `with`, an `Advance`."""

Tick = Callable[[], None]
"""Called when one more piece of work is done."""

_REFRESH_SECONDS = 0.1


def no_tick() -> None:
    """A tick that nobody sees."""


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


@contextmanager
def pieces(label: str, total: int) -> Iterator[Tick]:
    """A bar of `total` pieces on stderr while that is a terminal; silent otherwise.

    It is drawn by the ticks themselves: no thread disturbs work that is measured.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
        disable=not console.is_terminal,
    ) as shown:
        task = shown.add_task(label, total=total)
        drawn = time.monotonic()

        def tick() -> None:
            nonlocal drawn
            now = time.monotonic()
            due = now - drawn >= _REFRESH_SECONDS
            shown.update(task, advance=1, refresh=due)
            drawn = now if due else drawn

        shown.refresh()
        yield tick
