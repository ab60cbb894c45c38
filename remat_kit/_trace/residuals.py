"""Which values autodiff keeps: the linearized program read backwards, one `Residual` for each value kept.

Exact by construction: the entries are the distinct values that `jax.vjp` hands to its backward pass, each
traced through scans, branches, jit, remat, custom rules and shard_map to the equation that makes it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit._trace import jaxprs
from remat_kit._trace.cones import Cones
from remat_kit._trace.jaxprs import CallKind, JaxprEqn, Literal, Var
from remat_kit._trace.levels import VIEWS, Level, Source, trace_back
from remat_kit._trace.linearized import Linearized
from remat_kit._trace.recomputed import is_again
from remat_kit._trace.report import Kind, Residual


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A residual and where it was found, for those who ask more than a report shows."""

    entry: Residual
    source: Source


def read(
    lin: Linearized,
    labels: tuple[str, ...],
    *,
    device_bytes: Mapping[int, int] | None = None,
    hidden: Callable[[str], bool] = lambda name: False,
    block_of: Callable[[tuple[int, ...]], str] | None = None,
) -> list[Found]:
    """Reads the residuals of a linearized program.

    Args:
      labels: a name for each input of the program.
      device_bytes: bytes on one device, for inputs known to be sharded.
      hidden: whether a checkpoint name is one that the toolkit itself put in.
      block_of: the block that an original equation (its chain of numbers) lies in.
    """
    root = Level(lin.forward)
    back = Level(lin.backward)
    sources = [(v, indices, trace_back(root, v)) for v, indices in lin.kept]
    places: dict[tuple[int, Any], int] = {}
    for number, (_, _, s) in enumerate(sources):
        for level, var in s.points:
            places.setdefault((id(level), var), number)
    again = Cones(lambda level, var: not isinstance(var, Var) or (id(level), var) in places)
    found = []
    for number, (var, indices, s) in enumerate(sources):
        tags = lin.tagged
        aval = var.aval
        kind = _kind(root, var, aval)
        names, path, source, op, block = _describe(s, lin, hidden)
        needed_by, later = _needed_by(back, indices, tags.op)
        names = tuple(dict.fromkeys((*names, *(n for n in later if not hidden(n)))))
        if block_of is not None and not block:
            block = block_of(s.chain)
        if s.kind == "carry":  # it belongs to the loop, which bears the block's path
            path = path or block
        total = jaxprs.nbytes(aval)
        position = root.positions[s.var] if s.kind == "argument" and s.level is root else None
        copy_of = ""
        if kind in (Kind.ARGUMENT, Kind.CONSTANT):
            op, flops = "input", None
            path = "constant" if position is None else labels[position]
            local = total if position is None else (device_bytes or {}).get(position, total)
        else:
            local = _local_bytes(aval, s)
            flops = _recompute_flops(s, number, places, again)
            if position is not None or s.kind == "constant":  # handed on as it is: a second copy at most
                copy_of = "constant" if position is None else labels[position]
        entry = Residual(
            action=kind,
            names=names,
            op=op,
            shape=tuple(getattr(aval, "shape", ())),
            dtype=str(getattr(aval, "dtype", aval)),
            bytes=local,
            global_bytes=total,
            trips=s.stacked,
            block=block,
            path=path,
            source=source,
            needed_by=needed_by,
            alias_of=copy_of,
            recompute_flops=flops,
        )
        found.append(Found(entry, s))
    return _with_aliases(found, places)


def _kind(root: Level, var: Any, aval: Any) -> Kind:
    if var not in root.producers:
        return Kind.ARGUMENT if var in root.positions else Kind.CONSTANT
    return Kind.OFFLOADED if jaxprs.on_host(aval) else Kind.SAVED


def _describe(s: Source, lin: Linearized, hidden: Callable[[str], bool]) -> tuple[tuple[str, ...], str, str, str, str]:
    """Names, path, source line, operation and block of a value."""
    tagged, op = lin.tagged, s.kind
    names, source, block = _made(s, lin)
    if s.eqn is not None:
        op = jaxprs.op_of(s.eqn)
    elif s.kind == "carry" and s.level.call is not None:
        # The value carried in is what the iteration before carried out.
        i = s.level.positions[s.var] - s.level.call.num_consts
        more, source, block = _made(trace_back(s.level, s.level.jaxpr.outvars[i]), lin)
        names += more
    for other in s.others:
        names += _describe(other, lin, hidden)[0]
    kept = tuple(n for n in dict.fromkeys(names) if not hidden(n))
    return kept, tagged.path(s.chain), source, op, block


def _made(s: Source, lin: Linearized) -> tuple[list[str], str, str]:
    """Names, source line and block of a value, from the original of the equation that makes it."""
    chain, tagged, names = s.chain, lin.tagged, list(s.names)
    if s.eqn is None:
        return names, "", tagged.block(chain)
    source = _source(s.eqn)
    if chain:
        origin = tagged.origins[chain[-1]].eqn
        source = _source(origin) or source
        if jaxprs.op_of(origin) == jaxprs.op_of(s.eqn) and s.index < len(origin.outvars):
            names += tagged.names(chain, s.index)
    return names, source, tagged.block(chain)


