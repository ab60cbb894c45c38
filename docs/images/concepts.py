"""Makes the four pictures of docs/concepts.md again: `python docs/images/concepts.py`, with the extra plot.

All figures in them are the toolkit's own, for programs that are compiled for the CPU; some minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

import remat_kit as rk
from remat_kit._show import palette

HERE = Path(__file__).parent
MIB = 2**20
FLOATS = jax.ShapeDtypeStruct
INK, PALE = "#404040", "#e8e8e8"


def main() -> None:
    matplotlib.use("Agg")
    save("concept_residuals", residuals, height=3.6)
    save("concept_placement", placement, height=4.6)
    save("concept_peak", peak, height=4.2)
    save("concept_budget", budget, height=4.8)


def save(name: str, draw: Callable[[Axes], None], height: float) -> None:
    figure = Figure(figsize=(9.5, height), layout="constrained")
    draw(figure.subplots())
    figure.savefig(HERE / f"{name}.png", dpi=100)


# 1: what a residual is ------------------------------------------------------------------------------------------------


def residuals(ax: Axes) -> None:
    """A layer and its loss, forward above and backward below: what goes down is a residual."""

    def loss(params: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        up, down = params
        return jnp.mean((jnp.tanh(x @ up) @ down) ** 2)

    params = (FLOATS((256, 1024), "float32"), FLOATS((1024, 256), "float32"))
    report = rk.residuals(loss, params, FLOATS((2048, 256), "float32"))
    mib = {(e.op, e.shape): f"{e.bytes / MIB:.0f} MiB" for e in report.entries}
    forward = ["x @ up", "tanh", "h @ down", "mean of squares"]
    backward = ["gradient of up", "of tanh", "of h, of down", "of the mean"]
    for i, (above, below) in enumerate(zip(forward, backward, strict=True)):
        _box(ax, i, 2, above, palette.TEMPORARY)
        _box(ax, i, 0, below, palette.ARGUMENTS)
        if i:
            _arrow(ax, (i - 0.64, 2), (i - 0.37, 2), INK)
            _arrow(ax, (i - 0.37, 0), (i - 0.64, 0), INK)
    _arrow(ax, (-0.85, 2), (-0.37, 2), INK)
    _arrow(ax, (3.37, 2), (3.6, 2), INK)
    ax.text(3.63, 2, "loss", va="center", color=INK)
    ax.text(-0.88, 2, "x", ha="right", va="center", color=INK)
    _arrow(ax, (-0.62, 1.95), (-0.15, 0.28), palette.ARGUMENTS)
    ax.text(-0.98, 0.9, f"x\n{mib['input', (2048, 256)]}", color=palette.ARGUMENTS, fontsize=9)
    _arrow(ax, (1.0, 1.74), (1.0, 0.28), palette.SAVED)
    ax.text(0.3, 0.9, f"1 - h * h\n{mib['one_minus_square', (2048, 1024)]}", color=palette.SAVED, fontsize=9)
    _arrow(ax, (1.45, 1.95), (1.9, 0.28), palette.SAVED)
    ax.text(1.3, 0.9, f"h\n{mib['tanh', (2048, 1024)]}", color=palette.SAVED, fontsize=9)
    _arrow(ax, (2.12, 1.74), (2.12, 0.28), palette.ARGUMENTS)
    ax.text(2.2, 0.9, f"down\n{mib['input', (1024, 256)]}", color=palette.ARGUMENTS, fontsize=9)
    _arrow(ax, (2.5, 1.95), (2.95, 0.28), palette.SAVED)
    ax.text(2.98, 0.9, f"2 (h @ down)\n{mib['mul', (2048, 256)]}", color=palette.SAVED, fontsize=9)
    ax.text(-1.0, 2.55, "forward pass: h = tanh(x @ up), loss = mean((h @ down) ** 2)", fontsize=9, color=INK)
    ax.text(-1.0, -0.65, "backward pass, from right to left", fontsize=9, color=INK)
    ax.text(1.7, -0.65, "kept for it:", fontsize=9, color=INK)
    ax.text(2.2, -0.65, "intermediates", fontsize=9, color=palette.SAVED)
    ax.text(2.78, -0.65, "arguments, which are there anyway", fontsize=9, color=palette.ARGUMENTS)
    _plain(ax, "Residuals: what the backward pass reads of the forward pass", (-1.1, 4.1), (-0.85, 2.8))


def _box(ax: Axes, x: float, y: float, text: str, colour: str) -> None:
    style = {"boxstyle": "round,pad=0.03", "fc": colour, "ec": "none", "alpha": 0.35}
    ax.add_patch(FancyBboxPatch((x - 0.33, y - 0.22), 0.66, 0.44, **style))
    ax.text(x, y, text, ha="center", va="center", fontsize=10, color="black")


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.6})


def _plain(ax: Axes, title: str, x: tuple[float, float], y: tuple[float, float]) -> None:
    ax.set_title(title, loc="left", fontweight="bold", fontsize=11)
    ax.set(xlim=x, ylim=y)
    ax.axis("off")


# 2: where remat goes --------------------------------------------------------------------------------------------------

LAYERS, WIDTH, ROWS = 8, 256, 4096


def placement(ax: Axes) -> None:
    """One stack of layers with regions in five places, and the compiled memory of each."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + jnp.sin(jnp.cos(jnp.sin(x @ w)))

    def unrolled(layer: Callable) -> Callable:
        def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
            for i in range(LAYERS):
                x = layer(x, ws[i])
            return jnp.mean(x**2)

        return loss

    def scanned(layer: Callable, around: Callable = lambda f: f) -> Callable:
        stack = around(lambda x, ws: jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0])
        return lambda ws, x: jnp.mean(stack(x, ws) ** 2)

    def region(f: Callable) -> Callable:
        return rk.remat(f, block="region")

    rows = [
        ("no remat", unrolled(layer), [], False),
        ("around the whole loss", region(unrolled(layer)), [(0, LAYERS)], False),
        ("around each layer", unrolled(region(layer)), [(i, i + 1) for i in range(LAYERS)], False),
        ("around a scan over layers", scanned(layer, region), [(0, LAYERS)], True),
        ("in the body of the scan", scanned(region(layer)), [(0, 1)], True),
    ]
    args = FLOATS((LAYERS, WIDTH, WIDTH), "float32"), FLOATS((ROWS, WIDTH), "float32")
    measured = [rk.measure(loss, *args, target="cpu") for _, loss, _, _ in rows]
    for y, ((title, _, regions, loop), m) in enumerate(zip(rows, measured, strict=True)):
        colour = palette.SAVED if y in (2, 4) else palette.OUTPUTS
        width = m.temp_bytes / MIB / 40
        _stack(ax, -y, regions, loop)
        ax.text(0, -y + 0.34, title, fontsize=10)
        ax.add_patch(Rectangle((9.2, -y - 0.22), width, 0.44, fc=colour))
        again = f", {m.flops / measured[0].flops - 1:+.0%} FLOPs" if regions else ""
        ax.text(9.3 + width, -y, f"{m.temp_bytes / MIB:.0f} MiB{again}", va="center", fontsize=9)
    ax.text(9.2, 0.55, "temporary memory of the gradient (compiled, CPU)", fontsize=9, color=INK)
    _plain(ax, "Where remat goes: a region gives back what lies inside it, while others run", (-0.3, 17.5), (-4.5, 0.9))


