"""From a residual report to rows of finished text, which the terminal and the HTML views lay out.

Decides what is shown and in which order; knows nothing of widths, colours or markup.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from remat_kit._trace.report import Group, Kind, Residual, Residuals
from remat_kit._units import (
    format_bytes,
    format_flops,
    format_ratio,
    format_shape,
    format_share,
    printable,
)

_LONGEST_POLICY = 200
ACTIONS = {Kind.SAVED: "saved", Kind.OFFLOADED: "host"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a group of residuals of identical layers, as text.

    Attributes:
      share: its part of the intermediates kept (device and host), 0 to 1; 0 for aliases and constants.
      cells: text by column key; a missing key is an empty cell.
    """

    bytes: int
    share: float
    cells: dict[str, str]


def kept(report: Residuals) -> tuple[Row, ...]:
    """Rows of the intermediates (saved and offloaded, aliases apart), largest first."""
    entries = [e for e in report.entries if _intermediate(e) and not e.alias_of]
    return _rows(report, entries, report.total_bytes + report.host_bytes)


def aliases(report: Residuals) -> tuple[Row, ...]:
    """Rows of the views of values that are kept as well, largest first."""
    return _rows(report, [e for e in report.entries if _intermediate(e) and e.alias_of], 0)


def constants(report: Residuals) -> tuple[Row, ...]:
    """Rows of the arrays that the function closes over, largest first."""
    return _rows(report, [e for e in report.entries if e.action is Kind.CONSTANT], 0)


def _intermediate(e: Residual) -> bool:
    return e.action in (Kind.SAVED, Kind.OFFLOADED)


def _rows(report: Residuals, entries: Iterable[Residual], whole: int) -> tuple[Row, ...]:
    groups = dataclasses.replace(report, entries=tuple(entries)).groups()
    # sorted() is stable: ties keep program order
    return tuple(_row(g, whole) for g in sorted(groups, key=lambda g: -g.bytes))


def _row(group: Group, whole: int) -> Row:
    e = group.entry
    flops = group.recompute_flops
    worth = None if flops is None else (group.bytes / flops if flops else float("inf"))
    where = group.path or e.block
    times = f" x{group.count}" if group.count > 1 else ""
    return Row(
        group.bytes,
        group.bytes / whole if whole else 0.0,
        {
            "bytes": format_bytes(group.bytes),
            "share": format_share(group.bytes, whole) if whole else "",
            "what": printable(", ".join(e.names) or e.op),
            "op": printable(e.op),
            "shape": printable(format_shape(e.dtype, e.shape)),
            "where": printable(where) + times,
            "trips": f"x{e.trips}" if e.trips > 1 else "",
            "action": ACTIONS.get(e.action, ""),
            "alias": printable(e.alias_of),
            "needed": printable(", ".join(e.needed_by)),
            "flops": format_flops(flops),
            "worth": format_ratio(worth),
            "source": printable(e.source),
        },
    )


def totals(report: Residuals) -> tuple[tuple[str, str, str], ...]:
    """`(label, bytes, remark)` for each total; those that are zero are left out, but for the first."""
    everywhere = report.global_bytes
    over_all = f"; {format_bytes(everywhere)} over all devices" if everywhere != report.total_bytes else ""
    lines = [
        ("kept on device", report.total_bytes, Kind.SAVED, False, over_all),
        ("aliases", report.alias_bytes, Kind.SAVED, True, "; views of values that are kept: XLA may share the memory"),
        ("offloaded to host", report.host_bytes, Kind.OFFLOADED, False, ""),
        ("arguments", report.argument_bytes, Kind.ARGUMENT, False, " that the backward pass reads"),
        ("constants", report.constant_bytes, Kind.CONSTANT, False, " that the function closes over"),
    ]
    out = []
    for label, size, kind, alias, remark in lines:
        n = sum(e.action is kind and (kind is not Kind.SAVED or bool(e.alias_of) is alias) for e in report.entries)
        if size or not out:
            out.append((label, format_bytes(size), f"{n} {'value' if n == 1 else 'values'}{remark}"))
    return tuple(out)


def head(report: Residuals) -> tuple[tuple[str, str], ...]:
    """`(label, text)` for what stands above the table."""
    policy = printable(report.policy)  # presets by name list every spelling of each
    out = [("policy", policy if len(policy) <= _LONGEST_POLICY else policy[: _LONGEST_POLICY - 4] + " ...")]
    if report.blocks:
        shown = ", ".join(map(printable, report.blocks[:6]))
        more = f", ... and {len(report.blocks) - 6} more" if len(report.blocks) > 6 else ""
        out.append(("blocks", shown + more))
    out.append(("figures", "predicted from the jaxpr, before XLA; bytes on one device"))
    return tuple(out)
