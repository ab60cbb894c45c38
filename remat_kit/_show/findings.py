"""Findings of `lint` as text: one paragraph each, as a compiler prints its warnings."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from remat_kit._show.draw import draw, to_str
from remat_kit._show.parts import GAP, Line, Part, line
from remat_kit._units import printable
from remat_kit._verify.finding import Finding, Findings


def view(found: Findings) -> Iterator[Part]:
    """Findings, each with place, figures, reason and remedy."""
    for f in found.findings:
        yield from _finding(f)
    n, hidden = len(found.findings), len(found.suppressed)
    said = f"{n} finding{'s' * (n != 1)}" if n else "Nothing found"
    more = f", {hidden} ignored by comments in the source" if hidden else ""
    yield line(f"{said}{more}. Policy: {printable(found.policy)}.", "bold" if n else "green")
    for note in found.notes:
        yield line(f"note: {printable(note)}", "yellow")


def print_findings(found: Findings, console: Console | None = None) -> None:
    """Prints findings."""
    draw(view(found), console)


def findings_to_str(found: Findings) -> str:
    """Returns what `print_findings` prints, without colours."""
    return to_str(view(found))


def _finding(f: Finding) -> Iterator[Part]:
    where = printable(str(f.where))
    head = ((f.code, "bold red"), (f" {f.title}", "bold"), (f"  {where}", "cyan"))
    yield Line(head if where else head[:2])
    yield line(f"  {printable(f.what)}")
    if f.figures:
        yield line(f"  {printable(f.figure)}", "bold")
    yield line(f"  {f.why}", "dim")
    yield line(f"  -> {printable(f.change)}")
    yield GAP
