"""From a policy to checkpoint names: which values of a block get the toolkit's names, and how.

Names are the only handle on single values that both of JAX's remat implementations honour. Saved values get
one reserved name, offloaded ones another, so that a single JAX policy serves every block.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from remat_kit._errors import RematWarning
from remat_kit._policy import Action, Policy, ValueFacts
from remat_kit._trace import jaxprs, marks, provenance
from remat_kit._trace.jaxprs import CallKind, JaxprEqn, Literal, Var

_PREFIX = "remat_kit."

Names = tuple[str, ...]


def is_reserved(name: str) -> bool:
    """Whether a checkpoint name is one that the toolkit gives."""
    return name.startswith(_PREFIX)


def name_for(action: Action, policy: Policy) -> str:
    """The checkpoint name of values with an action under a policy. Another policy does not keep them by it."""
    return f"{_PREFIX}{action}.{_digest(policy)}"


def _digest(policy: Policy) -> str:
    return hashlib.sha256(str(policy).encode()).hexdigest()[:12]


def policy_behind(names: Iterable[str]) -> Policy | None:
    """The policy whose reserved names these are, where this process has made JAX's policy of it; else None."""
    return next((p for n in names if is_reserved(n) and (p := _made.get(n.rsplit(".", 1)[-1]))), None)


_made: dict[str, Policy] = {}


@functools.lru_cache(maxsize=1024)
def names_policy(policy: Policy) -> Callable[..., Any]:
    """JAX's policy that keeps the values named under a policy: the same object for equal policies."""
    _made[_digest(policy)] = policy
    policies = jax.checkpoint_policies
    saved, offloaded = (name_for(a, policy) for a in (Action.SAVE, Action.OFFLOAD))
    if Action.OFFLOAD not in policy.actions:
        return policies.save_only_these_names(saved)
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[saved],
        names_which_can_be_offloaded=[offloaded],
        offload_src="device",
        offload_dst="pinned_host",
    )


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a program stands, as far as policies may select by it.

    Attributes:
      scopes: the name scopes on the calls around it, marks included, outermost first.
      trips: how often it runs.
      position: the way from the block to it: for each call the index of its equation and that of the program in it.
    """

    scopes: tuple[str, ...] = ()
    trips: int = 1
    position: tuple[int, ...] = ()

    def into(self, eqn: JaxprEqn, index: int, number: int = 0, trips: int = 1) -> Place:
        """The place of a program nested in one of this one's equations, the `index`-th."""
        scopes = (*self.scopes, *jaxprs.scopes(eqn))
        return Place(scopes, self.trips * trips, (*self.position, index, number))


TOP = Place()


Labels = Mapping[tuple[tuple[int, ...], int], str]  # by the position of an equation in its block, and the output


@dataclasses.dataclass(frozen=True, eq=False)
class Naming:
    """How the values of one block are named.

    Attributes:
      name: the checkpoint name of a value; None leaves it without one.
      labels: the label of each value (see `labels`); may be empty where `name` does not ask for it.
    """

    name: Callable[[ValueFacts], str | None]
    labels: Labels = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, policy: Policy, jaxpr: Any) -> Naming:
        """Names what a policy saves or offloads in a closed program, by its reserved names."""

        def name(value: ValueFacts) -> str | None:
            action = policy.action(value)
            return None if action is Action.RECOMPUTE else name_for(action, policy)

        return cls(name, labels(jaxpr) if asks_labels(policy) else {})


def asks_labels(policy: Policy) -> bool:
    """Whether a policy selects single values by their labels."""
    return any(r.selector.value for r in policy.rules)


def facts(eqn: JaxprEqn, i: int, index: int, names: Names, place: Place, known: Labels) -> ValueFacts:
    """What a policy may select a value by.

    Args:
      i: the number of the equation in its program.
      place: of that program.
    """
    aval = eqn.outvars[index].aval
    file, _, _ = jaxprs.source_line(eqn)
    batch_dims = None
    if eqn.primitive.name == "dot_general":
        batch_dims = any(len(b) > 0 for b in eqn.params["dimension_numbers"][1])
    elif eqn.primitive.name == "scaled_matmul_wrapper":
        batch_dims = getattr(eqn.invars[0].aval, "shape", (1,))[0] != 1
    return ValueFacts(
        names=names,
        op=jaxprs.op_of(eqn),
        path=marks.path((*place.scopes, *jaxprs.scopes(eqn))),
        source=file,
        dtype=str(getattr(aval, "dtype", "")),
        bytes=jaxprs.nbytes(aval) * place.trips,
        batch_dims=batch_dims,
        value=known.get(((*place.position, i), index), ""),
    )


