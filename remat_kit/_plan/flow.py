"""What holds of the values of a program because of its inputs: which carry a derivative, which are there anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from remat_kit._trace import jaxprs
from remat_kit._trace.jaxprs import CallKind, JaxprEqn, Literal, Var
from remat_kit._trace.levels import VIEWS
from remat_kit._trace.op_costs import FREE

Flags = dict[Var, bool]

# Their results are numbers with a derivative of zero.
_FLAT = {"stop_gradient", "floor", "ceil", "round", "sign", "nextafter"}


def active(jaxpr: Any, differentiated: Sequence[bool]) -> Flags:
    """For each variable of a closed program and those nested in it, whether it carries a derivative.

    Args:
      differentiated: for each input of the program, whether it is differentiated with respect to.
    """

    def rule(eqn: JaxprEqn, inputs: Sequence[bool]) -> list[bool]:
        moves = any(inputs) and jaxprs.op_of(eqn) not in _FLAT
        return [moves and jaxprs.is_inexact(v.aval) for v in eqn.outvars]

    return _Flow(rule, any, literal=False).run(jaxpr, differentiated)


def given(jaxpr: Any) -> Flags:
    """For each variable whether it is an argument of the program, a constant, or a view of one: there anyway."""

    def rule(eqn: JaxprEqn, inputs: Sequence[bool]) -> list[bool]:
        op = jaxprs.op_of(eqn)
        constant = all(isinstance(v, Literal) for v in eqn.invars)  # compilers make it where it is read
        return [constant or (all(inputs) and (op in FREE or op in VIEWS))] * len(eqn.outvars)

    return _Flow(rule, all, literal=True).run(jaxpr, [True] * len(jaxprs.opened(jaxpr).invars))


class _Flow:
    """Carries a flag through a program: loops until nothing changes, branches and repeated calls joined."""

    def __init__(self, rule: Callable[..., list[bool]], join: Callable[..., bool], *, literal: bool) -> None:
        self.rule, self.join, self.literal = rule, join, literal
        self.found: Flags = {}

    def run(self, jaxpr: Any, inputs: Sequence[bool]) -> Flags:
        self.visit(jaxprs.opened(jaxpr), inputs)
        return self.found

    def visit(self, owner: Any, inputs: Sequence[bool]) -> list[bool]:
        here: Flags = dict.fromkeys(owner.constvars, self.literal)
        here.update(zip(owner.invars, inputs, strict=True))

        def read(v: Any) -> bool:
            return self.literal if isinstance(v, Literal) else here[v]

        for eqn in owner.eqns:
            here.update(zip(eqn.outvars, self.outputs(eqn, [read(v) for v in eqn.invars]), strict=True))
        for v, flag in here.items():
            self.found[v] = self.join((flag, self.found[v])) if v in self.found else flag
        return [read(v) for v in owner.outvars]

    def outputs(self, eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
        nested = [c for c in jaxprs.calls(eqn) if c.kind is not CallKind.OPAQUE]
        if not nested or nested[0].kind in (CallKind.WHILE, CallKind.CUSTOM):  # the rules of the latter decide
            for c in nested:
                self.visit(jaxprs.opened(c.jaxpr), [False] * len(c.operands))
            return self.rule(eqn, inputs)
        if nested[0].kind is CallKind.SCAN:
            return self.scan(nested[0], inputs)
        outs = [self.visit(jaxprs.opened(c.jaxpr), [inputs[o] for o in c.operands]) for c in nested]
        return [self.join(o) for o in zip(*outs, strict=True)]

    def scan(self, call: jaxprs.Call, inputs: list[bool]) -> list[bool]:
        first, last = call.num_consts, call.num_consts + call.num_carry
        while True:
            outs = self.visit(jaxprs.opened(call.jaxpr), inputs)
            carry = [self.join(pair) for pair in zip(inputs[first:last], outs, strict=False)]
            if carry == inputs[first:last]:
                return outs
            inputs = [*inputs[:first], *carry, *inputs[last:]]
