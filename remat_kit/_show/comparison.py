"""Comparisons of policies as text for a terminal: a row for each, the best one marked."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from remat_kit._show.draw import draw, to_str
from remat_kit._show.measurement import fits_text
from remat_kit._show.parts import Pairs, Part, line, table
from remat_kit._target.comparison import Comparison, ComparisonRow
from remat_kit._units import format_bytes, format_seconds, printable

# Notes that belong to one measurement, not to the comparison.
_DETAILS = ("flops counts", "An earlier compile", "How what is held", "The TPU compiler's peak")


def view(c: Comparison) -> Iterator[Part]:
    """One row for each policy: kept (predicted), peak, temporary and host memory (compiled), cost, time."""
    budget = format_bytes(c.budget_bytes) if c.budget_bytes is not None else "unknown"
    yield Pairs("Policies compared", (("target", printable(c.target)), ("budget", f"{budget} on one device")))
    timed = any(r.measurement.timing for r in c.rows)
    hosts = any(r.measurement.host_bytes for r in c.rows)
    columns = ["policy", "kept", "peak", "temp", *(["host"] if hosts else []), "FLOPs", "step", "fits", ""]
    best = (i for i, r in enumerate(c.rows) if r.name == c.best)
    rows = [_row(r, c.best, hosts) for r in c.rows]
    yield table(columns, rows, right=range(1, len(columns) - 2), whole=(0,), bold=best)
    yield line("kept: predicted; peak, temp, host: compiled; FLOPs: beyond those without remat, counted;")
    yield line("step: timed, median" if timed else "step: the roofline's, at the chip's limits (predicted)")
    if c.best:
        yield line(f"Best within the budget: {printable(c.best)}", "green")
    else:
        yield line("No policy keeps within the budget.", "red")
    said: set[str] = set()
    for r in c.rows:
        effect = r.measurement.effect
        for text in (*(effect.findings if effect is not None else ()), *r.measurement.notes):
            if text not in said and not text.startswith(_DETAILS):
                said.add(text)
                yield line(f"{printable(r.name)}: {printable(text)}", "yellow")
    for name, reason in c.refused.items():
        yield line(f"{printable(name)} is refused here: {printable(reason)}", "yellow")


def print_comparison(c: Comparison, console: Console | None = None) -> None:
    """Prints a comparison."""
    draw(view(c), console)


def comparison_to_str(c: Comparison) -> str:
    """Returns what `print_comparison` prints, without colours."""
    return to_str(view(c))


def _row(r: ComparisonRow, best: str, hosts: bool) -> list[str]:
    m = r.measurement

    def size(n: int | None) -> str:
        return "-" if n is None else format_bytes(n)

    remark = "best" if r.name == best else f"dominated by {printable(r.dominated_by)}" if r.dominated_by else ""
    host = [size(m.host_bytes) if m.host_bytes else ""] if hosts else []
    seconds = "-" if m.seconds is None else format_seconds(m.seconds)
    kept, share = size(m.predicted_bytes), f"+{r.overhead:.1%}" if r.overhead >= 0 else f"{r.overhead:.1%}"
    fits = fits_text(m.fits) if m.fits is not True or r.within else "over budget"
    return [printable(r.name), kept, size(m.peak_bytes), size(m.temp_bytes), *host, share, seconds, fits, remark]
