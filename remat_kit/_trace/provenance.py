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
    """

    jaxpr: Any
    origins: list[Origin]

    def names(self, chain: tuple[int, ...], index: int) -> tuple[str, ...]:
        """All checkpoint names of one output of an original equation, through the calls around it."""
        found: list[str] = []
        while chain:
            origin = self.origins[chain[-1]]
            var = origin.eqn.outvars[index]
            alike = identical(origin.owner).get(var, frozenset((var,)))
            found += [n for e in origin.owner.eqns if (n := jaxprs.name_of(e)) is not None and e.outvars[0] in alike]
            out = [i for i, v in enumerate(origin.owner.outvars) if isinstance(v, Var) and v in alike]
            chain = chain[:-1]
            if not out or not chain:
                break
            call = self._call(chain[-1], origin.owner)
            if call is None or call.kind is jaxprs.CallKind.OPAQUE:
                break
            index = out[0]
        return tuple(dict.fromkeys(found))

    def _call(self, tag: int, owner: Any) -> jaxprs.Call | None:
        return next((c for c in jaxprs.calls(self.origins[tag].eqn) if jaxprs.opened(c.jaxpr) is owner), None)

    def path(self, chain: tuple[int, ...]) -> str:
        """Module path of an equation, composed of the marks on the calls around it, then its own scopes."""
        scopes = [s for tag in chain for s in jaxprs.scopes(self.origins[tag].eqn)]
        called, rest = marks.split([s for s in scopes if not s.startswith(marks.BLOCK)])
        return "/".join((*map(marks.name, called), *rest))

    def block(self, chain: tuple[int, ...]) -> str:
        """Path of the block that an equation was put into, or the empty string."""
        scopes = [s for tag in chain for s in jaxprs.scopes(self.origins[tag].eqn)]
        return next((s[len(marks.BLOCK) :] for s in scopes if s.startswith(marks.BLOCK)), "")


def identical(owner: Any) -> dict[Var, frozenset[Var]]:
    """The variables of one program that are one value under several checkpoint names."""
    groups: dict[Var, set[Var]] = {}
    for e in owner.eqns:
        if jaxprs.name_of(e) is not None and isinstance(e.invars[0], Var):
            joined = groups.setdefault(e.invars[0], {e.invars[0]})
            joined.add(e.outvars[0])
            groups[e.outvars[0]] = joined
    return {v: frozenset(g) for v, g in groups.items()}


def tag(jaxpr: Any, *, without_remat: bool = False) -> Tagged:
    """Numbers the equations of a closed program and of the programs nested in it.

    Args:
      without_remat: whether `jax.checkpoint` regions are replaced by plain calls of their bodies.
    """
    origins: list[Origin] = []
    done: dict[int, Any] = {}

    def visit(closed: Any) -> Any:
        owner = jaxprs.opened(closed)
        if id(owner) in done:
            return done[id(owner)]
        eqns = []
        for e in owner.eqns:
            number = len(origins)
            origins.append(Origin(e, owner))
            nested = {c.key: visit(c.jaxpr) for c in jaxprs.calls(e) if c.kind is not jaxprs.CallKind.OPAQUE}
            region = jaxprs.remat_region(e) if without_remat else None
            if region is not None and not region.differentiated:
                new = jaxprs.as_jit(e, nested["jaxpr", None])
            else:
                new = e.replace(params=jaxprs.with_programs(e, nested)) if nested else e
            eqns.append(jaxprs.with_scopes(new, (f"{_TAG}{number}",)))
        done[id(owner)] = jaxprs.replace_eqns(closed, eqns)
        return done[id(owner)]

    return Tagged(visit(jaxpr), origins)


def tags(eqn: JaxprEqn) -> tuple[int, ...]:
    """The numbers on an equation of a program made from a numbered one, outermost first."""
    return tuple(int(s[len(_TAG) :]) for s in jaxprs.scopes(eqn) if s.startswith(_TAG))
