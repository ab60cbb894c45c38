"""From a policy to checkpoint names: which values of a block get the toolkit's names, and how.

Names are the only handle on single values that both of JAX's remat implementations honour. Saved values get
one reserved name, offloaded ones another, so that a single JAX policy serves every block.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_kit._errors import RematWarning
from remat_kit._policy import Action, Policy, ValueFacts
from remat_kit._trace import jaxprs, marks, provenance
from remat_kit._trace.jaxprs import CallKind, JaxprEqn, Literal, Var

SAVED = "remat_kit.save"
OFFLOADED = "remat_kit.offload"
RESERVED = frozenset((SAVED, OFFLOADED))
_NAME = {Action.SAVE: SAVED, Action.OFFLOAD: OFFLOADED}

Names = tuple[str, ...]


@functools.cache
def names_policy(offload: bool) -> Callable[..., Any]:
    """JAX's policy that saves the values with our names: the same object for every block."""
    policies = jax.checkpoint_policies
    if not offload:
        return policies.save_only_these_names(SAVED)
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[SAVED],
        names_which_can_be_offloaded=[OFFLOADED],
        offload_src="device",
        offload_dst="pinned_host",
    )


def facts(eqn: JaxprEqn, index: int, names: Names, path: str) -> ValueFacts:
    """What a policy may select a value by."""
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
        path=path,
        source=file,
        dtype=str(getattr(aval, "dtype", "")),
        bytes=jaxprs.nbytes(aval),
        batch_dims=batch_dims,
    )


def evaluate_named(
    jaxpr: Any, policy: Policy, args: Sequence[Any], path: tuple[str, ...] = (), outer: Any = None
) -> list:
    """Evaluates a closed program with the values that a policy saves or offloads named.

    Args:
      path: marks on the calls around the program.
      outer: for each output, the checkpoint names that it has further out.
    """
    owner = jaxprs.opened(jaxpr)
    outer = outer if outer is not None else [()] * len(owner.outvars)
    env: dict[Var, Any] = dict(zip(jaxprs.inputs(jaxpr), [*jaxprs.constants(jaxpr), *args], strict=True))
    names = names_of(owner, outer)
    made = {v for e in owner.eqns for v in e.outvars if jaxprs.name_of(e) is None}

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for eqn in owner.eqns:
        operands = [read(v) for v in eqn.invars]
        called, _ = marks.split(jaxprs.scopes(eqn))
        here = (*path, *map(marks.name, called))
        actions = _actions(eqn, policy, names, made, "/".join(here))
        results = _evaluate(eqn, policy, operands, here, [names.get(v, ()) for v in eqn.outvars], actions)
        for v, x in zip(eqn.outvars, results, strict=True):
            env[v] = x
    return [read(v) for v in owner.outvars]


def names_of(owner: Any, outer: Sequence[Names]) -> dict[Any, Names]:
    """All checkpoint names of each value of one program, those it gets outside included."""
    alike = provenance.identical(owner)
    found: dict[Any, Names] = {}
    for e in owner.eqns:
        name = jaxprs.name_of(e)
        if name is not None and isinstance(e.invars[0], Var):
            for v in alike[e.invars[0]]:
                found[v] = (*found.get(v, ()), name)
    for v, more in zip(owner.outvars, outer, strict=True):
        if isinstance(v, Var) and more:
            for same in alike.get(v, frozenset((v,))):
                found[same] = (*found.get(same, ()), *more)
    return found


def _actions(eqn: JaxprEqn, policy: Policy, names: dict[Any, Names], made: set[Any], path: str) -> list[Action]:
    """The action for each output of an equation; `RECOMPUTE` where it cannot or need not be named."""
    name = jaxprs.name_of(eqn)
    nested = any(c.rewritable for c in jaxprs.calls(eqn))
    out = []
    for i, v in enumerate(eqn.outvars):
        mine = names.get(v, ())
        # A named value is named once more where it is made; where that is outside, at the name itself.
        again = name is not None and eqn.invars[0] in made
        if again or jaxprs.is_ref(v.aval) or not hasattr(v.aval, "dtype") or (nested and not mine):
            out.append(Action.RECOMPUTE)
        else:
            out.append(policy.action(facts(eqn, i, mine, path)))
    return out


def _evaluate(
    eqn: JaxprEqn, policy: Policy, operands: list[Any], path: tuple[str, ...], names: list[Names], actions: list[Action]
) -> list[Any]:
    kept = [a for a in actions if a in _NAME]
    if kept and jaxprs.is_custom_vjp(eqn):
        if jaxprs.remat3():
            warnings.warn(
                f"the policy saves the custom_vjp call at {_where(eqn)}, but jax_remat3 ignores names inside forward "
                "rules: the forward rule will run again in the backward pass.",
                RematWarning,
                stacklevel=2,
            )
        results = jaxprs.name_custom_vjp(eqn, operands, _NAME[kept[0]])
    elif jaxprs.is_custom_vjp(eqn) and not jaxprs.remat3():
        results = jaxprs.through_forward_rule(eqn, operands, lambda rule, xs: evaluate_named(rule, policy, xs, path))
    elif (region := jaxprs.remat_region(eqn)) is not None:
        with jaxprs.context(eqn):
            results = list(_region(region, policy, path, names)(*operands))
    else:
        results = jaxprs.bind(eqn, operands, _named_programs(eqn, policy, path, names))
    if not kept:
        return results
    with jaxprs.context(eqn):
        results = [jaxprs.named(x, _NAME[a]) if a in _NAME else x for x, a in zip(results, actions, strict=True)]
        if reads_output(eqn):
            results = _attach(eqn, results, operands)
    return results


