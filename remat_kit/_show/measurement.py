"""Measurements as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console

from remat_kit._show.draw import draw, to_str
from remat_kit._show.parts import GAP, Figures, Pairs, Part, line, table
from remat_kit._target.measurement import Held, Measurement
from remat_kit._units import format_bytes, format_flops, format_seconds, printable

_SHOWN = 10


def view(m: Measurement, top: int = _SHOWN) -> Iterator[Part]:
    """A measurement: memory, cost, what is live at the peak, notes.

    Args:
      top: how many of the largest buffers to show.
    """
    yield Pairs("Measurement", tuple(_head(m)))
    yield from (Figures(tuple(_memory(m))), GAP, Figures(tuple(_cost(m))))
    if m.held:
        yield from (GAP, line("Largest buffers at the peak (compiled)", "bold"))
        yield from _held(m.held, top)
    if m.effect is not None:
        yield from (GAP, line(f"Against {printable(m.effect.against)}", "bold"), Figures(tuple(_effect(m))))
        for finding in m.effect.findings:
            yield line(printable(finding), "yellow")
    for note in (*m.differences, *m.notes):
        yield line(f"note: {printable(note)}", "yellow")


def print_measurement(m: Measurement, console: Console | None = None, *, top: int = _SHOWN) -> None:
    """Prints a measurement, with the `top` largest buffers at the peak."""
    draw(view(m, top), console)


def measurement_to_str(m: Measurement) -> str:
    """Returns what `print_measurement` prints, without colours."""
    return to_str(view(m))


def fits_text(fits: bool | None) -> str:
    """Whether a program fits, in a word."""
    return {True: "yes", False: "no", None: "unknown"}[fits]


def _head(m: Measurement) -> Iterable[tuple[str, str]]:
    yield "target", printable(m.target) + (f" ({m.devices} devices; figures are those of one)" if m.devices > 1 else "")
    policy = printable(m.policy)
    yield "policy", policy if len(policy) <= 120 else policy[:116] + " ..."
    if m.memory_bytes is not None and m.headroom_bytes is not None:
        left = m.headroom_bytes
        words = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much"
        yield "fits", f"{fits_text(m.fits)}: {format_bytes(m.peak_bytes)} of {format_bytes(m.memory_bytes)}, {words}"
    else:
        yield "fits", fits_text(m.fits)
    yield (
        "compiled in",
        f"{format_seconds(m.compile_seconds)}" + (" (an earlier compile, from the cache)" if m.cached else ""),
    )


def _memory(m: Measurement) -> Iterable[tuple[str, str, str]]:
    rows = [
        ("peak", m.peak_bytes, "compiled" if m.temp_bytes is not None else "what the compiler says it would need"),
        (
            "temporary",
            m.temp_bytes,
            "compiled" if (m.temp_bytes or 0) <= m.peak_bytes else "compiled; not all at one time",
        ),
        ("arguments", m.argument_bytes, "compiled"),
        ("outputs", m.output_bytes, "compiled"),
        ("aliased", m.alias_bytes, "compiled; outputs that lie in donated arguments"),
        ("host", m.host_bytes, "compiled; temporary values in host memory"),
        ("host arguments", m.host_argument_bytes, "compiled; arguments and outputs in host memory"),
        ("code", m.code_bytes, "compiled"),
    ]
    always = ("peak", "temporary", "arguments", "outputs")
    for label, n, remark in rows:
        if n is not None and (n or label in always):
            yield label, format_bytes(n), remark
    if m.residuals is not None:
        over = ", over all devices" if m.devices > 1 else ""
        yield "residuals kept", format_bytes(m.residuals.total_bytes), f"predicted from the jaxpr{over}"
        if m.held_residual_bytes is not None:
            yield "residuals held", format_bytes(m.held_residual_bytes), "compiled; what the forward pass leaves behind"


def _cost(m: Measurement) -> Iterable[tuple[str, str, str]]:
    exact = "" if m.flops_exact else "; at least, see the note"
    over, one = (", over all devices", ", on one device") if m.devices > 1 else ("", "")
    yield "FLOPs", format_flops(m.flops), f"counted from the jaxpr, with trip counts{over}{exact}"
    yield "matrix products", format_flops(m.counted_matmul_flops), f"counted likewise, what of these they take{over}"
    if m.matmul_flops is not None:
        yield "matrix products", format_flops(m.matmul_flops), f"compiled, with trip counts{one}"
    if m.xla_flops is not None:
        yield "FLOPs", format_flops(int(m.xla_flops)), f"XLA's count, loop bodies once{one}"
    if m.bytes_accessed is not None:
        yield "memory traffic", format_bytes(m.bytes_accessed), f"compiled, with trip counts{one}"
    if m.timing is not None:
        t = m.timing
        spread = f"{format_seconds(t.low)} to {format_seconds(t.high)}"
        yield "step", format_seconds(t.median), f"timed; median of {t.steps}, quartiles {spread}"
        if t.peak_bytes is not None:
            yield "in use at most", format_bytes(t.peak_bytes), "the allocator's high-water mark in this process"
    if m.roofline_seconds is not None:
        yield "step", format_seconds(m.roofline_seconds), "predicted by the roofline, at the chip's limits"


def _effect(m: Measurement) -> Iterable[tuple[str, str, str]]:
    e = m.effect
    assert e is not None
    if e.predicted_bytes is not None:
        yield "residuals", _change(-e.predicted_bytes), "predicted" + (", over all devices" if m.devices > 1 else "")
    yield "peak", "-" if e.peak_bytes is None else _change(-e.peak_bytes), "compiled"
    for flops, origin in ((e.counted_flops, "counted from the jaxpr"), (e.flops, "compiled")):
        text = "-" if flops is None else ("+" if flops >= 0 else "-") + format_flops(abs(flops))
        yield "matrix products", text, origin


def _change(n: int) -> str:
    return ("+" if n >= 0 else "-") + format_bytes(abs(n))


def _held(held: tuple[Held, ...], top: int) -> Iterator[Part]:
    columns = ["bytes", "what", "where", "phase", "shape", "source"]
    rows = []
    for h in held[:top]:
        times = f" x{h.count}" if h.count > 1 else ""
        what = h.name or h.op
        rows.append(
            [
                format_bytes(h.bytes),
                printable(what) + times,
                printable(h.path),
                h.phase or h.kind,
                printable(h.shape),
                printable(h.source.rsplit("/", 1)[-1]),
            ]
        )
    yield table(columns, rows, right=(0,), whole=(3, 4, 5))
    rest = held[top:]
    if rest:
        yield line(f"... and {len(rest)} more ({format_bytes(sum(h.bytes for h in rest))})", "dim")
