"""Labels beside points that do not cover each other: tried around the point, at growing distances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

_NEAR = 9
_PLACES = [  # distance in points, and angle
    (distance, 2 * math.pi * k / 16) for distance in (_NEAR, 16, 26, 40, 58, 80, 105) for k in range(16)
]


def place(
    ax: Axes, points: Sequence[tuple[float, float, str]], others: Sequence[tuple[float, float]] = ()
) -> list[Annotation]:
    """Writes a label beside each point where it covers no other label, point or vertical line, as far as there is room.

    The limits of the axes have to be set. The first of several places that are as good is taken, so that a picture is
    the same each time.

    Args:
      points: x, y and text, in data coordinates.
      others: points without a label.
    """
    if not points:
        return []
    figure = ax.get_figure()
    assert figure is not None
    figure.draw_without_rendering()  # settles the layout  # pyright: ignore[reportAttributeAccessIssue]
    frame = ax.get_window_extent()
    every = ax.transData.transform([*(p[:2] for p in points), *others])
    taken = [(Bbox.from_bounds(x - 5, y - 5, 10, 10), 10.0) for x, y in every]
    for line in ax.lines:
        ends = np.asarray(line.get_xdata())
        if len(ends) == 2 and ends[0] == ends[1]:  # a bound
            x = ax.transData.transform((ends[0], 0))[0]
            taken.append((Bbox.from_bounds(x - 1, frame.y0, 2, frame.height), 1.0))
    return [_placed(ax, point, taken, frame) for point in points]


def _placed(ax: Axes, point: tuple[float, float, str], taken: list[tuple[Bbox, float]], frame: Bbox) -> Annotation:
    """Writes one label and adds it to what is taken, with how much it matters that nothing covers it."""
    x, y, text = point
    label = ax.annotate(text, (x, y), (9, 0), textcoords="offset points", fontsize="small")
    label.set_path_effects([withStroke(linewidth=3, foreground=ax.get_facecolor())])  # readable across a line
    best, least = _PLACES[0], math.inf
    for place in _PLACES:
        if place[0] >= least:
            break
        box = _move(label, *place)
        covered = sum(weight * _covered(box, other) for other, weight in taken) + 10 * _outside(box, frame)
        if covered + place[0] < least:  # near and across a line is better than far away
            best, least = place, covered + place[0]
    taken.append((_move(label, *best), 10.0))
    if best[0] > _NEAR:  # it could be another one's
        ax.annotate("", (x, y), label.xyann, textcoords="offset points", arrowprops=_LEADER)
    return label


_LEADER: Any = {"arrowstyle": "-", "linewidth": 0.6, "alpha": 0.5, "shrinkA": 0, "shrinkB": 4}


def _move(label: Annotation, distance: float, angle: float) -> Bbox:
    dx, dy = math.cos(angle), math.sin(angle)
    label.xyann = (distance * dx, distance * dy)
    label.set_horizontalalignment("left" if dx > 0.3 else "right" if dx < -0.3 else "center")
    label.set_verticalalignment("bottom" if dy > 0.3 else "top" if dy < -0.3 else "center")
    return label.get_window_extent()


def _covered(a: Bbox, b: Bbox) -> float:
    both = Bbox.intersection(a, b)
    return 20 + both.width * both.height if both is not None else 0.0  # a corner counts, too


def _outside(box: Bbox, frame: Bbox) -> float:
    inside = Bbox.intersection(box, frame)
    return box.width * box.height - (inside.width * inside.height if inside is not None else 0.0)
