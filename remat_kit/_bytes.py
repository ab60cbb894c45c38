"""Byte sizes as people write them: ``"1MiB"``, ``"2GB"``, ``"512 KiB"``, ``4096`` and back again.

Exact in both directions: whatever `format_bytes` prints, `parse_bytes` reads as the same number of bytes.
"""

from __future__ import annotations

import operator
import re
from fractions import Fraction

from remat_kit._errors import RematError

_UNITS = {
    "b": 1,
    **{f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgtp")},
    **{f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgtp")},
}
_SPELLED = ["B", "KB", "MB", "GB", "TB", "PB", "KiB", "MiB", "GiB", "TiB", "PiB"]
_SIZE = re.compile(r"(\d{1,19}(?:\.\d{1,19})?)\s*([A-Za-z]*)", re.ASCII)  # bounded: the text may come from a stranger
_LARGEST = 2**63 - 1


def parse_bytes(size: int | str) -> int:
    """Reads a size in bytes.

    Args:
        size: a whole number of bytes, or text such as ``"1MiB"``, ``"1.5 GB"``, ``"4096"``. ``KB, MB, GB, TB, PB`` are
            powers of 1000 and ``KiB, MiB, GiB, TiB, PiB`` powers of 1024; upper and lower case are the same.

    Returns:
        The number of bytes.

    Raises:
        RematError: when the size is not one, is negative, or is not a whole number of bytes.
    """
    if isinstance(size, bool):
        raise RematError(f"a size in bytes was expected, got {size!r}.")
    if not isinstance(size, str):
        try:
            count = operator.index(size)
        except TypeError:
            raise RematError(
                f"a size in bytes was expected (an int, or text such as '1MiB'), got {size!r} of type "
                f"{type(size).__name__}."
            ) from None
        if not 0 <= count <= _LARGEST:
            raise RematError(
                f"a size in bytes lies between 0 and 2**63 - 1, got {count if abs(count) < 1e30 else '...'}."
            )
        return count
    found = _SIZE.fullmatch(size.strip())
    unit = found[2].lower() if found else ""
    if not found or (unit and unit not in _UNITS):
        hint = ""
        if found and f"{unit}b" in _UNITS:
            hint = f" Did you mean '{found[1]}{unit.upper()}iB' or '{found[1]}{unit.upper()}B'?"
        raise RematError(
            f"malformed size {size[:40]!r}: write a number and one of {', '.join(_SPELLED)}, as in '1MiB'.{hint}"
        )
    count = Fraction(found[1]) * _UNITS[unit or "b"]
    if count.denominator != 1:
        raise RematError(f"malformed size {size!r}: that is not a whole number of bytes.")
    return parse_bytes(int(count))


def format_bytes(count: int) -> str:
    """Prints a number of bytes exactly, in the unit that gives the shortest text: ``1048576`` -> ``"1MiB"``."""
    whole = [f"{count // _UNITS[u.lower()]}{u}" for u in _SPELLED[1:] if count and count % _UNITS[u.lower()] == 0]
    return min([*whole, str(count)], key=lambda text: (len(text.rstrip("KMGTPiB")), len(text)))
