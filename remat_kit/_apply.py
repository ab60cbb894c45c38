"""apply: the same function, made of `jax.checkpoint` calls, from an unmodified function and a policy."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit import _adapters, _block_inputs, _limits
from remat_kit._errors import RematError, near_matches
from remat_kit._every import Every, thinned
from remat_kit._globs import matches
from remat_kit._matching import check_names, warn_unmatched
from remat_kit._policy import Policy
from remat_kit._rewrite import Choice, program_of, rewrite
from remat_kit._trace import blocks, jaxprs, marks, survey, tracing
from remat_kit._trace.blocks import Candidate
from remat_kit._trace.default import default_blocks
from remat_kit._units import printable

Policies = Any  # str | Policy | JAX callable | Mapping[str, str | Policy | callable] | Planned


@dataclasses.dataclass(frozen=True)
class BlockForm:
    """What of a block's program a plan depends on.

    Attributes:
      inputs: the types of its inputs, ``bfloat16[8,1024]``.
      trips: the iterations of the scan whose body it is (of all its parts together); else 1.
      digest: of the operations in it, what they read and the types of their results.
    """

    inputs: tuple[str, ...]
    trips: int
    digest: str

    @classmethod
    def of(cls, block: Candidate) -> BlockForm:
        """Reads the form of a block."""
        program, _ = program_of(block)
        inputs = tuple(v.aval.str_short() for v in jaxprs.opened(program).invars)
        trips = jaxprs.calls(block.owner.eqns[block.eqns[0]])[0].trips if block.kind == "scan" else 1
        return cls(inputs, trips, survey.digest(program))

    def difference(self, now: BlockForm) -> str:
        """What differs in another one, in words."""
        if now.trips != self.trips:
            return f"it is a scan of {now.trips} iterations, and was one of {self.trips}"
        if len(now.inputs) != len(self.inputs):
            return f"it has {len(now.inputs)} inputs, and had {len(self.inputs)}"
        pairs = zip(self.inputs, now.inputs, strict=True)
        return next((f"an input is {b}, and was {a}" for a, b in pairs if a != b), "it computes something else")


class Planned(abc.ABC):
    """Policies that were chosen for the blocks of one program."""

    strict: bool

    @property
    @abc.abstractmethod
    def title(self) -> str:
        """What reports call it."""

    @abc.abstractmethod
    def items(self) -> tuple[tuple[str | None, Policy], ...]:
        """Policies by block glob, in order; the glob None means the default blocks."""

    @abc.abstractmethod
    def forms(self) -> Mapping[str, BlockForm]:
        """The form of each block that it was made for, by path."""

    def check(self, chosen: Sequence[tuple[Candidate, Policy]], candidates: Sequence[Candidate]) -> None:
        """Compares a program's blocks with those that this was made for.

        Args:
          chosen: the blocks that it comes to.
          candidates: all that the program has.

        Raises:
          RematError: where they are others; if `strict` also where one of them computes something else.
        """
        forms, found = self.forms(), {c.path: c for c, _ in chosen}
        lost, new = [p for p in forms if p not in found], [p for p in found if p not in forms]
        now = {p: BlockForm.of(found[p]) for p in forms if p in found}
        changed = [p for p in now if now[p] != forms[p]]
        if changed and not lost:  # a program of other sizes, or with more layers
            new += [c.path for c in blocks.alike([c for c, _ in chosen], candidates)]
        if lost or new:
            said = [f"it lacks {printable(', '.join(lost[:5]))}"] * bool(lost)
            said += [f"it has {printable(', '.join(new[:5]))} besides"] * bool(new)
            raise RematError(f"{self.title}: the program has other blocks than it was made for: {' and '.join(said)}.")
        if changed and self.strict:
            raise RematError(
                f"{self.title}: block {changed[0]!r} is not the one that it was made for: "
                f"{forms[changed[0]].difference(now[changed[0]])}. Plan again; or, to use it where the blocks are the "
                "same but for sizes, load it with strict=False."
            )


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a user asked of `apply`: policies by block glob, in order; the glob None means the default blocks."""

    items: tuple[tuple[str | None, Every], ...]
    plan: Planned | None = None

    @classmethod
    def of(cls, spec: Policies) -> Rules:
        """Reads a policy, a mapping of block globs to policies, or a plan.

        Raises:
          RematError: for an empty mapping, or a key that is no glob.
        """
        if isinstance(spec, Planned):
            return cls(tuple((g, Every.of(p)) for g, p in spec.items()), spec)
        if not isinstance(spec, Mapping):
            return cls(((None, Every.of(spec)),))
        if not spec:
            raise RematError("an empty mapping of blocks to policies: name at least one block, or pass one policy.")
        for key in spec:
            if not isinstance(key, str) or not key:
                raise RematError(f"blocks are chosen by globs on their paths, got the key {key!r}.")
            matches(key, "", "/")  # a malformed glob is refused here
        return cls(tuple((k, Every.of(v)) for k, v in spec.items()))

    @property
    def policies(self) -> tuple[Policy, ...]:
        """All policies in it."""
        return tuple(every.policy for _, every in self.items)

    def __str__(self) -> str:
        if self.plan is not None:
            return self.plan.title
        return "; ".join(f"{k}: {every}" if k is not None else str(every) for k, every in self.items)


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen:
    """The blocks that rules come to in one program.

    Attributes:
      blocks: each block with its policy.
      removed: paths of existing `jax.checkpoint` regions that give way (inside a block, or around one).
      replaced: paths of existing regions whose own policy is replaced.
    """

    blocks: tuple[tuple[Candidate, Policy], ...]
    removed: tuple[str, ...]
    replaced: tuple[str, ...]


