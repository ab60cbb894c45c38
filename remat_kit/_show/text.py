"""Residual reports, what distinguishes two of them, and sums of them, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat_kit._errors import RematError
from remat_kit._show import rows as _rows
from remat_kit._show.draw import draw, to_str
from remat_kit._show.layout import bar
from remat_kit._show.parts import GAP, Figures, Pairs, Part, Values, line
from remat_kit._show.tables import console_of, frame
from remat_kit._trace.report import Kind, Residuals, ResidualsDiff
from remat_kit._units import format_bytes, format_flops, format_share, printable

__all__ = [
    "diff_to_str",
    "diff_view",
    "format_bytes",
    "format_flops",
    "print_comparison",
    "print_diff",
    "print_residuals",
    "print_sums",
    "residuals_to_str",
    "residuals_view",
]


def residuals_view(report: Residuals, top: int | None = None) -> Iterator[Part]:
    """A report: what is kept (largest first), totals, notes.

    Args:
      top: how many rows of each table to show; None shows all.
    """
    yield Pairs("Residuals", _rows.head(report))
    if kept := _rows.kept(report):
        yield Values(kept, top)
    else:
        yield line("No intermediate value is kept: the backward pass reads its inputs only.")
    for title, rows in (
        ("Aliases: views of values that are kept as well", _rows.aliases(report)),
        ("Constants that the function closes over", _rows.constants(report)),
    ):
        if rows:
            yield from (GAP, line(title, "bold"), Values(rows, top))
    yield GAP
    yield Figures(_rows.totals(report))
    for note in report.notes:
        yield line(f"note: {printable(note)}", "yellow")


def print_residuals(report: Residuals, console: Console | None = None, *, top: int | None = None) -> None:
    """Prints a report.

    Args:
      report: the report.
      console: where to print; standard output by default.
      top: how many rows of the table to show; None shows all.

    Raises:
      RematError: for a `top` that is no number of rows.
    """
    if top is not None and (type(top) is not int or top < 0):
        raise RematError(f"top= is how many rows to show, a whole number or None for all; got {top!r:.80}.")
    draw(residuals_view(report, top), console)


def residuals_to_str(report: Residuals) -> str:
    """Returns what `print_residuals` prints, without colours.

    As wide as the terminal where standard output is one, else 100 columns.
    """
    return to_str(residuals_view(report))


def diff_view(diff: ResidualsDiff, top: int | None = None) -> Iterator[Part]:
    """What one policy keeps and the other does not."""
    change = f"{'-' if diff.bytes < 0 else '+'}{format_bytes(abs(diff.bytes))}" if diff.bytes else "no change"
    labelled = (
        ("before", printable(diff.before)),
        ("after", printable(diff.after)),
        ("kept on device", f"{change} (predicted from the jaxpr)"),
    )
    yield Pairs("Residuals compared", labelled)
    for title, entries, style in (("No longer kept", diff.gone, "green"), ("Kept in addition", diff.new, "red")):
        if kept := _rows.kept(Residuals(entries)):
            yield from (line(title, f"bold {style}"), Values(kept, top))
        inputs = len(entries) - sum(e.action in (Kind.SAVED, Kind.OFFLOADED) for e in entries)
        if inputs:
            yield line(f"{title}: {inputs} of the function's arguments or constants", "dim")
        if entries:
            yield GAP
    if not (diff.gone or diff.new):
        yield line("Both keep the same values.")


def print_diff(diff: ResidualsDiff, console: Console | None = None, *, top: int | None = None) -> None:
    """Prints what one policy keeps and the other does not."""
    draw(diff_view(diff, top), console)


def diff_to_str(diff: ResidualsDiff) -> str:
    """Returns what `print_diff` prints, without colours."""
    return to_str(diff_view(diff))


def print_sums(title: str, sums: Mapping[str, int], console: Console | None = None, *, top: int | None = None) -> None:
    """Prints bytes by a key (see `Residuals.by`), each with its share as a bar."""
    whole = sum(sums.values())
    made = tuple(
        _rows.Row(
            n,
            n / whole if whole else 0.0,
            {"bytes": format_bytes(n), "share": format_share(n, whole), "what": printable(key)},
        )
        for key, n in sums.items()
    )
    draw([Values(made, top, {"what": title}) if made else line("No intermediate value is kept.")], console)


def print_comparison(reports: Mapping[str, Residuals], console: Console | None = None) -> None:
    """Prints one line for each policy: what it keeps, beside the one that keeps most."""
    console = console_of(console)
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
