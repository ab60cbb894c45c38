"""Figures as text: bytes in binary units, FLOPs in decimal ones, seconds, ratios and shares.

Every view (terminal, HTML, command line) writes its figures through these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")


def _scaled(value: float, step: int, units: Sequence[str]) -> str:
    """Divides until three significant digits and a unit say it; never prints 1000 kFLOP for 1 MFLOP."""
    for unit in units:
        value /= step
        for digits in (2, 1, 0):
            text = f"{value:.{digits}f}"
            if abs(float(text)) < 10 ** (3 - digits):
                return f"{text} {unit}"
        if abs(float(text)) < step:  # 1000 to 1023 KiB
            return f"{text} {unit}"
    return f"{value:.3g} {units[-1]}"


def format_bytes(n: int) -> str:
    """Writes a number of bytes in binary units.

    >>> format_bytes(0), format_bytes(1023), format_bytes(1536), format_bytes(3 * 2**30)
    ('0 B', '1023 B', '1.50 KiB', '3.00 GiB')
    """
    return f"{n} B" if abs(n) < 1024 else _scaled(n, 1024, _BINARY)


def format_flops(n: int | None) -> str:
    """Writes a number of floating point operations; `None` (cannot be recomputed) is ``"-"``.

    >>> format_flops(12), format_flops(2_500_000), format_flops(None)
    ('12 FLOP', '2.50 MFLOP', '-')
    """
    if n is None:
        return "-"
    return f"{n} FLOP" if abs(n) < 1000 else _scaled(n, 1000, _DECIMAL)


def format_seconds(x: float) -> str:
    """Writes a time in the unit that fits.

    >>> format_seconds(12.345), format_seconds(0.0123), format_seconds(2e-6), format_seconds(0)
    ('12.3 s', '12.3 ms', '2.00 us', '0 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if x * scale >= 1 or unit == "us":
            return f"{x * scale:.{2 if x * scale < 10 else 1 if x * scale < 100 else 0}f} {unit}" if x else "0 s"
    raise AssertionError


def format_ratio(x: float | None) -> str:
    """Writes bytes per FLOP: ``"free"`` where recomputing costs nothing, ``"-"`` where it is not possible.

    >>> format_ratio(2.0), format_ratio(0.0123456), format_ratio(float("inf")), format_ratio(None)
    ('2', '0.0123', 'free', '-')
    """
    if x is None:
        return "-"
    return "free" if math.isinf(x) else f"{x:.3g}"


def format_share(part: int, whole: int) -> str:
    """Writes a share in per cent; ``"<1%"`` instead of a zero that is none.

    >>> format_share(1, 2), format_share(1, 1000), format_share(0, 0)
    ('50%', '<1%', '0%')
    """
    share = part / whole if whole else 0.0
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def format_shape(dtype: str, shape: Sequence[int]) -> str:
    """Writes an array type as JAX does.

    >>> format_shape("bfloat16", (8, 16)), format_shape("float32", ())
    ('bf16[8,16]', 'f32[]')
    """
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if dtype.startswith(long) and dtype[len(long) :].isdigit():
            dtype = short + dtype[len(long) :]
            break
    return f"{dtype}[{','.join(map(str, shape))}]"


def printable(text: str) -> str:
    """Escapes control and formatting characters, so that a name can neither move the cursor nor break a row.

    >>> printable("a\\x1b[31m\\nb")
    'a\\\\x1b[31m\\\\nb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
