"""A plan: for each block how many bytes are saved, offloaded and recomputed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from remat_kit._show import palette
from remat_kit._show.plan import alike, paths
from remat_kit._show.plots import axes
from remat_kit._units import format_bytes

if TYPE_CHECKING:
    from remat_kit._plan.plan import Plan, PlannedBlock

_MOST_BARS = 24


def draw(p: Plan, ax: Axes | None = None) -> Axes:
    """Draws a plan; see `Plan.plot`."""
    groups = alike(p)
    shown, rest = groups[:_MOST_BARS], groups[_MOST_BARS:]
    names = [paths(blocks) for blocks in shown] + [f"{sum(map(len, rest))} more blocks"] * bool(rest)
    rows = [*shown, [b for blocks in rest for b in blocks]][: len(names)]
    ax = axes.axes(ax, (9, 1.8 + 0.36 * max(len(names), 2)))
    left = [0] * len(names)
    for word, color in palette.ACTIONS.items():
        widths = [sum(_bytes(b)[word] for b in blocks) for blocks in rows]
        if any(widths):
            ax.barh(range(len(names)), widths, left=left, color=color, label=word, height=0.7)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, blocks in enumerate(rows):
        figures = {word: sum(_bytes(b)[word] for b in blocks) for word in palette.ACTIONS}
        said = ", ".join(f"{format_bytes(n)} {word}" for word, n in figures.items() if n) or "nothing"
        none = all(not b.policy.remat for b in blocks)
        text = f"{said}{' (no remat)' if none else ''}"
        ax.annotate(text, (left[y], y), (4, 0), textcoords="offset points", va="center", fontsize="small")
    ax.set_yticks(range(len(names)), [axes.shortened(name) for name in names])
    ax.set_ylim(max(len(names), 1) - 0.4, -0.6)
    ax.set_xlim(0, 1.75 * max([*left, 1]))
    axes.in_bytes(ax.xaxis, max([*left, 1]))
    axes.quiet(ax, "x")
    axes.legend(ax, loc="lower right")
    peak = f"peak {format_bytes(p.peak_bytes)} {'compiled' if p.measured is not None else 'predicted'}"
    over = "" if p.within else ": not kept"
    axes.title(
        ax, axes.shortened(p.title[0].upper() + p.title[1:], 80) + over,
        f"{peak}; bytes predicted, of all runs of a block; recomputed: the values that the plan tells of",
    )  # fmt: skip
    return ax


def _bytes(b: PlannedBlock) -> dict[str, int]:
    again = sum(v.bytes for v in b.values if v.action == "recompute")
    return {"saved": b.kept_bytes, "offloaded": b.host_bytes, "recomputed": again}