def _stack(ax: Axes, y: float, regions: list[tuple[int, int]], loop: bool) -> None:
    for i in range(1 if loop else LAYERS):
        ax.add_patch(Rectangle((i + 0.16, y - 0.16), 0.68, 0.32, fc=palette.TEMPORARY, alpha=0.5))
    for start, end in regions:
        around = loop and end > 1  # the scan itself, not its body
        width = 1.5 if around else 0.92 if loop else end - start - 0.08
        height = 0.56 if around else 0.46
        frame = (start + (-0.02 if around else 0.04), y - height / 2)
        ax.add_patch(Rectangle(frame, width, height, fill=False, ec=palette.RECOMPUTED, lw=1.6, ls="--"))
    if loop:
        ax.text(1.05, y, f"x{LAYERS}", va="center", fontsize=9)


# 3: saved bytes are not the peak --------------------------------------------------------------------------------------


def peak(ax: Axes) -> None:
    """A chain of 64 steps in segments: the fewer segments, the less is kept, and the more is made again at one time."""
    n = 64

    def loss(x: jax.Array, ws: jax.Array, segments: int) -> jax.Array:
        def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.sin(jnp.cos(x * w)), None

        return jnp.mean(rk.scan(step, x, ws, segments=segments, policy="none")[0] ** 2)

    args = FLOATS((512, 2048), "float32"), FLOATS((n, 2048), "float32")
    counts = [1, 2, 4, 8, 16, 32, 64]
    kept, peaks = [], []
    for k in counts:
        run = lambda x, ws, k=k: loss(x, ws, k)  # noqa: E731
        kept.append(rk.residuals(run, *args).total_bytes / MIB)
        peaks.append(rk.measure(run, *args, target="cpu").peak_bytes / MIB)
    ax.plot(range(len(counts)), peaks, "o-", color=palette.RECOMPUTED, label="peak of the gradient (compiled, CPU)")
    ax.plot(range(len(counts)), kept, "o-", color=palette.SAVED, label="kept for the backward pass (predicted)")
    for values, above in ((peaks, 9), (kept, -14)):
        for i, value in enumerate(values):
            ax.annotate(f"{value:.0f}", (i, value), (0, above), textcoords="offset points", ha="center", fontsize=9)
    ax.set_xticks(range(len(counts)), [str(k) for k in counts])
    ax.set(xlabel=f"segments of a scan over {n} steps", ylabel="MiB", ylim=(min(0, min(kept)) - 30, max(peaks) * 1.15))
    ax.set_title("Saved bytes are not the peak", loc="left", fontweight="bold", fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9)


# 4: from a budget to a plan -------------------------------------------------------------------------------------------


def budget(ax: Axes) -> None:
    """All plans for a small GPT, presets beside them, and one budget."""
    loss, args = rk.zoo.gpt(layers=8, batch=8, length=256, width=256, heads=4, vocab=1024)
    presets = rk.compare(loss, *args, policies=("none", "full", "dots", "dots_no_batch"), target="cpu")
    plans = rk.frontier(loss, *args, target="cpu", minimize="flops", points=8, compiles=8)
    plans.plot(ax, presets=presets, budget="200MiB")


if __name__ == "__main__":
    main()
