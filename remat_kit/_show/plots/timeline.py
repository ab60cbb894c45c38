"""Memory over the schedule of a compiled program: stacked by class or module, the peak marked, a second one over it."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import rcParams
from matplotlib.axes import Axes

from remat_kit._errors import RematError
from remat_kit._show import palette
from remat_kit._show.plots import axes
from remat_kit._target.measurement import Held, Measurement
from remat_kit._target.timeline import Timeline
from remat_kit._units import format_bytes

_MODULES = 7  # parts with a colour of their own
_LARGEST = 5  # buffers named at the peak


def draw(m: Measurement, ax: Axes | None = None, by: str = "class", against: Measurement | None = None) -> Axes:
    """Draws a timeline; see `Measurement.plot`."""
    t = of(m)
    parts = _parts(t, by)
    other = None if against is None else of(against)
    ax = axes.axes(ax, (10, 5))
    x = _positions(t, other)
    names = [_label(name, sizes, t) for name, sizes in parts.items()]
    colors = _colors(list(parts), by)
    ax.stackplot(x, list(parts.values()), labels=names, colors=colors, alpha=0.85, step="post")
    ax.step(x, t.total, where="post", color=rcParams["text.color"], linewidth=1, label=f"_{axes.shortened(m.policy)}")
    highest = t.peak_bytes
    if other is not None:
        over = _positions(other, t)
        name = f"{axes.shortened(other.policy)}: {format_bytes(other.peak_bytes)}"
        ax.step(over, other.total, where="post", color=palette.OTHER, linewidth=1.8, label=name)
        ax.plot(over[other.peak], other.peak_bytes, "v", color=palette.OTHER, label="_peak of the other")
        highest = max(highest, other.peak_bytes)
    upto = axes.bound(ax, m.memory_bytes, "memory", horizontal=True, upto=highest)
    ax.set_xlim(x[0], x[-1])
    ax.set_ylim(0, 1.42 * upto)
    _mark(ax, t, x)
    _passes(ax, t, x, aligned=other is not None)
    axes.in_bytes(ax.yaxis, upto)
    axes.quiet(ax, "y")
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    apart = abs(m.peak_bytes - t.peak_bytes) > 0.005 * m.peak_bytes
    own = f" (XLA's own figure: {format_bytes(m.peak_bytes)})" if apart else ""
    axes.title(
        ax,
        f"Memory over the schedule: {axes.shortened(m.policy, 60)} on {axes.shortened(m.target)}",
        f"peak {format_bytes(t.peak_bytes)}{own}; compiled, bytes on one device; what a loop runs stands here once",
    )
    return ax


def of(m: Measurement) -> Timeline:
    """The timeline of a measurement.

    Raises:
      RematError: where it has none, or is no measurement.
    """
    if not isinstance(m, Measurement):
        raise RematError(f"against= is a Measurement, as rk.measure returns it; got {type(m).__name__}.")
    if m.timeline is None:
        why = "the compiler found no room for the program" if m.temp_bytes is None else "there is no schedule of it"
        raise RematError(
            f"no memory over time for {m.policy!r:.80} on {m.target}: {why}. Measure it with a policy that fits, "
            "or for target='cpu'."
        )
    return m.timeline


def _parts(t: Timeline, by: str) -> dict[str, Sequence[int]]:
    """The parts that are stacked; small modules together, so that each has a colour of its own."""
    parts: dict[str, Sequence[int]] = {k: v for k, v in t.by(by).items() if any(v)}
    if by == "class":
        return parts
    fixed = {k: v for k, v in parts.items() if k.startswith("(") and k != "(no module)"}
    rest = [k for k in parts if k not in fixed]
    small = rest[_MODULES - 1 :] if len(rest) > _MODULES else []
    shown = {**fixed, **{k: parts[k] for k in rest if k not in small}}
    if small:
        shown[f"{len(small)} more"] = [sum(v) for v in zip(*(parts[k] for k in small), strict=True)]
    return shown


def _label(name: str, sizes: Sequence[int], t: Timeline) -> str:
    """What the legend says; nothing for what is too small to be seen."""
    return axes.shortened(name) if max(sizes) > 0.002 * t.peak_bytes else f"_{name}"


def _colors(names: list[str], by: str) -> list[str]:
    if by == "class":
        return [palette.CLASSES[n] for n in names]
    free = iter(palette.SERIES)
    return [palette.CLASSES.get(n[1:-1]) or next(free) for n in names]


def _positions(t: Timeline, other: Timeline | None) -> list[float]:
    """Where the steps stand: at their numbers; beside another timeline each pass at the same width."""
    count = len(t.steps)
    if other is None:
        return [float(n) for n in range(count)]
    if t.turn is None or other.turn is None:
        return [n / max(count - 1, 1) for n in range(count)]
    forward, backward = max(t.turn, 1), max(count - 1 - t.turn, 1)
    return [n / forward if n < t.turn else 1 + (n - t.turn) / backward for n in range(count)]


def _mark(ax: Axes, t: Timeline, x: Sequence[float]) -> None:
    """Marks the peak and names its largest buffers above it, on the side where there is more room."""
    color = rcParams["text.color"]
    at = x[t.peak]
    ax.plot(at, t.peak_bytes, "o", color=color, markersize=5, label="_peak")
    left = at - x[0] > x[-1] - at
    lines = [f"peak {format_bytes(t.peak_bytes)}", *(_what(h) for h in t.at()[:_LARGEST])]
    ax.annotate(
        "\n".join(lines),
        (at, t.peak_bytes),
        (at, 0.935),
        textcoords=("data", ax.get_xaxis_transform()),
        ha="right" if left else "left",
        va="top",
        fontsize="x-small",
        linespacing=1.3,
        bbox={"boxstyle": "round,pad=0.3", "facecolor": ax.get_facecolor(), "edgecolor": "none", "alpha": 0.75},
        arrowprops={"arrowstyle": "-", "linewidth": 0.6, "color": color, "alpha": 0.6, "relpos": (float(left), 0)},
    )


def _what(h: Held) -> str:
    name = h.name or "/".join(filter(None, (h.path, h.op)))
    times = f" x{h.count}" if h.count > 1 else ""
    return f"{format_bytes(h.bytes)}  {axes.shortened(name, 44)}{times}  {h.phase or h.kind}"


def _passes(ax: Axes, t: Timeline, x: Sequence[float], *, aligned: bool) -> None:
    """Names the passes and, below them, the loops; a line where the backward pass begins."""
    color = rcParams["text.color"]
    below = ax.get_xaxis_transform()
    ax.set_xlabel("position in the schedule, each pass at one width" if aligned else "steps of the schedule")
    if aligned:
        ax.set_xticks([])
    said = {"transform": below, "ha": "center", "fontsize": "small"}
    if t.turn is not None:
        turn = 1.0 if aligned else x[t.turn]
        ax.axvline(turn, color=color, linewidth=0.8, alpha=0.5, linestyle=":")
        for start, end, name in ((x[0], turn, "forward"), (turn, x[-1], "backward")):
            ax.text((start + end) / 2, 0.985, name, va="top", alpha=0.65, **said)
    bar = {"transform": below, "color": color, "linewidth": 2, "solid_capstyle": "butt", "alpha": 0.6}
    for loop in t.loops if not aligned else ():
        if loop.end - loop.start >= 0.05 * len(x):
            trips = "?" if loop.trips is None else loop.trips
            name = f"{axes.shortened(loop.path.rsplit('/', 1)[-1] or 'loop', 16)} x{trips}"
            start, end = x[loop.start], x[loop.end - 1]
            ax.plot([start, end], [0.012, 0.012], label="_loop", **bar)
            ax.text((start + end) / 2, 0.02, name, va="bottom", **said)
