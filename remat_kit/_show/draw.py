"""Parts of a view on a terminal: tables with bars, sized to its width.

Names come from programs of strangers: every cell is a `rich.text.Text`, so that no markup in one is interpreted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat_kit._show import parts, tables
from remat_kit._show.layout import GAP, Column, bar, fit, shorten
from remat_kit._show.rows import Row
from remat_kit._units import format_bytes


def draw(view: Iterable[parts.Part], console: Console | None = None) -> None:
    """Prints the parts of a view; to standard output by default.

    Raises:
      RematError: for a `console` that is none.
    """
    console = tables.console_of(console)
    for part in view:
        match part:
            case parts.Line(spans):
                console.print(Text.assemble(*spans))
            case parts.Pairs(title, rows):
                tables.pairs(console, title, rows)
            case parts.Figures(rows):
                tables.figure_table(console, rows)
            case parts.Table(columns, rows, right, whole, bold):
                bold_rows = [i in bold for i in range(len(rows))]
                tables.table(console, columns, rows, right=right, whole=whole, bold=bold_rows)
            case parts.Values():
                _draw_values(console, part)


def to_str(view: Iterable[parts.Part]) -> str:
    """What `draw` prints, without colours: as wide as the terminal where standard output is one, else 100 columns."""
    return tables.captured(lambda console: draw(view, console))


def _draw_values(console: Console, part: parts.Values) -> None:
    if part.shown:
        console.print(_table(console, part.shown, part.titles), no_wrap=True, overflow="crop", crop=True)
    if part.rest:
        more = format_bytes(sum(r.bytes for r in part.rest))
        tables.line(console, f"... and {len(part.rest)} more ({more})", style="dim")


def _table(console: Console, rows: Sequence[Row], titles: Mapping[str, str]) -> Table:
    columns = fit([r.cells for r in rows], console.width, titles)
    table = Table(box=tables.frame(console), show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for column, width in columns:
        justify = "right" if column.right else "left"
        title = Text(shorten(column.title, width))
        table.add_column(title, justify=justify, width=width, no_wrap=True, overflow="crop")
    for row in rows:
        table.add_row(*(_cell(console, row, column, width) for column, width in columns))
    return table


def _cell(console: Console, row: Row, column: Column, width: int) -> Text:
    ascii_only = console.options.ascii_only
    if column.key == "bar":
        return Text(bar(row.share, width, ascii_only), style="cyan")
    text = row.cells.get(column.key, "")
    style = "bold" if column.key == "bytes" else "yellow" if column.key == "action" and text == "host" else ""
    return Text(shorten(text, width, column.keep, "..." if ascii_only else "…"), style=style)
