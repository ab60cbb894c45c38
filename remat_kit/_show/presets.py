"""The table of presets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat_kit._presets import Presets, preset_table
from remat_kit._show.layout import shorten
from remat_kit._show.parts import Part, line, table
from remat_kit._units import printable


def view(presets: Presets) -> Iterator[Part]:
    """Name, doc and text form of each preset."""
    yield line("Policies by name", "bold")
    rows = [[printable(name), printable(doc), printable(form)] for name, doc, form in preset_table()]
    yield table(["name", "what it keeps and costs", "policy"], rows, whole=(0,))


def print_presets(presets: Sequence[Mapping[str, str]], console: Console, *, whole: bool = False) -> None:
    """Prints name, doc and text form of each preset.

    Args:
      presets: mappings with `name`, `doc` and `policy` (the text form).
      console: where to print.
      whole: print text forms whole; otherwise each is cut to one line.
    """
    names = max((len(p["name"]) for p in presets), default=0)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=names * 3 < console.width, overflow="fold", style="bold")
    grid.add_column(overflow="fold")
    room = max(20, console.width - names - 4)
    for p in presets:
        form = printable(p["policy"])
        form = form if whole else shorten(form, room, dots="..." if console.options.ascii_only else "…")
        text = Text(printable(p["doc"]))
        if form != p["name"]:
            text = Text("\n").join([text, Text(form, style="cyan")]) if p["doc"] else Text(form, style="cyan")
        grid.add_row(Text(printable(p["name"])), text)
    console.print(grid)
