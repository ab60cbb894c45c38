"""From the buffers of a compiled program back to the values of the program that was lowered."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

from remat_kit._target.live import Buffer, Memory
from remat_kit._target.measurement import Held
from remat_kit._trace.report import Kind, Residuals
from remat_kit._units import format_bytes

_SHOWN = 30  # buffers
_LISTED = 4  # values in a sentence
_NOTEWORTHY = 0.05  # of what was predicted

# What JAX and XLA put in name stacks beside modules and scopes: transforms, loops, regions, calls.
_TRANSFORM = re.compile(r"\w+\(.*\)")
_STRUCTURE = re.compile(
    r"while|body|cond|branch_\d+_fun|checkpoint|rematted_computation|remat\d?|closed_call|core_call|eval_jaxpr|"
    r"custom_(jvp|vjp)_call\w*|shard_map|shmap_body|vmap|scan"
)
_JVP = re.compile(r"jvp\([^()]*\)")
_LEAF = re.compile(r"leaves\[(\d+)\]")


def held(memory: Memory, labels: Sequence[str], residuals: Residuals | None) -> tuple[Held, ...]:
    """The largest buffers at the peak, identical ones together.

    Args:
      labels: names of the arguments' leaves.
      residuals: the report whose names the buffers get where path and size agree.
    """
    return joined(to_held(buffer, labels, residuals) for buffer in memory.buffers)[:_SHOWN]


def joined(buffers: Iterable[Held]) -> tuple[Held, ...]:
    """Identical buffers together, also those of layers that differ in their numbers; the largest first."""
    groups: dict[Held, Held] = {}
    for one in buffers:
        key = dataclasses.replace(one, bytes=0, path=re.sub(r"\d+", "{}", one.path))
        so_far = groups.get(key)
        if so_far is None:
            groups[key] = one
        else:
            groups[key] = dataclasses.replace(so_far, bytes=so_far.bytes + one.bytes, count=so_far.count + 1)
    return tuple(sorted(groups.values(), key=lambda h: -h.bytes))


def held_residuals(memory: Memory) -> int | None:
    """Bytes that the forward pass leaves in device memory for the backward pass.

    None where the program does not tell the two apart: no gradient in it, or name stacks lost.
    """
    return None if memory.between is None else sum(b.bytes for b in memory.handed_over)


def differences(memory: Memory, residuals: Residuals | None) -> tuple[str, ...]:
    """Why the compiled program holds another number of bytes for the backward pass than was predicted, as sentences.

    Predicted residuals and buffers are matched by their number of elements, which layouts and stacking leave alone.
    """
    if residuals is None or memory.between is None:
        return ()
    predicted = [e for e in residuals.entries if e.action is Kind.SAVED and not e.alias_of]
    buffers = list(memory.handed_over)
    missing: list[tuple[str, int]] = []
    narrowed: list[tuple[str, int]] = []
    for e in sorted(predicted, key=lambda e: -e.bytes):
        match = next((b for b in buffers if b.elements == math.prod(e.shape)), None)
        if match is None:
            missing.append((e.label, e.bytes))
        else:
            buffers.remove(match)
            if match.bytes < e.bytes:
                narrowed.append((e.label, e.bytes - match.bytes))
    besides = [("/".join(filter(None, place(b.op_name))) or b.name, b.bytes) for b in buffers]
    out = []
    for title, found in (
        (
            "Predicted residuals without a buffer of their size (fused, recomputed or in on-chip memory)",
            missing,
        ),
        ("Saved by holding predicted residuals before a conversion to a wider dtype", narrowed),
        ("Held for the backward pass besides the predicted residuals", besides),
    ):
        total = sum(n for _, n in found)
        if total > _NOTEWORTHY * residuals.total_bytes:
            out.append(f"{title}: {format_bytes(total)}, {_listing(found)}.")
    return tuple(out)


def _listing(found: Sequence[tuple[str, int]]) -> str:
    sums: dict[str, int] = {}
    for label, n in found:
        label = re.sub(r"\d+", "*", label) if len(found) > _LISTED else label
        sums[label] = sums.get(label, 0) + n
    largest = sorted(sums.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{label} ({format_bytes(n)})" for label, n in largest[:_LISTED])
    return shown + (", ..." if len(largest) > _LISTED else "")


def place(op_name: str) -> tuple[str, str]:
    """The module path and the operation in a name stack of HLO metadata.

    >>> place("jit(loss)/transpose(jvp(GPT))/while/body/layers/attention/query/dot_general")
    ('layers/attention/query', 'dot_general')

    In a rematerialized region JAX writes the stack around it twice:

    >>> place("jit(loss)/transpose(jvp(GPT))/layers_1/jvp(GPT)/layers_1/checkpoint/mlp/dot_general")
    ('layers_1/mlp', 'dot_general')
    """
    scopes = _split(op_name)
    kept: list[str] = []
    transforms = ""
    for scope in scopes[:-1]:
        if _TRANSFORM.fullmatch(scope):
            again = _JVP.search(scope)
            if again is not None and again[0] in transforms:
                kept = []
            transforms += scope
        elif not _STRUCTURE.fullmatch(scope) and "->" not in scope:
            kept.append(scope)
    return "/".join(kept), scopes[-1] if scopes else ""


def _split(op_name: str) -> list[str]:
    """Splits at slashes outside brackets: ``jvp(a/b)`` is one scope."""
    out, depth, start = [], 0, 0
    for i, c in enumerate(op_name):
        if c == "/" and depth <= 0:
            out.append(op_name[start:i])
            start = i + 1
        depth += (c in "([{") - (c in ")]}")
    return [s for s in (*out, op_name[start:]) if s]


def _name(residuals: Residuals | None, path: str, op: str, elements: int) -> str:
    """The checkpoint name of a buffer: that of the one named residual of its size at its path.

    A name may be given outside the module that made the value, or to a value on its way out of it; JAX rounds what it
    saves there (`reduce_precision`), which tells such a buffer.
    """
    if residuals is None or not path:
        return ""
    found: dict[str, set[str]] = {}
    for e in residuals.entries:
        short, long = sorted((f"{path}/", f"{e.path}/"), key=len)
        near = e.path == path or (op == "reduce_precision" and long.startswith(short))
        if e.names and near and math.prod(e.shape) == elements:
            found.setdefault(e.path, set()).add(", ".join(e.names))
    nearest = found[max(found, key=len)] if found else set()
    return nearest.pop() if len(nearest) == 1 else ""


def to_held(buffer: Buffer, labels: Sequence[str], residuals: Residuals | None) -> Held:
    path, op = place(buffer.op_name)
    if buffer.kind == "argument":
        leaf = _LEAF.fullmatch(buffer.op_name)
        name = labels[int(leaf[1])] if leaf and int(leaf[1]) < len(labels) else buffer.op_name
        path, op = "", "argument"
    else:
        name = _name(residuals, path, op, buffer.elements) if buffer.phase == "forward" else ""
    source = f"{buffer.source[0]}:{buffer.source[1]}" if buffer.source else ""
    phase = "recomputed" if buffer.recomputed else buffer.phase
    return Held(buffer.bytes, buffer.shape, buffer.kind, phase, name, path, op or buffer.opcode, source)
