"""What making a value again costs: the equations behind it, back to the inputs and to what is kept.

Every value of a deep program has the program so far behind it. The equations are therefore visited from the last to
the first, and whenever few of them are left to visit, what lies behind these is remembered: another value with the
same few ahead of it needs to look no further. So the work grows with the program where it has narrow places, as the
boundaries of layers are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from remat_kit._trace import cost
from remat_kit._trace.jaxprs import CallKind, JaxprEqn, Var
from remat_kit._trace.levels import Level

_FEW = 8

_Place = tuple[tuple[int, ...], Level, JaxprEqn]


class Cones:
    """The equations behind values of one program.

    Args:
      kept: whether a variable of a level (or a literal) holds a value that need not be made again.
    """

    def __init__(self, kept: Callable[[Level, Any], bool]):
        self._kept = kept
        self._orders: dict[int, tuple[tuple[int, ...], dict[int, int]]] = {}
        self._behind: dict[frozenset[tuple[int, ...]], int] = {}

    def flops(self, level: Level, var: Any) -> int:
        """FLOPs to make a value again, whether it is kept or not, over all iterations of the loops around it."""
        # Positions sort as the equations run; no two equations share one.
        heap: list[tuple[tuple[int, ...], _Place]] = []
        waiting: set[tuple[int, ...]] = set()

        def wait_for(found: _Place | None) -> None:
            if found is not None and found[0] not in waiting:
                waiting.add(found[0])
                heapq.heappush(heap, (tuple(-n for n in found[0]), found))

        wait_for(self._made(level, var))
        total = 0
        passed: list[tuple[frozenset[tuple[int, ...]], int]] = []
        while heap:
            if len(heap) <= _FEW:
                few = frozenset(waiting)
                if few in self._behind:
                    total += self._behind[few]
                    break
                passed.append((few, total))
            _, (position, level, eqn) = heapq.heappop(heap)
            waiting.remove(position)
            total += cost.eqn_flops(eqn) * level.trips
            for v in eqn.invars:
                if not self._kept(level, v):
                    wait_for(self._made(level, v))
        self._behind.update((few, total - before) for few, before in passed)
        return total

    def _made(self, level: Level, var: Any) -> _Place | None:
        """The equation that makes a value, through the calls that hand it on; None for one that is kept or an input."""
        while isinstance(var, Var):
            made = level.producers.get(var)
            if made is None:
                call, position = level.call, level.positions.get(var)
                if level.parent is None or level.eqn is None or call is None or position is None:
                    return None
                if not _hands_on(call.kind):
                    return None
                level, var = level.parent, level.eqn.invars[call.operands[position]]
            else:
                eqn, index = made
                inner = [c for c in level.children(eqn) if c.call is not None and _hands_on(c.call.kind)]
                if not inner or index >= len(inner[0].jaxpr.outvars):
                    above, order = self._order(level)
                    return (*above, order[id(eqn)]), level, eqn
                level, var = inner[0], inner[0].jaxpr.outvars[index]
            if self._kept(level, var):
                return None
        return None

    def _order(self, level: Level) -> tuple[tuple[int, ...], dict[int, int]]:
        """Where a level is called, and the positions of its equations."""
        if id(level) not in self._orders:
            above: tuple[int, ...] = ()
            if level.parent is not None and level.eqn is not None:
                outer, order = self._order(level.parent)
                above = (*outer, order[id(level.eqn)], level.parent.children(level.eqn).index(level))
            self._orders[id(level)] = above, {id(e): i for i, e in enumerate(level.jaxpr.eqns)}
        return self._orders[id(level)]


def _hands_on(kind: CallKind) -> bool:
    return kind in (CallKind.JIT, CallKind.REMAT, CallKind.CUSTOM, CallKind.SHARD_MAP)
