"""Rules on where remat stands: around too much, around a loop, in another region, where it saves nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax

from remat_kit._rewrite import is_loop
from remat_kit._trace import jaxprs
from remat_kit._trace.jaxprs import CallKind, JaxprEqn
from remat_kit._verify.finding import Hit
from remat_kit._verify.regions import Region
from remat_kit._verify.rule import rule
from remat_kit._verify.subject import Subject

_ALL = 0.9  # the share of what a program keeps from which on a region counts as all of it
_LITTLE = 0.1
_EARLY_REMAT3 = jax.__version_info__ < (0, 11)


@rule(
    "RK004",
    "remat of the whole loss",
    "The backward pass starts by computing all of the region again, so that everything is kept at once all the same, "
    "and the forward pass runs twice.",
)
def whole_loss(s: Subject) -> Iterator[Hit]:
    """A region that holds all that the program would keep; around a scan without remat in it, another rule's."""
    for r in _outermost(s):
        if _holds_all(s, r) and (_inner(s, r) or _loop_in(s, r) is None):
            yield Hit(
                s.place(r.chain),
                "one region holds all that the loss keeps.",
                {
                    "kept_without_remat_bytes": s.plain_bytes,
                    "in_the_region_bytes": s.held(r),
                    "recomputed_flops": r.flops,
                },
                "Rematerialize the layers instead: decorate the layer, or rk.apply(loss, policy), which finds them.",
            )


@rule(
    "RK005",
    "remat around a scan instead of its body",
    "The backward pass computes the whole scan again and keeps the residuals of every step while it does.",
)
def around_scan(s: Subject) -> Iterator[Hit]:
    """A region in which a scan without remat of its own holds most of what the program would keep."""
    for r in s.regions:
        loop = None if _inner(s, r) or r.looped else _loop_in(s, r)
        if loop is None or 2 * loop[1] < s.plain_bytes:
            continue
        eqn, held = loop
        trips = jaxprs.calls(eqn)[0].trips
        yield Hit(
            s.place(r.chain),
            f"the region is around a scan of {trips} steps, all of which it keeps while it runs again.",
            {"replayed_bytes": held, "of_one_step_bytes": held // trips},
            "Rematerialize the body: jax.lax.scan(jax.checkpoint(body, prevent_cse=False), ...) or rk.scan(body, ...).",
        )


@rule(
    "RK006",
    "remat inside remat",
    "The outer region computes everything in it again, the inner one that once more; what the inner policy keeps is "
    "kept only while the outer one runs again.",
)
def nested(s: Subject) -> Iterator[Hit]:
    """Regions that are most of the region around them, with no loop between the two, or the only one in it."""
    for r in s.regions:
        if r.outer is None or any(map(is_loop, r.chain[len(r.outer.chain) : -1])):
            continue
        if len(_inner(s, r.outer)) > 1 and 2 * s.held(r) < s.held(r.outer):
            continue
        over = "" if r.policy == r.outer.policy else f" Its policy ({_title(r)}) gives way to that around it."
        yield Hit(
            s.place(r.chain),
            f"a region lies in another one, {s.place(r.outer.chain).source}.{over}",
            {"in_the_inner_region_flops": r.flops},
            "Take one of the two away.",
        )


@rule(
    "RK007",
    "last block rematerialized for nothing",
    "The backward pass begins with the last block, whose values are needed at once: what remat drops is made again "
    "before anything else could use the memory.",
)
def last_block(s: Subject) -> Iterator[Hit]:
    """A region outside loops behind which hardly anything is kept."""
    outermost = _outermost(s)
    last = outermost[-1] if outermost else None
    if last is None or last.looped or _holds_all(s, last) or _inner(s, last) or _loop_in(s, last) is not None:
        return
    held, total = s.held(last), sum(r.flops for r in outermost)
    behind = sum(k.bytes for k in s.plain if last.precedes(k.chain))
    if held and last.flops >= _LITTLE * total > 0 and behind < _LITTLE * held:
        where = s.place(last.chain)
        yield Hit(
            where,
            "the last block is rematerialized, and hardly anything is kept after it.",
            {
                "in_the_block_bytes": held,
                "behind_it_bytes": behind,
                "recomputed_flops": last.flops,
                "of_all_regions_flops": total,
            },
            f'Leave it without remat: rk.apply(loss, {{"{where.block or "<last block>"}": "none", "**": policy}}).',
        )


@rule(
    "RK012",
    "prevent_cse that does not fit",
    "Outside loops the compiler may merge recomputation with the forward pass unless prevent_cse=True; in a scan it "
    "cannot, and the barriers of prevent_cse=True only keep it from fusing.",
)
def prevent_cse(s: Subject) -> Iterator[Hit]:
    """`prevent_cse=False` outside loops and `True` directly in them."""
    if jaxprs.remat3() and _EARLY_REMAT3:  # ignores it
        return
    for r in s.regions:
        asked = r.prevent_cse if isinstance(r.prevent_cse, bool) else any(jax.tree.leaves(r.prevent_cse))
        if asked and _directly_in_loop(r) or not asked and not r.looped:
            yield Hit(
                s.place(r.chain),
                f"prevent_cse={asked} {'in' if r.looped else 'outside'} a loop.",
                {"in_the_region_flops": r.flops},
                f"Write prevent_cse={not asked}, or use rk.remat, which sets it by itself.",
            )


def _outermost(s: Subject) -> list[Region]:
    return [r for r in s.regions if r.outer is None]


def _inner(s: Subject, region: Region) -> list[Region]:
    return [r for r in s.regions if r.outer is region]


def _holds_all(s: Subject, region: Region) -> bool:
    return not region.looped and s.held(region) >= _ALL * s.plain_bytes > 0


def _directly_in_loop(region: Region) -> bool:
    """Whether it lies in a loop, and in no function of `jax.jit` there, whose trace may be used elsewhere."""
    around = itertools.takewhile(lambda e: jaxprs.calls(e)[0].kind is not CallKind.JIT, reversed(region.chain[:-1]))
    return any(map(is_loop, around))


def _loop_in(s: Subject, region: Region) -> tuple[JaxprEqn, int] | None:
    """The scan that holds most of what a region would keep, and how much that is; None if none holds half of it."""
    held: dict[int, int] = {}
    loops: dict[int, JaxprEqn] = {}
    for k in s.within(region):
        for e in k.chain[len(region.chain) :]:
            calls = jaxprs.calls(e)
            if calls and calls[0].kind is CallKind.SCAN and calls[0].trips > 1:
                loops[id(e)] = e
                held[id(e)] = held.get(id(e), 0) + k.bytes
                break
    if not held:
        return None
    most = max(held, key=lambda i: held[i])
    return (loops[most], held[most]) if 2 * held[most] >= s.held(region) else None


def _title(region: Region) -> str:
    return region.policy.name or str(region.policy)[:80]
