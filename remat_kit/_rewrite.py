"""Rewriting a program: chosen blocks become `jax.checkpoint` calls, everything else is bound as it was.

The rewriter is an interpreter: it evaluates a program and, on its way, evaluates each chosen block through a
function that `jax.checkpoint` wraps. What it makes is for JAX to trace again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from remat_kit import _block_inputs, _limits, _naming
from remat_kit._errors import RematError
from remat_kit._policy import Policy, Selector
from remat_kit._trace import jaxprs, marks, survey
from remat_kit._trace.blocks import Candidate, Site
from remat_kit._trace.jaxprs import CallKind, JaxprEqn, Literal, Var

Flat = Callable[..., list[Any]]
_FULL = Policy()


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """Blocks and the policy for each. Blocks do not lie in one another.

    Attributes:
      blocks: each with its policy.
      in_loop: whether the whole program is evaluated directly in the body of a loop.
    """

    blocks: tuple[tuple[Candidate, Policy], ...]
    in_loop: bool = False

    @functools.cached_property
    def _by_site(self) -> dict[Site, list[tuple[Candidate, Policy]]]:
        found: dict[Site, list[tuple[Candidate, Policy]]] = {}
        for c, p in self.blocks:
            for n in range(len(c.site)):
                found.setdefault(c.site[:n], [])
            found.setdefault(c.site, []).append((c, p))
        return found

    @functools.cached_property
    def _by_eqn(self) -> dict[tuple[Site, tuple[int, ...]], list[tuple[Candidate, Policy]]]:
        found: dict[tuple[Site, tuple[int, ...]], list[tuple[Candidate, Policy]]] = {}
        for c, p in self.blocks:
            found.setdefault((c.site, c.eqns), []).append((c, p))
        return found

    def at(self, site: Site) -> list[tuple[Candidate, Policy]]:
        """The blocks in the program at a site."""
        return self._by_site.get(site, [])

    def of(self, site: Site, i: int) -> list[tuple[Candidate, Policy]]:
        """The blocks that are one equation of that program, or parts of it."""
        return self._by_eqn.get((site, (i,)), [])

    def below(self, site: Site) -> bool:
        """Whether any block lies in the program at a site, or in one nested in it."""
        return site in self._by_site


def rewrite(jaxpr: Any, choice: Choice) -> Flat:
    """A flat function that computes the same as a closed program, with its chosen blocks rematerialized."""

    def run(*args: Any) -> list[Any]:
        return _run(jaxpr, args, choice, ())

    return run


def _run(jaxpr: Any, args: Sequence[Any], choice: Choice, site: Site) -> list[Any]:
    owner = jaxprs.opened(jaxpr)
    env: dict[Var, Any] = dict(zip(jaxprs.inputs(jaxpr), [*jaxprs.constants(jaxpr), *args], strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for block, members in _schedule(owner, choice.at(site)):
        if block is None:
            eqn = owner.eqns[members[0]]
            results = _eqn(eqn, members[0], [read(v) for v in eqn.invars], choice, site)
            env.update(zip(eqn.outvars, results, strict=True))
        else:
            candidate, policy = block
            program, invars, outvars, scopes = outline(owner, members, candidate.marks)
            program = _block_inputs.named(candidate, program, policy)
            place = _naming.Place((*_scopes_around(candidate), *scopes), candidate.runs)
            fun = block_function(program, policy, prevent_cse=not _in_loop(candidate, choice), place=place)
            with _scoped((*scopes, marks.BLOCK + candidate.path)):
                results = fun(*(env[v] for v in invars))
            env.update(zip(outvars, results, strict=True))
    return [read(v) for v in owner.outvars]


def program_of(c: Candidate, policy: Policy = _FULL) -> tuple[Any, _naming.Place]:
    """The program of a block, closed, as a policy sees it, and the place where it stands."""
    if c.kind in ("scan", "checkpoint"):
        eqn = c.owner.eqns[c.eqns[0]]
        (call,) = jaxprs.calls(eqn)
        program = _block_inputs.named(c, call.jaxpr, policy)
        return program, _naming.Place((*_scopes_around(c), *jaxprs.scopes(eqn)), c.runs)
    program, _, _, scopes = outline(c.owner, c.eqns, c.marks)
    return _block_inputs.named(c, program, policy), _naming.Place((*_scopes_around(c), *scopes), c.runs)


def _scopes_around(c: Candidate) -> tuple[str, ...]:
    return tuple(s for e in c.outer for s in jaxprs.scopes(e))


def _in_loop(c: Candidate, choice: Choice) -> bool:
    return choice.in_loop or any(is_loop(e) for e in c.outer)


def is_loop(eqn: JaxprEqn, trips: int | None = None) -> bool:
    """Whether XLA is given a loop: not where a scan has one iteration, or all of them in one."""
    if eqn.primitive.name != "scan":
        return eqn.primitive.name == "while"
    return max(1, eqn.params["unroll"]) < (eqn.params["length"] if trips is None else trips)


def _scoped(names: Sequence[str]) -> Any:
    stack = contextlib.ExitStack()
    for n in names:
        stack.enter_context(jax.named_scope(n))
    return stack


def _eqn(eqn: JaxprEqn, i: int, operands: list[Any], choice: Choice, site: Site) -> list[Any]:
    """Evaluates one equation: itself a block (a scan's body, a region), with blocks in it, or as it was."""
    parts = [(c, p) for c, p in choice.of(site, i) if c.span is not None]
    if parts:
        return _parts_of_scan(eqn, operands, parts, choice)
    for c, policy in choice.of(site, i):
        if c.kind in ("scan", "checkpoint"):
            return _block_eqn(eqn, operands, c, policy, choice)
    programs: dict[Any, Any] = {}
    for call in jaxprs.calls(eqn):
        below = (*site, (i, call.key))
        if not call.rewritable or not choice.below(below):
            continue
        if call.kind is CallKind.REMAT:  # a block inside: blocks do not nest, the outer region goes
            with jaxprs.context(eqn):
                return _run(call.jaxpr, operands, choice, below)

        def body(*xs: Any, call: Any = call, below: Site = below) -> list[Any]:
            return _run(call.jaxpr, xs, choice, below)

        in_place = call.kind is CallKind.SHARD_MAP
        programs[call.key] = body if in_place else jaxprs.trace(body, _avals(call.jaxpr))
    return jaxprs.bind(eqn, operands, programs)


def _block_eqn(eqn: JaxprEqn, operands: list[Any], c: Candidate, policy: Policy, choice: Choice) -> list[Any]:
    program, place = program_of(c, policy)
    region = jaxprs.remat_region(eqn)
    if region is not None:
        asked = region.prevent_cse is not True or not _in_loop(c, choice)
        fun = block_function(program, policy, prevent_cse=region.prevent_cse if asked else False, place=place)
        with jaxprs.context(eqn), jax.named_scope(marks.BLOCK + c.path):
            return list(fun(*operands))
    fun = block_function(program, policy, prevent_cse=not (choice.in_loop or is_loop(eqn)), place=place)

    def body(*xs: Any) -> list[Any]:
        with jax.named_scope(marks.BLOCK + c.path):
            return list(fun(*xs))

    (call,) = jaxprs.calls(eqn)
    return jaxprs.bind(eqn, operands, {call.key: jaxprs.trace(body, _avals(program))})


def _parts_of_scan(
    eqn: JaxprEqn, operands: list[Any], parts: Sequence[tuple[Candidate, Policy]], choice: Choice
) -> list[Any]:
    """A scan run in parts, each with its own policy; iterations that no part has are left without remat."""
    (call,) = jaxprs.calls(eqn)
    programs: list[tuple[int, int, Any]] = []
    at = 0
    for c, policy in sorted(parts, key=lambda x: x[0].span or (0, 0)):
        first, last = c.span or (0, c.trips)
        if at < first:
            programs.append((at, first, call.jaxpr))
        program, place = program_of(c, policy)
        fun = block_function(program, policy, prevent_cse=not is_loop(eqn, last - first), place=place)

        def body(*xs: Any, fun: Any = fun, c: Candidate = c) -> list[Any]:
            with jax.named_scope(marks.BLOCK + c.path):
                return list(fun(*xs))

        programs.append((first, last, jaxprs.trace(body, _avals(program))))
        at = last
    if at < call.trips:
        programs.append((at, call.trips, call.jaxpr))
    return jaxprs.bind_parts(eqn, operands, programs)


def _avals(jaxpr: Any) -> list[Any]:
    return [v.aval for v in jaxprs.opened(jaxpr).invars]


# Groups of equations -------------------------------------------------------------------------------


def _schedule(
    owner: Any, chosen: Sequence[tuple[Candidate, Policy]]
) -> list[tuple[tuple[Candidate, Policy] | None, tuple[int, ...]]]:
    """Orders a program's equations so that each group of a block stands together.

    Raises:
      RematError: where an equation outside a group needs the group and is needed by it.
    """
    groups = [(c, p) for c, p in chosen if c.kind not in ("scan", "checkpoint")]
    order: list[tuple[tuple[Candidate, Policy] | None, tuple[int, ...]]] = []
    of = {i: g for g, (c, _) in enumerate(groups) for i in c.eqns}
    placed: set[int] = set()
    for i in range(len(owner.eqns)):
        if i in placed:
            continue
        if i not in of:
            order.append((None, (i,)))
            placed.add(i)
            continue
        c, p = groups[of[i]]
        members = set(c.eqns)
        between = [k for k in range(i, max(members) + 1) if k not in members and k not in placed]
        fed: set[Var] = {v for k in members for v in owner.eqns[k].outvars}
        late: set[int] = set()
        for k in range(i, max(members) + 1):
            eqn = owner.eqns[k]
            reads = any(isinstance(v, Var) and v in fed for v in eqn.invars)
            if k in late or (k in between and reads):
                late.add(k)
                fed.update(eqn.outvars)
        made_late = {v for k in late for v in owner.eqns[k].outvars}
        if any(isinstance(v, Var) and v in made_late for k in members for v in owner.eqns[k].invars):
            raise RematError(
                f"block {c.path!r} cannot be one unit: it calls out to a part of the program that needs its own "
                "results. Choose the blocks inside it or around it."
            )
        for k in between:
            if k not in late:
                if k in of and of[k] != of[i]:
                    raise RematError(
                        f"blocks {c.path!r} and {groups[of[k]][0].path!r} are interleaved; choose one of them."
                    )
                order.append((None, (k,)))
                placed.add(k)
        order.append(((c, p), tuple(sorted(members))))
        placed |= members
    return order


def outline(owner: Any, members: Sequence[int], depth: int) -> tuple[Any, list[Var], list[Var], tuple[str, ...]]:
    """Makes a program of some equations: it, its inputs and outputs outside, and the scopes that they share."""
    inside = [owner.eqns[i] for i in members]
    scopes = _upto_mark(jaxprs.scopes(inside[0]), depth)
    eqns = [jaxprs.with_scopes(e, jaxprs.scopes(e)[len(_upto_mark(jaxprs.scopes(e), depth)) :]) for e in inside]
    made = {v for e in inside for v in e.outvars}
    invars = list(dict.fromkeys(v for e in inside for v in e.invars if isinstance(v, Var) and v not in made))
    mine, readers = set(members), survey.readers(owner)
    outvars = [v for e in inside for v in e.outvars if not mine.issuperset(readers.get(v, ()))]
    return jaxprs.subprogram(owner, eqns, invars, outvars), invars, outvars, scopes


def _upto_mark(scopes: tuple[str, ...], depth: int) -> tuple[str, ...]:
    """The scopes up to and with the `depth`-th mark."""
    for i in range(len(scopes) if depth else 0):
        if len(marks.split(scopes[: i + 1])[0]) == depth:
            return scopes[: i + 1]
    return ()


# Blocks --------------------------------------------------------------------------------------------

_functions: collections.OrderedDict[Any, tuple[Flat, dict[int, Any]]] = collections.OrderedDict()
_lock = threading.Lock()
_MOST_FUNCTIONS = 512


def block_function(jaxpr: Any, policy: Policy, *, prevent_cse: Any = True, place: _naming.Place = _naming.TOP) -> Flat:
    """A flat function that runs a closed program as one rematerialized block, in place of the regions inside it.

    Args:
      prevent_cse: as in `jax.checkpoint`.
      place: where the program stands, for rules on paths and sizes.

    Raises:
      RematError: for a program that writes to a mutable reference, or a policy that cannot be honoured.
    """
    if not policy.remat:
        return lambda *args: evaluate_plain(jaxpr, args)
    program = without_regions(jaxpr)
    _limits.check(policy, program)
    check_effects(program)
    return region_function(program, policy, prevent_cse=prevent_cse, place=place)


def region_function(
    jaxpr: Any, policy: Policy, *, prevent_cse: Any, place: _naming.Place = _naming.TOP, plain: bool = False
) -> Flat:
    """A flat function that runs a closed program in one `jax.checkpoint` region under a policy.

    Equal programs share one function object, so that JAX traces and differentiates identical layers once.

    Args:
      prevent_cse, place: as in `block_function`.
      plain: whether the marks in the program go, once rules on paths are asked.
    """
    native = policy.as_jax()
    fun = _shared(jaxpr, None if native is not None else policy, place, plain)
    saver = native if native is not None else _naming.names_policy(policy)
    wrapped = jax.checkpoint(fun, policy=saver, prevent_cse=prevent_cse)
    return lambda *args: list(wrapped(*args))


def _shared(jaxpr: Any, policy: Policy | None, place: _naming.Place, plain: bool) -> Flat:
    fun = _function(jaxpr, policy, place, plain)
    kept: dict[int, Any] = {}
    matters = policy is not None and any(asks_place(r.selector) for r in policy.rules)
    fingerprint = survey.fingerprint(jaxpr, kept, marks.unnumbered)
    key = (fingerprint, policy, place if matters else None, plain, jaxprs.cache_key())
    if any(hasattr(x, "shape") for x in kept.values()):  # arrays and tracers must not live as long as the cache
        return fun
    with _lock:
        found, _ = _functions.setdefault(key, (fun, kept))
        _functions.move_to_end(key)
        while len(_functions) > _MOST_FUNCTIONS:
            _functions.popitem(last=False)
    return found


def asks_place(selector: Selector) -> bool:
    """Whether a selector asks where a value stands, or how much all its trips take."""
    return bool(selector.path) or selector.larger_than is not None or selector.smaller_than is not None


def _function(jaxpr: Any, policy: Policy | None, place: _naming.Place, plain: bool) -> Flat:
    def block(*args: Any) -> list[Any]:
        if policy is None:
            return jaxprs.evaluate(jaxpr, *args)
        return _naming.evaluate_named(jaxpr, _naming.Naming.of(policy, jaxpr), args, place)

    def unmarked(*args: Any) -> list[Any]:
        return jaxprs.evaluate(survey.map_scopes(jaxprs.trace(block, _avals(jaxpr)), marks.plain), *args)

    return unmarked if plain else block


def evaluate_plain(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a closed program without the `jax.checkpoint` regions in it."""
    return jaxprs.evaluate(without_regions(jaxpr), *args)


def without_regions(jaxpr: Any) -> Any:
    """The same closed program with each `jax.checkpoint` region replaced by a plain call of its body."""
    owner = jaxprs.opened(jaxpr)
    eqns, changed = [], False
    for e in owner.eqns:
        programs: Mapping[Any, Any] = {
            c.key: new for c in jaxprs.calls(e) if c.rewritable and (new := without_regions(c.jaxpr)) is not c.jaxpr
        }
        region = jaxprs.remat_region(e)
        if region is not None and not region.differentiated:
            e, changed = jaxprs.as_jit(e, programs.get(("jaxpr", None), region.jaxpr)), True
        elif programs:
            e, changed = e.replace(params=jaxprs.with_programs(e, programs)), True
        eqns.append(e)
    return jaxprs.replace_eqns(jaxpr, eqns) if changed else jaxpr


def check_effects(jaxpr: Any) -> None:
    """Refuses blocks whose recomputation would write twice.

    Raises:
      RematError: when the program writes to a mutable reference that it is given.
    """
    refuse_writes(jaxprs.writes(jaxpr))


def refuse_writes(written: Sequence[str]) -> None:
    """Raises a RematError if any mutable reference, given as text, is written to."""
    if written:
        raise RematError(
            f"a rematerialized function writes to a mutable reference ({', '.join(written)}): recomputation would "
            "write again. Return the value instead and write it outside, or leave this part without remat."
        )
