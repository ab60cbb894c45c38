"""Results as the data that a page's script reads: columns of numbers, with texts kept once.

Figures are those of `to_dict`, unrounded; texts are made printable. JSON in a page cannot end its element.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from remat_kit._show import rows
from remat_kit._show.layout import COLUMNS
from remat_kit._show.plan import alike, parts_of_peak, paths, policy_text, treatment
from remat_kit._trace.report import Kind, Residual, Residuals
from remat_kit._units import format_bytes, format_shape, printable

if TYPE_CHECKING:
    from remat_kit._plan.frontier import Frontier
    from remat_kit._plan.plan import Plan, PlannedBlock

_KINDS = ("saved", "offloaded", "alias", "argument", "constant")
_GROUPINGS = (
    ("", "nothing"),
    ("where", "module"),
    ("block", "block"),
    ("name", "name"),
    ("op", "op"),
    ("kind", "action"),
    ("dtype", "dtype"),
    ("source", "source line"),
)


def as_json(data: Any) -> str:
    """JSON that is safe between script tags: no `<`, no `&`, ASCII only.

    Raises:
      ValueError: for infinite figures, which JSON does not have.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for c in "<>&":
        text = text.replace(c, f"\\u{ord(c):04x}")
    return text


class _Texts:
    """Texts by number, each kept once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(printable(text), len(self.numbers))


def residuals(report: Residuals) -> dict[str, Any]:
    """A residual report, a column for each attribute; `group` numbers the identical layers."""
    texts = _Texts()
    groups = report.groups()
    number = {id(e): i for i, g in enumerate(groups) for e in g.entries}
    texted: dict[str, Callable[[Residual], str]] = {
        "name": lambda e: ", ".join(e.names),
        "op": lambda e: e.op,
        "shape": lambda e: format_shape(e.dtype, e.shape),
        "path": lambda e: e.path,
        "block": lambda e: e.block,
        "dtype": lambda e: e.dtype,
        "source": lambda e: e.source,
        "needed": lambda e: ", ".join(e.needed_by),
        "alias": lambda e: e.alias_of,
        "action": lambda e: rows.ACTIONS.get(e.action, str(e.action)),
    }
    columns = {
        "bytes": [e.bytes for e in report.entries],
        "global_bytes": [e.global_bytes for e in report.entries],
        "flops": [e.recompute_flops for e in report.entries],
        "trips": [e.trips for e in report.entries],
        "kind": [_KINDS.index(_kind(e)) for e in report.entries],
        "group": [number[id(e)] for e in report.entries],
        **{key: [texts(of(e)) for e in report.entries] for key, of in texted.items()},
    }
    return {
        "title": "Residuals",
        "head": rows.head(report),
        "notes": [printable(n) for n in report.notes],
        "whole": report.total_bytes + report.host_bytes,
        "totals": [_total(report, kind, label, remark) for kind, (label, remark) in zip(_KINDS, _TOTALS, strict=True)],
        "columns": [
            {"key": c.key, "title": c.title, "right": c.right}
            for c in sorted(COLUMNS, key=lambda c: c.key == "needed")  # the widest, and the last that is looked for
        ],
        "groupings": _GROUPINGS,
        "kinds": _KINDS,
        "texted": list(texted),
        "entries": columns,
        "groups": [texts(g.path) for g in groups],
        "texts": list(texts.numbers),
    }


_TOTALS = (
    ("kept on device", ""),
    ("offloaded to host", ""),
    ("aliases", "views of values that are kept: XLA may share the memory"),
    ("arguments", "that the backward pass reads"),
    ("constants", "that the function closes over"),
)


def _total(report: Residuals, kind: str, label: str, remark: str) -> dict[str, Any]:
    found = [e.bytes for e in report.entries if _kind(e) == kind]
    values = f"{len(found)} {'value' if len(found) == 1 else 'values'}"
    if kind == "saved" and report.global_bytes != report.total_bytes:
        remark = f"{format_bytes(report.global_bytes)} over all devices"
    return {
        "kind": kind,
        "label": label,
        "bytes": sum(found),
        "values": len(found),
        "remark": f"{values}; {remark}" if remark else values,
        "usual": kind in ("saved", "offloaded"),
    }


def _kind(e: Residual) -> str:
    return "alias" if e.alias_of and e.action is Kind.SAVED else str(e.action)


def frontier(f: Frontier) -> dict[str, Any]:
    """A frontier; what several plans say of a value is there once."""
    values: dict[Any, int] = {}
    timed = f.minimize == "time"
    rivals = f.plans[-1].rivals if f.plans else ()
    names_only = bool(f.plans) and f.plans[0].names_only
    memory = format_bytes(f.memory_bytes) if f.memory_bytes is not None else "unknown"
    return {
        "title": "Plan explorer",
        "head": [
            ("target", printable(f.target) or "none"),
            ("memory", f"{memory} on one device"),
            ("minimized", f.minimize),
            ("figures", "predicted, but for peaks that are marked compiled"),
        ],
        "minimize": f.minimize,
        "memory_bytes": f.memory_bytes,
        "names_only": names_only,
        "plans": [_plan(p, values) for p in f.plans],
        "values": [
            {"label": printable(v.label), **{k: getattr(v, k) for k in ("action", "bytes", "flops", "seconds", "why")}}
            for v in values
        ],
        "presets": [
            {
                "name": printable(r.name),
                "peak_bytes": r.peak_bytes,
                "flops": r.flops,
                "seconds": r.seconds,
                "cost": r.seconds if timed else r.flops,
            }
            for r in rivals
        ],
    }


def _plan(p: Plan, values: dict[Any, int]) -> dict[str, Any]:
    q = p.predicted
    return {
        "peak_bytes": p.peak_bytes,
        "peak_is": "compiled" if p.measured is not None else "predicted",
        "compiled_bytes": p.measured.peak_bytes if p.measured is not None else None,
        "corrected_bytes": q.corrected_bytes,
        "predicted_bytes": q.peak_bytes,
        "host_bytes": q.host_bytes,
        "recompute_flops": q.recompute_flops,
        "remat_seconds": q.remat_seconds,
        "flops": q.flops,
        "seconds": q.seconds,
        "cost": p.cost,
        "gap": p.gap,
        "parts": parts_of_peak(p),
        "policy": policy_text(p),
        "blocks": [_block(blocks, values) for blocks in alike(p)],
    }


def _block(blocks: list[PlannedBlock], values: dict[Any, int]) -> dict[str, Any]:
    b = blocks[0]
    return {
        "path": printable(b.path),  # of the first of them
        "name": paths(blocks),
        "treatment": treatment(b),
        "policy": printable(str(b.policy)),
        "kept_bytes": sum(x.kept_bytes for x in blocks),
        "host_bytes": sum(x.host_bytes for x in blocks),
        "working_bytes": max(x.working_bytes for x in blocks),
        "flops": sum(x.flops for x in blocks),
        "seconds": sum(x.seconds for x in blocks),
        "values": [values.setdefault(v, len(values)) for v in b.values],
    }
