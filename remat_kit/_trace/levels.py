"""Walking a program made of nested programs: levels, and where a value of one comes from.

A `Level` is one program at one place where it is called. `trace_back` follows a value through calls,
loops, branches and checkpoint names to the equation that makes it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from remat_kit._trace import jaxprs, provenance
from remat_kit._trace.jaxprs import Call, CallKind, JaxprEqn, Literal, Var

# Equations that pass a value on as it is (to another memory, with a name, behind a barrier).
_SAME = {"reduce_precision", "optimization_barrier", "copy", "copy_p", "device_put", "pvary", "pcast"}
# Equations whose result holds the same numbers in another order or shape.
VIEWS = {"reshape", "transpose", "squeeze", "expand_dims", "rev"}


class Level:
    """One program at one call site. Children are made once, so that levels compare by identity."""

    def __init__(self, jaxpr: Any, parent: Level | None = None, eqn: JaxprEqn | None = None, call: Call | None = None):
        self.jaxpr = jaxprs.opened(jaxpr)
        self.parent, self.eqn, self.call = parent, eqn, call
        above = () if parent is None or eqn is None else (*parent.chain, *provenance.tags(eqn))
        self.chain: tuple[int, ...] = _collapse(above)
        self.trips: int = 1 if parent is None or call is None else parent.trips * call.trips
        self.producers: dict[Var, tuple[JaxprEqn, int]] = {
            v: (e, i) for e in self.jaxpr.eqns for i, v in enumerate(e.outvars) if isinstance(v, Var)
        }
        self._children: dict[int, list[Level]] = {}

    @functools.cached_property
    def positions(self) -> dict[Var, int]:
        """Which input of this level a variable is; constants apart."""
        return {v: i for i, v in enumerate(self.jaxpr.invars)}

    @functools.cached_property
    def readers(self) -> dict[Var, list[tuple[JaxprEqn, list[int]]]]:
        """For each variable, the equations of this level that read it, in program order, and at which operands."""
        found: dict[Var, list[tuple[JaxprEqn, list[int]]]] = {}
        for eqn in self.jaxpr.eqns:
            for i, v in enumerate(eqn.invars):
                if isinstance(v, Var):
                    reads = found.setdefault(v, [])
                    if not reads or reads[-1][0] is not eqn:
                        reads.append((eqn, []))
                    reads[-1][1].append(i)
        return found

    def children(self, eqn: JaxprEqn) -> list[Level]:
        """The programs nested in one of this level's equations."""
        if id(eqn) not in self._children:
            self._children[id(eqn)] = [Level(c.jaxpr, self, eqn, c) for c in jaxprs.calls(eqn)]
        return self._children[id(eqn)]

    def chain_of(self, eqn: JaxprEqn) -> tuple[int, ...]:
        """The numbers of the original equations that this one comes from, outermost call first."""
        return _collapse((*self.chain, *provenance.tags(eqn)))


def _collapse(chain: tuple[int, ...]) -> tuple[int, ...]:
    """A chain without repeats: an equation under all its scopes, the calls around it included, begins once more."""
    found: list[int] = []
    for t in chain:
        if t in found:
            del found[found.index(t) + 1 :]
        else:
            found.append(t)
    return tuple(found)


@dataclasses.dataclass(eq=False)
class Source:
    """Where a value comes from.

    Attributes:
      level, var: the place of the equation's output (or of the input) that it was traced back to.
      eqn, index: the equation and which of its outputs; None for an input of the whole program.
      kind: "equation", "argument", "constant", "carry" (a loop's carried value) or "literal".
      points: every place that the value passes on its way.
      names: checkpoint names met on the way.
      stacked: product of the lengths of the scans that stack it.
      shards: how many times smaller it is on one device, as shard_map splits it.
      others: where it comes from in the other branches of a cond, which keep theirs in the same place.
    """

    level: Level
    var: Any
    eqn: JaxprEqn | None = None
    index: int = 0
    kind: str = "equation"
    points: list[tuple[Level, Any]] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    stacked: int = 1
    shards: float = 1.0
    others: list[Source] = dataclasses.field(default_factory=list)

    @property
    def chain(self) -> tuple[int, ...]:
        return self.level.chain if self.eqn is None else self.level.chain_of(self.eqn)


def trace_back(level: Level, var: Any) -> Source:
    """Follows a value to the equation that makes it, or to the input that it is."""
    s = Source(level, var)
    while True:
        if isinstance(s.var, Literal):
            s.kind = "literal"
            return s
        s.points.append((s.level, s.var))
        made = s.level.producers.get(s.var)
        if made is None:
            if not _leave(s):
                return s
            continue
        eqn, index = made
        name = jaxprs.name_of(eqn)
        if name is not None:
            s.names.append(name)
        if name is not None or (eqn.primitive.name in _SAME and index < len(eqn.invars)):
            s.var = eqn.invars[index]
            continue
        if not _enter(s, eqn, index):
            s.eqn, s.index, s.kind = eqn, index, "equation"
            return s


def _leave(s: Source) -> bool:
    """Steps from an input of a nested program to the operand that feeds it; False at the end."""
    level = s.level
    if level.parent is None or level.call is None or level.eqn is None:
        s.kind = "argument" if s.var in level.positions else "constant"
        return False
    if s.var not in level.positions:
        s.kind = "constant"
        return False
    i = level.positions[s.var]
    call = level.call
    carried = call.num_consts <= i < call.num_consts + call.num_carry
    if call.kind is CallKind.WHILE or (call.kind is CallKind.SCAN and carried):
        s.kind = "carry"
        return False
    if i >= len(call.operands):
        s.kind = "argument"
        return False
    s.level, s.var = level.parent, level.eqn.invars[call.operands[i]]
    return True


def _enter(s: Source, eqn: JaxprEqn, index: int) -> bool:
    """Steps from an output of a call to the value inside that it is; False for ordinary equations."""
    children = [c for c in s.level.children(eqn) if c.call is not None and c.call.kind is not CallKind.OPAQUE]
    if not children:
        return False
    kind = children[0].call.kind  # type: ignore[union-attr]
    if kind is CallKind.WHILE:
        return False
    if kind is CallKind.COND:  # a branch without this residual fills it with zeros
        filled = [c for c in children if not _is_filling(c, c.jaxpr.outvars[index])] or children[:1]
        inner = filled[0]
        s.others += [trace_back(c, c.jaxpr.outvars[index]) for c in filled[1:]]
    else:
        inner = children[0]
    if index >= len(inner.jaxpr.outvars):
        return False
    if kind is CallKind.SCAN and inner.call is not None and index >= inner.call.num_carry:
        s.stacked *= inner.call.trips
    var = inner.jaxpr.outvars[index]
    if kind is CallKind.SHARD_MAP and isinstance(var, Var):
        local = jaxprs.nbytes(var.aval)
        s.shards *= jaxprs.nbytes(eqn.outvars[index].aval) / local if local else 1
    s.level, s.var = inner, var
    return True


def _is_filling(level: Level, var: Any) -> bool:
    """Whether a value depends on no input: the zeros of a branch that does not have a residual."""
    todo = [var]
    while todo:
        v = todo.pop()
        if isinstance(v, Literal):
            continue
        made = level.producers.get(v)
        if made is None:
            return False
        todo += made[0].invars
    return True


def walk(level: Level) -> Iterator[tuple[Level, JaxprEqn]]:
    """All equations of a program, nested ones included, in program order."""
    for eqn in level.jaxpr.eqns:
        yield level, eqn
        for child in level.children(eqn):
            yield from walk(child)