def select(traced: tracing.Traced, rules: Rules) -> Chosen:
    """Finds the blocks of a program that rules speak of.

    Raises:
      RematError: for a glob that matches no block (near matches named), or that decides nothing.
    """
    candidates = blocks.find(traced.jaxpr)
    if not rules.items:
        matched: list[tuple[Candidate, Every]] = []
    elif rules.items[0][0] is None:
        every = rules.items[0][1]
        matched = [(c, every) for c in default_blocks(traced, candidates)]
    else:
        globs = [(str(g), p) for g, p in rules.items]
        pieces = blocks.segments(traced.jaxpr)
        among = [{g for g, _ in globs if any(matches(g, c.path, "/") for c in cs)} for cs in (candidates, pieces)]
        if not candidates or (len(among[1]) > len(among[0]) and all(g in among[1] for g, _ in globs)):
            candidates = pieces
        rest = [
            (g, p)
            for g, p in globs
            if g.startswith(blocks.REST) and not any(matches(g, c.path, "/") for c in candidates)
        ]
        matched = _by_glob(candidates, [item for item in globs if item not in rest])
        if rest:
            matched += _by_glob(blocks.rest([c for c, _ in matched], candidates), rest)
    taken = thinned(matched)
    mine = {id(c) for c, _ in taken}
    around = {id(a) for c, _ in taken for a in c.ancestors()}
    removed = [
        c.path
        for c in candidates
        if c.kind == "checkpoint"
        and (id(c) in around or any(id(a) in mine for a in c.ancestors()))
        and id(c) not in mine
    ]
    chosen_paths = {c.path for c, _ in taken}  # a region that fills the body of a chosen scan shares its path
    replaced = [c.path for c, _ in taken if c.kind == "checkpoint"] + [p for p in removed if p in chosen_paths]
    removed = [p for p in removed if p not in chosen_paths]
    return Chosen(tuple(taken), tuple(dict.fromkeys(removed)), tuple(dict.fromkeys(replaced)))


def _by_glob(candidates: Sequence[Candidate], items: Sequence[tuple[str, Every]]) -> list[tuple[Candidate, Every]]:
    """The blocks that globs match, outer ones first, each with the policy of the first glob that matches it.

    A glob with a part (``layers@0:4``) speaks of some iterations of a scan; those that are left get what comes next.
    """
    paths = list(dict.fromkeys(c.path for c in candidates))
    taken: list[tuple[Candidate, Every]] = []
    inside: set[int] = set()
    decided: set[str] = set()
    asked: list[tuple[str, str, tuple[int, int | None] | None, Every]] = []
    for g, p in items:  # "@" may stand in a module's own name
        base, part = (g, None) if any(matches(g, path, "/") for path in paths) else blocks.split_part(g)
        asked.append((g, base, part, p))
    for c in candidates:
        if any(id(a) in inside for a in c.ancestors()):
            continue
        n = max(c.trips, 1)  # a loop that never runs is still one block
        left = [(0, n)]
        for glob, base, part, p in asked:
            if not matches(base, c.path, "/"):
                continue
            of = c if part is None else blocks.part_of(c, part)
            if of is None:
                raise RematError(f"{glob!r}: block {c.path!r} is {_extent(c)}.")
            spans = [(0, n)] if of.span is None else [of.span]
            mine = [(max(a, s), min(b, e)) for a, b in left for s, e in spans if max(a, s) < min(b, e)]
            if not mine:
                continue
            decided.add(glob)
            inside.add(id(c))
            whole = mine == [(0, n)]
            taken += [(c if whole else blocks.part_of(c, m) or c, p) for m in mine]
            left = [x for a, b in left for x in _without(a, b, mine)]
            if not left:
                break
    for glob, _ in items:
        if glob in decided:
            continue
        matched = [p for p in paths if matches(blocks.split_part(glob)[0], p, "/")]
        if not matched:
            raise RematError(
                f"no block of the program matches {glob!r}. Its blocks: {printable(', '.join(paths)[:600]) or 'none'}."
                + near_matches(glob, paths)
            )
        raise RematError(
            f"the policy for {glob!r} decides nothing: {matched[0]!r} is taken by an earlier pattern, or lies in a "
            "block that is (blocks do not nest). Put it first, or choose the blocks inside instead of the one around."
        )
    return taken


