"""What all pictures share: Axes to draw into, axes in bytes, seconds and FLOPs, bounds, legends, files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from remat_kit._errors import RematError
from remat_kit._units import format_bytes, format_flops, format_seconds, printable

_DIM = 0.65  # opacity of what is said beside the figures


def axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The Axes to draw into: those given, else new ones in a figure of some inches, which notebooks show.

    Raises:
      RematError: for what is no Axes.
    """
    if ax is None:
        from matplotlib import pyplot

        return pyplot.subplots(figsize=size, layout="constrained")[1]
    if not isinstance(ax, Axes):
        raise RematError(f"ax= is a matplotlib Axes, got {type(ax).__name__}: one of plt.subplots(), say.")
    return ax


def write(draw: Callable[[Axes], Any], path: str | os.PathLike[str], size: tuple[float, float] = (9, 5)) -> None:
    """Draws into a figure of its own and writes it to a file, whose suffix says how: png, svg, pdf.

    Raises:
      RematError: for another suffix, or where the file cannot be written.
    """
    figure = Figure(figsize=size, layout="constrained")
    draw(figure.subplots())
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise RematError(f"cannot write the picture to {os.fspath(path)!r:.200}: {error}") from None


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def in_bytes(axis: Axis, largest: float) -> None:
    """Labels an axis in the binary unit that fits the largest figure, with round numbers of it."""
    power = min(len(_UNITS) - 1, int(math.log2(max(largest, 1)) / 10))
    unit = 1024**power
    axis.set_major_locator(_Scaled(unit))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / unit:.4g} {_UNITS[power]}" if x else "0"))


def in_flops(axis: Axis) -> None:
    """Labels an axis in FLOPs."""
    axis.set_major_formatter(FuncFormatter(lambda x, _: _short(format_flops(int(x)))))


def in_seconds(axis: Axis) -> None:
    """Labels an axis in seconds."""
    axis.set_major_formatter(FuncFormatter(lambda x, _: _short(format_seconds(x))))


class _Scaled(MaxNLocator):
    """Round numbers of a unit."""

    def __init__(self, unit: int) -> None:
        super().__init__(nbins=7, steps=[1, 2, 2.5, 5, 10])
        self._unit = unit

    def tick_values(self, vmin: float, vmax: float) -> Any:
        return [x * self._unit for x in super().tick_values(vmin / self._unit, vmax / self._unit)]


def _short(text: str) -> str:
    """``2.00 GiB`` as ``2 GiB``, 0 without its unit."""
    number, _, unit = text.partition(" ")
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return "0" if number in ("0", "") else f"{number} {unit}"


def bound(ax: Axes, size: int | None, name: str, *, horizontal: bool, upto: float, style: str = "--") -> float:
    """A line for a number of bytes, where it is not so far off that the rest would be lost; else only in the legend.

    Args:
      upto: the largest of the other figures.

    Returns:
      How far the axis has to reach.
    """
    if size is None:
        return upto
    look = {"linestyle": style, "color": rcParams["text.color"], "linewidth": 1.2, "alpha": _DIM}
    label = f"{name} {format_bytes(size)}"
    if size > 2.5 * max(upto, 1):
        ax.plot([], [], label=f"{label} ({'above' if horizontal else 'beyond'})", **look)
        return upto
    (ax.axhline if horizontal else ax.axvline)(size, label=label, **look)
    return max(upto, size)


def legend(ax: Axes, **options: Any) -> None:
    """A legend without a frame, where there is something to tell apart."""
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        ax.legend(handles, labels, frameon=False, fontsize="small", **options)


def title(ax: Axes, text: str, remark: str = "") -> None:
    """A title at the left and, smaller, what the figures are."""
    ax.set_title(text if not remark else f"{text}\n", loc="left", fontsize="large", fontweight="bold")
    if remark:
        ax.text(0, 1.01, remark, transform=ax.transAxes, va="bottom", fontsize="small", alpha=_DIM)


def quiet(ax: Axes, grid: str) -> None:
    """Takes away what carries no figures: the frame at the top and right; a faint grid along one or both axes."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=grid, alpha=0.2, linewidth=0.8)  # pyright: ignore[reportArgumentType]
    ax.set_axisbelow(True)


def shortened(text: str, most: int = 40) -> str:
    """A name in a picture: on one line, not interpreted as mathematics, its end kept."""
    text = printable(text)
    text = text if len(text) <= most else "..." + text[-(most - 3) :]
    return text.replace("$", r"\$")
