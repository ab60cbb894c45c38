"""Rules on what the backward pass computes again though it should rather not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from remat_kit import _limits
from remat_kit._policy import Action
from remat_kit._trace import cost, jaxprs
from remat_kit._trace.levels import VIEWS, Level, trace_back
from remat_kit._trace.recomputed import Again, forward_rules
from remat_kit._verify.finding import Hit
from remat_kit._verify.regions import chain_of
from remat_kit._verify.rule import rule
from remat_kit._verify.subject import Kept, Subject

_ROUTING = {"top_k", "approx_top_k", "sort", "argmax", "argmin"}
_THREEFRY = {"random_bits", "threefry2x32"}  # with keys of "rbg" the first is another generator
_RANDOM = {*_THREEFRY, "rng_bit_generator", "rng_uniform"}
_COLLECTIVES = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced"),
    *("all_to_all", "ppermute", "reduce_scatter", "psum_scatter", "unreduced_psum", "unreduced_reduce_scatter"),
}
_KEPT = 0.1  # of all bytes kept
_DRAWN = 0.01  # of the operations of a step; they run on units an order of magnitude slower than those for matrices


@rule(
    "RK008",
    "policy that jax_remat3 ignores",
    "JAX's newer implementation of remat, to become the default, asks a policy only about names and matrix products, "
    "and recomputes everything else that it keeps.",
)
def ignored_policy(s: Subject) -> Iterator[Hit]:
    """JAX's own and users' callables that keep results of other operations."""
    seen: set[Any] = set()
    for r in s.regions:
        native = jaxprs.remat_region(r.eqn)
        if native is None or native.policy is None or native.policy in seen:
            continue
        seen.add(native.policy)
        lost = _limits.ignored(native.policy, r.body)
        if lost:
            kept = {op: 0 for op in lost}
            for level, e in r.inside:
                op = jaxprs.op_of(e)
                if op in kept and not jaxprs.calls(e):
                    kept[op] += sum(jaxprs.nbytes(v.aval) for v in e.outvars) * level.trips * r.level.trips
            yield Hit(
                s.place(r.chain),
                f"the policy keeps the results of {', '.join(lost[:6])}, which jax_remat3 recomputes"
                f"{'.' if jaxprs.remat3() else ' (it is off now).'}",
                {"results_bytes": sum(kept.values())},
                "Use rk.policy (its rules become names, which both implementations honour), or name the values.",
            )


@rule(
    "RK010",
    "kernel that runs again though its output is named",
    "A custom_vjp function hands its backward rule more than its output (attention: the log-sum-exp). What is not kept "
    "is made by running the forward rule, the whole kernel, again.",
)
def kernel_again(s: Subject) -> Iterator[Hit]:
    """Forward rules that run again although the policy keeps the function's output."""
    tagged = s.lin.tagged
    for r in forward_rules(s.lin):
        eqn = tagged.origins[r.tag].eqn
        names = {n for i in range(len(eqn.outvars)) for n in tagged.names(r.chain, i)} & s.kept_names
        if names:
            yield Hit(
                s.origin(s.lin, r.chain),
                f"{', '.join(map(repr, sorted(names)))} is kept, and the forward rule that makes it runs again for its "
                f"other residuals: {', '.join(r.types)}.",
                {"recomputed_flops": r.flops},
                "Name these residuals too, inside the forward rule, or keep all of the call with rk.apply(loss, "
                "'save op=custom_vjp_call') (classic implementation).",
            )


@rule(
    "RK011",
    "dots_no_batch that keeps no product",
    "Products with batch dimensions, such as those of MoE experts and everything under vmap, are recomputed under a "
    "policy for products without them.",
)
def batched_products(s: Subject) -> Iterator[Hit]:
    """Regions under such a policy in which most products with what is given to the region have batch dimensions.

    Attention scores, which such a policy is there to recompute, are products of values that the region computes.
    """
    seen: set[tuple[str, int]] = set()
    for r in s.regions:
        if not any(x.selector.batch_dims is False and x.action is not Action.RECOMPUTE for x in r.policy.rules):
            continue
        flops = {True: 0, False: 0}
        first = None
        for level, e in r.inside:
            if e.primitive.name == "dot_general" and any(_given(level, v) for v in e.invars):
                batched = any(map(len, e.params["dimension_numbers"][1]))
                flops[batched] += cost.eqn_flops(e) * level.trips * r.level.trips
                if batched and first is None:
                    first = (*r.chain, *chain_of(level), e)
        if first is None or flops[True] < flops[False]:
            continue
        where = s.place(first)
        if (where.file, where.line) in seen:
            continue
        seen.add((where.file, where.line))
        yield Hit(
            where,
            "most products with weights have batch dimensions here, and the policy recomputes them.",
            {"with_batch_dimensions_flops": flops[True], "without_flops": flops[False]},
            "Use the preset 'matmuls' or 'dots', or keep the values by name.",
        )