def labels(jaxpr: Any) -> Labels:
    """A label for each value of a closed program that can be named, nested programs included.

    The module path inside the program and the primitive, and from the second one on its number there, in program
    order: ``attn/dot_general#2``. Equal programs have equal labels, wherever they stand. A first module that all
    paths share (the layer that a scan's body is) is left out.
    """
    visited = list(_visit(jaxpr, TOP, None, {}))
    heads = {value.path.partition("/")[0] for _, _, value in visited}
    shared = f"{heads.pop()}/" if len(heads) == 1 else ""
    used: collections.Counter[str] = collections.Counter()
    found: dict[tuple[tuple[int, ...], int], str] = {}
    for at, index, value in visited:
        text = f"{value.path}/{value.op}".removeprefix(shared).lstrip("/")
        label = "".join("_" if c.isspace() or not c.isprintable() else c for c in text)
        used[label] += 1
        found[at, index] = label if used[label] == 1 else f"{label}#{used[label]}"
    return found


def evaluate_named(jaxpr: Any, naming: Naming, args: Sequence[Any], place: Place = TOP, outer: Any = None) -> list:
    """Evaluates a closed program with values named.

    Args:
      place: of the program.
      outer: for each output, the checkpoint names that it has further out.
    """
    owner = jaxprs.opened(jaxpr)
    outer = outer if outer is not None else [()] * len(owner.outvars)
    env: dict[Var, Any] = dict(zip(jaxprs.inputs(jaxpr), [*jaxprs.constants(jaxpr), *args], strict=True))
    names = names_of(owner, outer)
    made = {v for e in owner.eqns for v in e.outvars if jaxprs.name_of(e) is None}

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for i, eqn in enumerate(owner.eqns):
        operands = [read(v) for v in eqn.invars]
        asked = nameable(eqn, i, names, made, place, naming.labels)
        given = [naming.name(f) if f is not None else None for f in asked]
        results = _evaluate(eqn, i, naming, operands, place, names, given)
        for v, x in zip(eqn.outvars, results, strict=True):
            env[v] = x
    return [read(v) for v in owner.outvars]


def names_of(owner: Any, outer: Sequence[Names]) -> dict[Any, Names]:
    """All checkpoint names of each value of one program, those it gets outside included."""
    alike = provenance.identical(owner)
    found: dict[Any, Names] = {}
    for e in owner.eqns:
        name = jaxprs.name_of(e)
        if name is not None and not is_reserved(name) and isinstance(e.invars[0], Var):
            for v in alike[e.invars[0]]:
                found[v] = (*found.get(v, ()), name)
    for v, more in zip(owner.outvars, outer, strict=True):
        if isinstance(v, Var) and more:
            for same in alike.get(v, frozenset((v,))):
                found[same] = (*found.get(same, ()), *more)
    return found


def nameable(
    eqn: JaxprEqn, i: int, names: dict[Any, Names], made: set[Any], place: Place, known: Labels
) -> list[ValueFacts | None]:
    """For each output of the `i`-th equation of a program what a policy may select it by.

    None where it cannot or need not be named.
    """
    name = jaxprs.name_of(eqn)
    nested = any(c.rewritable for c in jaxprs.calls(eqn))
    out: list[ValueFacts | None] = []
    for index, v in enumerate(eqn.outvars):
        mine = names.get(v, ())
        # A named value is named once more where it is made; where that is outside, at the name itself.
        again = name is not None and isinstance(eqn.invars[0], Var) and eqn.invars[0] in made
        skip = again or jaxprs.is_ref(v.aval) or not hasattr(v.aval, "dtype") or (nested and not mine)
        out.append(None if skip else facts(eqn, i, index, mine, place, known))
    return out


def values(jaxpr: Any, place: Place = TOP, known: Labels | None = None) -> Iterator[ValueFacts]:
    """What a policy is asked about in a closed program and those nested in it, in program order.

    Args:
      known: the labels of its values, where they matter.
    """
    return (value for _, _, value in _visit(jaxpr, place, None, known or {}))


