"""Provenance: following an equation of a differentiated program back to the equation it came from.

Each equation of a program, nested ones included, gets a numbered scope in place of its name stack. JAX
carries name stacks through jvp, partial evaluation and transposition, so that whatever autodiff makes of
an equation still tells its number.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from remat_kit._trace import jaxprs, marks
from remat_kit._trace.jaxprs import JaxprEqn, Var

_TAG = "rk@"


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """An equation of the original program, and the (open) program that it stands in."""

    eqn: JaxprEqn
    owner: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Tagged:
    """A program with numbered equations.

    Attributes:
      jaxpr: the numbered program, closed.
      origins: what each number stands for.
      regions: whether there are `jax.checkpoint` regions in it.
    """

    jaxpr: Any
    origins: list[Origin]
    regions: bool = False
    _known: dict[int, tuple[dict[Var, frozenset[Var]], dict[Var, str]]] = dataclasses.field(default_factory=dict)

    def _named(self, owner: Any) -> tuple[dict[Var, frozenset[Var]], dict[Var, str]]:
        """`identical` of one program and its named variables, found once: every residual asks."""
        if id(owner) not in self._known:
            named = {e.outvars[0]: n for e in owner.eqns if (n := jaxprs.name_of(e)) is not None}
            self._known[id(owner)] = identical(owner, through_rules=True), named
        return self._known[id(owner)]

    def names(self, chain: tuple[int, ...], index: int) -> tuple[str, ...]:
        """All checkpoint names of one output of an original equation, through the calls around it."""
        found: list[str] = []
        while chain:
            origin = self.origins[chain[-1]]
            var = origin.eqn.outvars[index]
            same, named = self._named(origin.owner)
            alike = same.get(var, frozenset((var,)))
            found += [n for v, n in named.items() if v in alike]
            out = [i for i, v in enumerate(origin.owner.outvars) if isinstance(v, Var) and v in alike]
            chain = chain[:-1]
            if not out or not chain:
                break
            call = self._call(chain[-1], origin.owner)
            if call is None or call.kind is jaxprs.CallKind.OPAQUE:
                break
            index = out[0]
        return tuple(dict.fromkeys(found))

    def op(self, tag: int) -> str:
        """The operation that a number stands for; for a rule attached to a value, the operation that makes it."""
        eqn, owner = self.origins[tag].eqn, self.origins[tag].owner
        named = handed_on(eqn)
        made = {v: e for e in owner.eqns for v in e.outvars} if named is not None else {}
        while isinstance(named, Var) and named in made:
            if jaxprs.name_of(made[named]) is None:
                return jaxprs.op_of(made[named] if named is not handed_on(eqn) else eqn)
            named = made[named].invars[0]
        return jaxprs.op_of(eqn)

    def _call(self, tag: int, owner: Any) -> jaxprs.Call | None:
        return next((c for c in jaxprs.calls(self.origins[tag].eqn) if jaxprs.opened(c.jaxpr) is owner), None)

    def path(self, chain: tuple[int, ...]) -> str:
        """Module path of an equation, composed of the marks on the calls around it, then its own scopes."""
        scopes = [s for tag in chain for s in jaxprs.scopes(self.origins[tag].eqn)]
        return marks.path(scopes)

    def block(self, chain: tuple[int, ...]) -> str:
        """Path of the block that an equation was put into, or the empty string."""
        scopes = [s for tag in chain for s in jaxprs.scopes(self.origins[tag].eqn)]
        return next((s[len(marks.BLOCK) :] for s in scopes if s.startswith(marks.BLOCK)), "")


def identical(owner: Any, *, through_rules: bool = False) -> dict[Var, frozenset[Var]]:
    """The variables of one program that are one value under several checkpoint names.

    Args:
      through_rules: whether a value that a custom rule hands on as it is counts as the same.
    """
    groups: dict[Var, set[Var]] = {}
    for e in owner.eqns:
        operand = e.invars[0] if jaxprs.name_of(e) is not None else handed_on(e) if through_rules else None
        if isinstance(operand, Var):
            joined = groups.setdefault(operand, {operand})
            joined.add(e.outvars[0])
            groups[e.outvars[0]] = joined
    return {v: frozenset(g) for v, g in groups.items()}


def handed_on(eqn: JaxprEqn) -> Any:
    """The operand that a custom_jvp call returns as it is (only its derivative is another); None for any other."""
    if eqn.primitive.name != "custom_jvp_call" or len(eqn.outvars) != 1:
        return None
    inner = jaxprs.opened(jaxprs.calls(eqn)[0].jaxpr)
    out = inner.outvars[0]
    return eqn.invars[inner.invars.index(out)] if not inner.eqns and out in inner.invars else None


def tag(jaxpr: Any, *, without_remat: bool = False) -> Tagged:
    """Numbers the equations of a closed program and of the programs nested in it.

    Args:
      without_remat: whether `jax.checkpoint` regions are replaced by plain calls of their bodies.
    """
    origins: list[Origin] = []
    done: dict[int, Any] = {}
    regions = False

    def visit(closed: Any) -> Any:
        nonlocal regions
        owner = jaxprs.opened(closed)
        if id(owner) in done:
            return done[id(owner)]
        eqns = []
        for e in owner.eqns:
            number = len(origins)
            origins.append(Origin(e, owner))
            nested = {c.key: visit(c.jaxpr) for c in jaxprs.calls(e) if c.kind is not jaxprs.CallKind.OPAQUE}
            region = jaxprs.remat_region(e)
            if without_remat and region is not None and not region.differentiated:
                new = jaxprs.as_jit(e, nested["jaxpr", None])
            else:
                regions = regions or region is not None
                new = e.replace(params=jaxprs.with_programs(e, nested)) if nested else e
            eqns.append(jaxprs.with_scopes(new, (f"{_TAG}{number}",)))
        done[id(owner)] = jaxprs.replace_eqns(closed, eqns)
        return done[id(owner)]

    return Tagged(visit(jaxpr), origins, regions)


def tags(eqn: JaxprEqn) -> tuple[int, ...]:
    """The numbers on an equation of a program made from a numbered one, outermost first."""
    return tuple(int(s[len(_TAG) :]) for s in jaxprs.scopes(eqn) if s.startswith(_TAG))
