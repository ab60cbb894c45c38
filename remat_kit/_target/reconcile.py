"""From the buffers of a compiled program back to the values of the program that was lowered."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from remat_kit._target.live import Buffer, Timeline
from remat_kit._target.measurement import Held
from remat_kit._trace.report import Residual, Residuals

_SHOWN = 30

# What JAX and XLA put in name stacks beside modules and scopes: transforms, loops, regions, calls.
_TRANSFORM = re.compile(r"\w+\(.*\)")
_STRUCTURE = re.compile(
    r"while|body|cond|branch_\d+_fun|checkpoint|rematted_computation|remat\d?|closed_call|core_call|eval_jaxpr|"
    r"custom_(jvp|vjp)_call\w*|shard_map|shmap_body|vmap|scan"
)
_LEAF = re.compile(r"leaves\[(\d+)\]")


def held(timeline: Timeline, labels: Sequence[str], residuals: Residuals | None) -> tuple[Held, ...]:
    """The largest buffers at the peak, identical ones together.

    Args:
      labels: names of the arguments' leaves.
      residuals: the report whose names the buffers get where path, operation and size agree.
    """
    names = _names(residuals)
    groups: dict[Held, Held] = {}
    for buffer in timeline.buffers:
        one = _held(buffer, labels, names)
        key = dataclasses.replace(one, bytes=0, path=re.sub(r"\d+", "{}", one.path))
        so_far = groups.get(key)
        if so_far is None:
            groups[key] = one
        else:
            groups[key] = dataclasses.replace(so_far, bytes=so_far.bytes + one.bytes, count=so_far.count + 1)
    return tuple(sorted(groups.values(), key=lambda h: -h.bytes)[:_SHOWN])


def held_residuals(timeline: Timeline) -> int | None:
    """Bytes that the forward pass leaves in device memory for the backward pass.

    None where the program does not tell the two apart: no gradient in it, or name stacks lost.
    """
    return None if timeline.between is None else sum(b.bytes for b in timeline.handed_over)


def place(op_name: str) -> tuple[str, str]:
    """The module path and the operation in a name stack of HLO metadata.

    >>> place("jit(loss)/transpose(jvp(GPT))/while/body/layers/attention/query/dot_general")
    ('layers/attention/query', 'dot_general')
    """
    scopes = _split(op_name)
    if not scopes:
        return "", ""
    kept = [s for s in scopes[:-1] if not _TRANSFORM.fullmatch(s) and not _STRUCTURE.fullmatch(s) and "->" not in s]
    return "/".join(kept), scopes[-1]


def _split(op_name: str) -> list[str]:
    """Splits at slashes outside brackets: ``jvp(a/b)`` is one scope."""
    out, depth, start = [], 0, 0
    for i, c in enumerate(op_name):
        if c == "/" and depth <= 0:
            out.append(op_name[start:i])
            start = i + 1
        depth += (c in "([{") - (c in ")]}")
    return [s for s in (*out, op_name[start:]) if s]


def _names(residuals: Residuals | None) -> Mapping[tuple[str, str, int], str]:
    if residuals is None:
        return {}
    found: dict[tuple[str, str, int], str] = {}
    for e in residuals.entries:
        if e.names:
            found.setdefault(_key(e), ", ".join(e.names))
    return found


def _key(e: Residual) -> tuple[str, str, int]:
    return e.path, e.op, math.prod(e.shape)


def _held(buffer: Buffer, labels: Sequence[str], names: Mapping[tuple[str, str, int], str]) -> Held:
    path, op = place(buffer.op_name)
    if buffer.kind == "argument":
        leaf = _LEAF.fullmatch(buffer.op_name)
        name = labels[int(leaf[1])] if leaf and int(leaf[1]) < len(labels) else buffer.op_name
        path, op = "", "argument"
    else:
        name = names.get((path, op, buffer.elements), "")
    source = f"{buffer.source[0]}:{buffer.source[1]}" if buffer.source else ""
    phase = "recomputed" if buffer.recomputed else buffer.phase
    return Held(buffer.bytes, buffer.shape, buffer.kind, phase, name, path, op or buffer.opcode, source)