def _visit(
    jaxpr: Any, place: Place, outer: Any, known: Labels, in_rule: bool = False
) -> Iterator[tuple[tuple[int, ...], int, ValueFacts]]:
    """Each value that a policy is asked about, with the position of its equation and its number among the outputs.

    Args:
      in_rule: whether the program is part of a forward rule, in which other forward rules (or itself) do not run.
    """
    owner = jaxprs.opened(jaxpr)
    names = names_of(owner, outer if outer is not None else [()] * len(owner.outvars))
    made = {v for e in owner.eqns for v in e.outvars if jaxprs.name_of(e) is None}
    for i, eqn in enumerate(owner.eqns):
        for index, f in enumerate(nameable(eqn, i, names, made, place, known)):
            if f is not None:
                yield (*place.position, i), index, f
        for number, call in enumerate(jaxprs.calls(eqn)):
            if _reaches(call):
                inside = place.into(eqn, i, number, call.trips)
                yield from _visit(call.jaxpr, inside, _outer(call, eqn, names), known, in_rule)
        asks = jaxprs.is_custom_vjp(eqn) and not jaxprs.remat3() and not in_rule
        if asks and (rule := jaxprs.forward_rule(eqn)) is not None:
            yield from _visit(jaxprs.close(rule), place.into(eqn, i), None, known, True)


def _reaches(call: jaxprs.Call) -> bool:
    """Whether a policy can save values of a nested program."""
    return call.rewritable and call.kind is not CallKind.WHILE


def _outer(call: jaxprs.Call, eqn: JaxprEqn, names: dict[Any, Names]) -> list[Names]:
    """For each output of a nested program, the names that it gets outside, where it is the same value there."""
    same = call.kind in (CallKind.JIT, CallKind.COND, CallKind.SHARD_MAP, CallKind.REMAT)
    return [names.get(v, ()) if same else () for v in eqn.outvars]


def _evaluate(
    eqn: JaxprEqn,
    i: int,
    naming: Naming,
    operands: list[Any],
    place: Place,
    names: dict[Any, Names],
    given: list[str | None],
) -> list[Any]:
    inside = place.into(eqn, i)
    kept = [name for name in given if name is not None]
    if kept and jaxprs.is_custom_vjp(eqn):
        if jaxprs.remat3():
            warnings.warn(
                f"the policy saves the custom_vjp call at {_where(eqn)}, but jax_remat3 ignores names inside forward "
                "rules: the forward rule will run again in the backward pass.",
                RematWarning,
                stacklevel=2,
            )
        results = jaxprs.name_custom_vjp(eqn, operands, kept[0])
    elif jaxprs.is_custom_vjp(eqn) and not jaxprs.remat3():
        results = jaxprs.through_forward_rule(eqn, operands, lambda rule, xs: evaluate_named(rule, naming, xs, inside))
    elif (region := jaxprs.remat_region(eqn)) is not None:
        with jaxprs.context(eqn):
            results = list(_region(eqn, region, naming, inside, names)(*operands))
    else:
        results = jaxprs.bind(eqn, operands, _named_programs(eqn, i, naming, place, names))
    if not kept:
        return results
    with jaxprs.context(eqn):
        results = [x if name is None else jaxprs.named(x, name) for x, name in zip(results, given, strict=True)]
        if reads_output(eqn):
            results = _attach(eqn, results, [name is not None for name in given], operands)
    return results


def _region(
    eqn: JaxprEqn, region: jaxprs.Region, naming: Naming, inside: Place, names: dict[Any, Names]
) -> Callable[..., Any]:
    """A `jax.checkpoint` region inside the block, as it was written but with the values of the block's policy named."""
    (call,) = jaxprs.calls(eqn)

    def body(*xs: Any) -> list[Any]:
        return evaluate_named(region.jaxpr, naming, xs, inside, _outer(call, eqn, names))

    return jax.checkpoint(body, policy=region.policy, prevent_cse=region.prevent_cse)


def _named_programs(eqn: JaxprEqn, i: int, naming: Naming, place: Place, names: dict[Any, Names]) -> dict[Any, Any]:
    """The programs nested in an equation, each with its own values named."""
    programs: dict[Any, Any] = {}
    for number, call in enumerate(jaxprs.calls(eqn)):
        if not _reaches(call):
            continue

        def body(*xs: Any, call: Any = call, number: int = number) -> list[Any]:
            inside = place.into(eqn, i, number, call.trips)
            return evaluate_named(call.jaxpr, naming, xs, inside, _outer(call, eqn, names))

        if call.kind is CallKind.SHARD_MAP:
            programs[call.key] = body
        else:
            programs[call.key] = jaxprs.trace(body, [v.aval for v in jaxprs.opened(call.jaxpr).invars])
    return programs


# Rules that read their output -----------------------------------------------------------------------


def reads_output(eqn: JaxprEqn) -> bool:
    """Whether an equation's derivative rule reads its own results (exp, tanh, sqrt, max, top_k, ...).

    Naming the result of such an equation does not keep what its rule reads: the value before the name.
    """
    if jaxprs.calls(eqn) or not any(jaxprs.is_inexact(v.aval) for v in eqn.outvars):
        return False
    try:
        return _jvp_program(eqn)[1]
    except Exception:  # no rule, or one that cannot be traced alone: leave the equation as it is
        return False


