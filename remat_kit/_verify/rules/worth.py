"""Rules on bytes against FLOPs: what is kept though it is cheap, and computed again though it is dear."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from remat_kit._trace import cost, jaxprs
from remat_kit._trace.jaxprs import Var
from remat_kit._trace.levels import VIEWS
from remat_kit._trace.provenance import identical
from remat_kit._verify.finding import Hit, Where
from remat_kit._verify.rule import rule
from remat_kit._verify.spared import Spared, spared
from remat_kit._verify.subject import Kept, Subject, Unavailable

_LARGE = 0.1  # of all that is kept
_SMALL = 0.01
_CHEAP = 4.0  # FLOPs a byte: an elementwise operation, which waits for memory on any chip
_DEAR = 0.1  # of all FLOPs that are computed again
_CARRIES = 0.25


@rule(
    "RK022",
    "carries that could lie in host memory",
    "A scan keeps the carry of every step, each until its own backward step: where a step computes longer than the "
    "link takes, they can wait in the host's memory for nothing.",
)
def carries(s: Subject) -> Iterator[Hit]:
    """Stacked carries that are a good part of what is kept, and whose transfers hide behind a step of the target."""
    chip = s.target.chip if s.target is not None else None
    stacked = [k for k in s.kept if k.counts and k.found.entry.op == "carry"]
    size = sum(k.bytes for k in stacked)
    if chip is None or not stacked or size < _CARRIES * s.kept_bytes:
        return
    first = stacked[0].found.entry
    transfers = 2 * size / chip.host_bandwidth
    products = cost.matmul_flops(s.lin.forward) + cost.matmul_flops(s.lin.backward)
    seconds = products / chip.peak(first.dtype)
    if transfers < seconds:
        yield Hit(
            s.place(stacked[0].chain),
            f"the carries of {first.trips} steps are kept on the device.",
            {"kept_bytes": size, "transfer_seconds": transfers, "of_matrix_products_seconds": seconds},
            "rk.scan(..., offload_carry=True), or 'offload name=block_input' in the policy.",
        )


@rule(
    "RK023",
    "large value kept though it is cheap",
    "An elementwise result can be had again for less time than its bytes take to be written and read.",
)
def cheap(s: Subject) -> Iterator[Hit]:
    """The largest groups of kept intermediates that cost few FLOPs a byte.

    What goes between blocks is none of them, nor what is made behind the last block, which is needed at once.
    """
    if not s.regions:
        raise Unavailable("")
    found = []
    last = next(r for r in reversed(s.regions) if r.outer is None)
    applied = () if s.loss.applied is None else s.loss.applied.blocks
    left_out = {c.path for c, policy in applied if not policy.remat}
    looked_at = (k for k in s.kept if not _handed_on(s, k) and not last.precedes(k.chain))
    for group in _lines(k for k in looked_at if s.place(k.chain).block not in left_out):
        entries = [k.found.entry for k in group]
        size, flops = sum(e.bytes for e in entries), sum(e.recompute_flops or 0 for e in entries)
        if size >= _LARGE * s.kept_bytes and flops <= _CHEAP * size:
            found.append((size, flops, group))
    for size, flops, group in sorted(found, key=lambda x: -x[0])[:3]:
        entry = group[0].found.entry
        inside = s.region_of(group[0].chain) is not None
        yield Hit(
            s.place(group[0].chain),
            f"{entry.label} is kept{'' if inside else ', outside all blocks'}.",
            {"kept_bytes": size, "of_all_kept_bytes": s.kept_bytes, "recompute_flops": flops},
            f"Leave it out of the policy ('recompute op={entry.op}' before the rule that keeps it)."
            if inside
            else "Rematerialize the function that makes it, with rk.remat.",
        )


@rule(
    "RK024",
    "small value computed again though it is dear",
    "A few bytes would spare many operations, which are computed again for this value alone.",
)
def dear(s: Subject) -> Iterator[Hit]:
    """Values of at most a hundredth of what the program would keep, behind a tenth of the recomputation."""
    total = sum(x.flops for x in s.again)
    lines: dict[tuple[str, str, int], tuple[Where, int, int]] = {}
    for x in spared(s.lin) if total else ():
        if not x.chain or not x.bytes or x.flops < x.bytes or _is_mask(s, x):
            continue
        where, op = s.origin(s.lin, x.chain), s.lin.tagged.op(x.chain[-1])
        _, size, flops = lines.get((op, where.file, where.line), (where, 0, 0))
        lines[op, where.file, where.line] = where, size + x.bytes, flops + x.flops
    found: dict[tuple[int, int], tuple[str, Where]] = {}  # a value and its views and names cost the same
    for (op, *_), (where, size, flops) in lines.items():
        if size <= _SMALL * s.plain_bytes and flops >= _DEAR * total:
            found.setdefault((size, flops), (op, where))
    for (size, flops), (op, where) in sorted(found.items(), key=lambda x: x[0][0] / x[0][1])[:3]:
        yield Hit(
            where,
            f"the result of {op} is computed again.",
            {"result_bytes": size, "recomputed_flops": flops, "of_all_recomputed_flops": total},
            "Keep it: give it a name and save that.",
        )


def _is_mask(s: Subject, x: Spared) -> bool:
    """Whether a value is one of bools: those of dropout have a rule of their own."""
    made = s.lin.tagged.origins[x.chain[-1]].eqn.outvars
    return all(str(getattr(v.aval, "dtype", "")) == "bool" for v in made)


def _handed_on(s: Subject, k: Kept) -> bool:
    """Whether a value leaves its block: the input of what comes next, kept whatever the policy says."""
    source = k.found.source
    if source.eqn is None or not source.chain:
        return True
    origin = s.lin.tagged.origins[source.chain[-1]]
    if jaxprs.op_of(origin.eqn) != jaxprs.op_of(source.eqn) or s.region_of(k.chain) is None:
        return False
    made = origin.eqn.outvars[source.index]
    alike = identical(origin.owner).get(made, frozenset((made,)))
    return any(isinstance(v, Var) and v in alike for v in origin.owner.outvars)


def _lines(kept: Iterable[Kept]) -> list[list[Kept]]:
    """Intermediates on the device by operation and source line."""
    groups: dict[Any, list[Kept]] = {}
    for k in kept:
        e = k.found.entry
        if k.counts and e.op not in ("carry", *VIEWS) and e.recompute_flops is not None:
            groups.setdefault((e.op, e.source), []).append(k)
    return list(groups.values())
