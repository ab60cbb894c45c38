"""Choosing among the checkpoint names that a program has: one policy for all blocks, as codebases write it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from remat_kit._errors import RematError
from remat_kit._plan.graph import Choice, Graph, Op, Value
from remat_kit._plan.point import choose
from remat_kit._plan.problem import Problem, Selection
from remat_kit._plan.rates import Rates
from remat_kit._plan.solve import Solver
from remat_kit._plan.stages import Stage, Stages


class NamesProblem(Problem):
    """A program whose blocks all save the same names.

    One mixed integer program holds all blocks side by side, each as often as it runs; what it chooses is then
    evaluated block by block.
    """

    by_name = True

    def __init__(self, program: Stages, rates: Rates, minimize: str, actions: frozenset[str]) -> None:
        super().__init__(program, rates, minimize, actions, points=0)
        self.planned = [s for s in program.stages if s.graph is not None and s.block.kind != "rest"]
        if not any(s.graph.choices for s in self.planned if s.graph is not None):
            raise RematError(
                "names_only=True chooses among checkpoint names, and the program's blocks have none. Name values with "
                "rk.checkpoint_name, or leave names_only out."
            )
        self.merged = merge(self.planned)
        host = sum(self.host_bytes(s) * s.trips * s.around for s in self.planned)
        self.solver = Solver(self.merged, minimize, host, save="save" in actions)

    def solve(self, peak: float) -> Selection | None:
        """The cheapest names within a predicted peak: the bytes that may be kept are narrowed down to what fits."""
        low, high = 0.0, float(self.merged_bytes)
        best = self._within(high, peak)
        if best is not None:
            return best
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            found = self._within(middle, peak)
            if found is None:
                high = middle
            else:
                best, low = found, middle
        return best

    def bound(self, peak: float) -> float:
        """What no set of names within a predicted peak costs less than: that of all that keep no more than the peak."""
        room = min(peak, 2.0**62) - self.fixed_bytes
        point = self.solver.solve(max(room, 0.0))
        return point.bound if point is not None else 0.0

    def least(self) -> Selection:
        """The names with the smallest predicted peak: as few bytes as can be, or all that is to be had."""
        ends = [self.of(self.solver.least().saved), self.of(c.label for c in self.merged.choices)]
        if not self.merged.decisions:
            ends.append(self.of(()))
        return min(ends, key=lambda s: (s.peak, s.cost))

    def of(self, saved: Iterable[str], offloaded: Iterable[str] = ()) -> Selection:
        """The selection of names that are saved and offloaded in all blocks."""
        saved, offloaded = tuple(saved), tuple(offloaded)
        return self.evaluate(lambda s, graph: None if s.block.kind == "rest" else choose(graph, saved, offloaded))

    @property
    def merged_bytes(self) -> int:
        """What keeping everything would take."""
        return int(self.solver.unit) + 1

    def _within(self, kept_bytes: float, peak: float) -> Selection | None:
        point = self.solver.solve(kept_bytes)
        if point is None:
            return None
        found = self.of(point.saved, point.offloaded)
        return found if found.peak <= peak else None


_HALVINGS = 12


def merge(stages: Iterable[Stage]) -> Graph:
    """One graph of several blocks, each as often as it runs, in which equal labels are one choice."""
    values: list[Value] = []
    ops: list[Op] = []
    residuals: list[int] = []
    arguments: set[int] = set()
    decisions: set[int] = set()
    choices: dict[str, Choice] = {}
    rates: Rates | None = None
    for stage in stages:
        graph, runs = stage.graph, stage.trips * stage.around
        if graph is None:
            continue
        v0, o0 = len(values), len(ops)
        moved = {k: o0 + k for k in range(graph.forward)}
        for v in graph.values:
            maker = moved.get(v.maker, -1)
            values.append(Value(v.bytes, v.trips * runs, maker, v.root + v0))
        for op in graph.ops[: graph.forward]:
            ops.append(
                dataclasses.replace(
                    op,
                    reads=tuple(r + v0 for r in op.reads),
                    writes=tuple(w + v0 for w in op.writes),
                    flops=op.flops * runs,
                    seconds=op.seconds * runs,
                )
            )
        residuals += [r + v0 for r in graph.residuals]
        decisions |= {moved[n] for n in graph.decisions}
        arguments |= {a + v0 for a in graph.arguments}
        # What the backward pass makes is no input here.
        arguments |= {n + v0 for n, v in enumerate(graph.values) if v.maker >= graph.forward or n in graph.cotangents}
        for c in graph.choices:
            mine = tuple(o + o0 for o in c.ops if o < graph.forward)
            old = choices.get(c.label)
            before = old.ops if old is not None else ()
            size = (old.bytes if old is not None else 0) + c.bytes * runs
            seconds = (old.seconds if old is not None else 0.0) + c.seconds * runs
            choices[c.label] = Choice(c.label, c.facts, (*before, *mine), size, seconds)
        rates = graph.rates
    assert rates is not None, "there is a block to plan for"
    return Graph(
        values=tuple(values),
        ops=tuple(ops),
        forward=len(ops),
        residuals=tuple(residuals),
        arguments=frozenset(arguments),
        choices=tuple(choices.values()),
        decisions=frozenset(decisions),
        constant=frozenset(),
        loop=False,
        varying=(True,) * len(values),
        cotangents=(),
        carried=(),
        stacked=frozenset(),
        rates=rates,
    )
