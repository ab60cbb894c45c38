"""Residual reports as text for a terminal: tables with bars, sized to its width.

Names come from programs of strangers: every cell is a `rich.text.Text`, so that no markup in one is interpreted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat_kit._errors import RematError
from remat_kit._show import rows as _rows
from remat_kit._show.layout import GAP, Column, bar, fit, shorten
from remat_kit._show.tables import captured, figure_table, frame, line, pairs
from remat_kit._trace.report import Kind, Residuals, ResidualsDiff
from remat_kit._units import format_bytes, format_flops, format_share, printable

__all__ = [
    "diff_to_str",
    "format_bytes",
    "format_flops",
    "print_comparison",
    "print_diff",
    "print_residuals",
    "print_sums",
    "residuals_to_str",
]


def print_residuals(report: Residuals, console: Console | None = None, *, top: int | None = None) -> None:
    """Prints a report: what is kept (largest first), totals, notes.

    Args:
      report: the report.
      console: where to print; standard output by default.
      top: how many rows of the table to show; None shows all.

    Raises:
      RematError: for a `top` that is no number of rows.
    """
    if top is not None and type(top) is not int:
        raise RematError(f"top= is how many rows to show, a whole number or None for all; got {top!r}.")
    console = console or Console()
    pairs(console, "Residuals", _rows.head(report))
    kept = _rows.kept(report)
    if kept:
        _print_rows(console, kept, top)
    else:
        line(console, "No intermediate value is kept: the backward pass reads its inputs only.")
    for title, rows in (
        ("Aliases: views of values that are kept as well", _rows.aliases(report)),
        ("Constants that the function closes over", _rows.constants(report)),
    ):
        if rows:
            line(console)
            line(console, title, style="bold")
            _print_rows(console, rows, top)
    line(console)
    figure_table(console, _rows.totals(report))
    for note in report.notes:
        line(console, f"note: {printable(note)}", style="yellow")


def residuals_to_str(report: Residuals) -> str:
    """Returns what `print_residuals` prints, without colours.

    As wide as the terminal where standard output is one, else 100 columns.
    """
    return captured(lambda console: print_residuals(report, console))


def print_diff(diff: ResidualsDiff, console: Console | None = None, *, top: int | None = None) -> None:
    """Prints what one policy keeps and the other does not."""
    console = console or Console()
    change = f"{'-' if diff.bytes < 0 else '+'}{format_bytes(abs(diff.bytes))}" if diff.bytes else "no change"
    labelled = [
        ("before", printable(diff.before)),
        ("after", printable(diff.after)),
        ("kept on device", f"{change} (predicted from the jaxpr)"),
    ]
    pairs(console, "Residuals compared", labelled)
    for title, entries, style in (
        ("No longer kept", diff.gone, "green"),
        ("Kept in addition", diff.new, "red"),
    ):
        report = Residuals(entries)
        kept = _rows.kept(report)
        if kept:
            line(console, title, style=f"bold {style}")
            _print_rows(console, kept, top)
        inputs = len(entries) - sum(e.action in (Kind.SAVED, Kind.OFFLOADED) for e in entries)
        if inputs:
            line(console, f"{title}: {inputs} of the function's arguments or constants", style="dim")
        if entries:
            line(console)
    if not (diff.gone or diff.new):
        line(console, "Both keep the same values.")


def diff_to_str(diff: ResidualsDiff) -> str:
    """Returns what `print_diff` prints, without colours."""
    return captured(lambda console: print_diff(diff, console))


def print_sums(title: str, sums: Mapping[str, int], console: Console | None = None, *, top: int | None = None) -> None:
    """Prints bytes by a key (see `Residuals.by`), each with its share as a bar."""
    console = console or Console()
    whole = sum(sums.values())
    made = [
        _rows.Row(
            n,
            n / whole if whole else 0.0,
            {"bytes": format_bytes(n), "share": format_share(n, whole), "what": printable(key)},
        )
        for key, n in sums.items()
    ]
    if made:
        _print_rows(console, made, top, titles={"what": title})
    else:
        line(console, "No intermediate value is kept.")


def print_comparison(reports: Mapping[str, Residuals], console: Console | None = None) -> None:
    """Prints one line for each policy: what it keeps, beside the one that keeps most."""
    console = console or Console()
    most = max((r.total_bytes + r.host_bytes for r in reports.values()), default=0)
    table = Table(box=frame(console), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    ascii_only = console.options.ascii_only
    hosts = any(r.host_bytes for r in reports.values())
    roomy = console.width >= 72
    table.add_column("policy", overflow="fold")
    table.add_column("on device", justify="right", no_wrap=True, style="bold")
    if hosts:
        table.add_column("on host", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, style="cyan")
    table.add_column("values", justify="right", no_wrap=True)
    if roomy:
        table.add_column("largest", overflow="fold")
    for name, report in reports.items():
        cells = [printable(name), format_bytes(report.total_bytes)]
        if hosts:
            cells.append(format_bytes(report.host_bytes) if report.host_bytes else "")
        kept = _rows.kept(report)
        cells.append(bar((report.total_bytes + report.host_bytes) / most if most else 0.0, 16, ascii_only))
        cells.append(str(sum(e.action in (Kind.SAVED, Kind.OFFLOADED) for e in report.entries)))
        if roomy:
            cells.append(f"{kept[0].cells['what']} {kept[0].cells['bytes']}" if kept else "")
        table.add_row(*map(Text, cells))
    console.print(table)


def _print_rows(
    console: Console, rows: Sequence[_rows.Row], top: int | None, titles: Mapping[str, str] | None = None
) -> None:
    shown = rows if top is None else rows[: max(top, 0)]
    if shown:
        console.print(_table(console, shown, titles or {}), no_wrap=True, overflow="crop", crop=True)
    rest = rows[len(shown) :]
    if rest:
        line(console, f"... and {len(rest)} more ({format_bytes(sum(r.bytes for r in rest))})", style="dim")


def _table(console: Console, rows: Sequence[_rows.Row], titles: Mapping[str, str]) -> Table:
    columns = fit([r.cells for r in rows], console.width, titles)
    table = Table(box=frame(console), show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for column, width in columns:
        justify = "right" if column.right else "left"
        title = Text(shorten(column.title, width))
        table.add_column(title, justify=justify, width=width, no_wrap=True, overflow="crop")
    for row in rows:
        table.add_row(*(_cell(console, row, column, width) for column, width in columns))
    return table


def _cell(console: Console, row: _rows.Row, column: Column, width: int) -> Text:
    ascii_only = console.options.ascii_only
    if column.key == "bar":
        return Text(bar(row.share, width, ascii_only), style="cyan")
    text = row.cells.get(column.key, "")
    style = "bold" if column.key == "bytes" else "yellow" if column.key == "action" and text == "host" else ""
    return Text(shorten(text, width, column.keep, "..." if ascii_only else "…"), style=style)