@rule(
    "RK015",
    "dropout mask at a cost",
    "A mask that is kept takes as many values as the activation; one that is not is drawn again, with some 120 integer "
    "operations for each number, on units slower than those for matrices.",
)
def masks(s: Subject) -> Iterator[Hit]:
    """Masks that are a good part of what is kept, and random bits drawn again that are a good part of the step."""
    for where, group in _grouped(s, (k for k in s.kept if k.counts and _random(k)) if s.regions else ()):
        size = sum(k.bytes for k in group)
        if size >= _KEPT * s.kept_bytes:
            entry = group[0].found.entry
            yield Hit(
                where,
                f"random {'bits' if entry.dtype.startswith('u') else 'masks'} are kept ({entry.dtype}).",
                {"kept_bytes": size, "of_all_kept_bytes": s.kept_bytes},
                "Recompute them (rk.remat around the dropout), which with the generator 'rbg' costs little: "
                "jax.config.update('jax_default_prng_impl', 'rbg').",
            )
    drawn = [x for x in s.again if jaxprs.op_of(x.eqn) in _THREEFRY and "rbg" not in str(x.eqn.invars[0].aval)]
    operations, total = sum(x.flops for x in drawn), s.step_flops
    if drawn and operations >= _DRAWN * total:
        yield Hit(
            s.first(drawn),
            "random numbers are drawn again in the backward pass.",
            {"drawing_flops": operations, "of_a_step_flops": total},
            "Keep the masks, one byte each ('save op=lt' or a name on the mask), or use the generator 'rbg': "
            "jax.config.update('jax_default_prng_impl', 'rbg').",
        )


@rule(
    "RK016",
    "routing computed again",
    "A top-k, sort or argmax that is computed again may choose otherwise where two values are nearly equal, since "
    "recomputation may be rounded differently; then the gradient is that of another choice.",
)
def routing(s: Subject) -> Iterator[Hit]:
    """Choices (top-k, sort, argmax) among what is computed again."""
    yield from _each_again(
        s,
        lambda op: op in _ROUTING,
        "{op} is computed again.",
        "Keep its result, which is small: name it, or add 'save op={op}' to the policy.",
    )


@rule(
    "RK017",
    "collective computed again",
    "A collective in the backward pass waits for every device once more; its result is often cheaper to keep.",
)
def collectives(s: Subject) -> Iterator[Hit]:
    """Communication among what is computed again."""
    yield from _each_again(
        s,
        lambda op: op in _COLLECTIVES,
        "{op} runs again in the backward pass.",
        "Keep its result: name it, or add 'save op={op}' to the policy.",
    )


def _each_again(s: Subject, wanted: Callable[[str], bool], what: str, change: str) -> Iterator[Hit]:
    """One hit for each source line at which wanted operations are computed again."""
    lines: dict[tuple[str, str, int], list[Again]] = {}
    for x in s.again:
        if wanted(jaxprs.op_of(x.eqn)):
            where = s.origin(s.lin, x.chain)
            lines.setdefault((jaxprs.op_of(x.eqn), where.file, where.line), []).append(x)
    for (op, _, _), group in lines.items():
        yield Hit(
            s.first(group),
            what.format(op=op),
            {"result_bytes": sum(x.bytes for x in group), "recomputed_flops": sum(x.flops for x in group)},
            change.format(op=op),
        )


def _grouped(s: Subject, kept: Iterable[Kept]) -> Iterator[tuple[Any, list[Kept]]]:
    """Residuals by source line, each with its place."""
    lines: dict[tuple[str, int], tuple[Any, list[Kept]]] = {}
    for k in kept:
        where = s.place(k.chain)
        lines.setdefault((where.file, where.line), (where, []))[1].append(k)
    yield from lines.values()


def _given(level: Level, operand: Any) -> bool:
    """Whether an operand is given to the region, perhaps in another shape or type."""
    source = trace_back(level, operand)
    while source.eqn is not None and jaxprs.op_of(source.eqn) in _RESHAPED:
        source = trace_back(source.level, source.eqn.invars[0])
    return source.kind in ("argument", "constant")


_RESHAPED = {*VIEWS, "convert_element_type", "broadcast_in_dim"}
_STEPS = 8


def _random(k: Kept) -> bool:
    """Whether a value is made of random numbers by a few elementwise operations."""
    entry = k.found.entry
    if not (entry.dtype == "bool" or entry.dtype.startswith("uint") or entry.op in _RANDOM):
        return False
    todo = [(k.found.source, 0)]
    while todo:
        source, depth = todo.pop()
        if source.eqn is None or depth > _STEPS:
            continue
        if jaxprs.op_of(source.eqn) in _RANDOM:
            return True
        todo += [(trace_back(source.level, v), depth + 1) for v in source.eqn.invars]
    return False
