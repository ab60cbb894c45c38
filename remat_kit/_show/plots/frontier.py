"""The frontier of plans as a line, presets as labelled points beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from remat_kit._errors import RematError
from remat_kit._show import palette
from remat_kit._show.plots import axes, labels
from remat_kit._show.plots.points import Point, limits, scatter
from remat_kit._target.comparison import Comparison
from remat_kit._units import format_bytes, format_flops, format_seconds

if TYPE_CHECKING:
    from remat_kit._plan.frontier import Frontier


_REMARK = "filled: peak compiled; hollow: peak predicted; the cost of all of them: predicted"


def draw(
    f: Frontier, ax: Axes | None = None, presets: Comparison | None = None, budget_bytes: int | None = None
) -> Axes:
    """Draws a frontier; see `Frontier.plot`."""
    if not f.plans:
        raise RematError("nothing to draw: the frontier has no plans.")
    limit = budget_bytes if budget_bytes is not None else f.memory_bytes
    others = _rivals(f, limit) if presets is None else _compared(f, presets, limit)
    plans = [Point(p.peak_bytes, p.cost, "", p.measured is not None, None) for p in f.plans]
    ax = axes.axes(ax, (8, 5))
    ax.plot(
        [p.peak_bytes for p in plans],
        [p.cost for p in plans],
        drawstyle="steps-post",
        color=palette.SAVED,
        linewidth=1.8,
        label="frontier",
    )
    for compiled, word in ((True, "compiled"), (False, "predicted")):
        some = [p for p in plans if p.compiled is compiled]
        if some:
            ax.scatter(
                [p.peak_bytes for p in some],
                [p.cost for p in some],
                s=36,
                facecolors=palette.SAVED if compiled else ax.get_facecolor(),
                edgecolors=palette.SAVED,
                zorder=3,
                label=f"plan, {word}",
            )
    near = [p for p in others if _near(p, plans)]
    far = [p for p in others if p not in near]
    scatter(ax, near)
    points = [*plans, *near]
    upto = axes.bound(ax, f.memory_bytes, "memory", horizontal=False, upto=max(p.peak_bytes for p in points))
    if budget_bytes is not None:
        upto = axes.bound(ax, budget_bytes, "budget", horizontal=False, upto=upto, style=":")
    limits(ax, points, upto)
    axes.in_bytes(ax.xaxis, upto)
    ax.set_xlabel("peak memory of one device" + _outside(far, f))
    if f.minimize == "time":
        axes.in_seconds(ax.yaxis)
        ax.set_ylabel("time of recomputation and of keeping the rest")
    else:
        axes.in_flops(ax.yaxis)
        ax.set_ylabel("FLOPs of recomputation")
    axes.quiet(ax, "both")
    axes.legend(ax, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    target = f" on {axes.shortened(f.target)}" if f.target else ""
    axes.title(ax, f"Plans{target}: memory against recomputation", _REMARK)
    labels.place(
        ax, [(p.peak_bytes, p.cost, axes.shortened(p.name)) for p in near], [(p.peak_bytes, p.cost) for p in plans]
    )
    return ax


def _near(p: Point, plans: Sequence[Point]) -> bool:
    """Whether a point is so near to the plans that a picture of both still tells the plans apart."""

    def within(x: float, others: Sequence[float]) -> bool:
        low, high = min(others), max(others)
        room = max(high - low, 0.25 * high)
        return low - room <= x <= high + 1.5 * room

    return within(p.peak_bytes, [q.peak_bytes for q in plans]) and within(p.cost, [q.cost for q in plans])


def _outside(points: Sequence[Point], f: Frontier) -> str:
    """Names the points that are too far off to be shown, with their figures, in lines below the picture."""
    if not points:
        return ""
    cost = format_seconds if f.minimize == "time" else lambda flops: format_flops(int(flops))
    found = [f"{axes.shortened(p.name)} ({format_bytes(p.peak_bytes)}, {cost(p.cost)})" for p in points]
    return "\n" + textwrap.fill("outside: " + ", ".join(found), 110)


def _rivals(f: Frontier, limit: int | None) -> Sequence[Point]:
    """The presets in the model of the plans, as the cheapest plan knows them."""
    return [
        Point(r.peak_bytes, _cost(f, r), r.name, False, None if limit is None else r.peak_bytes <= limit)
        for r in f.plans[-1].rivals
    ]


def _cost(f: Frontier, rival: object) -> float:
    return getattr(rival, "seconds" if f.minimize == "time" else "flops")


def _compared(f: Frontier, c: Comparison, limit: int | None) -> Sequence[Point]:
    """Compiled policies: their peaks, at the cost that the model of the plans has for them."""
    if not isinstance(c, Comparison):
        raise RematError(f"presets= is a Comparison, as rk.compare returns it; got {type(c).__name__}.")
    known = {r.name: r for r in f.plans[-1].rivals}
    strange = [r.name for r in c.rows if r.name not in known]
    if strange:
        raise RematError(
            f"the plans' model has no cost for {', '.join(map(repr, strange))[:200]}. Presets that it has: "
            f"{', '.join(known) or 'none'}; compare these."
        )
    return [
        Point(
            r.measurement.peak_bytes,
            _cost(f, known[r.name]),
            r.name,
            r.measurement.temp_bytes is not None,
            None if limit is None else r.measurement.peak_bytes <= limit,
        )
        for r in c.rows
    ]
