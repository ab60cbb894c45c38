"""What keeping one recomputed value would spare: the operations that are computed again for it alone.

In the part of a backward pass that computes again, an operation is spared by keeping v if every way from it to a reader
outside leads through v: v is its dominator in the graph turned round. Immediate dominators are found as in Cooper,
Harvey and Kennedy (2001), "A Simple, Fast Dominance Algorithm"; for a program, which has no cycles, one pass is enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat_kit._trace import cost, jaxprs
from remat_kit._trace.jaxprs import JaxprEqn, Var
from remat_kit._trace.levels import Level, walk
from remat_kit._trace.linearized import Linearized
from remat_kit._trace.recomputed import is_again


@dataclasses.dataclass(frozen=True, eq=False)
class Spared:
    """A recomputed value.

    Attributes:
      chain: the numbers of the original equations that it comes from.
      bytes: of the value, trip counts included.
      flops: what is computed again for it alone, trip counts included.
    """

    chain: tuple[int, ...]
    bytes: int
    flops: int


def spared(lin: Linearized) -> list[Spared]:
    """For each operation that is computed again, what keeping its results would spare."""
    found: list[Spared] = []
    seen: set[int] = set()
    for level, _ in walk(Level(lin.backward)):
        if id(level) not in seen:
            seen.add(id(level))
            found += _of_level(level)
    return found


def _of_level(level: Level) -> list[Spared]:
    eqns = [e for e in level.jaxpr.eqns if is_again(level, e)]
    if not eqns:
        return []
    number = {id(e): i for i, e in enumerate(eqns)}
    n = len(eqns)  # stands for everything outside
    over = [n] * (n + 1)
    for i in reversed(range(n)):
        over[i] = _common(over, _readers(level, eqns[i], number, n))
    flops = [cost.eqn_flops(e) for e in eqns]
    for i in range(n):  # dominators come later in the program
        if over[i] < n:
            flops[over[i]] += flops[i]
    trips = level.trips
    return [
        Spared(level.chain_of(e), sum(jaxprs.nbytes(v.aval) for v in e.outvars) * trips, flops[i] * trips)
        for i, e in enumerate(eqns)
    ]


def _readers(level: Level, eqn: JaxprEqn, number: dict[int, int], outside: int) -> list[int]:
    out = [v for v in eqn.outvars if isinstance(v, Var)]
    found = [number.get(id(e), outside) for v in out for e, _ in level.readers.get(v, ())]
    handed = {v for v in level.jaxpr.outvars if isinstance(v, Var)}
    return found + [outside] * any(v in handed for v in out) or [outside]


def _common(over: Sequence[int], nodes: Sequence[int]) -> int:
    """The nearest node that lies on all ways out of some nodes."""
    common = nodes[0]
    for node in nodes[1:]:
        while common != node:
            if common < node:
                common = over[common]
            else:
                node = over[node]
    return common
