"""The pieces of text views: tables whose cells are shown as they are, labelled figures, plain captures."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat_kit._errors import RematError

PLAIN_WIDTH = 100


def console_of(console: Any) -> Console:
    """The console to print to: the one given, or standard output.

    Raises:
      RematError: for what is no console, such as a number of rows.
    """
    if console is not None and not isinstance(console, Console):
        raise RematError(f"console= is a rich.console.Console, got {console!r:.80}. Other options go by keyword.")
    return console or Console()


def line(console: Console, text: str = "", style: str = "") -> None:
    """Prints a line without interpreting markup."""
    console.print(Text(text, style=style))


def frame(console: Console) -> box.Box:
    """The rules of a table, in characters that the console has."""
    return box.ASCII2 if console.options.ascii_only else box.SIMPLE_HEAD


def table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Iterable[int] = (),
    whole: Iterable[int] = (),
    bold: Sequence[bool] = (),
) -> None:
    """Prints a table that folds its text to the console's width.

    Args:
      right: which columns are figures.
      whole: which other columns are not folded.
      bold: which rows stand out.
    """
    figures, unfolded = set(right), {*right, *whole}
    out = Table(box=frame(console), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, title in enumerate(columns):
        justify = "right" if i in figures else "left"
        out.add_column(Text(title), justify=justify, no_wrap=i in unfolded, overflow="fold")
    for i, row in enumerate(rows):
        out.add_row(*map(Text, row), style="bold" if i < len(bold) and bold[i] else "")
    console.print(out)


def pairs(console: Console, title: str, content: Iterable[tuple[str, str]]) -> None:
    """Prints a title and labelled lines under it."""
    line(console, title, style="bold")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for label, text in content:
        grid.add_row(Text(label), Text(text))
    console.print(grid)
    line(console)


def figure_table(console: Console, content: Iterable[tuple[str, str, str]]) -> None:
    """Prints labelled figures with a remark each; narrow consoles leave the remarks out."""
    roomy = console.width >= 56  # else the remarks would be columns of single words
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right", style="bold")
    grid.add_column(overflow="fold", style="dim")
    for label, figure, remark in content:
        grid.add_row(Text(label), Text(figure), Text(remark if roomy else ""))
    console.print(grid)


def captured(show: Callable[[Console], None]) -> str:
    """What a view prints, without colours: as wide as the terminal where standard output is one, else 100 columns."""
    width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns if _is_terminal() else PLAIN_WIDTH
    out = io.StringIO()
    show(Console(file=out, width=max(width, 40), color_system=None, force_terminal=False))
    return "\n".join(text.rstrip() for text in out.getvalue().splitlines())


def _is_terminal() -> bool:
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):  # replaced or closed
        return False
