"""Long work on standard error: a bar over items, a line for a step. Nothing where nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from remat_kit._units import printable

T = TypeVar("T")


def _wanted(asked: bool | None) -> bool:
    return sys.stderr is not None and sys.stderr.isatty() if asked is None else asked


def track(items: Iterable[T], what: str, asked: bool | None = None) -> Iterator[T]:
    """Goes through items with a bar on standard error.

    Args:
      what: what is done with each.
      asked: whether to show it; None shows it on a terminal.
    """
    items = list(items)
    if not _wanted(asked):
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn as Bar
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),  # policies and blocks bear names of strangers
        Bar(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(items))
        for item in items:
            label = "as written" if item is None else printable(str(item))
            progress.update(task, description=f"{what}: {label if len(label) <= 30 else label[:27] + '...'}")
            yield item
            progress.advance(task)


def say(what: str, asked: bool | None = None) -> None:
    """Writes a line of progress on standard error."""
    if _wanted(asked):
        print(f"{printable(what)} ...", file=sys.stderr, flush=True)
