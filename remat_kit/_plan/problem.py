"""A whole program with a budget: stages, their frontiers, and the cheapest selection within a predicted peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from remat_kit._apply import BlockForm
from remat_kit._plan import knapsack
from remat_kit._plan.block_frontier import BlockFrontier
from remat_kit._plan.graph import Graph
from remat_kit._plan.knapsack import Option
from remat_kit._plan.point import Point, choose
from remat_kit._plan.rates import Rates
from remat_kit._plan.stages import Stage, Stages
from remat_kit._policy import ValueFacts


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """A point for each stage, with what is predicted of the whole program.

    Attributes:
      points: one for each stage of the problem; None for stages that keep nothing.
      peak: bytes.
      cost: of what is recomputed, in what is minimized.
      bound: no selection within the peak that was asked for costs less, as far as was proved.
    """

    points: tuple[Point | None, ...]
    peak: int
    cost: float
    bound: float

    @property
    def key(self) -> tuple[Point | None, ...]:
        return self.points


_POINTS = 12  # solved for each block before anything is asked
_ROUNDS = 4


class Problem:
    """The stages of a program and what can be done with each.

    Attributes:
      stages: the program.
      minimize: ``"time"`` or ``"flops"``.
    """

    by_name = False  # whether choices go by checkpoint names

    def __init__(
        self, program: Stages, rates: Rates, minimize: str, actions: frozenset[str], *, points: int = _POINTS
    ) -> None:
        self.program, self.minimize, self.rates = program, minimize, rates
        self.offloads = "offload" in actions
        self.stages = program.stages
        self._forms: dict[str, BlockForm] = {}
        self.frontiers: dict[int, BlockFrontier] = {}
        for s in self.stages:
            if s.graph is not None and id(s.graph) not in self.frontiers:
                f = BlockFrontier(s.graph, minimize, self.host_bytes(s), save="save" in actions)
                f.fill(points)
                self.frontiers[id(s.graph)] = f

    @property
    def fixed_bytes(self) -> int:
        """What is there all the time: arguments, results, and residuals outside all stages."""
        return self.program.argument_bytes + self.program.output_bytes + self.program.other_bytes

    def host_bytes(self, stage: Stage) -> float:
        """What can go to the host and come back while a block computes, one way each, in one run of it."""
        graph = stage.graph
        if graph is None or not self.offloads:
            return 0.0
        return self.rates.host_bandwidth * min(graph.forward_seconds, graph.backward_seconds)

    def form(self, stage: Stage) -> BlockForm:
        """What of a stage's program a plan depends on."""
        path = stage.block.path
        if path not in self._forms:
            self._forms[path] = BlockForm.of(stage.block)
        return self._forms[path]

    def extra(self, selection: Selection) -> tuple[int, float]:
        """FLOPs of what a selection recomputes, and seconds of that and of keeping the rest."""
        runs = [(s.trips * s.around, p) for s, p in zip(self.stages, selection.points, strict=True) if p is not None]
        return sum(n * p.flops for n, p in runs), sum(n * p.cost("time") for n, p in runs)

    def frontier(self, stage: Stage) -> BlockFrontier | None:
        return None if stage.graph is None else self.frontiers[id(stage.graph)]

    def solve(self, peak: float) -> Selection | None:
        """The cheapest selection within a predicted peak; None if there is none.

        After a first answer each block is solved for the bytes that it left over, until that gains nothing more.
        """
        best: Selection | None = None
        for _ in range(_ROUNDS):
            found = self._solve(peak)
            if found is None:
                break
            if best is not None and found.cost >= best.cost * (1 - 1e-6):
                break
            best = found
            if not self._refine(found, peak):
                break
        return None if best is None else dataclasses.replace(best, bound=min(best.cost, self.bound(peak)))

    def least(self) -> Selection:
        """The selection with the smallest predicted peak, and the least cost among those."""
        low, high = self.fixed_bytes, self.without_remat().peak
        while self._solve(high) is None:  # without remat there may be more to keep than the model saw
            high *= 2
        while high - low > max(1 << 10, high >> 12):
            middle = (low + high) // 2
            low, high = (low, middle) if self._solve(middle) is not None else (middle, high)
        found = self.solve(high)
        return found if found is not None else self.without_remat()

    def cheapest(self) -> Selection:
        """The selection with the least cost, whatever it takes: without remat, unless keeping things costs too much."""
        return self.solve(float("inf")) or self.least()

    def without_remat(self) -> Selection:
        """Nothing is recomputed."""
        return self.evaluate(lambda stage, graph: None)

    def evaluate(self, choice: Callable[[Stage, Graph], Point | None]) -> Selection:
        """The selection of a choice made by somebody else; None leaves a stage without remat."""
        points: list[Point | None] = []
        for s in self.stages:
            f = self.frontier(s)
            if f is None or s.graph is None:
                points.append(None)
                continue
            points.append(choice(s, s.graph) or f.plain)
        options = [
            _option(s, p, p.cost(self.minimize)) for s, p in zip(self.stages, points, strict=True) if p is not None
        ]
        peak = self.fixed_bytes + knapsack.peak_of(options)
        return Selection(tuple(points), peak, sum(o.cost for o in options), 0.0)

    def by_facts(self, keeps: Callable[[ValueFacts], str | None], planned: Callable[[Stage], bool]) -> Selection:
        """The selection of a policy, asked about each value; stages that are not planned have no remat."""

        def choice(stage: Stage, graph: Graph) -> Point | None:
            if not planned(stage):
                return None
            actions = {c.label: keeps(c.facts) for c in graph.choices}
            saved = [k for k, a in actions.items() if a == "save"]
            return choose(graph, saved, [k for k, a in actions.items() if a == "offload"])

        return self.evaluate(choice)

    def _solve(self, peak: float) -> Selection | None:
        tables = [(s, f.points) for s in self.stages if (f := self.frontier(s)) is not None]
        options = [[_option(s, p, p.cost(self.minimize)) for p in points] for s, points in tables]
        room = _room(peak, self.fixed_bytes)
        answer = knapsack.solve(options, room)
        if answer is None:
            return None
        taken = iter(points[k] for (_, points), k in zip(tables, answer.taken, strict=True))
        points = tuple(next(taken) if self.frontier(s) is not None else None for s in self.stages)
        return Selection(points, self.fixed_bytes + answer.peak, answer.cost, 0.0)

    def bound(self, peak: float) -> float:
        """What no selection within a predicted peak costs less than, as far as the solver proved it.

        Between two points of a block's frontier the next one's bound holds, and the smaller of their working bytes.
        """
        tables = []
        for s in self.stages:
            if (f := self.frontier(s)) is None:
                continue
            points = f.points
            options = []
            for k, p in enumerate(points):
                beyond = points[k + 1] if k + 1 < len(points) else None
                least = min(p.cost(self.minimize), f.bound(beyond.kept_bytes) if beyond is not None else 0.0)
                lighter = p if beyond is None or p.working_bytes < beyond.working_bytes else beyond
                working = min(p.working_bytes, lighter.working_bytes)
                options.append(_option(s, dataclasses.replace(p, working_bytes=working), least))
            tables.append(options)
        return knapsack.bound(tables, _room(peak, self.fixed_bytes))

    def _refine(self, found: Selection, peak: float) -> bool:
        """Solves blocks for what they keep and what is left over; tells whether there was anything to solve."""
        left = peak - found.peak
        asked = False
        seen: set[int] = set()
        for s, p in zip(self.stages, found.points, strict=True):
            f = self.frontier(s)
            if f is None or p is None or p == f.points[-1] or id(f) in seen:
                continue
            seen.add(id(f))
            alike = sum(t.trips * t.around for t, q in zip(self.stages, found.points, strict=True) if q is p)
            asked |= f.at(min(p.kept_bytes + left / max(alike, 1), f.points[-1].kept_bytes)) is not None
        return asked


def _room(peak: float, fixed: int) -> int:
    return int(min(peak, 2.0**62)) - fixed


def _option(stage: Stage, p: Point, cost: float) -> Option:
    runs = stage.trips * stage.around
    return Option(kept_bytes(stage, p), p.working_bytes, cost * runs)


def kept_bytes(stage: Stage, p: Point) -> int:
    """What a stage keeps in all its runs."""
    runs = stage.trips * stage.around
    return (p.kept_bytes - p.fixed_bytes) * runs + p.fixed_bytes * stage.around
