"""The cheapest way to keep a block within some bytes: a mixed integer program, solved exactly by SciPy's HiGHS.

For each operation ``r`` says that it runs again in the backward pass, for each choice ``s`` that its value is saved
and ``o`` that it is offloaded, for each input ``i`` that it is kept:

    minimize  sum c r + sum k (s + o)      over  r, i, s, o in {0, 1}
    with      a(v) >= 1          for each residual v
              r(p) <= a(v)       for each value v that an operation p reads
              a(v)  = s(v) + o(v) + r(the operation that makes v), or i(v) for an input
              sum m s + sum m i <= B,    sum m o <= H

``c`` is what running an operation again takes, ``k`` what keeping a value takes (of time only).

Without the two budgets this is a closure problem, whose linear relaxation is integral (Picard 1976), so that branching
is only needed between corners of the frontier.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from remat_kit._plan.graph import Graph
from remat_kit._plan.point import Point, trimmed
from remat_kit._quiet import quiet


class Solver:
    """The program of one block, solved for many budgets.

    Attributes:
      graph: the block.
      minimize: ``"time"`` or ``"flops"``.
      host_bytes: the most that may be offloaded in one run of the block; 0 for none.
      save: whether values may be saved.
    """

    def __init__(self, graph: Graph, minimize: str, host_bytes: float = 0.0, *, save: bool = True) -> None:
        from scipy.optimize import LinearConstraint  # slow to load, and only planning needs it
        from scipy.sparse import coo_array, csr_array

        self.graph, self.minimize, self.host_bytes = graph, minimize, host_bytes
        n = graph.forward
        values, ops = graph.values, graph.ops
        self.inputs = [v for v in range(len(values)) if values[v].maker < 0 and v not in graph.arguments]
        column = {v: n + k for k, v in enumerate(self.inputs)}
        first = n + len(self.inputs)
        self.saving = [k for k in range(len(graph.choices)) if save]
        self.hosting = [k for k in range(len(graph.choices)) if 0 < graph.choices[k].bytes <= host_bytes]
        named: dict[int, list[int]] = {}
        for c, k in enumerate((*self.saving, *self.hosting)):
            for o in graph.choices[k].ops:
                named.setdefault(o, []).append(first + c)
        self.first, self.size = first, first + len(self.saving) + len(self.hosting)

        rows, cols, data, low = [], [], [], []

        def available(v: int) -> list[int] | None:
            maker = values[v].maker
            if v in graph.arguments:
                return None
            return [column[v]] if maker < 0 else [maker, *named.get(maker, ())]

        def at_least(v: int, bound: float, less: int | None) -> None:
            terms = available(v)
            if terms is None:
                return
            row = len(low)
            low.append(bound)
            entries = [(t, 1.0) for t in terms] + ([(less, -1.0)] if less is not None else [])
            for at, factor in entries:
                rows.append(row)
                cols.append(at)
                data.append(factor)

        for v in graph.residuals:
            at_least(v, 1.0, None)
        for number in range(n):
            for v in dict.fromkeys(ops[number].reads):
                at_least(v, 0.0, number)
        most = np.ones(self.size)  # decisions are not made again
        most[sorted(graph.decisions if save else ())] = 0.0
        self.most: Any = most
        matrix: Any = csr_array(coo_array((data, (rows, cols)), shape=(len(low), self.size)))
        least: Any = np.array(low)  # SciPy's stubs know only one bound for all rows
        self.need = LinearConstraint(matrix, least, np.inf)
        self.kept = np.zeros(self.size)
        for k, v in enumerate(self.inputs):
            self.kept[n + k] = values[v].kept_bytes
        for c, k in enumerate(self.saving):
            self.kept[first + c] = graph.choices[k].bytes
        self.hosted = np.zeros(self.size)
        for c, k in enumerate(self.hosting):
            self.hosted[first + len(self.saving) + c] = graph.choices[k].bytes
        self.cost = np.zeros(self.size)
        for number in range(n):
            self.cost[number] = ops[number].again_seconds if minimize == "time" else ops[number].again_flops
        if minimize == "time":
            for k, v in enumerate(self.inputs):
                self.cost[n + k] = graph.copy_seconds(values[v].kept_bytes)
            for c, k in enumerate((*self.saving, *self.hosting)):
                self.cost[first + c] = graph.choices[k].seconds
        self.scale = float(self.cost.sum()) or 1.0
        self.unit = float(self.kept.sum()) or 1.0

    def solve(self, kept_bytes: float) -> Point | None:
        """The cheapest point that keeps no more than some bytes; None if there is none.

        Its `bound` is what the solver proved: nothing that keeps as few bytes costs less.
        """
        # What costs nothing is not done for nothing: ties go to fewer bytes, kept rather than offloaded, and to inputs
        # rather than names.
        trifles = _TRIFLE * (self.kept / self.unit + 2 * self.hosted / self.unit)
        trifles[self.first :] += _TRIFLE / self.size
        objective = self.cost / self.scale + trifles
        from scipy.optimize import LinearConstraint

        limits = [LinearConstraint(self.kept / self.unit, -np.inf, kept_bytes / self.unit)]
        if self.hosting:
            limits.append(LinearConstraint(self.hosted / self.unit, -np.inf, self.host_bytes / self.unit))
        result = self._milp(objective, limits)
        if result.x is None:
            return None
        point = self._point(result.x)
        if point.kept_bytes > kept_bytes:  # within the solver's tolerance only
            return None
        bound = max(0.0, float(result.mip_dual_bound or 0.0) - float(trifles.sum())) * self.scale
        return dataclasses.replace(point, bound=min(bound, point.cost(self.minimize)))

    def least(self) -> Point:
        """The point that keeps the fewest bytes, and costs least among those."""
        from scipy.optimize import LinearConstraint

        limits = []
        if self.hosting:
            limits.append(LinearConstraint(self.hosted / self.unit, -np.inf, self.host_bytes / self.unit))
        result = self._milp(self.kept / self.unit, limits)
        assert result.x is not None, "recomputing everything is always possible"
        found = self._point(result.x)
        return self.solve(found.kept_bytes) or found

    def _milp(self, objective: np.ndarray, limits: list[Any]) -> Any:
        from scipy.optimize import Bounds, milp

        with quiet(Warning):
            return milp(
                objective,
                integrality=np.ones(self.size),  # faster than with the recomputations left continuous
                bounds=Bounds(0.0, self.most),
                constraints=[self.need, *limits],
                options={"mip_rel_gap": _GAP, "node_limit": _NODES},
            )

    def _point(self, x: np.ndarray) -> Point:
        taken = x[self.first :] > 0.5
        labels = [self.graph.choices[k].label for k in (*self.saving, *self.hosting)]
        n = len(self.saving)
        saved = [label for label, t in zip(labels[:n], taken[:n], strict=True) if t]
        hosted = [label for label, t in zip(labels[n:], taken[n:], strict=True) if t]
        return trimmed(self.graph, saved, hosted, self.minimize)


_TRIFLE = 1e-7
_GAP = 1e-4
_NODES = 2000  # a limit that, unlike one on time, is the same on every run