def _region(region: jaxprs.Region, policy: Policy, path: tuple[str, ...], names: list[Names]) -> Callable[..., Any]:
    """A `jax.checkpoint` region inside the block, as it was written but with the values of the block's policy named."""

    def body(*xs: Any) -> list[Any]:
        return evaluate_named(region.jaxpr, policy, xs, path, names)

    return jax.checkpoint(body, policy=region.policy, prevent_cse=region.prevent_cse)


def _named_programs(eqn: JaxprEqn, policy: Policy, path: tuple[str, ...], names: list[Names]) -> dict[Any, Any]:
    """The programs nested in an equation, each with its own values named."""
    programs: dict[Any, Any] = {}
    for call in jaxprs.calls(eqn):
        if not call.rewritable or call.kind in (CallKind.WHILE, CallKind.REMAT):
            continue
        same = call.kind in (CallKind.JIT, CallKind.COND, CallKind.SHARD_MAP)
        outer = names if same else [()] * len(names)

        def body(*xs: Any, call: Any = call, outer: Any = outer) -> list[Any]:
            return evaluate_named(call.jaxpr, policy, xs, path, outer)

        if call.kind is CallKind.SHARD_MAP:
            programs[call.key] = body
        else:
            programs[call.key] = jaxprs.trace(body, [v.aval for v in jaxprs.opened(call.jaxpr).invars])
    return programs


# Rules that read their output -----------------------------------------------------------------------


def reads_output(eqn: JaxprEqn) -> bool:
    """Whether an equation's derivative rule reads its own result (exp, tanh, sqrt, max, ...).

    Naming the result of such an equation does not keep what its rule reads: the value before the name.
    """
    if jaxprs.calls(eqn) or len(eqn.outvars) != 1 or not jaxprs.is_inexact(eqn.outvars[0].aval):
        return False
    try:
        return _jvp_program(eqn)[1]
    except Exception:  # no rule, or one that cannot be traced alone: leave the equation as it is
        return False


def _jvp_program(eqn: JaxprEqn) -> tuple[Any, bool, int]:
    """The jvp of one equation as a program, whether its tangent reads the result, and where it is made."""
    avals = [v.aval for v in eqn.invars]
    diff = [jaxprs.is_inexact(a) for a in avals]
    if not any(diff):
        return None, False, -1

    def jvp(*xs: Any) -> list[Any]:
        primals, tangents = xs[: len(avals)], xs[len(avals) :]
        it = iter(tangents)
        given = [p for p, d in zip(primals, diff, strict=True) if d]

        def fun(*ys: Any) -> Any:
            y = iter(ys)
            return jaxprs.bind(eqn, [next(y) if d else p for p, d in zip(primals, diff, strict=True)])[0]

        return list(jax.jvp(fun, tuple(given), tuple(it)))

    tangent_avals = [a for a, d in zip(avals, diff, strict=True) if d]
    program = jaxprs.trace(jvp, [*avals, *tangent_avals])
    owner = jaxprs.opened(program)
    result, tangent = owner.outvars
    made = next((i for i, e in enumerate(owner.eqns) if result in e.outvars), -1)
    if made < 0 or owner.eqns[made].primitive is not eqn.primitive:
        return program, False, -1
    return program, _depends(owner, tangent, result), made


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


def _attach(eqn: JaxprEqn, results: list[Any], operands: list[Any]) -> list[Any]:
    """Gives a named result back its derivative, by a rule that reads the named value instead of its own.

    The primal is the named value; the tangent is that of the original equation at the same operands, with
    the equation's own result replaced by the named one, so that keeping it is enough.
    """
    program, _, made = _jvp_program(eqn)
    owner = jaxprs.opened(program)
    diff = [jaxprs.is_inexact(v.aval) for v in eqn.invars]

    @jax.custom_jvp
    def attached(value: Any, *xs: Any) -> Any:
        return value

    @attached.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        value, *xs = primals
        given = [t for t, d in zip(tangents[1:], diff, strict=True) if d]
        env = dict(zip(jaxprs.inputs(program), [*jaxprs.constants(program), *xs, *given], strict=True))
        env[owner.eqns[made].outvars[0]] = value
        for i, e in enumerate(owner.eqns):
            if i != made:
                ins = [v.val if isinstance(v, Literal) else env[v] for v in e.invars]
                env.update(zip(e.outvars, jaxprs.bind(e, ins), strict=True))
        tangent = owner.outvars[1]
        return value, tangent.val if isinstance(tangent, Literal) else env[tangent]

    return [attached(results[0], *operands)]


def _where(eqn: JaxprEqn) -> str:
    file, line, function = jaxprs.source_line(eqn)
    return f"{file}:{line} ({function})" if file else "an unknown place"
