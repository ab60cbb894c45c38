"""Whether a policy did anything to the compiled program, and what became of what was predicted."""

from __future__ import annotations

import jax

from remat_kit._target.measurement import Effect, Measurement
from remat_kit._units import format_bytes, format_flops

_NOTHING = 0.05  # less than this share of what was predicted is nothing
_MOST = 0.5
# Expands the barriers around recomputation before it removes common subexpressions (seen on 0.10.2, not on 0.12.0.1).
_MERGES = jax.__version_info__ < (0, 11)


def effect(before: Measurement, after: Measurement, keep_barriers: bool = False) -> Effect:
    """Compares two measurements of one step on one target: `before` under another policy than `after`.

    Args:
      keep_barriers: whether they were compiled so that the CPU's compiler keeps recomputation apart.
    """
    counted = (after.counted_matmul_flops - before.counted_matmul_flops) // after.devices
    kept = fell = grew = None
    if before.residuals is not None and after.residuals is not None:
        kept = before.residuals.total_bytes - after.residuals.total_bytes
    if before.temp_bytes is not None and after.temp_bytes is not None:  # else there is nothing compiled to compare
        fell = before.peak_bytes - after.peak_bytes
        grew = (after.matmul_flops or 0) - (before.matmul_flops or 0)
    found: list[str] = []
    if fell is not None and grew is not None:
        # What is kept is known over all devices, what is in use on one.
        found = [
            *(_memory(before, after, kept, fell, counted) if after.devices == 1 else []),
            *_products(counted, grew),
        ]
    if found and after.platform == "cpu" and not keep_barriers and _MERGES:
        found.append("The CPU compiler of this JAX merges recomputation outside loops: try keep_barriers=True.")
    return Effect(before.policy, kept, fell, counted, grew, tuple(found))


def _memory(before: Measurement, after: Measurement, kept: int | None, fell: int, counted: int) -> list[str]:
    peaks = f"{format_bytes(after.peak_bytes)} against {format_bytes(before.peak_bytes)} under {before.policy}"
    if kept is None:  # a whole step: that it computes more is all that is known
        if counted > 0 and fell < _NOTHING / 10 * before.peak_bytes:
            return [f"No effect on the peak: {format_flops(counted)} are computed again (counted), but it is {peaks}."]
        return []
    if kept > 0 and fell < _NOTHING * kept:
        return [
            f"No effect on the peak: {format_bytes(kept)} fewer residuals are kept (predicted), but it is {peaks} "
            "(compiled). What is live there: see the largest buffers at the peak."
        ]
    if kept > 0 and fell < _MOST * kept:
        return [
            f"{format_bytes(kept)} fewer residuals are kept (predicted), the peak fell by {format_bytes(fell)}, to "
            f"{peaks} (compiled): XLA had not kept the rest either (fused or recomputed), or other buffers make the "
            "peak now."
        ]
    return []


def _products(counted: int, grew: int) -> list[str]:
    if counted > 0 and grew < _MOST * counted:
        return [
            f"The compiler merged recomputation with the forward pass: {format_flops(counted)} of matrix products are "
            f"to be computed again (counted), {format_flops(max(grew, 0))} are (compiled)."
        ]
    return []


def offload_findings(m: Measurement) -> list[str]:
    """What became of the values that the policy offloads."""
    wanted = m.residuals.host_bytes if m.residuals is not None else 0
    if not wanted or m.host_bytes is None:
        return []
    if m.platform == "cpu":
        return [
            f"{format_bytes(wanted)} are offloaded by the policy; on the CPU that cannot be seen, host and device are "
            "one memory."
        ]
    if m.host_bytes < _MOST * wanted // m.devices:
        partly = "" if m.host_bytes == 0 else " partly"
        return [
            f"Offload{partly} dropped: the policy offloads {format_bytes(wanted)}, the compiled program has "
            f"{format_bytes(m.host_bytes)} in host memory."
        ]
    return []
