"""Rules on checkpoint names: those that do nothing, and those that do not do what they seem to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from remat_kit._errors import near_matches
from remat_kit._globs import matches
from remat_kit._naming import is_reserved
from remat_kit._policy import Action
from remat_kit._presets import presets, unmatched_names
from remat_kit._trace import jaxprs, survey
from remat_kit._trace.jaxprs import CallKind
from remat_kit._trace.levels import Level
from remat_kit._trace.recomputed import Again
from remat_kit._units import printable
from remat_kit._verify.finding import Hit, Where
from remat_kit._verify.regions import Region, chain_of
from remat_kit._verify.rule import rule
from remat_kit._verify.subject import Subject

_CLASSIC = "or use the classic implementation (jax.config.update('jax_remat3', False))."


@rule(
    "RK001",
    "name that the program lacks",
    "JAX passes over names in a policy that no value has, and recomputes what was meant to be kept.",
)
def unknown_name(s: Subject) -> Iterator[Hit]:
    """Names of the asked policy that the program lacks, and of policies in it that their regions lack."""
    asked = [m for m in s.missing if not m.hidden]
    for policy in dict.fromkeys(m.policy for m in asked):
        mine = [m for m in asked if m.policy == policy]
        yield _unknown(Where(), [m.name for m in mine], mine[0].present)
    for group in _by_policy(s.regions) if s.loss.rules is None else ():
        policy = group[0].policy
        have = frozenset(n for r in group for n in survey.names_in(r.body, forward_rules=True) if not is_reserved(n))
        lacking = [n for n in unmatched_names(policy, have) if not is_reserved(n)] if policy.name_globs else []
        if lacking:
            yield _unknown(s.place(group[0].chain), lacking, have)


def _unknown(where: Where, names: Sequence[str], present: frozenset[str]) -> Hit:
    listed = printable(", ".join(sorted(present))[:300])
    near = "".join(near_matches(n, present) for n in names[:6])
    quoted = ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return Hit(
        where,
        f"no value is named {quoted}.{near}",
        {"missing_names": len(names), "names_in_the_program": len(present)},
        f"Use names that are there: {listed}." if present else "Name values with rk.checkpoint_name.",
    )


def _by_policy(regions: tuple[Region, ...]) -> list[list[Region]]:
    groups: dict[Any, list[Region]] = {}
    for r in regions:
        groups.setdefault(r.policy, []).append(r)
    return list(groups.values())


@rule(
    "RK002",
    "named value that is no residual",
    "A name keeps a value only if the backward pass, or what it computes again, reads that very value.",
)
def idle_name(s: Subject) -> Iterator[Hit]:
    """Names that a policy keeps and a region has, without any value being kept for them."""
    seen: set[str] = set()
    lists = set(presets.values())  # of the names of many codebases
    for region in s.regions:
        if region.policy in lists:
            continue
        globs = [g for r in region.policy.rules if r.action is not Action.RECOMPUTE for g in r.selector.name]
        for level, eqn in region.inside:
            name = jaxprs.name_of(eqn)
            if name is None or is_reserved(name) or name in seen or name in s.kept_names:
                continue
            if any(map(jaxprs.is_custom_vjp, chain_of(level))):  # a fault of its own
                continue
            if any(matches(g, name) for g in globs):
                seen.add(name)
                yield Hit(
                    s.place((*region.chain, *chain_of(level), eqn)),
                    f"the policy keeps {name!r}, and the backward pass reads no such value.",
                    {"named_bytes": jaxprs.nbytes(eqn.outvars[0].aval) * region.level.trips * level.trips},
                    "Name the value that the derivative reads (rk.residuals lists what is kept without remat), or take "
                    "the name out of the policy.",
                )


@rule(
    "RK003",
    "one name on several values",
    "A policy cannot tell values of one name apart: it keeps all of them or none.",
)
def shared_name(s: Subject) -> Iterator[Hit]:
    """Names given at several lines of one block, or of one function where there is none."""
    places: dict[tuple[str, str], dict[tuple[str, int], tuple[Where, int]]] = {}
    for level, eqn in s.equations:
        name = jaxprs.name_of(eqn)
        if name is None or is_reserved(name) or _in_branch(level):
            continue
        where = s.at(level, eqn)
        found = places.setdefault((name, where.block or where.function), {})
        size = jaxprs.nbytes(eqn.outvars[0].aval) * level.trips
        first, before = found.get((where.file, where.line), (where, 0))
        found[where.file, where.line] = first, before + size
    seen: set[tuple[str, frozenset[tuple[str, int]]]] = set()
    for (name, _), lines in places.items():
        if len(lines) > 1 and (name, frozenset(lines)) not in seen:
            seen.add((name, frozenset(lines)))
            where = next(iter(lines.values()))[0]
            listed = ", ".join(w.source for w, _ in lines.values())
            yield Hit(
                where,
                f"{name!r} names {len(lines)} different values: {listed}.",
                {"named_bytes": sum(n for _, n in lines.values()), "values": len(lines)},
                "Give each value a name of its own; a glob (name=attn_*) can still speak of all of them.",
            )


def _in_branch(level: Level) -> bool:
    here: Level | None = level
    while here is not None and here.call is not None:
        if here.call.kind is CallKind.COND:
            return True
        here = here.parent
    return False


@rule(
    "RK009",
    "name that a custom_vjp function hides",
    "A custom_vjp function runs its forward rule when it is differentiated, not its body; and jax_remat3 ignores the "
    "names in forward rules.",
)
def hidden_name(s: Subject) -> Iterator[Hit]:
    """Names in bodies of custom_vjp functions that their forward rules lack; under `jax_remat3` those in the rules."""
    outside = _names_outside(s)
    asked = {g for p in s.policies() for g in p.name_globs} | {m.name for m in s.missing}
    seen: set[str] = set()
    for level, eqn in s.equations:
        if not jaxprs.is_custom_vjp(eqn):
            continue
        body = survey.names_in(jaxprs.calls(eqn)[0].jaxpr)
        forward = jaxprs.forward_rule(eqn)
        rule_names = survey.names_in(forward) if forward is not None else frozenset()
        lost = body - rule_names if forward is not None else frozenset()
        ignored = {n for n in rule_names if any(matches(g, n) for g in asked)} if jaxprs.remat3() else frozenset()
        for name in sorted((lost | ignored) - outside - seen):
            if is_reserved(name):
                continue
            seen.add(name)
            in_rule = name in ignored
            yield Hit(
                s.at(level, eqn),
                f"{name!r} is given in the forward rule of a custom_vjp function, where jax_remat3 ignores it."
                if in_rule
                else f"{name!r} is given in the body of a custom_vjp function, which does not run when it is "
                "differentiated.",
                {"output_bytes": sum(jaxprs.nbytes(v.aval) for v in eqn.outvars) * level.trips},
                f"Name a value outside the function, {_CLASSIC}" if in_rule else "Give the name in the forward rule.",
            )


def _names_outside(s: Subject) -> frozenset[str]:
    return frozenset(
        name
        for level, eqn in s.equations
        if (name := jaxprs.name_of(eqn)) is not None and not any(jaxprs.is_custom_vjp(e) for e in chain_of(level))
    )


@rule(
    "RK025",
    "named value that is computed again",
    "The derivative of exp, tanh, softmax and others reads their result before it gets its name, so that keeping the "
    "named value does not keep what the derivative needs.",
)
def named_too_late(s: Subject) -> Iterator[Hit]:
    """Values that are kept by name, and whose operation runs again all the same."""
    tagged = s.lin.tagged
    kept: dict[tuple[int, ...], set[str]] = {}  # a value of the same name elsewhere may well be kept
    for k in s.kept:
        kept.setdefault(k.found.source.chain, set()).update(k.found.entry.names)
    costs: dict[tuple[int, str], int] = {}
    places: dict[tuple[int, str], tuple[int, ...]] = {}
    for x in s.again:
        if not x.chain or not x.flops or not _read(x):
            continue
        origin = tagged.origins[x.chain[-1]].eqn
        if jaxprs.op_of(origin) != jaxprs.op_of(x.eqn) or any(
            jaxprs.is_custom_vjp(tagged.origins[t].eqn) for t in x.chain
        ):
            continue
        for i in range(len(origin.outvars)):
            for name in set(tagged.names(x.chain, i)) & kept.get(x.chain, set()):
                key = x.chain[-1], name
                costs[key] = costs.get(key, 0) + x.flops
                places[key] = x.chain
    seen: set[tuple[str, int]] = set()
    for (_, name), chain in places.items():
        where = s.origin(s.lin, chain)
        if (where.file, where.line) in seen:
            continue
        seen.add((where.file, where.line))
        op = jaxprs.op_of(tagged.origins[chain[-1]].eqn)
        yield Hit(
            where,
            f"{name!r} is kept, and the {op} that makes it is computed again.",
            {"recomputed_flops": sum(f for (t, n), f in costs.items() if n == name)},
            "Apply the policy with rk.apply or rk.remat, which name the value that the derivative reads; or keep the "
            f"operation itself ('save op={op}').",
        )


def _read(x: Again) -> bool:
    """Whether anything but a name reads a result: what only gets its name again is dropped by the compiler."""
    return any(jaxprs.name_of(e) is None for v in x.eqn.outvars for e, _ in x.level.readers.get(v, ()))
