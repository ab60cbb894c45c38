"""Policies as points: peak memory against the cost of recomputation, or against time."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from remat_kit._errors import RematError
from remat_kit._show.plots import axes, labels
from remat_kit._show.plots.points import Point, limits, scatter
from remat_kit._target.comparison import Comparison


def draw(c: Comparison, ax: Axes | None = None, cost: str = "flops") -> Axes:
    """Draws a comparison; see `Comparison.plot`."""
    if cost not in ("flops", "time"):
        raise RematError(f"cost={cost!r:.40}: policies are drawn by 'flops' or 'time'.")
    found = [
        Point(
            r.measurement.peak_bytes,
            r.overhead if cost == "flops" else r.measurement.seconds or 0.0,
            r.name,
            r.measurement.temp_bytes is not None,
            r.within if c.budget_bytes is not None else None,
        )
        for r in c.rows
        if cost == "flops" or r.measurement.seconds is not None
    ]
    left_out = [r.name for r in c.rows if cost == "time" and r.measurement.seconds is None]
    if not found:
        raise RematError(f"nothing to draw by {cost!r}: no policy has a time on {c.target}. Draw it with cost='flops'.")
    ax = axes.axes(ax, (8, 5))
    scatter(ax, found)
    memory = next((r.measurement.memory_bytes for r in c.rows if r.measurement.memory_bytes is not None), None)
    upto = axes.bound(ax, memory, "memory", horizontal=False, upto=max(p.peak_bytes for p in found))
    if c.budget_bytes != memory:
        upto = axes.bound(ax, c.budget_bytes, "budget", horizontal=False, upto=upto, style=":")
    limits(ax, found, upto)
    axes.in_bytes(ax.xaxis, upto)
    ax.set_xlabel("peak memory of one device")
    if cost == "flops":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.4g}%"))
        ax.set_ylabel("FLOPs beyond those without remat")
    else:
        axes.in_seconds(ax.yaxis)
        timed = any(r.measurement.timing is not None for r in c.rows)
        ax.set_ylabel("time of a step, timed" if timed else "time of a step by the roofline")
    axes.quiet(ax, "both")
    _legend(ax, found)
    said = "peak: compiled; hollow: what the compiler says of a program that it refuses"
    said += "; FLOPs: counted" if cost == "flops" else ""
    if left_out:
        said += f"; without a time: {', '.join(map(axes.shortened, left_out))}"
    best = f", best {axes.shortened(c.best)}" if c.best else ""
    axes.title(ax, f"Policies on {axes.shortened(c.target)}{best}", said)
    labels.place(ax, [(p.peak_bytes, p.cost, axes.shortened(p.name)) for p in found])
    return ax


def _legend(ax: Axes, found: list[Point]) -> None:
    handles, words = ax.get_legend_handles_labels()
    said = [w.replace("predicted", "refused by the compiler") for w in words]
    ax.legend(handles, said, frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
