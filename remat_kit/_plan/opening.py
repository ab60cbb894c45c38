"""Opening a block: from its program to its `Graph`. Differentiates it, with every value named that can be."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from remat_kit import _naming
from remat_kit._plan.graph import Choice, Graph, Op, Value, fused_values, makers
from remat_kit._plan.rates import Rates
from remat_kit._policy import ValueFacts
from remat_kit._rewrite import without_regions
from remat_kit._trace import cost, jaxprs
from remat_kit._trace.jaxprs import CallKind, JaxprEqn, Literal, Var
from remat_kit._trace.levels import VIEWS
from remat_kit._trace.linearized import Linearized, linearize
from remat_kit._trace.op_costs import ELEMENTWISE, FREE

_PREFIX = "remat_kit.value."


def build(
    program: Any,
    active: Sequence[bool],
    arguments: Sequence[bool],
    rates: Rates,
    *,
    loop: int | None = None,
    by_name: bool = False,
) -> Graph:
    """Opens one block.

    Args:
      program: the block, closed.
      active: for each of its inputs whether it is differentiated.
      arguments: for each whether it is kept anyway.
      loop: for the body of a scan the number of its inputs that are the same in all iterations; else None.
      by_name: whether only values with checkpoint names of the user's can be chosen, by these names.
    """
    program = without_regions(program)
    facts: dict[str, ValueFacts] = {}

    def name(value: ValueFacts) -> str | None:
        label = (value.names[0] if value.names else "") if by_name else value.value
        if not label or (jaxprs.remat3() and value.op.startswith("custom_vjp")):  # the newer remat would run it again
            return None
        facts.setdefault(label, value)
        return _PREFIX + label

    naming = _naming.Naming(name, {} if by_name else _naming.labels(program))
    owner = jaxprs.opened(program)
    avals = [v.aval for v in owner.invars]
    named = jaxprs.trace(lambda *xs: _naming.evaluate_named(program, naming, xs), avals)
    outputs = [jaxprs.is_inexact(v.aval) for v in jaxprs.opened(named).outvars]
    moves = [a and jaxprs.is_inexact(v) for a, v in zip(active, avals, strict=True)]
    if not any(moves) or not any(outputs):
        raise NotDifferentiated
    lin = linearize(named, moves, outputs)
    return _Builder(rates).block(lin, facts, moves, arguments, loop)


class NotDifferentiated(Exception):
    """The block carries no derivative: it keeps nothing."""


class _Builder:
    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.varying: list[bool] = []
        self.literals: list[int] = []

    def block(
        self,
        lin: Linearized,
        facts: dict[str, ValueFacts],
        moves: Sequence[bool],
        arguments: Sequence[bool],
        loop: int | None,
    ) -> Graph:
        forward = jaxprs.opened(lin.forward)
        env: dict[Var, int] = {}
        inputs = []
        for v in jaxprs.inputs(lin.forward):
            env[v] = self.value(v, -1, 1, varies=False)
            inputs.append(env[v])
        given = inputs[len(inputs) - len(arguments) :]  # constants come first
        for i, v in enumerate(given):
            self.varying[v] = loop is None or i >= loop
        constants = inputs[: len(inputs) - len(arguments)]
        self.visit(forward, env, 1)
        count = len(self.ops)
        results = forward.outvars[: len(jaxprs.opened(lin.tagged.jaxpr).outvars)]
        self.mark_primal([env[v] for v in results if isinstance(v, Var)])
        kept = {i: env[v] for v, indices in lin.kept for i in indices}
        back = jaxprs.opened(lin.backward)
        env = {v: self.value(v, -1, 1) for v in back.constvars}
        cotangents = []
        for i, v in enumerate(back.invars):
            env[v] = kept[i] if i in kept else self.value(v, -1, 1)
            if i not in kept:
                cotangents.append(env[v])
        self.visit(back, env, 1)
        self.update_in_place()
        time_ops(self.ops, self.values, self.rates)
        free = {v for v, a in zip(given, arguments, strict=True) if a} | set(constants) | set(self.literals)
        free |= {n for n, v in enumerate(self.values) if v.root in free}
        outs = [self.read(v, env) for v in back.outvars]
        moved = [a for a, m in zip(arguments, moves, strict=True) if m]
        return Graph(
            values=tuple(self.values),
            ops=tuple(self.ops),
            forward=count,
            residuals=tuple(dict.fromkeys(kept.values())),
            arguments=frozenset(free),
            choices=self.choices(facts, loop is not None, count),
            decisions=self.decisions(count, set(kept.values())),
            constant=_constant(self.ops, count),
            loop=loop is not None,
            varying=tuple(self.varying),
            cotangents=tuple(dict.fromkeys(cotangents)),
            carried=tuple(v for v, a in zip(outs, moved, strict=True) if not a),
            stacked=_stacked(self.ops, self.values, count),
            rates=self.rates,
        )

    def mark_primal(self, results: Sequence[int]) -> None:
        """Tells the operations that the results need from those that only the derivative needs."""
        needed = makers(self.values, self.ops, results)
        for number, op in enumerate(self.ops):
            op.primal = number in needed

    def decisions(self, forward: int, residuals: set[int]) -> frozenset[int]:
        """Operations that choose, if only names read their results."""
        live = makers(self.values, self.ops, residuals)
        other = residuals | {v for n in live if not self.ops[n].label for v in self.ops[n].reads}
        choosing = (n for n in live if n < forward and self.ops[n].op in _CHOOSING and self.ops[n].primal)
        return frozenset(n for n in choosing if other.isdisjoint(self.ops[n].writes))

    def update_in_place(self) -> None:
        """Lets an update that is the only reader of what it updates write there."""
        readers = collections.Counter(v for op in self.ops for v in op.reads)
        for op in self.ops:
            if op.op.startswith(_UPDATES) and op.reads and self.values[op.reads[0]].maker >= 0:
                if readers[op.reads[0]] == 1:
                    for v in op.writes:
                        self.values[v].root = self.values[op.reads[0]].root

    def choices(self, facts: dict[str, ValueFacts], loop: bool, forward: int) -> tuple[Choice, ...]:
        fused = fused_values(self.ops[:forward], self.rates)
        found: dict[str, list[int]] = {}
        for number, op in enumerate(self.ops[:forward]):
            if op.label:
                found.setdefault(op.label, []).append(number)
        out = []
        for label, ops in found.items():
            named = [v for o in ops for v in self.ops[o].writes]
            size = sum(self.values[v].kept_bytes for v in named)
            written = sum(self.values[v].kept_bytes for v in named if self.values[v].root in fused)
            seconds = (2 * size if loop else written) / self.rates.bandwidth
            out.append(Choice(label, facts[label], tuple(ops), size, seconds))
        return tuple(out)

    def value(self, v: Any, maker: int, trips: int, *, root: int | None = None, varies: bool = False) -> int:
        number = len(self.values)
        self.values.append(Value(jaxprs.nbytes(v.aval), trips, maker, number if root is None else root))
        self.varying.append(varies)
        return number

    def add(
        self,
        eqn: JaxprEqn | None,
        op: str,
        form: str,
        reads: Sequence[int],
        outs: Sequence[Any],
        trips: int,
        label: str = "",
    ) -> list[int]:
        """Adds an operation; returns the values that it makes."""
        number = len(self.ops)
        varies = any(self.varying[r] for r in reads)
        root = self.values[reads[0]].root if form == "alias" and len(reads) == 1 == len(outs) else None
        writes = [self.value(v, number, trips, root=root, varies=varies) for v in outs]
        c = cost.eqn_cost(eqn) if eqn is not None and form != "alias" else cost.Cost()
        dtype = str(getattr(eqn.invars[0].aval, "dtype", "")) if eqn is not None and eqn.invars else ""
        self.ops.append(
            Op(
                op,
                tuple(dict.fromkeys(reads)),
                tuple(writes),
                c.flops * trips,
                c.bytes * trips,
                trips,
                dtype,
                label,
                form,
            )
        )
        return writes

    def visit(self, owner: Any, env: dict[Var, int], trips: int) -> None:
        """Adds the equations of one program, given the values of its inputs."""
        for v in owner.constvars:
            if v not in env:
                env[v] = self.value(v, -1, 1)
        for eqn in owner.eqns:
            nested = jaxprs.calls(eqn)
            opened = _OPENED.get(nested[0].kind) if len(nested) == 1 else None
            outs = opened(self, eqn, nested[0], env, trips) if opened is not None else self.eqn(eqn, env, trips)
            env.update(zip(eqn.outvars, outs, strict=True))

    def eqn(self, eqn: JaxprEqn, env: dict[Var, int], trips: int) -> list[int]:
        reads = [env[v] for v in eqn.invars if isinstance(v, Var)]
        given = jaxprs.name_of(eqn) or ""
        label = given.removeprefix(_PREFIX) if given.startswith(_PREFIX) else ""
        return self.add(eqn, jaxprs.op_of(eqn), _form(eqn), reads, eqn.outvars, trips, label)

    def inline(self, eqn: JaxprEqn, call: jaxprs.Call, env: dict[Var, int], trips: int) -> list[int]:
        inner = jaxprs.opened(call.jaxpr)
        inside = {v: self.read(eqn.invars[o], env) for v, o in zip(inner.invars, call.operands, strict=True)}
        self.visit(inner, inside, trips)
        return [self.read(v, inside) for v in inner.outvars]

    def scan(self, eqn: JaxprEqn, call: jaxprs.Call, env: dict[Var, int], trips: int) -> list[int]:
        """Opens a scan: what its body makes stands for all iterations, a carried value depends on the one before."""
        inner = jaxprs.opened(call.jaxpr)
        inside: dict[Var, int] = {}
        carries: list[tuple[int, int]] = []
        for i, v in enumerate(inner.invars):
            outer = self.read(eqn.invars[call.operands[i]], env)
            if i < call.num_consts:
                inside[v] = outer
            elif i < call.num_consts + call.num_carry:
                (inside[v],) = self.add(None, "carry", "other", [outer], [v], trips * call.trips)
                carries.append((len(self.ops) - 1, i - call.num_consts))
            else:
                (inside[v],) = self.add(None, "slice", "alias", [outer], [v], trips * call.trips)
                self.values[inside[v]].root = self.values[outer].root
        self.visit(inner, inside, trips * call.trips)
        results = [self.read(v, inside) for v in inner.outvars]
        for number, i in carries:
            op = self.ops[number]
            op.reads = tuple(dict.fromkeys((*op.reads, results[i])))
        outs: list[int] = []
        for i, v in enumerate(eqn.outvars):
            if i < call.num_carry:
                outs += self.add(None, "carry", "other", [results[i]], [v], trips)
            else:
                outs.append(results[i])
        return outs

    def read(self, v: Any, env: dict[Var, int]) -> int:
        if not isinstance(v, Literal):
            return env[v]
        self.literals.append(self.value(v, -1, 1))
        return self.literals[-1]


# A fused operation still costs something: registers, and being computed in each of its readers.
_FUSED = 0.1

_OPENED: dict[CallKind, Callable[..., list[int]]] = {
    CallKind.JIT: _Builder.inline,
    CallKind.CUSTOM: _Builder.inline,
    CallKind.REMAT: _Builder.inline,
    CallKind.SHARD_MAP: _Builder.inline,
    CallKind.SCAN: _Builder.scan,
}


def time_ops(ops: Sequence[Op], values: Sequence[Value], rates: Rates) -> None:
    """Sets the seconds of each operation by the roofline, given what the compiler will fuse."""
    fused = fused_values(ops, rates)
    for op in ops:
        compute = op.flops / rates.flops(op.dtype) if op.form == "product" else 0.0
        moved: float = op.moved
        if op.form in ("elementwise", "reduce"):
            # Only what is read from memory and what is written to it takes time: the rest stays in registers.
            touched = sum(values[v].bytes for v in (*op.reads, *op.writes) if v not in fused)
            moved = min(moved, touched * op.trips) + _FUSED * sum(values[v].bytes for v in op.writes) * op.trips
        op.seconds = 0.0 if op.form == "alias" else max(compute, moved / rates.bandwidth)


def _constant(ops: Sequence[Op], forward: int) -> frozenset[int]:
    """Forward values that depend on no input of the block."""
    found: set[int] = set()
    for op in ops[:forward]:
        if all(v in found for v in op.reads):
            found.update(op.writes)
    return frozenset(found)


def _stacked(ops: Sequence[Op], values: Sequence[Value], forward: int) -> frozenset[int]:
    """Values in inner scans that are read by the backward pass, or outside their scan."""
    found = set()
    for number, op in enumerate(ops):
        for v in op.reads:
            made = values[v].maker
            if values[v].trips > 1 and made >= 0 and (op.trips != values[v].trips or made < forward <= number):
                found.add(values[v].root)
                found.add(v)
    return frozenset(found)


_CHOOSING = ("top_k", "approx_top_k", "argmax", "argmin", "sort")
_UPDATES = ("scatter", "dynamic_update_slice")
_REDUCTIONS = ("reduce_", "argmax", "argmin")


def _form(eqn: JaxprEqn) -> str:
    op = jaxprs.op_of(eqn)
    if op in FREE or (op in VIEWS and op != "rev"):
        return "alias"
    if cost.is_matmul(eqn):
        return "product"
    if op in ELEMENTWISE:
        return "elementwise"
    return "reduce" if op.startswith(_REDUCTIONS) else "other"