def _source(eqn: JaxprEqn) -> str:
    file, line, function = jaxprs.source_line(eqn)
    return f"{os.path.basename(file)}:{line} ({function})" if file else ""


def _local_bytes(aval: Any, s: Source) -> int:
    if s.shards != 1.0:
        return int(jaxprs.nbytes(aval) / s.shards)
    size = 1
    for n in getattr(aval, "shape", ()):
        size *= n
    if not size or not hasattr(aval, "shape"):
        return jaxprs.nbytes(aval)
    local = 1
    for n in jaxprs.shard_shape(aval):
        local *= n
    return jaxprs.nbytes(aval) * local // size


# What recomputing costs ---------------------------------------------------------------------------


def _recompute_flops(s: Source, number: int, places: Mapping[tuple[int, Any], int], again: Cones) -> int:
    """FLOPs to make a value again from what else is kept and the inputs of its loop body."""
    start = s.var
    if s.eqn is None:
        # A carried value is made by one iteration; it cannot be had for less.
        if s.kind != "carry" or s.level.call is None:
            return 0
        start = s.level.jaxpr.outvars[s.level.positions[s.var] - s.level.call.num_consts]
    if not isinstance(start, Var) or places.get((id(s.level), start), number) != number:
        return 0
    return again.flops(s.level, start)


# Who needs it -------------------------------------------------------------------------------------


def _needed_by(
    back: Level, indices: Sequence[int], op_of: Callable[[int], str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The operations whose derivative rule reads a value or whose recomputation starts from it; names given there."""
    ops: dict[str, None] = {}
    names: list[str] = []
    # Whether what is read is still the value itself, so that a name given to it is a name of the value.
    todo: list[tuple[Level, Any, bool]] = [(back, back.jaxpr.invars[i], True) for i in indices]
    seen: set[tuple[int, Any]] = set()
    while todo:
        level, var, itself = todo.pop(0)
        if (id(level), var) in seen:
            continue
        seen.add((id(level), var))
        for eqn, positions in level.readers.get(var, ()):
            children = [c for c in level.children(eqn) if c.call is not None and c.call.kind is not CallKind.OPAQUE]
            if children:
                for c in children:
                    first, carried = c.call.num_consts, c.call.num_carry  # type: ignore[union-attr]
                    todo += [
                        (c, v, itself and not first <= i < first + carried)
                        for i, (v, o) in enumerate(zip(c.jaxpr.invars, c.call.operands, strict=False))  # type: ignore[union-attr]
                        if o in positions
                    ]
            elif eqn.primitive.name == "optimization_barrier":
                todo += [(level, eqn.outvars[i], itself) for i in positions]
            elif eqn.primitive.name in _PASSING or jaxprs.name_of(eqn) is not None:
                names += [n] if (n := jaxprs.name_of(eqn)) is not None and itself else []
                same = itself and eqn.primitive.name not in _CHANGING
                todo += [(level, v, same) for v in eqn.outvars if _same_size(v, var)]
            else:
                chain = level.chain_of(eqn)
                if chain:
                    op = op_of(chain[-1])
                    ops.setdefault(f"recompute({op})" if is_again(level, eqn) else op)
    return tuple(ops), tuple(names)


_CHANGING = {"convert_element_type", *VIEWS}
_PASSING = {"reduce_precision", "device_put", "copy", *_CHANGING}


def _same_size(a: Any, b: Any) -> bool:
    return getattr(a.aval, "size", None) == getattr(b.aval, "size", None)


# Aliases ------------------------------------------------------------------------------------------


def _with_aliases(found: list[Found], places: Mapping[tuple[int, Any], int]) -> list[Found]:
    """Flags entries that are a view (reshape, transpose, ...) of a value that is kept as well."""
    roots: list[tuple[int, Any] | None] = []
    for f in found:
        roots.append(_view_of(f.source) if f.source.eqn is not None else None)
    out = []
    first: dict[tuple[int, Any] | None, int] = {}
    for number, (f, base) in enumerate(zip(found, roots, strict=True)):
        of = None
        if base is not None:  # two views of one value that is not kept itself: the second is an alias of the first
            of = places.get(base, first.setdefault(base, number))
        if of is None or of == number or f.entry.action is not Kind.SAVED or f.entry.alias_of:
            out.append(f)
            continue
        out.append(Found(dataclasses.replace(f.entry, alias_of=found[of].entry.label), f.source))
    return out


def _view_of(s: Source) -> tuple[int, Any] | None:
    """The place of the value that this one is a view of, if it is one of the same stacking."""
    eqn, level, moved = s.eqn, s.level, False
    while eqn is not None and eqn.primitive.name in VIEWS:
        base = trace_back(level, eqn.invars[0])
        if base.stacked != 1 or isinstance(base.var, Literal):
            break
        moved = True
        eqn, level = base.eqn, base.level
        place = (id(base.level), base.var)
    return place if moved else None
