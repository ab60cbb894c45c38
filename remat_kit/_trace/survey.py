"""Questions about a whole program and the programs nested in it."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from remat_kit._trace import jaxprs
from remat_kit._trace.jaxprs import ClosedJaxpr, Jaxpr, Literal, Var


def programs(jaxpr: Any, *, forward_rules: bool = False) -> Iterator[Any]:
    """A program and all that are nested in it, each (open) once.

    Args:
      forward_rules: whether the forward rules of custom_vjp calls count. Those inside a forward rule do not run when it
        does, and one may call its own function.
    """
    seen: dict[tuple[int, bool], Any] = {}  # by identity, and kept alive so that none takes another's
    todo = [(jaxprs.opened(jaxpr), forward_rules)]
    while todo:
        program, rules = todo.pop()
        if (id(program), rules) in seen or (id(program), True) in seen:
            continue
        if (id(program), False) not in seen:
            yield program
        seen[id(program), rules] = program
        for e in program.eqns:
            todo += [(jaxprs.opened(c.jaxpr), rules) for c in jaxprs.calls(e)]
            if rules and jaxprs.is_custom_vjp(e) and (rule := jaxprs.forward_rule(e)) is not None:
                todo.append((jaxprs.opened(rule), False))


def readers(owner: Any) -> dict[Var, list[int]]:
    """For each variable of an open program the equations that read it; their number where it is a result.

    Remembered for as long as the program lives, since each of its blocks asks.
    """
    found = _readers.get(owner)
    if found is None:
        found = _readers[owner] = {}
        for i, read in enumerate((*(e.invars for e in owner.eqns), owner.outvars)):
            for v in read:
                if isinstance(v, Var):
                    found.setdefault(v, []).append(i)
    return found


_readers: weakref.WeakKeyDictionary[Any, dict[Var, list[int]]] = weakref.WeakKeyDictionary()


def names_in(jaxpr: Any, *, forward_rules: bool = False) -> frozenset[str]:
    """All checkpoint names in a program and the programs nested in it.

    Args:
      forward_rules: whether those in the forward rules of custom_vjp calls count.
    """
    found = (jaxprs.name_of(e) for program in programs(jaxpr, forward_rules=forward_rules) for e in program.eqns)
    return frozenset(name for name in found if name is not None)


def contains_gradient(eqns: Iterable[jaxprs.JaxprEqn]) -> bool:
    """Whether equations, nested ones included, were made by reverse mode: those of a training step, not of a loss."""
    return any(
        jaxprs.transposed(e)
        or any(contains_gradient(jaxprs.opened(c.jaxpr).eqns) for c in jaxprs.calls(e) if c.rewritable)
        for e in eqns
    )


def map_scopes(jaxpr: Any, scopes_as: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Any:
    """The same closed program with other scopes on its equations, those of nested programs included."""
    done: dict[int, Any] = {}

    def visit(closed: Any) -> Any:
        owner = jaxprs.opened(closed)
        if id(owner) not in done:
            eqns = []
            for e in owner.eqns:
                nested = {c.key: visit(c.jaxpr) for c in jaxprs.calls(e) if c.kind is not jaxprs.CallKind.OPAQUE}
                e = e.replace(params=jaxprs.with_programs(e, nested)) if nested else e
                eqns.append(jaxprs.with_scopes(e, scopes_as(jaxprs.scopes(e))))
            done[id(owner)] = jaxprs.replace_eqns(closed, eqns)
        return done[id(owner)]

    return visit(jaxpr)


def digest(jaxpr: Any) -> str:
    """A short text that differs for programs whose operations, their operands or types do.

    The same in every process and, as far as JAX traces the same operations, in every version.
    """
    found = hashlib.sha256()

    def visit(program: Any) -> None:
        owner = jaxprs.opened(program)
        number: dict[Any, int] = {}

        def said(v: Any) -> str:
            at = "c" if isinstance(v, Literal) else number.setdefault(v, len(number))
            return f"{at}:{v.aval}"

        found.update(" ".join(map(said, jaxprs.inputs(program))).encode())
        for e in owner.eqns:
            operands, results = " ".join(map(said, e.invars)), " ".join(map(said, e.outvars))
            found.update(f"{jaxprs.op_of(e)} {operands} > {results};".encode())
            for call in jaxprs.calls(e):
                visit(call.jaxpr)

    visit(jaxpr)
    return found.hexdigest()[:16]


def fingerprint(jaxpr: Any, kept: dict[int, Any], scopes_as: Callable[[tuple[str, ...]], Any]) -> Any:
    """A hashable form of a program's structure: equal for two programs that compute the same in the same way.

    Scopes and source lines count. What cannot be compared by value counts by identity.

    Args:
      kept: collects the objects compared by identity, which must outlive the fingerprint.
      scopes_as: what of an equation's scopes counts.
    """
    j = jaxprs.opened(jaxpr)
    number: dict[Any, int] = {}

    def by_identity(x: Any) -> tuple[str, int]:
        kept[id(x)] = x
        return ("id", id(x))

    def atom(v: Any) -> Any:
        if isinstance(v, Literal):
            scalar = not getattr(v.aval, "shape", (1,)) and not jaxprs.is_tracer(v.val)
            return ("literal", repr(v.val), str(v.aval)) if scalar else by_identity(v.val)
        return number.setdefault(v, len(number))

    def value(x: Any) -> Any:
        if isinstance(x, (Jaxpr, ClosedJaxpr)):
            return fingerprint(x, kept, scopes_as)
        if isinstance(x, (tuple, list)):
            return tuple(map(value, x))
        if isinstance(x, dict):
            return tuple((str(k), value(v)) for k, v in x.items())
        try:
            hash(x)
        except TypeError:
            return by_identity(x)
        return x

    ins = tuple((atom(v), v.aval) for v in jaxprs.inputs(jaxpr))
    eqns = tuple(
        (
            e.primitive,
            value(e.params),
            tuple(map(atom, e.invars)),
            tuple((atom(v), v.aval) for v in e.outvars),
            scopes_as(jaxprs.scopes(e)),
            jaxprs.source_line(e),
            value(e.ctx),
        )
        for e in j.eqns
    )
    return ins, tuple(map(by_identity, jaxprs.constants(jaxpr))), eqns, tuple(map(atom, j.outvars))
