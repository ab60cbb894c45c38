"""Points of memory against cost, with one look for what was compiled and what is predicted, what fits and what not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from matplotlib.axes import Axes

from remat_kit._show import palette

_LOOKS = {  # by whether it is within the budget or the memory
    True: (palette.GOOD, "o", "fits"),
    False: (palette.RECOMPUTED, "X", "does not fit"),
    None: (palette.SAVED, "o", "memory unknown"),
}


@dataclasses.dataclass(frozen=True)
class Point:
    """A policy or plan: its peak in bytes, its cost, its name (or none), where the peak is from, whether it fits."""

    peak_bytes: int
    cost: float
    name: str = ""
    compiled: bool = True
    within: bool | None = None


def scatter(ax: Axes, points: Sequence[Point], size: float = 60) -> None:
    """Draws points: filled if compiled, else hollow; colour and shape say whether they are within the budget."""
    for within, (color, marker, word) in _LOOKS.items():
        for compiled in (True, False):
            some = [p for p in points if p.within is within and p.compiled is compiled]
            if some:
                ax.scatter(
                    [p.peak_bytes for p in some],
                    [p.cost for p in some],
                    s=size,
                    marker=marker,
                    facecolors=color if compiled else "none",
                    edgecolors=color,
                    linewidths=1.5,
                    zorder=3,
                    label=f"{word}, {'compiled' if compiled else 'predicted'}",
                )


def limits(ax: Axes, points: Sequence[Point], upto: float) -> None:
    """Leaves room around the points, so that labels find a place."""
    costs = [p.cost for p in points] or [0.0]
    low, high = min(costs), max(costs)
    room = (high - low) or abs(high) or 1.0
    ax.set_ylim(low - 0.15 * room, high + 0.2 * room)
    least = min([p.peak_bytes for p in points] or [0])
    width = max(upto - least, 0.2 * upto, 1.0)
    ax.set_xlim(max(0.0, least - 0.14 * width), upto + 0.16 * width)
