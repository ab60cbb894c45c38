"""Budgets: peak bytes of memory per device, absolute or as a share of a target's memory."""

from __future__ import annotations

from remat_kit._bytes import parse_bytes
from remat_kit._errors import RematError
from remat_kit._target.target import Target


def budget_bytes(budget: int | float | str | None, target: Target | None) -> int | None:
    """Reads a budget.

    Args:
      budget: bytes (``14 * 2**30``), text (``"14GiB"``), a share of the target's memory (``0.9``), or None for all of
        it.

    Returns:
      Bytes; None without a budget on a target whose memory is not known.

    Raises:
      RematError: for what is none of these; for a share of memory that is not known.
    """
    if budget is None:
        return target.memory_bytes if target is not None else None
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise RematError(
                f"budget={budget!r}: a share of the memory is at most 1.0. For bytes pass an int or '14GiB'."
            )
        if target is None or target.memory_bytes is None:
            whose = f"{target}, which is not known" if target is not None else "a target, and there is none"
            raise RematError(f"budget={budget!r} is a share of the memory of {whose}: pass bytes.")
        return int(budget * target.memory_bytes)
    found = parse_bytes(budget)
    if found == 0:
        raise RematError(f"budget={budget!r}: no program fits into no memory.")
    return found