def _jvp_program(eqn: JaxprEqn) -> tuple[Any, bool, int]:
    """The jvp of one equation as a program of results and their tangents (of those that have one).

    Returns:
      It, whether a tangent reads a result, and which of its equations makes the results.
    """
    avals = [v.aval for v in eqn.invars]
    diff = [jaxprs.is_inexact(a) for a in avals]
    if not any(diff):
        return None, False, -1

    def jvp(*xs: Any) -> list[Any]:
        primals, tangents = xs[: len(avals)], xs[len(avals) :]
        given = [p for p, d in zip(primals, diff, strict=True) if d]

        def fun(*ys: Any) -> Any:
            y = iter(ys)
            return jaxprs.bind(eqn, [next(y) if d else p for p, d in zip(primals, diff, strict=True)])

        out, moved = jax.jvp(fun, tuple(given), tuple(tangents))
        return [*out, *(t for t, v in zip(moved, eqn.outvars, strict=True) if jaxprs.is_inexact(v.aval))]

    tangent_avals = [a for a, d in zip(avals, diff, strict=True) if d]
    program = jaxprs.trace(jvp, [*avals, *tangent_avals])
    owner = jaxprs.opened(program)
    n = len(eqn.outvars)
    results, tangents = owner.outvars[:n], owner.outvars[n:]
    made = next((i for i, e in enumerate(owner.eqns) if list(e.outvars) == list(results)), -1)
    if made < 0 or owner.eqns[made].primitive is not eqn.primitive:
        return program, False, -1
    return program, any(_depends(owner, t, r) for t in tangents for r in results), made


def _depends(owner: Any, var: Any, on: Any) -> bool:
    made = {v: e for e in owner.eqns for v in e.outvars}
    todo, seen = [var], set()
    while todo:
        v = todo.pop()
        if v is on:
            return True
        if isinstance(v, Var) and v not in seen and v in made:
            seen.add(v)
            todo += made[v].invars
    return False


def _attach(eqn: JaxprEqn, results: list[Any], named: Sequence[bool], operands: list[Any]) -> list[Any]:
    """Gives named results back their derivative, by a rule that reads the named values instead of its own.

    The primals are the named values; the tangents are those of the original equation at the same operands, with the
    equation's own results replaced by the named ones, so that keeping these is enough.

    Args:
      named: for each result whether it is named. The others stay as they are; a rule that reads one is given it.
    """
    program, _, made = _jvp_program(eqn)
    owner = jaxprs.opened(program)
    diff = [jaxprs.is_inexact(v.aval) for v in eqn.invars]
    n = len(results)
    moving = [i for i, v in enumerate(eqn.outvars) if jaxprs.is_inexact(v.aval)]
    tangent_of = dict(zip(moving, owner.outvars[n:], strict=True))
    mine = [i for i in range(n) if named[i]]
    asked = [tangent_of[i] for i in mine if i in tangent_of]
    made_vars = owner.eqns[made].outvars
    read = [i for i in range(n) if not named[i] and any(_depends(owner, t, made_vars[i]) for t in asked)]

    @jax.custom_jvp
    def attached(values: list[Any], others: list[Any], *xs: Any) -> list[Any]:
        return values

    @attached.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        values, others, *xs = primals
        given = [t for t, d in zip(tangents[2:], diff, strict=True) if d]
        env = dict(zip(jaxprs.inputs(program), [*jaxprs.constants(program), *xs, *given], strict=True))
        env.update(zip((made_vars[i] for i in (*mine, *read)), (*values, *others), strict=True))
        for i, e in enumerate(owner.eqns):
            if i != made and all(isinstance(v, Literal) or v in env for v in e.invars):
                ins = [v.val if isinstance(v, Literal) else env[v] for v in e.invars]
                env.update(zip(e.outvars, jaxprs.bind(e, ins), strict=True))

        def tangent(i: int) -> Any:
            if i not in tangent_of:
                return _no_tangent(eqn.outvars[i].aval)
            v = tangent_of[i]
            return v.val if isinstance(v, Literal) else env[v]

        return values, [tangent(i) for i in mine]

    fresh = iter(attached([results[i] for i in mine], [results[i] for i in read], *operands))
    return [next(fresh) if named[i] else x for i, x in enumerate(results)]


def _no_tangent(aval: Any) -> Any:
    """The tangent of an integer, as JAX wants it."""
    return np.zeros(aval.shape, jax.dtypes.float0)


def _where(eqn: JaxprEqn) -> str:
    file, line, function = jaxprs.source_line(eqn)
    return f"{file}:{line} ({function})" if file else "an unknown place"