def _extent(c: Candidate) -> str:
    return f"a scan of {c.trips} iterations" if c.kind == "scan" else "no scan, and has no parts"


def _without(first: int, last: int, taken: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of a range without some parts of it."""
    ends = sorted([first, *(x for t in taken if first <= t[0] < last for x in t), last])
    return [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]


def rewritten(traced: tracing.Traced, rules: Rules, *, in_loop: bool = False) -> tuple[Any, Chosen]:
    """The program of a traced function with rules applied, traced anew, and the blocks that they came to.

    Args:
      in_loop: whether it is to be evaluated directly in the body of a loop.
    """
    check_names(traced.jaxpr, rules.policies, _block_inputs.INPUT)
    chosen = select(traced, rules)
    if rules.plan is not None:
        rules.plan.check(chosen.blocks, blocks.find(traced.jaxpr))
    # A loss may hold a gradient (a penalty on it, say); a step returns what it makes of one.
    returns_arrays = any(jaxprs.is_inexact(v.aval) and v.aval.shape for v in jaxprs.opened(traced.jaxpr).outvars)
    if returns_arrays and any(survey.contains_gradient(c.owner.eqns[i] for i in c.eqns) for c, _ in chosen.blocks):
        raise RematError(
            "the function contains its own gradient (a training step?), so what it keeps is decided already. Apply the "
            "policy to the loss, before jax.grad; or mark blocks in it with rk.remat(block=...) and use rk.override."
        )
    warn_unmatched([(p, *program_of(c, p)) for c, p in chosen.blocks])
    avals = [v.aval for v in jaxprs.opened(traced.jaxpr).invars]
    return jaxprs.trace(rewrite(traced.jaxpr, Choice(chosen.blocks, in_loop)), avals), chosen


def apply(fun: Callable[..., Any], policy: Policies) -> Callable[..., Any]:
    """Makes the same function of `jax.checkpoint` calls, without touching its source.

    The function is traced at the types of each call's arguments, its blocks are found, and each becomes one
    `jax.checkpoint` region under its policy. Values, gradients, parameter names, dropout masks and sown values
    cannot change. Traced programs are cached by the types of the arguments, as `jax.jit` does.

    Args:
      fun: any function of pytrees of arrays, numbers, static values and Flax NNX modules.
      policy: a policy (preset name, text, `Policy`, JAX policy) for the default blocks: the outermost
        repeated level (layers, scan bodies) that holds most residual bytes. Or a mapping of globs on block
        paths to policies; the first match wins, ``*`` stops at ``/``, ``**`` does not, ``"none"`` leaves a
        block without remat.

    Returns:
      A function with the signature of `fun`.

    Raises:
      RematError: for an unknown policy, at once; when called, for a block or a name that the program does not
        have, or a block that would write to a mutable reference again.
    """
    if not callable(fun):
        raise RematError(f"apply takes a function first, got {type(fun).__name__}: {fun!r:.80}")
    _adapters.refuse_without_variables(fun)
    rules = Rules.of(policy)
    cache: dict[Any, tuple[tracing.Traced, Any]] = {}

    @functools.wraps(fun)
    def applied(*args: Any, **kwargs: Any) -> Any:
        with _adapters.adapted(fun, args, kwargs) as call:
            leaves, traced, program = _program(call, rules, cache)
            with _limits.refusals_said():
                results = jaxprs.evaluate(program, *leaves)
            return call.finish(traced.outputs.merge(results))

    return applied


def _program(call: _adapters.Call, rules: Rules, cache: dict[Any, Any]) -> tuple[list[Any], tracing.Traced, Any]:
    leaves, spec = tracing.split((call.args, call.kwargs))
    avals = tuple(jaxprs.aval_of(x) for x in leaves)
    in_loop = jaxprs.in_loop_body()
    key = (spec, avals, in_loop, marks.reading(), jaxprs.cache_key())
    if key in cache:
        return leaves, *cache[key]
    traced = tracing.trace(call.fun, call.args, call.kwargs)
    program, _ = rewritten(traced, rules, in_loop=in_loop)
    if not marks.reading():
        program = survey.map_scopes(program, marks.plain)
    lasting = spec.reusable and traced.outputs.reusable
    if lasting and not any(jaxprs.is_tracer(c) for c in jaxprs.constants(program)):
        cache[key] = (traced, program)
    return leaves, traced, program
