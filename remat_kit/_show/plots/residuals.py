"""What is kept for the backward pass: bars by a key of the report, or an icicle by module path."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from remat_kit._show import palette
from remat_kit._show.plots import axes
from remat_kit._trace.report import KEYS, Group, Kind, Residual, Residuals
from remat_kit._units import format_bytes

_KINDS = {
    Kind.SAVED: ("saved", palette.SAVED),
    Kind.OFFLOADED: ("offloaded", palette.OFFLOADED),
    Kind.ARGUMENT: ("arguments", palette.ARGUMENTS),
    Kind.CONSTANT: ("constants", palette.CONSTANTS),
}
_MOST_BARS = 20
_LEAST = 0.004  # of the whole: what is smaller shares a box
_READABLE = 0.024  # of the height: a box that has room for a line of text


def draw(report: Residuals, ax: Axes | None = None, by: str = "path") -> Axes:
    """Draws a residual report; see `Residuals.plot`."""
    report.by(by)  # refuses an unknown key
    kept = [e for e in report.entries if not e.alias_of]
    if by != "action":
        kept = [e for e in kept if e.action in (Kind.SAVED, Kind.OFFLOADED)]
    if by == "path":
        return _icicle(report, kept, ax)
    return _bars(report, kept, ax, by)


def _heading(ax: Axes, report: Residuals) -> None:
    host = f", {format_bytes(report.host_bytes)} on the host" if report.host_bytes else ""
    axes.title(
        ax,
        f"Kept for the backward pass: {format_bytes(report.total_bytes)}{host}",
        f"policy {axes.shortened(report.policy, 60)}; predicted from the jaxpr, bytes on one device",
    )


# Bars -----------------------------------------------------------------------------------------------


def _bars(report: Residuals, kept: Sequence[Residual], ax: Axes | None, by: str) -> Axes:
    sums: dict[str, dict[Kind, int]] = {}
    layers: dict[str, set[str]] = {}
    for e in kept:
        key = KEYS[by](e)
        folded = re.sub(r"\d+", "*", key) if by == "block" else key
        row = sums.setdefault(folded, {})
        row[e.action] = row.get(e.action, 0) + e.bytes
        layers.setdefault(folded, set()).add(key)
    names = sorted(sums, key=lambda name: -sum(sums[name].values()))
    shown = {_bar_name(name, layers[name]): sums[name] for name in names[:_MOST_BARS]}
    rest = names[_MOST_BARS:]
    if rest:
        shown[f"{len(rest)} more"] = {k: sum(sums[n].get(k, 0) for n in rest) for k in _KINDS}
    ax = axes.axes(ax, (9, 1.6 + 0.32 * max(len(shown), 2)))
    left = [0] * len(shown)
    for kind, (word, color) in _KINDS.items():
        widths = [row.get(kind, 0) for row in shown.values()]
        if any(widths):
            ax.barh(range(len(shown)), widths, left=left, color=color, label=word, height=0.72)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, size in enumerate(left):
        ax.annotate(format_bytes(size), (size, y), (4, 0), textcoords="offset points", va="center", fontsize="small")
    ax.set_yticks(range(len(shown)), [axes.shortened(name) for name in shown])
    ax.set_ylim(max(len(shown), 1) - 0.4, -0.6)
    ax.set_xlim(0, 1.13 * max([*left, 1]))
    axes.in_bytes(ax.xaxis, max([*left, 1]))
    axes.quiet(ax, "x")
    ax.set_ylabel(by)
    axes.legend(ax, loc="lower right")
    _heading(ax, report)
    return ax


def _bar_name(folded: str, keys: set[str]) -> str:
    return next(iter(keys)) if len(keys) == 1 else f"{folded} (x{len(keys)})"


# Icicle ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Node:
    """A module or, without `children`, a value; `label` has layers of one kind together."""

    label: str
    bytes: int = 0
    kind: Kind | None = None
    children: dict[str, _Node] = dataclasses.field(default_factory=dict)


def _icicle(report: Residuals, kept: Iterable[Residual], ax: Axes | None) -> Axes:
    root = _Node("all")
    for group in dataclasses.replace(report, entries=tuple(kept)).groups():
        node = root
        node.bytes += group.bytes
        for part in _parts(group):
            node = node.children.setdefault(part, _Node(part))
            node.bytes += group.bytes
        e = group.entry
        word = ", ".join(e.names) or e.op
        leaf = node.children.setdefault(f"{word} {e.action}", _Node(word, kind=e.action))
        leaf.bytes += group.bytes
    depth = max(_depth(root), 1)
    ax = axes.axes(ax, (9, 6))
    found: set[Kind] = set()
    _boxes(ax, root, 0, 0, depth, root.bytes, found)
    ax.set_xlim(0, depth)
    ax.set_ylim(max(root.bytes, 1), 0)
    ax.set_xticks([])
    axes.in_bytes(ax.yaxis, root.bytes)
    axes.quiet(ax, "y")
    ax.grid(False)
    ax.spines["bottom"].set_visible(False)
    handles = [Patch(color=_KINDS[k][1], label=_KINDS[k][0]) for k in _KINDS if k in found]
    if handles:
        below = {"loc": "upper left", "bbox_to_anchor": (0, -0.01), "ncols": len(handles)}
        ax.legend(handles=handles, frameon=False, fontsize="small", **below)
    _heading(ax, report)
    return ax


def _parts(group: Group) -> list[str]:
    """The path of identical layers, with how many they are on the part that counts them."""
    parts = [p for p in group.path.split("/") if p] or ["(no module)"]
    if group.count > 1 and "{" in group.path:
        parts = [f"{p} x{group.count}" if "{" in p else p for p in parts]
    elif group.entry.trips > 1:
        parts[0] += f" x{group.entry.trips}"
    return parts


def _depth(node: _Node) -> int:
    return max((1 + _depth(c) for c in node.children.values()), default=0)


def _boxes(ax: Axes, node: _Node, x: int, y: int, depth: int, whole: int, found: set[Kind]) -> None:
    children = sorted(node.children.values(), key=lambda c: -c.bytes)
    large = [c for c in children if c.bytes >= _LEAST * whole]
    small = [c for c in children if c.bytes < _LEAST * whole]
    for child in large:
        _box(ax, child, x, y, depth if not child.children else x + 1, whole)
        if child.kind is not None:
            found.add(child.kind)
        _boxes(ax, child, x + 1, y, depth, whole, found)
        y += child.bytes
    if small:
        rest = _Node(f"{len(small)} more", sum(c.bytes for c in small))
        if rest.bytes:
            _box(ax, rest, x, y, depth, whole)


def _box(ax: Axes, node: _Node, x: int, y: int, right: int, whole: int) -> None:
    leaf = node.kind is not None
    color = _KINDS[node.kind][1] if node.kind is not None else palette.ARGUMENTS
    box = Rectangle(
        (x, y), right - x, node.bytes, facecolor=color, edgecolor=ax.get_facecolor(), linewidth=1,
        alpha=1.0 if leaf else 0.35, label="_value" if leaf else "_module",
    )  # fmt: skip
    ax.add_patch(box)
    if node.bytes >= _READABLE * whole:
        text = f"{axes.shortened(node.label, 24 * (right - x))}  {format_bytes(node.bytes)}"
        ink = "white" if node.kind is Kind.SAVED else "black" if leaf else rcParams["text.color"]
        said = ax.text(x + 0.03, y + node.bytes / 2, text, va="center", fontsize="small", color=ink)
        said.set_clip_path(box)
