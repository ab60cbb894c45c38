"""Checks as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console

from remat_kit._show.draw import draw, to_str
from remat_kit._show.parts import GAP, Pairs, Part, line, table
from remat_kit._units import format_bytes, format_shape, printable
from remat_kit._verify.result import Check, Compared

_SHOWN = 10
_PREFIXES = {
    "loss": "",
    "aux": "",
    "state": "state ",
    "gradient": "gradient ",
    "tangent": "tangent ",
    "forward_over_reverse": "Hessian, fwd/rev ",
    "reverse_over_reverse": "Hessian, rev/rev ",
}


def view(c: Check, top: int = _SHOWN) -> Iterator[Part]:
    """A check: the verdict, what failed, what of each derivative, the largest differences.

    Args:
      top: how many of the compared arrays to show, those that differ first.
    """
    yield Pairs("Check", tuple(_head(c)))
    for failure in c.failures:
        yield line(f"failed: {printable(failure)}", "red")
    for finding in c.findings:
        yield line(f"note: {printable(finding)}", "yellow")
    if c.failures or c.findings:
        yield GAP
    yield from _compared(c, top)


def print_check(c: Check, console: Console | None = None, *, top: int = _SHOWN) -> None:
    """Prints a check, with the `top` largest differences."""
    draw(view(c, top), console)


def check_to_str(c: Check) -> str:
    """Returns what `print_check` prints, without colours."""
    return to_str(view(c))


def _head(c: Check) -> Iterable[tuple[str, str]]:
    yield "result", "the same with and without remat" if c.ok else "not the same, or not pure"
    policy = printable(c.policy)
    yield "policy", policy if len(policy) <= 120 else policy[:116] + " ..."
    if c.blocks:
        yield "blocks", _list(c.blocks)
    yield "regions", str(c.regions)
    if c.bytes_before is not None:
        after = "unknown" if c.bytes_after is None else format_bytes(c.bytes_after)
        host = f", {format_bytes(c.host_bytes)} on the host" if c.host_bytes else ""
        yield "residuals", f"{format_bytes(c.bytes_before)} without, {after} with remat{host} (predicted)"
    for d in c.derivatives:
        yield d.name.replace("_", " "), d.status + (f": {printable(d.reason)}" if d.reason else "")
    yield "pure", "no" if c.impurities else "yes: traced twice and run twice, the same"
    if c.made_up:
        yield "made up", f"{_list(c.made_up)} (random, seed {c.seed})"
    if c.skipped:
        yield "no gradient", _list(c.skipped)
    if c.reference:
        yield "reference", f"{c.reference}, without remat"


def _list(items: tuple[str, ...]) -> str:
    more = f", ... and {len(items) - 6} more" if len(items) > 6 else ""
    return ", ".join(map(printable, items[:6])) + more


def _compared(c: Check, top: int) -> Iterator[Part]:
    if not c.compared:
        return
    order = sorted(range(len(c.compared)), key=lambda i: _weight(c.compared[i]))
    shown = [c.compared[i] for i in sorted(order[: max(top, 0)])]
    columns = ["what", "type", "apart", "relative", "ulps", "allowed"]
    if c.reference:
        columns += ["off, plain", "off, remat"]
    rows = [[_what(x), format_shape(x.dtype, x.shape), *map(_figure, _figures(x, bool(c.reference)))] for x in shown]
    bold = (i for i, x in enumerate(shown) if not x.ok)
    yield table(columns, rows, right=range(2, len(columns)), whole=(1,), bold=bold)
    rest = len(c.compared) - len(shown)
    if rest > 0:
        yield line(f"... and {rest} more arrays that are the same", "dim")


def _weight(x: Compared) -> tuple[bool, float]:
    return x.ok, -(x.error / x.tolerance if x.tolerance else float(x.error > 0))


def _what(x: Compared) -> str:
    return printable(_PREFIXES.get(x.kind, _PREFIXES.get(x.derivative, "")) + x.label)


def _figures(x: Compared, reference: bool) -> list[float | None]:
    found: list[float | None] = [x.error, x.relative_error, x.ulps, x.tolerance]
    return [*found, x.plain_error, x.remat_error] if reference else found


def _figure(x: float | None) -> str:
    return "-" if x is None else "0" if x == 0 else f"{x:.2g}"
